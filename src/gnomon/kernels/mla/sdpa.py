"""Causal attention through PyTorch's flash kernel, documents of similar length in one call.

Values are padded to the width of the keys (or the other way round), because the kernel wants one width; documents are padded
on the right to a common length, which a causal mask makes harmless: a padded key lies in every real query's future.
Read next: `reference.py` for the meaning.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from gnomon.kernels.mla.reference import check_attention, document_spans

LENGTH_STEP = 64  # documents whose lengths round up to the same multiple share a call


def refuse_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor | None = None, offset: int = 0
) -> str | None:
    """Refuse queries that do not start with the keys: the kernel's causal mask is anchored at the first of both."""
    if offset != 0 or q.shape[1] != k.shape[1]:
        return f"the mask starts at key 0, but offset is {offset} with {q.shape[1]} queries and {k.shape[1]} keys"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}"
    return None


def attention(
    q: Float[Tensor, "B T H Q"],
    k: Float[Tensor, "B T H Q"],
    v: Float[Tensor, "B T H V"],
    scale: float,
    cu_seqlens: Int[Tensor, "S1"] | None = None,
    offset: int = 0,
) -> Float[Tensor, "B T H V"]:
    """As the reference."""
    check_attention(q, k, cu_seqlens, offset)
    if q.shape[1] == 0:
        return v[:, :0]
    width = v.shape[-1]
    if width < q.shape[-1]:
        v = pad(v, (0, q.shape[-1] - width))
    elif width > q.shape[-1]:
        q, k = (pad(x, (0, width - q.shape[-1])) for x in (q, k))
    if cu_seqlens is None:
        return _attend(q, k, v, scale)[..., :width]
    lengths = [b - a for a, b in document_spans(cu_seqlens)]
    if len(set(lengths)) == 1:
        q, k, v = (x.unflatten(1, (-1, lengths[0])).squeeze(0) for x in (q, k, v))  # [S, L, H, Q]
        return _attend(q, k, v, scale).flatten(0, 1).unsqueeze(0)[..., :width]
    plan = _plan(lengths, q.device)
    outputs = []
    for length, *parts in zip(plan.lengths, *(_Group.apply(x[0], plan).split(plan.sizes) for x in (q, k, v)), strict=True):
        q, k, v = (part.unflatten(0, (-1, length)) for part in parts)  # [n, length, H, .]
        outputs.append(_attend(q, k, v, scale).flatten(0, 1))
    return _Ungroup.apply(torch.cat(outputs), plan).unsqueeze(0)[..., :width]


class _Plan(NamedTuple):
    """Where the tokens stand once documents of one rounded length lie together."""

    token: Tensor  # token at each grouped row; a padded row repeats a token of its document
    padding: Tensor  # the padded rows
    position: Tensor  # grouped row of each token
    sizes: list[int]  # grouped rows per bucket
    lengths: list[int]  # rounded document length per bucket


def _plan(lengths: list[int], device: torch.device) -> _Plan:
    buckets: dict[int, list[tuple[int, int]]] = defaultdict(list)  # rounded length -> (first token, length)
    first = 0
    for length in lengths:
        buckets[-(-length // LENGTH_STEP) * LENGTH_STEP].append((first, length))
        first += length
    index, real = [], []
    for rounded, documents in buckets.items():
        start, length = torch.tensor(documents).T.unsqueeze(-1)  # [n, 1] each
        row = torch.arange(rounded)
        index.append((start + torch.minimum(row, length - 1)).flatten())
        real.append((row < length).flatten())
    flat, is_real = torch.cat(index), torch.cat(real)
    rows = is_real.nonzero().squeeze(-1)
    position = torch.empty(first, dtype=torch.int64)
    position[flat[rows]] = rows
    sizes = [rounded * len(documents) for rounded, documents in buckets.items()]
    padding = (~is_real).nonzero().squeeze(-1)
    return _Plan(flat.to(device), padding.to(device), position.to(device), sizes, list(buckets))


class _Group(torch.autograd.Function):
    """Tokens to grouped rows. Padded rows come out of attention with a zero gradient, so the way back is a plain lookup."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.plan.position), None


class _Ungroup(torch.autograd.Function):
    """Grouped rows to tokens; padded rows receive a zero gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.position)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.plan.token).index_fill_(0, ctx.plan.padding, 0.0), None


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal self-attention of a batch [S, L, H, .] of equal lengths."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
