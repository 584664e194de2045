"""The depth read: every sub-layer looks up the embedding, the finished blocks and the running sum with its own query.

Report §2.2 (Attention Residuals, block form). The query is a parameter and not a function of the input, so all queries of a
block may read the finished blocks in one pass (`bank_partials`) and add the one live source later (`merge`).
Read next: `gnomon/model/residuals.py` for the schedule of sources.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.errors import KernelError


def depth_read(sources: Sequence[Tensor], query: Float[Tensor, "D"], eps: float) -> Float[Tensor, "B T D"]:
    """Mix the raw sources by the softmax of their normalised scores.

    k_j = v_j / rms(v_j), s_j = <query, k_j>, p = softmax_j(s), result = sum_j p_j v_j: no 1/sqrt(D), no bias, raw values.

    Args:
        sources: tensors [B, T, D], oldest first, the live sum last.
        query: norm weight times pseudo-query, multiplied in fp32 by the caller and never rounded.
        eps: added to the mean square.

    Computes in fp32 (fp64 for fp64 sources) and casts once to the dtype of the sources.
    Raises `KernelError` for an empty list or sources of different shapes.
    """
    check_sources(sources, query)
    values = torch.stack(list(sources)).to(compute_dtype(sources[0]))  # [n, B, T, D]
    p = _scores(values, query, eps).softmax(dim=0)
    return (p.unsqueeze(-1) * values).sum(dim=0).to(sources[0].dtype)


def read_norm(
    sources: Sequence[Tensor], query: Float[Tensor, "D"], eps: float, weight: Float[Tensor, "D"]
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
    """`depth_read`, and the RMSNorm of the next sub-layer over it: (the mix, the mix / sqrt(mean mix^2 + eps) times `weight`).

    The norm rounds where `model.layers.RMSNorm` does: to the dtype of the sources before the weight multiplies. One source is its own mix.
    """
    check_sources(sources, query)
    mixed = sources[0] if len(sources) == 1 else depth_read(sources, query, eps)
    wide = mixed.to(compute_dtype(mixed))
    return mixed, (wide * _inverse_rms(wide, eps)).to(mixed.dtype) * weight


def depth_weights(sources: Sequence[Tensor], query: Float[Tensor, "D"], eps: float) -> Float[Tensor, "B T n"]:
    """The probabilities p of `depth_read`, one per source: what a sub-layer looks at."""
    check_sources(sources, query)
    values = torch.stack(list(sources)).to(compute_dtype(sources[0]))
    return _scores(values, query, eps).softmax(dim=0).movedim(0, -1)


def bank_partials(
    bank: Sequence[Tensor], queries: Float[Tensor, "R D"], eps: float
) -> tuple[Float[Tensor, "R B T"], Float[Tensor, "R B T"], Float[Tensor, "R B T D"]]:
    """Phase one: all R queries of a block against the finished sources at once.

    Returns the largest score, the denominator sum_j exp(s_j - max) and the numerator sum_j exp(s_j - max) v_j of each query,
    in fp32. Row r of each, with the live source, goes to `merge`.
    """
    check_sources(bank, queries[0])
    values = torch.stack(list(bank)).to(compute_dtype(bank[0]))  # [n, B, T, D]
    keys = values * _inverse_rms(values, eps)
    scores = torch.einsum("nbtd,rd->rnbt", keys, queries.to(values.dtype))
    largest = scores.amax(dim=1)
    weights = (scores - largest.unsqueeze(1)).exp()
    return largest, weights.sum(dim=1), torch.einsum("rnbt,nbtd->rbtd", weights, values)


def merge(
    partials: tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T D"]],
    live: Float[Tensor, "B T D"],
    query: Float[Tensor, "D"],
    eps: float,
) -> Float[Tensor, "B T D"]:
    """Phase two: add the live source to one query's partials by online softmax; equals `depth_read(bank + [live], ...)`."""
    largest, denominator, numerator = partials
    value = live.to(numerator.dtype)
    score = _scores(value, query, eps)  # [B, T]
    new_largest = torch.maximum(largest, score)
    kept, added = (largest - new_largest).exp(), (score - new_largest).exp()
    total = denominator * kept + added
    return (((numerator * kept.unsqueeze(-1)) + added.unsqueeze(-1) * value) / total.unsqueeze(-1)).to(live.dtype)


def compute_dtype(source: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: fp64 for fp64 sources, else fp32."""
    return torch.promote_types(source.dtype, torch.float32)


def check_sources(sources: Sequence[Tensor], query: Tensor) -> None:
    """Refuse an empty list, sources that differ in shape or dtype, and a query of another width."""
    if not sources:
        raise KernelError("depth_read: no sources; pass at least the running sum")
    first = sources[0]
    for index, source in enumerate(sources):
        if source.shape != first.shape or source.dtype != first.dtype:
            raise KernelError(
                f"depth_read: source {index} is {source.dtype} {tuple(source.shape)}, "
                f"source 0 is {first.dtype} {tuple(first.shape)}; all sources must agree"
            )
    if query.shape != first.shape[-1:]:
        raise KernelError(f"depth_read: query has shape {tuple(query.shape)}, the sources have width {first.shape[-1]}")


def _inverse_rms(values: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)


def _scores(values: Tensor, query: Tensor, eps: float) -> Tensor:
    return (values * _inverse_rms(values, eps)) @ query.to(values.dtype)
