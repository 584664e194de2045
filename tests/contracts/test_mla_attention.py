"""Causal attention, its largest logits and the decode on the latent, against loops over queries."""

import pytest
import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import mla
from gnomon.kernels.mla import reference, sdpa

SCALE = 0.37
IMPLEMENTATIONS = pytest.mark.parametrize("attention", [reference.attention, sdpa.attention], ids=["reference", "sdpa"])
PACKINGS = pytest.mark.parametrize("lengths", [[5, 0, 70, 1, 63, 64, 65, 2], [9, 9, 9], [20], [1, 1]], ids=str)


def by_hand(q: Tensor, k: Tensor, v: Tensor, first: list[int], offset: int = 0) -> Tensor:
    """Query by query: query t sees the keys first[t]..offset+t."""
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=v.dtype)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                seen = slice(first[t], offset + t + 1)
                p = torch.softmax(SCALE * (k[b, seen, h] @ q[b, t, h]), dim=0)
                out[b, t, h] = p @ v[b, seen, h]
    return out


def borders(lengths: list[int]) -> tuple[Tensor, list[int]]:
    """cu_seqlens, and the first token of each token's document."""
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return cu, [int(cu[i]) for i, n in enumerate(lengths) for _ in range(n)]


def qkv(batch: int, time: int, *, keys: int | None = None, width: int = 6, value: int = 4) -> list[Tensor]:
    """Random queries, keys and values of two heads in fp64."""
    shapes = ((time, width), (keys or time, width), (keys or time, value))
    return [torch.randn(batch, length, 2, w, dtype=torch.float64) for length, w in shapes]


@IMPLEMENTATIONS
@PACKINGS
def test_documents_do_not_see_each_other(attention, lengths: list[int]) -> None:
    cu, first = borders(lengths)
    q, k, v = qkv(1, sum(lengths))
    torch.testing.assert_close(attention(q, k, v, SCALE, cu), by_hand(q, k, v, first), rtol=1e-12, atol=1e-12)


@IMPLEMENTATIONS
@pytest.mark.parametrize("widths", [(6, 4), (4, 6), (5, 5)], ids=str)
def test_rows_are_documents_without_borders(attention, widths: tuple[int, int]) -> None:
    q, k, v = qkv(3, 7, width=widths[0], value=widths[1])
    torch.testing.assert_close(attention(q, k, v, SCALE), by_hand(q, k, v, [0] * 7), rtol=1e-12, atol=1e-12)


@IMPLEMENTATIONS
@pytest.mark.parametrize("lengths", [[3, 0, 1, 4], [2, 2], None], ids=str)
def test_gradients_are_those_of_the_function(attention, lengths: list[int] | None) -> None:
    cu = None if lengths is None else borders(lengths)[0]
    inputs = [x.requires_grad_() for x in qkv(1, 5 if lengths is None else sum(lengths), width=3, value=2)]
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, SCALE, cu), inputs)


@IMPLEMENTATIONS
def test_padding_rows_do_not_leak_gradients(attention) -> None:
    """Documents of many lengths share padded calls; the gradient must be that of each document alone."""
    lengths = [3, 66, 5, 64, 1]
    inputs = [x.requires_grad_() for x in qkv(1, sum(lengths))]
    projection = torch.randn(1, sum(lengths), 2, 4, dtype=torch.float64)
    (attention(*inputs, SCALE, borders(lengths)[0]) * projection).sum().backward()
    together = [x.grad.clone() for x in inputs]
    for x in inputs:
        x.grad = None
    start = 0
    for n in lengths:
        part = slice(start, start + n)
        (reference.attention(*(x[:, part] for x in inputs), SCALE) * projection[:, part]).sum().backward()
        start += n
    torch.testing.assert_close(together, [x.grad for x in inputs], rtol=1e-11, atol=1e-11)


def test_queries_may_continue_a_longer_past() -> None:
    q, k, v = qkv(2, 4, keys=11)
    torch.testing.assert_close(mla.attention(q, k, v, SCALE, None, 6), by_hand(q, k, v, [0] * 4, 6), rtol=1e-12, atol=1e-12)


@IMPLEMENTATIONS
def test_the_past_does_not_depend_on_the_future(attention) -> None:
    lengths = [50, 70, 9]
    q, k, v = (x.float() for x in qkv(1, 129))
    before = attention(q, k, v, SCALE, borders(lengths)[0])
    for x in (q, k, v):
        x[:, 100:] = torch.randn_like(x[:, 100:])
    assert torch.equal(attention(q, k, v, SCALE, borders(lengths)[0])[:, :100], before[:, :100])


