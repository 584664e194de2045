"""Which experts a token visits: sigmoid scores, a selection bias, weights from the raw scores (report §2.3.1, §2.3.3).

The bias takes part in the choice and never in the weights, so it never touches a gradient. In training the router counts what
Quantile Balancing needs; the optimiser step then updates the bias (`gnomon/train/balance.py`). Frozen at inference.
Read next: `balance.py` for the estimator, `experts.py` for what happens to the chosen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from gnomon.model import balance
from gnomon.model.parts import MoEConfig

TINY = 1e-20
"""Added to the sum of chosen scores, as the released router does."""

_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Inside, routers do not count: activation checkpointing runs a layer twice, its tokens are seen once."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


class Router(nn.Module):
    """Scores, choice and weights of one layer.

    While `observing`, each forward adds to `histogram` [E, bins] (required biases) and `load` [E] (routed tokens); while `auxiliary`,
    it leaves the balance loss in `auxiliary_loss`. Counters are not part of a checkpoint of the model.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: MoEConfig, hidden_size: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.observing = False
        self.auxiliary = False
        self.auxiliary_loss: Tensor | None = None
        self.histogram = balance.new_histogram(0)
        self.load = torch.zeros(0, dtype=torch.int64)

    def start_observing(self) -> None:
        """Begin to count, from zero; until then the counters are empty."""
        self.observing = True
        self.reset()

    def reset(self) -> None:
        """Zero the counters: after each update of the bias."""
        self.histogram = balance.new_histogram(self.config.num_experts, self.weight.device)
        self.load = torch.zeros(self.config.num_experts, dtype=torch.int64, device=self.weight.device)

    def forward(
        self, x: Float[Tensor, "N D"], mask: Bool[Tensor, "N"] | None = None
    ) -> tuple[Int[Tensor, "N k"], Float[Tensor, "N k"]]:
        """`(expert ids, weights)` of each token; `mask` is false where a token is padding and must not be counted."""
        scores = self.scores(x)
        ids, cutoff = self.choose(scores)
        if self.observing and not _recomputing.get():
            self._observe(scores.detach(), ids, cutoff, mask)
        if self.auxiliary:  # computed again when recomputing, which must repeat every operation, but kept once
            loss = balance.auxiliary_loss(scores, ids, mask)
            self.auxiliary_loss = self.auxiliary_loss if _recomputing.get() else loss
        return ids, self.weigh(scores, ids)

    def scores(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
        """Sigmoid affinities of the full-width input, in fp32 whatever the model's type."""
        with torch.autocast(x.device.type, enabled=False):
            exact = torch.promote_types(x.dtype, torch.float32)
            return torch.sigmoid(functional.linear(x.to(exact), self.weight.to(exact)))

    @torch.no_grad()
    def choose(self, scores: Float[Tensor, "N E"]) -> tuple[Int[Tensor, "N k"], Float[Tensor, "N"]]:
        """The k largest biased scores, and the (k+1)-th as cutoff (the smallest chosen where there is none)."""
        biased = self._without_weak_groups(scores + self.e_score_correction_bias)
        k = self.config.num_experts_per_token
        values, ids = biased.topk(min(k + 1, self.config.num_experts), dim=-1)
        cutoff = torch.where(values[:, -1].isneginf(), values[:, k - 1], values[:, -1])  # no other expert in the kept groups
        return ids[:, :k], cutoff

    def weigh(self, scores: Float[Tensor, "N E"], ids: Int[Tensor, "N k"]) -> Float[Tensor, "N k"]:
        """Raw scores of the chosen, divided by their sum, times the scaling factor."""
        chosen = scores.gather(-1, ids)
        if self.config.moe_renormalize:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + TINY)
        return chosen * self.config.routed_scaling_factor

    def _without_weak_groups(self, biased: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
        """Keep the groups whose two best experts sum highest; others cannot be chosen. One group: nothing to do."""
        groups = self.config.num_expert_group
        if groups == 1:
            return biased
        by_group = biased.view(biased.shape[0], groups, -1)
        strength = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(strength, dtype=torch.bool).scatter(1, strength.topk(self.config.topk_group, dim=-1).indices, True)
        return by_group.masked_fill(~kept.unsqueeze(-1), float("-inf")).view_as(biased)

    @torch.no_grad()
    def _observe(self, scores: Tensor, ids: Tensor, cutoff: Tensor, mask: Tensor | None) -> None:
        balance.accumulate(self.histogram, scores.float(), cutoff.float(), self.e_score_correction_bias, mask)
        counted = ids if mask is None else ids[mask]
        self.load += torch.bincount(counted.flatten(), minlength=self.config.num_experts)
