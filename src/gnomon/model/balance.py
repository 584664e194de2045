"""Quantile Balancing: the router bias as a quantile of the margins, from a histogram (report §2.3.3, App. C and D).

A token's *cutoff* is its (k+1)-th largest biased score. Expert j would sit exactly on the cutoff of token i if its bias were
r_ij = cutoff_i - score_ij; the k/n quantile of r_:j over the tokens of an optimiser step is therefore the bias at which j gets
its fair share, one exact coordinate step on the dual of the balanced assignment. Counts of r in fixed bins add up over
micro-batches and ranks, which averages of quantiles do not.

Pure functions on tensors. Read next: `router.py`, which observes, and `gnomon/train/balance.py`, which updates once per step.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gnomon.kernels import router as kernels

BINS = 1000  # report App. D: error at most one bin, a few 1e-3


def new_histogram(experts: int, device: torch.device | str | None = None) -> Int[Tensor, "E bins"]:
    """An empty histogram of required biases, one row per expert."""
    return torch.zeros(experts, BINS, dtype=torch.int64, device=device)


def bin_range(bias: Float[Tensor, "E"], bins: int = BINS) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Lower edge and width of the bins: uniform on [b_min - 1, b_max + 1], which holds every r because scores are in (0, 1).

    The range follows the bias, so it is fixed over all micro-batches of a step and moves with each update.
    """
    lowest, highest = bias.min().double(), bias.max().double()
    return lowest - 1.0, (highest - lowest + 2.0) / bins


@torch.no_grad()
def accumulate(
    histogram: Int[Tensor, "E bins"],
    scores: Float[Tensor, "N E"],
    cutoff: Float[Tensor, "N"],
    bias: Float[Tensor, "E"],
    mask: Bool[Tensor, "N"] | None = None,
) -> None:
    """Count the required biases r = cutoff - score of these tokens, in place; tokens where `mask` is false do not exist.

    `scores` are the raw sigmoid scores, `cutoff` the (k+1)-th largest of `scores + bias` per token.
    """
    bins = histogram.shape[1]
    lowest, width = (float(edge) for edge in bin_range(bias, bins))
    histogram += kernels.required_bias_histogram(scores, cutoff, mask, lowest, width, bins)


def quantile_bias(histogram: Int[Tensor, "E bins"], bias: Float[Tensor, "E"], k: int) -> Float[Tensor, "E"]:
    """The next step's bias: each expert's k/n quantile of the counted required biases, then centred (report App. D).

    With q = m k / n tokens due to each expert, t the first bin whose cumulative count reaches ceil(q), c the count before
    it and h the count in it: b = b_min - 1 + (t + clip((q - c)/h, 0, 1)) w, then b - mean(b).
    `bias` must be the one that the histogram was counted with. No tokens: the bias stays.
    """
    experts, bins = histogram.shape
    tokens = int(histogram[0].sum())
    if tokens == 0:
        return bias.clone()
    due = tokens * k / experts
    needed = -(-tokens * k // experts)  # ceil in integers: 0.1 + 0.2 must not cost a token
    lowest, width = bin_range(bias, bins)
    cumulative = histogram.cumsum(1)
    chosen = (cumulative < needed).sum(1, keepdim=True).clamp_(max=bins - 1)  # [E, 1], first bin that reaches it
    inside = histogram.gather(1, chosen).double()
    before = cumulative.gather(1, chosen).double() - inside
    fraction = ((due - before) / inside.clamp(min=1)).clamp_(0, 1)
    wanted = (lowest + (chosen + fraction) * width).squeeze(1)  # [E]
    return (wanted - wanted.mean()).to(bias.dtype)


def exact_quantile_bias(scores: Float[Tensor, "N E"], cutoff: Float[Tensor, "N"], k: int) -> Float[Tensor, "E"]:
    """What the histogram estimates: the (q+1)-th smallest required bias, below which lie exactly q tokens (report App. C)."""
    tokens, experts = scores.shape
    required = (cutoff[:, None] - scores).double()
    due = min(tokens, math.floor(tokens * k / experts) + 1)
    wanted = required.kthvalue(due, dim=0).values
    return (wanted - wanted.mean()).to(scores.dtype)


def sign_rule(bias: Float[Tensor, "E"], load: Int[Tensor, "E"], step: float) -> Float[Tensor, "E"]:
    """The comparator: move each bias by a fixed step against its load, b + step sign(mean load - load).

    This is sign descent on the same dual, so it needs many steps from a cold start and then oscillates by `step`.
    """
    load = load.double()
    return (bias.double() + step * torch.sign(load.mean() - load)).to(bias.dtype)


def max_violation(load: Int[Tensor, "*L E"]) -> Float[Tensor, "*L"]:
    """MaxVio: how far the busiest expert is above the mean load, max(load)/mean(load) - 1; 0 is perfect balance."""
    load = load.double()
    mean = load.mean(-1)
    return torch.where(mean > 0, load.amax(-1) / mean.clamp(min=1e-300) - 1.0, torch.zeros_like(mean))


def auxiliary_loss(
    scores: Float[Tensor, "N E"], ids: Int[Tensor, "N k"], mask: Bool[Tensor, "N"] | None = None
) -> Float[Tensor, ""]:
    """The other comparator, a loss term: n sum_j f_j P_j with f_j the routed share and P_j the mean normalised score.

    It is 1 at balance; its gradient goes to the scores alone. Add it to the loss with a small weight (1e-2 to 1e-4).
    """
    experts = scores.shape[1]
    if mask is not None:
        scores, ids = scores[mask], ids[mask]
    share = torch.bincount(ids.reshape(-1), minlength=experts).to(scores.dtype) / max(1, ids.numel())
    probability = (scores / scores.sum(-1, keepdim=True)).sum(0) / max(1, scores.shape[0])
    return experts * (share * probability).sum()
