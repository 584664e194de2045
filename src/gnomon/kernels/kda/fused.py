"""KDA in chunks with a written backward: the products are shared, nothing is kept that one multiplication can remake.

Same equations as `reference.chunk`, in the order that needs the fewest operations: the loop over chunks carries the state
and solves for the corrected values Ṽ = T (V − e^G K S); all else is batched over every chunk, document and head at once.
The gradient of the decay follows from those of queries and keys, ∂G = q ∂q + k (∂k as row − ∂k as column), because G only
ever appears as e^(G_i − G_j). Read next: `gnomon.kernels.kda.layout`.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.kernels.kda.layout import ChunkLayout, leaf_size
from gnomon.kernels.kda.reference import transition_by

CHUNK = 32


def chunk(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    initial_state: Float[Tensor, "S H K V"] | None = None,
    cu_seqlens: Int[Tensor, " S1"] | None = None,
    min_log_decay: float = -math.inf,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "S H K V"]]:
    """`reference.chunk` with a written backward; first derivatives only."""
    layout = ChunkLayout.of(q, cu_seqlens, CHUNK)
    return _Chunk.apply(q, k, v, g, beta, initial_state, layout, leaf_size(min_log_decay, CHUNK))


def refuse_chunk(*_args: Any, **_kwargs: Any) -> str | None:
    """Never: any device, dtype and length."""
    return None


def transition(
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    cu_seqlens: Int[Tensor, " S1"] | None = None,
    min_log_decay: float = -math.inf,
) -> tuple[Float[Tensor, "S H K K"], Float[Tensor, "S H K V"]]:
    """`reference.transition` by the `chunk` above."""
    return transition_by(chunk, k, v, g, beta, cu_seqlens, min_log_decay)


def refuse_transition(*_args: Any, **_kwargs: Any) -> str | None:
    """Never: any device, dtype and length."""
    return None


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, initial, layout, leaf = inputs
        q, k, v, g, b = *tensors[:4], tensors[4][..., None]
        ctx.dtypes, ctx.layout = [x.dtype for x in tensors], layout
        ctx.initial_dtype = None if initial is None else initial.dtype
        q, k, v, g, b = (layout.pack(x) for x in (q, k, v, g, b))  # [chunks·H, C, ·]
        tiles, since_start, to_end = _tiles(g, leaf)
        from_start = since_start.exp_()
        a_kk, a_qk = _products(tiles, q, k)
        identity = torch.eye(CHUNK, dtype=k.dtype, device=k.device).expand_as(a_kk)
        inverse = torch.linalg.solve_triangular(b * a_kk, identity, upper=False, unitriangular=True)
        state = _start(initial, k, v, layout)
        states, last, error, fixed = _advance(
            v, from_start * k, inverse * b.mT, to_end.exp_() * k, from_start[:, -1, :, None], state, layout
        )
        output = torch.bmm(from_start * q, states).baddbmm_(a_qk, fixed)
        ctx.save_for_backward(q, k, b, from_start, to_end, a_kk, a_qk, inverse, states, error, fixed, *(t for tile in tiles for t in tile))
        return layout.unpack(output), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        q, k, b, from_start, to_end, a_kk, a_qk, inverse, states, error, fixed, *flat = ctx.saved_tensors
        tiles = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
        layout: ChunkLayout = ctx.layout
        d_output = layout.pack(d_output)
        k_start, k_end, gamma = from_start * k, to_end * k, from_start[:, -1, :, None]
        d_after, d_solved, d_initial = _retreat(
            torch.bmm(a_qk.mT, d_output), torch.bmm((from_start * q).mT, d_output), inverse, b * k_start, k_end, gamma, d_last, layout
        )
        d_beta = (d_solved * torch.baddbmm(error, a_kk, fixed, alpha=-1)).sum(-1, keepdim=True)
        d_v = d_solved * b
        d_qk, d_kk = torch.bmm(d_output, fixed.mT), torch.bmm(d_v, fixed.mT).neg_()

        d_q = torch.bmm(d_output, states.mT).mul_(from_start)
        d_row = torch.bmm(d_v, states.mT).neg_().mul_(from_start)  # of the keys as rows: decayed from before
        d_col = torch.bmm(fixed, d_after.mT).mul_(to_end)  # of the keys as columns: decaying until later
        d_end = (d_after * states).sum(-1) * gamma[..., 0] + (d_col * k).sum(-2)
        _products_backward(tiles, q, k, d_kk, d_qk, d_q, d_row, d_col)
        d_decay = (q * d_q).addcmul_(k, d_row - d_col)
        d_decay[:, -1] += d_end
        d_g = d_decay.flip(-2).cumsum(-2).flip(-2)
        grads = [layout.unpack(x) for x in (d_q, d_row.add_(d_col), d_v, d_g)] + [layout.unpack(d_beta)[..., 0]]
        out = [x.to(dtype) for x, dtype in zip(grads, ctx.dtypes, strict=True)]
        return *out, None if ctx.initial_dtype is None else d_initial.to(ctx.initial_dtype), None, None


Tile = tuple[Tensor, Tensor]  # the decay of rows since an anchor and of columns until it, [chunks·H, blocks, rows of a block, K]


def _tiles(g: Tensor, leaf: int) -> tuple[list[Tile], Tensor, Tensor]:
    """The tiles below the diagonal, leaf first, then the sums of g from the chunk's start and to its end.

    Only sums of neighbours are added, never subtracted: small sums keep their precision next to large ones.
    """
    blocks = g.unflatten(1, (-1, leaf))
    since_first, to_end = torch.zeros_like(blocks), torch.zeros_like(blocks)
    for r in range(1, leaf):
        torch.add(since_first[:, :, r - 1], blocks[:, :, r], out=since_first[:, :, r])
        torch.add(to_end[:, :, leaf - r], blocks[:, :, leaf - r], out=to_end[:, :, leaf - r - 1])
    tiles = [(since_first.exp(), since_first.neg().exp_())]
    since_start, to_end = since_first.add_(blocks[:, :, :1]).flatten(1, 2), to_end.flatten(1, 2)
    half = leaf
    while half < g.shape[1]:
        (since_early, since_late), (to_end_early, _) = _halves(since_start, half), _halves(to_end, half)
        tiles.append((since_late.exp(), to_end_early.exp()))
        to_end_early += since_late[:, :, -1:]
        since_late += since_early[:, :, -1:]
        half *= 2
    return tiles, since_start, to_end


def _products(tiles: list[Tile], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """A_kk strictly below the diagonal and A_qk with it, [chunks·H, C, C]."""
    a_kk, a_qk = k.new_zeros(len(k), CHUNK, CHUNK), k.new_zeros(len(k), CHUNK, CHUNK)
    for since, until in tiles:
        columns = (_columns(k, until) * until).flatten(0, 1).mT
        for a, x, diagonal in ((a_kk, k, -1), (a_qk, q, 0)):
            block = torch.bmm((_rows(x, since) * since).flatten(0, 1), columns)
            if _is_leaf(since):
                block.tril_(diagonal)
            for target, source in zip(_blocks(a, since), block.unflatten(0, since.shape[:2]).unbind(1), strict=True):
                target.copy_(source)
    return a_kk, a_qk


def _products_backward(
    tiles: list[Tile], q: Tensor, k: Tensor, d_kk: Tensor, d_qk: Tensor, d_q: Tensor, d_row: Tensor, d_col: Tensor
) -> None:
    """Add the gradients of A_kk and A_qk to those of queries, of keys as rows and of keys as columns."""
    for since, until in tiles:
        columns = (_columns(k, until) * until).flatten(0, 1)
        d_columns = torch.zeros_like(columns)
        for d_a, x, d_x, diagonal in ((d_kk, k, d_row, -1), (d_qk, q, d_q, 0)):
            d_block = torch.stack(_blocks(d_a, since), 1).flatten(0, 1)
            if _is_leaf(since):
                d_block.tril_(diagonal)
            _rows(d_x, since).addcmul_(torch.bmm(d_block, columns).view_as(since), since)
            d_columns.baddbmm_(d_block.mT, (_rows(x, since) * since).flatten(0, 1))
        _columns(d_col, until).addcmul_(d_columns.view_as(until), until)


def _advance(
    v: Tensor, k_start: Tensor, solve: Tensor, k_end: Tensor, gamma: Tensor, state: Tensor, layout: ChunkLayout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From chunk to chunk: the state before each, the last of each document, V − e^G K S and Ṽ."""
    heads = layout.heads
    states, error, fixed = v.new_empty(len(v), *state.shape[1:]), torch.empty_like(v), torch.empty_like(v)
    last, start = torch.empty_like(state), 0
    for width in layout.widths:
        here = slice(start, start := start + width * heads)
        last[width * heads : len(state)], state = state[width * heads :], state[: width * heads]
        states[here] = state
        torch.baddbmm(v[here], k_start[here], state, alpha=-1, out=error[here])
        torch.bmm(solve[here], error[here], out=fixed[here])
        state = (gamma[here] * state).baddbmm_(k_end[here].mT, fixed[here])
    last[: len(state)] = state
    return states, layout.from_states(last), error, fixed


