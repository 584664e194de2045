"""Causal softmax attention of MLA with explicit scores, its largest logits, and decoding on the compressed latent.

Report §2.1. No position enters anywhere: order comes only from the causal mask (and from the KDA layers around it).
Read next: `gnomon/model/mixers/mla.py`.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.errors import KernelError

QUERY_TILE = 256  # queries per tile in `max_logits`: bounds memory to H * QUERY_TILE * L scores


def attention(
    q: Float[Tensor, "B T H Q"],
    k: Float[Tensor, "B L H Q"],
    v: Float[Tensor, "B L H V"],
    scale: float,
    cu_seqlens: Int[Tensor, "S1"] | None = None,
    offset: int = 0,
) -> Float[Tensor, "B T H V"]:
    """softmax(scale * q k^T) v, where query t sees the keys 0..offset+t; softmax in fp32, probabilities in the dtype of `v`.

    With `cu_seqlens` (document borders over T, first 0, last T) B is 1, L is T, offset is 0, and a query sees only keys of
    its own document. Raises `KernelError` when these conditions are not met or a query would see no key.
    """
    check_attention(q, k, cu_seqlens, offset)
    if q.shape[1] == 0:
        return v[:, :0]
    if cu_seqlens is None:
        return _attend(q, k, v, scale, offset)
    outputs = [_attend(q[:, a:b], k[:, a:b], v[:, a:b], scale, 0) for a, b in document_spans(cu_seqlens)]
    return torch.cat(outputs, dim=1)


def max_logits(
    q: Float[Tensor, "B T H Q"], k: Float[Tensor, "B L H Q"], scale: float, cu_seqlens: Int[Tensor, "S1"] | None = None, offset: int = 0
) -> Float[Tensor, "H"]:
    """The largest visible causal logit scale * <q, k> of each head over the batch: what QK-Clip compares with its threshold.

    No gradient; memory is bounded by tiles of queries. Conventions of `cu_seqlens` and `offset` as in `attention`.
    """
    check_attention(q, k, cu_seqlens, offset)
    spans = [(0, q.shape[1])] if cu_seqlens is None else list(document_spans(cu_seqlens))
    dtype = torch.promote_types(q.dtype, torch.float32)
    largest = torch.full((q.shape[2],), -torch.inf, dtype=dtype, device=q.device)
    with torch.no_grad():
        for first, last in spans:
            for start in range(first, last, QUERY_TILE):
                stop = min(start + QUERY_TILE, last)
                scores = _scores(q[:, start:stop], k[:, first : stop + offset], scale, start - first + offset)
                largest = torch.maximum(largest, scores.amax(dim=(0, 2, 3)))
    return largest


def absorbed(
    q_n: Float[Tensor, "B T H n"],
    q_r: Float[Tensor, "B T H r"],
    cache: Float[Tensor, "B L cr"],
    kv_b: Float[Tensor, "H nv c"],
    lengths: Int[Tensor, "B"],
    scale: float,
) -> Float[Tensor, "B T H v"]:
    """Attention on the cached rows [latent c | shared key r] with the key and value expansions folded into query and output.

    score = <W_k^T q_n, latent> + <q_r, shared key>, context = sum p latent, o = W_v context, where kv_b[h] = [W_k (n) | W_v (v)]
    rows. The T new tokens are already in the cache: query t of sequence b sees the first lengths[b] - T + t + 1 rows.
    Softmax in fp32; the cache may have another dtype than queries and weights, the result has theirs.
    Rows past `lengths[b]` are never read into a result, whatever they hold.
    Raises `KernelError` when a query would see no row or more rows than the cache has.
    """
    _, tokens, _, nope = q_n.shape
    latent = kv_b.shape[-1]
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < tokens or longest > cache.shape[1]:
        raise KernelError(
            f"absorbed: lengths span {shortest}..{longest}; they count the {tokens} new tokens and fit the cache of {cache.shape[1]} rows"
        )
    rows = cache[:, :longest]
    visible = lengths[:, None] - tokens + torch.arange(1, tokens + 1, device=lengths.device)  # [B, T]
    hidden = torch.arange(longest, device=lengths.device) >= visible[..., None]  # [B, T, L]
    rows = rows.masked_fill(hidden[:, -1, :, None], 0.0)  # stale rows may hold NaN, and 0 * NaN is NaN
    q_latent = torch.einsum("bthn,hnc->bthc", q_n, kv_b[:, :nope])
    query = torch.cat((q_latent, q_r), dim=-1).flatten(1, 2)  # [B, T*H, c+r]
    dtype = torch.promote_types(cache.dtype, torch.float32)
    scores = (query.to(dtype) @ rows.to(dtype).mT).mul(scale).unflatten(1, (tokens, -1))  # [B, T, H, L]
    p = scores.masked_fill(hidden.unsqueeze(2), -torch.inf).softmax(dim=-1).to(cache.dtype)
    context = (p.flatten(1, 2) @ rows[..., :latent]).unflatten(1, (tokens, -1))  # [B, T, H, c]
    return torch.einsum("bthc,hvc->bthv", context.to(kv_b.dtype), kv_b[:, nope:])


def paged(
    q: Float[Tensor, "N H Q"],
    pages: Float[Tensor, "P page cr"],
    kv_b: Float[Tensor, "H nv c"],
    table: Int[Tensor, "S M"],
    past: Int[Tensor, " S"],
    cu_seqlens: Int[Tensor, " S1"],
    scale: float,
) -> Float[Tensor, "N H v"]:
    """`absorbed` for sequences that bring any number of new tokens each and whose cached rows lie scattered over pages.

    Sequence s brings the tokens `cu_seqlens[s]` to `cu_seqlens[s + 1]`; `past[s]` rows stand before theirs. Its position p is row
    p % page of page `table[s, p // page]`, and the rows of the new tokens are there already. What other rows hold never matters.
    Computes in fp32 (fp64 for fp64 queries) from the values as stored; the result has the dtype of `q`.
    Raises `KernelError` for borders, lengths or pages that do not fit.
    """
    check_paged(q, pages, kv_b, table, past, cu_seqlens)
    dtype = torch.promote_types(q.dtype, torch.float32)
    latent, out = kv_b.shape[-1], []
    nope = q.shape[-1] - (pages.shape[-1] - latent)
    for sequence, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        if stop > start:
            length = int(past[sequence]) + stop - start
            own = table[sequence, : -(-length // pages.shape[1])].long()
            rows = pages[own].flatten(0, 1)[:length].to(dtype).unsqueeze(0)
            q_n, q_r = q[start:stop].to(dtype).unsqueeze(0).split([nope, q.shape[-1] - nope], dim=-1)
            out.append(absorbed(q_n, q_r, rows, kv_b.to(dtype), past.new_tensor([length]), scale)[0])
    result = torch.cat(out) if out else q.new_empty(0, q.shape[1], kv_b.shape[1] - nope)
    return result.to(q.dtype)


def check_paged(q: Tensor, pages: Tensor, kv_b: Tensor, table: Tensor, past: Tensor, cu_seqlens: Tensor) -> None:
    """Refuse inputs outside the contract of `paged`, naming the value."""
    nope = q.shape[-1] - (pages.shape[-1] - kv_b.shape[-1])
    if kv_b.shape[0] != q.shape[1] or not 0 <= nope <= min(q.shape[-1], kv_b.shape[1]):
        raise KernelError(
            f"paged: q {tuple(q.shape)}, pages {tuple(pages.shape)} and kv_b {tuple(kv_b.shape)} do not fit: the heads agree, a row is "
            "[latent | shared key], a query [key part | shared key], and kv_b[h] maps the latent to [key part | value]"
        )
    borders, before = cu_seqlens.tolist(), past.tolist()
    if not borders or borders[0] != 0 or borders[-1] != len(q) or any(a > b for a, b in pairwise(borders)):
        raise KernelError(f"paged: cu_seqlens must rise from 0 to {len(q)}, got {borders}")
    if not len(borders) - 1 == len(before) == len(table):
        raise KernelError(f"paged: cu_seqlens has {len(borders) - 1} sequences, past {len(before)}, table {len(table)}")
    for sequence, ((start, stop), done) in enumerate(zip(pairwise(borders), before, strict=True)):
        if done < 0:
            raise KernelError(f"paged: past[{sequence}] is {done}; it counts cached tokens")
        used = -(-(done + stop - start) // pages.shape[1]) if stop > start else 0
        if used > table.shape[1]:
            raise KernelError(
                f"paged: sequence {sequence} has {done + stop - start} tokens and needs {used} pages of {pages.shape[1]}; "
                f"table has room for {table.shape[1]}"
            )
        if used and not 0 <= int(table[sequence, :used].min()) <= int(table[sequence, :used].max()) < len(pages):
            raise KernelError(f"paged: table[{sequence}] names pages {table[sequence, :used].tolist()}, but there are {len(pages)}")


def document_spans(cu_seqlens: Tensor) -> Iterator[tuple[int, int]]:
    """(first, last) of each document that has tokens."""
    borders = cu_seqlens.tolist()
    return ((a, b) for a, b in pairwise(borders) if b > a)


def check_attention(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, offset: int) -> None:
    """Refuse inputs outside the contract of `attention`, naming the value."""
    tokens, keys = q.shape[1], k.shape[1]
    if cu_seqlens is None:
        if offset < 0 or offset + tokens > keys:
            raise KernelError(f"attention: offset {offset} with {tokens} queries needs {offset + tokens} keys, there are {keys}")
        return
    if q.shape[0] != 1 or keys != tokens or offset != 0:
        raise KernelError(
            f"attention: cu_seqlens needs batch 1, as many keys as queries and offset 0; got batch {q.shape[0]}, "
            f"{tokens} queries, {keys} keys, offset {offset}"
        )
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != tokens or bool((cu_seqlens.diff() < 0).any()):
        raise KernelError(f"attention: cu_seqlens must rise from 0 to {tokens}, got {cu_seqlens.tolist()}")


def _scores(q: Tensor, k: Tensor, scale: float, offset: int) -> Tensor:
    """Masked fp32 scores [B, H, T, L]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bthq,blhq->bhtl", q.to(dtype), k.to(dtype)) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(offset + 1)
    return scores.masked_fill(future, -torch.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int) -> Tensor:
    p = _scores(q, k, scale, offset).softmax(dim=-1).to(v.dtype)
    return torch.einsum("bhtl,blhv->bthv", p, v)
