"""The meaning of Kimi Delta Attention in plain PyTorch: token by token, and the same in chunks of matrix products.

Report section 2.1.1 and equation 5; the chunkwise form is that of the Kimi Linear report. Legend: B rows, T time, H heads,
K key channels, V value channels, S documents. Everything is computed in fp32, or in fp64 where an input is fp64.
Read next: `gnomon.kernels.kda.layout` (documents to chunks), `gnomon.kernels.kda.fused` (the same with a written backward).
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.kernels.gated_norm.reference import gated_norm
from gnomon.kernels.kda.layout import ChunkLayout, document_bounds, leaf_size
from gnomon.kernels.short_conv.reference import short_conv

CHUNK = 32


def prepare(
    q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T H K"], eps: float = 1e-6
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H K"]]:
    """Normalise queries and keys to unit length and scale the queries: (q̂ · K^-½, k̂) in fp32.

    `eps` is added to the SUM of squares inside the root, as in the released model; added to the mean it would be another model.
    """
    q, k = _compute(q), _compute(k)
    q = q * (torch.rsqrt((q * q).sum(-1, keepdim=True) + eps) * q.shape[-1] ** -0.5)
    return q, k * torch.rsqrt((k * k).sum(-1, keepdim=True) + eps)


def decay(
    z: Float[Tensor, "*B H K"], A_log: Float[Tensor, " H"], lower_bound: float | None, bias: Float[Tensor, " HK"] | None = None
) -> Float[Tensor, "*B H K"]:
    """The log-decay g per key channel from the gate logits z, plus `bias` where it is not in them yet; exp(A_log) is one scalar per head.

    With a bound (report equation 5): g = lower_bound · sigmoid(exp(A_log) z), in (lower_bound, 0).
    Without (Kimi Linear): g = −exp(A_log) · softplus(z).
    """
    z, rate = _compute(z), _compute(A_log).exp()[:, None]
    if bias is not None:
        z = z + _compute(bias).view(z.shape[-2:])
    if lower_bound is None:
        return -rate * F.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


def step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    g: Float[Tensor, "B H K"],
    beta: Float[Tensor, "B H"],
    state: Float[Tensor, "B H K V"],
) -> tuple[Float[Tensor, "B H V"], Float[Tensor, "B H K V"]]:
    """One token per sequence: S ← Diag(e^g) S; S ← S + β k (v − Sᵀk)ᵀ; o = Sᵀq. Returns the new state, leaves the old one.

    The error v − Sᵀk is taken against the decayed state, the output from the updated one.
    """
    q, k, v, g, beta, state = (_compute(x) for x in (q, k, v, g, beta, state))
    state = state * g.exp()[..., None]
    error = v - torch.einsum("bhkv,bhk->bhv", state, k)
    state = state + (beta[..., None] * k)[..., None] * error[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q), state


def recurrent(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    initial_state: Float[Tensor, "S H K V"] | None = None,
    cu_seqlens: Int[Tensor, " S1"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "S H K V"]]:
    """Token by token with `step`: the meaning of every other form. Returns the outputs and each document's last state.

    Without `cu_seqlens` each row is a document. With it there is one row (B = 1), document s is tokens
    `cu_seqlens[s]:cu_seqlens[s + 1]`, and a document of length zero passes its state through.
    """
    batch, time, heads, width = q.shape
    bounds = document_bounds(batch, time, cu_seqlens)
    state = _initial(initial_state, v, len(bounds) - 1, heads, width)
    if cu_seqlens is not None:
        parts = []
        for s, (a, b) in enumerate(pairwise(bounds)):
            parts.append(recurrent(q[:, a:b], k[:, a:b], v[:, a:b], g[:, a:b], beta[:, a:b], state[s : s + 1]))
        if parts:
            return torch.cat([o for o, _ in parts], 1), torch.cat([last for _, last in parts])
    outputs = [v.new_empty(batch, 0, heads, v.shape[-1], dtype=state.dtype)]
    for t in range(time):
        o, state = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        outputs.append(o[:, None])
    return torch.cat(outputs, 1), state


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
    """`recurrent` in chunks: within a chunk all tokens at once, from chunk to chunk one affine map of the state.

    With G the sum of g from the chunk's start, A_kk[i,j] = Σ k_i k_j e^(G_i − G_j) below the diagonal and A_qk likewise with the diagonal::

        (I + Diag(β) A_kk) [U | W] = Diag(β) [V | e^G K]
        O  = (e^G Q − A_qk W) S + A_qk U
        S' = (Diag(e^G_C) − K̃ᵀW) S + K̃ᵀU,      K̃ = e^(G_C − G) K

    `min_log_decay` is a bound on g known in advance (−5 in K3); it only selects how many rows one dense product may span.
    Every exponent is a sum of same-signed terms, so nothing overflows or cancels however strong the decay is, and no row
    depends on a later token.
    """
    heads, width = q.shape[2:]
    layout = ChunkLayout.of(q, cu_seqlens, CHUNK)
    q, k, v, g, b = (layout.to_chunks(_compute(x)) for x in (q, k, v, g, beta[..., None]))  # [chunks, H, C, ·]
    state = _initial(initial_state, v, layout.num_documents, heads, width)[layout.order]

    prefix, suffix = g.cumsum(-2), _sum_after(g)
    leaf = leaf_size(min_log_decay, CHUNK)
    system = torch.eye(CHUNK, dtype=k.dtype, device=k.device) + b * decayed_products(k, k, g, leaf).tril(-1)
    right = b * torch.cat([v, prefix.exp() * k], -1)
    local = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)  # [U | W]
    output, reach = (decayed_products(q, k, g, leaf) @ local).split([v.shape[-1], width], -1)
    added, erased = ((suffix.exp() * k).mT @ local).split([v.shape[-1], width], -1)
    carried = torch.diag_embed(prefix[..., -1, :].exp()) - erased  # [chunks, H, K, K]

    states, last = _scan(carried, added, state, layout)
    output = output + (prefix.exp() * q - reach) @ states
    return layout.to_tokens(output), last


def transition(
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    cu_seqlens: Int[Tensor, " S1"] | None = None,
    min_log_decay: float = -math.inf,
) -> tuple[Float[Tensor, "S H K K"], Float[Tensor, "S H K V"]]:
    """What each segment does to the state, S_out = S̃ + M S_in, as (M, S̃) (report section 5.1.2).

    The recurrence is affine in the state and treats value columns alike: M is what becomes of the columns of the identity
    when no value is written, S̃ what becomes of zero.
    """
    return transition_by(chunk, k, v, g, beta, cu_seqlens, min_log_decay)


def decode(
    projected: Float[Tensor, "N C"],
    raw_decay: Float[Tensor, "N H K"],
    raw_beta: Float[Tensor, "N H"],
    gate: Float[Tensor, "N H K"],
    conv: Float[Tensor, "S W1 C"],
    matrix: Float[Tensor, "S H K K"],
    conv_weight: Float[Tensor, "C W"],
    A_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, " HK"],
    norm: Float[Tensor, " K"],
    lower_bound: float | None,
    eps: float,
    cu_seqlens: Int[Tensor, " S1"],
    copies: Int[Tensor, "M 2"] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A KDA layer between its projections, for new tokens of several sequences: outputs [N, H, K], conv, matrix, copies of both.

    `projected` holds q | k | v before the convolution (C = 3·H·K), `raw_decay` lacks its bias, `raw_beta` and `gate` their sigmoid.
    `conv` and `matrix` are the states before the first new token; those after the last are returned. Each row (sequence, tokens) of
    `copies`, in rising order, asks for that sequence's states after its first `tokens` new tokens [M, W-1, C] and [M, H, K, K].
    """
    bounds = document_bounds(1, len(projected), cu_seqlens)
    outputs, after, kept = [gate[:0]], [(conv[:0], matrix[:0])], [(conv[:0], matrix[:0])]
    for s, (a, b) in enumerate(pairwise(bounds)):
        wanted = [] if copies is None else [a + tokens for sequence, tokens in copies.tolist() if sequence == s]
        state = conv[s : s + 1], matrix[s : s + 1]
        for first, last in pairwise([a, *wanted, b]):
            rows = slice(first, last)
            o, *moved = _advance(projected[rows], raw_decay[rows], raw_beta[rows], *state, conv_weight, A_log, dt_bias, lower_bound)
            outputs.append(gated_norm(o, norm, gate[rows], eps))
            state = moved[0], moved[1]
            kept.append(state)
        after.append(kept.pop())
    ends, copied = (tuple(torch.cat(parts) for parts in zip(*states, strict=True)) for states in (after, kept))
    return torch.cat(outputs), ends[0], ends[1], copied[0], copied[1]