def _retreat(
    d_fixed: Tensor, d_read: Tensor, inverse: Tensor, k_start: Tensor, k_end: Tensor, gamma: Tensor, d_last: Tensor, layout: ChunkLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """`_advance` backwards: the gradients of the state after each chunk, of the solved values, of the initial states."""
    heads, d_last = layout.heads, layout.to_states(d_last.to(d_fixed.dtype))
    d_after, d_solved = torch.empty_like(d_read), torch.empty_like(d_fixed)
    stop, state = len(d_fixed), d_last[:0]
    for width in reversed(layout.widths):
        here = slice(stop - width * heads, stop)
        state = torch.cat([state, d_last[len(state) : width * heads]])
        d_after[here] = state
        d_fixed[here].baddbmm_(k_end[here], state)
        torch.bmm(inverse[here].mT, d_fixed[here], out=d_solved[here])
        state = d_read[here].addcmul_(gamma[here], state).baddbmm_(k_start[here].mT, d_solved[here], alpha=-1)
        stop = here.start
    state = torch.cat([state, d_last[len(state) :]])
    return d_after, d_solved, layout.from_states(state)


def _start(initial: Tensor | None, k: Tensor, v: Tensor, layout: ChunkLayout) -> Tensor:
    """The initial states [S·H, K, V], longest document first."""
    if initial is None:
        return v.new_zeros(layout.num_documents * layout.heads, k.shape[-1], v.shape[-1])
    return layout.to_states(initial.to(v.dtype))


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The early and the late half of every block of 2 · half rows."""
    early, late = x.unflatten(1, (-1, 2, half)).unbind(2)
    return early, late


def _is_leaf(decay: Tensor) -> bool:
    """A leaf tile lies on the diagonal and covers every row; the others cover the late rows against the early columns."""
    return decay.shape[1] * decay.shape[2] == CHUNK


def _rows(x: Tensor, decay: Tensor) -> Tensor:
    return x.view_as(decay) if _is_leaf(decay) else _halves(x, decay.shape[2])[1]


def _columns(x: Tensor, decay: Tensor) -> Tensor:
    return x.view_as(decay) if _is_leaf(decay) else _halves(x, decay.shape[2])[0]


def _blocks(a: Tensor, decay: Tensor) -> list[Tensor]:
    """The views of [chunks·H, C, C] that a kind of tile fills."""
    count, rows = decay.shape[1:3]
    if _is_leaf(decay):
        return [a[:, i : i + rows, i : i + rows] for i in range(0, CHUNK, rows)]
    return [a[:, i + rows : i + 2 * rows, i : i + rows] for i in range(0, 2 * rows * count, 2 * rows)]