@IMPLEMENTATIONS
def test_bf16_softmax_runs_in_fp32(attention) -> None:
    q, k, v = (x.bfloat16() for x in qkv(1, 200, width=16, value=16))
    out = attention(q, k, v, SCALE)
    assert out.dtype == torch.bfloat16
    exact = reference.attention(q.double(), k.double(), v.double(), SCALE)
    assert float((out.double() - exact).norm() / exact.norm()) < 4e-3


@pytest.mark.parametrize("lengths", [None, [300, 0, 1, 259]], ids=str)
def test_max_logits_is_the_largest_visible_logit_of_each_head(lengths: list[int] | None) -> None:
    q, k, _ = qkv(1, 560)
    cu, first = (None, [0] * 560) if lengths is None else borders(lengths)
    logits = SCALE * torch.einsum("thq,lhq->htl", q[0], k[0])
    t, key = torch.arange(560)[:, None], torch.arange(560)[None, :]
    visible = (key <= t) & (key >= torch.tensor(first)[:, None])
    q.requires_grad_()
    found = mla.max_logits(q, k, SCALE, cu)
    torch.testing.assert_close(found, logits.masked_fill(~visible, -torch.inf).amax(dim=(1, 2)), rtol=1e-12, atol=0.0)
    assert not found.requires_grad


def test_absorbed_decode_equals_attention_on_expanded_keys() -> None:
    heads, nope, shared, value, latent = 2, 5, 3, 4, 6
    lengths, new = [9, 4, 12], 3
    cache = torch.randn(3, 14, latent + shared, dtype=torch.float64)
    kv_b = torch.randn(heads, nope + value, latent, dtype=torch.float64)
    q = torch.randn(3, new, heads, nope + shared, dtype=torch.float64)
    expanded = torch.einsum("blc,hxc->blhx", cache[..., :latent], kv_b)
    k = torch.cat((expanded[..., :nope], cache[:, :, None, latent:].expand(-1, -1, heads, -1)), dim=-1)
    for b, length in enumerate(lengths):
        cache[b, length:] = torch.nan  # stale rows must not matter, whatever they hold
    out = mla.absorbed(q[..., :nope], q[..., nope:], cache, kv_b, torch.tensor(lengths), SCALE)
    for b, length in enumerate(lengths):
        row = slice(b, b + 1)
        expected = by_hand(q[row], k[row, :length], expanded[row, :length, :, nope:], [0] * new, length - new)
        torch.testing.assert_close(out[row], expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("keys", "cu", "offset", "message"), [
    (7, None, 3, "offset 3 with 5 queries needs 8 keys"),
    (5, [0, 4], 0, "must rise from 0 to 5"),
    (5, [0, 3, 2, 5], 0, "must rise from 0 to 5"),
    (5, [1, 5], 0, "must rise from 0 to 5"),
    (7, [0, 5], 0, "as many keys as queries"),
    (5, [0, 5], 1, "offset 0"),
])  # fmt: skip
def test_refuses_what_does_not_fit(keys: int, cu: list[int] | None, offset: int, message: str) -> None:
    q, k, v = qkv(1, 5, keys=keys)
    with pytest.raises(KernelError, match=message):
        mla.attention(q, k, v, SCALE, None if cu is None else torch.tensor(cu), offset)


def test_absorbed_refuses_lengths_that_do_not_fit() -> None:
    arguments = mla.absorbed.module("sample").samples("cpu")["absorbed"]
    for lengths in ([12, 5], [11, 2]):
        with pytest.raises(KernelError, match="lengths span"):
            mla.absorbed(*arguments[:4], torch.tensor(lengths), SCALE)


@pytest.mark.parametrize("candidate", ["reference", "sdpa"])
@pytest.mark.parametrize("bounds", [None, [0], [0, 0], [0, 0, 0]])
def test_a_stream_without_tokens_has_an_empty_result(candidate, bounds):
    q, v = torch.zeros(1, 0, 2, 8), torch.zeros(1, 0, 2, 4)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    assert mla.attention.module(candidate).attention(q, q, v, 1.0, cu_seqlens).shape == (1, 0, 2, 4)