def commit(
    projected: Float[Tensor, "N C"],
    raw_decay: Float[Tensor, "N H K"],
    raw_beta: Float[Tensor, "N H"],
    conv: Float[Tensor, "S W1 C"],
    matrix: Float[Tensor, "S H K K"],
    conv_weight: Float[Tensor, "C W"],
    A_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, " HK"],
    lower_bound: float | None,
    cu_seqlens: Int[Tensor, " S1"],
    prefix: Int[Tensor, " S"],
) -> tuple[Tensor, Tensor]:
    """The states after the first `prefix[s]` new tokens of each sequence, from what `decode` was given (report section 5.4.2)."""
    bounds, states = document_bounds(1, len(projected), cu_seqlens), [(conv[:0], matrix[:0])]
    for s, taken in enumerate(prefix.tolist()):
        rows, start = slice(bounds[s], bounds[s] + taken), (conv[s : s + 1], matrix[s : s + 1])
        states.append(_advance(projected[rows], raw_decay[rows], raw_beta[rows], *start, conv_weight, A_log, dt_bias, lower_bound)[1:])
    return torch.cat([c for c, _ in states]), torch.cat([m for _, m in states])


def _advance(
    projected: Tensor, raw_decay: Tensor, raw_beta: Tensor, conv: Tensor, matrix: Tensor, conv_weight: Tensor, A_log: Tensor,
    dt_bias: Tensor, lower_bound: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence: outputs before the norm [N, H, K], and its states after the rows."""
    mixed, history = short_conv(projected[None], conv_weight, conv)
    assert history is not None  # asked for by default
    q, k, v = mixed.view(1, len(projected), 3, *raw_decay.shape[1:]).unbind(2)
    q, k = prepare(q, k)
    g = decay(raw_decay[None] + dt_bias.view(raw_decay.shape[1:]), A_log, lower_bound)
    o, matrix = recurrent(q, k, v, g, torch.sigmoid(_compute(raw_beta))[None], matrix)
    return o[0], history, matrix


def transition_by(
    form: Callable[..., tuple[Tensor, Tensor]],
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    min_log_decay: float,
) -> tuple[Tensor, Tensor]:
    """`transition` by any form of `chunk`."""
    segments, heads = (k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1), k.shape[2]
    identity = torch.eye(k.shape[-1], dtype=_compute(v).dtype, device=k.device).expand(segments, heads, -1, -1)
    start = torch.cat([identity.new_zeros(*identity.shape[:-1], v.shape[-1]), identity], -1)
    values = torch.cat([v, torch.zeros_like(k, dtype=v.dtype)], -1)
    _, last = form(torch.zeros_like(k), k, values, g, beta, start, cu_seqlens, min_log_decay)
    added, carried = last.split([v.shape[-1], k.shape[-1]], -1)
    return carried, added


def compose(later: tuple[Tensor, Tensor], earlier: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The map of two consecutive segments: (M₂, S̃₂) after (M₁, S̃₁) is (M₂ M₁, S̃₂ + M₂ S̃₁)."""
    return later[0] @ earlier[0], later[1] + later[0] @ earlier[1]


def decayed_products(
    x: Float[Tensor, "*N C K"], k: Float[Tensor, "*N C K"], g: Float[Tensor, "*N C K"], leaf: int
) -> Float[Tensor, "*N C C"]:
    """A[i, j] = Σ_c x_ic k_jc exp(g_(j+1)c + … + g_ic) for j ≤ i, else 0.

    The rows are halved: between the halves the decay splits at the middle into two factors that are at most one, and each half is
    the same problem again, down to `leaf` rows, where the decay is anchored at the first row.
    """
    rows = x.shape[-2]
    if rows <= leaf:
        since_first = F.pad(g[..., 1:, :], (0, 0, 1, 0)).cumsum(-2)
        return ((x * since_first.exp()) @ (k * (-since_first).exp()).mT).tril()
    half = rows // 2
    x, k, g = (y.unflatten(-2, (2, half)) for y in (x, k, g))  # [*N, 2, C/2, K]
    inner = decayed_products(x, k, g, leaf)
    (_, x_late), (k_early, _), (g_early, g_late) = (y.unbind(-3) for y in (x, k, g))
    across = (x_late * g_late.cumsum(-2).exp()) @ (k_early * _sum_after(g_early).exp()).mT
    early, late = inner.unbind(-3)
    return torch.cat([torch.cat([early, torch.zeros_like(early)], -1), torch.cat([across, late], -1)], -2)


def _scan(carried: Tensor, added: Tensor, state: Tensor, layout: ChunkLayout) -> tuple[Tensor, Tensor]:
    """The state before every chunk [chunks, H, K, V], and the last one of every document in the caller's order."""
    states, finished, start = [state[:0]], [], 0
    for width in [*layout.widths, 0]:
        finished.append(state[width:])  # documents that have no further chunk
        state = state[:width]
        states.append(state)
        state = carried[start : start + width] @ state + added[start : start + width]
        start += width
    last = torch.cat(finished[::-1])
    return torch.cat(states), torch.empty_like(last).index_copy(0, layout.order, last)


def _sum_after(g: Tensor) -> Tensor:
    """Σ_(r>i) g_r along rows, by addition alone: the total minus a prefix would lose the small sums next to large ones."""
    after = F.pad(g[..., 1:, :], (0, 0, 0, 1))
    return after.flip(-2).cumsum(-2).flip(-2)


def _initial(state: Tensor | None, like: Tensor, documents: int, heads: int, width: int) -> Tensor:
    """The given state in the precision of the computation, or zeros."""
    if state is None:
        return like.new_zeros(documents, heads, width, like.shape[-1], dtype=_compute(like[:0]).dtype)
    return _compute(state)


def _compute(x: Tensor) -> Tensor:
    """fp64 stays, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()
