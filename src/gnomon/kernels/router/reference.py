"""The router between its scores and the experts. Of equal biased scores any may be chosen; the C++ one takes the lowest index.

Read next: `gnomon/model/balance.py`, which turns the counts into the next bias.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TINY = 1e-20
"""Added to the sum of chosen scores, as the released router does."""

CHUNK_ELEMENTS = 1 << 20  # scores counted together; bounds the memory of one call


@dataclass(frozen=True, slots=True)
class Choice:
    """How a router chooses: k experts of the `kept_groups` strongest of `groups`; weights are divided by their sum, then scaled."""

    k: int
    groups: int = 1
    kept_groups: int = 1
    renormalise: bool = True
    scaling: float = 1.0


def route(
    scores: Float[Tensor, "N E"], bias: Float[Tensor, "E"], choice: Choice
) -> tuple[Int[Tensor, "N k"], Float[Tensor, "N k"], Float[Tensor, "N"]]:
    """`(ids, weights, cutoff)`: the k largest biased scores, weights from the scores alone, and the (k+1)-th largest biased score.

    Only the weights carry a gradient.
    """
    ids, cutoff = choose(scores, bias, choice)
    return ids, weigh(scores, ids, choice), cutoff


@torch.no_grad()
def choose(
    scores: Float[Tensor, "N E"], bias: Float[Tensor, "E"], choice: Choice
) -> tuple[Int[Tensor, "N k"], Float[Tensor, "N"]]:
    """The k largest biased scores, and the (k+1)-th as cutoff (the smallest chosen where there is none)."""
    biased = _without_weak_groups(scores + bias, choice)
    values, ids = biased.topk(min(choice.k + 1, scores.shape[-1]), dim=-1)
    cutoff = torch.where(values[:, -1].isneginf(), values[:, choice.k - 1], values[:, -1])  # no other expert in the kept groups
    return ids[:, : choice.k], cutoff


def weigh(scores: Float[Tensor, "N E"], ids: Int[Tensor, "N k"], choice: Choice) -> Float[Tensor, "N k"]:
    """Raw scores of the chosen, divided by their sum, times the scaling factor."""
    chosen = scores.gather(-1, ids)
    if choice.renormalise:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + TINY)
    return chosen * choice.scaling


def _without_weak_groups(biased: Float[Tensor, "N E"], choice: Choice) -> Float[Tensor, "N E"]:
    """Keep the groups whose two best experts sum highest; others cannot be chosen. One group: nothing to do."""
    if choice.groups == 1:
        return biased
    by_group = biased.view(biased.shape[0], choice.groups, -1)
    strength = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(strength, dtype=torch.bool).scatter(1, strength.topk(choice.kept_groups, dim=-1).indices, True)
    return by_group.masked_fill(~kept.unsqueeze(-1), float("-inf")).view_as(biased)


@torch.no_grad()
def required_bias_histogram(
    scores: Float[Tensor, "N E"], cutoff: Float[Tensor, "N"], mask: Bool[Tensor, "N"] | None, lowest: float, width: float, bins: int
) -> Int[Tensor, "E bins"]:
    """How many tokens need each bias: counts of (cutoff - score - lowest) / width, values outside in the first and last bin.

    Tokens where `mask` is false do not exist. fp64 decides the bin.
    """
    experts = scores.shape[1]
    first = torch.arange(experts, device=scores.device) * bins  # [E], where an expert's row starts
    flat = torch.zeros(experts * bins, dtype=torch.int64, device=scores.device)
    rows = max(1, CHUNK_ELEMENTS // experts)
    for start in range(0, scores.shape[0], rows):
        part, edge = scores[start : start + rows], cutoff[start : start + rows]
        if mask is not None:
            keep = mask[start : start + rows]
            part, edge = part[keep], edge[keep]
        position = (edge[:, None].double() - part - lowest) / width  # [N, E]
        index = position.long().clamp_(0, bins - 1) + first
        flat += torch.bincount(index.view(-1), minlength=flat.numel())
    return flat.view(experts, bins)
