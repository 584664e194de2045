"""KDA under random documents: packing, splitting and segment maps never change the meaning."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnomon.kernels import kda

LENGTHS = st.lists(st.integers(0, 70), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**31)
QUICK = settings(max_examples=25, deadline=None)


def draw(seed: int, time: int, strength: float) -> tuple[Tensor, ...]:
    """q, k, v, g, beta of one row, two heads; decays down to −strength per step."""
    source = torch.Generator().manual_seed(seed)
    q, k = kda.prepare(*(torch.randn(1, time, 2, 6, generator=source) for _ in range(2)))
    g = -strength * torch.rand(1, time, 2, 6, generator=source)
    return q, k, torch.randn(1, time, 2, 5, generator=source), g, torch.rand(1, time, 2, generator=source)


def close(ours: Any, exact: Any) -> None:
    torch.testing.assert_close(ours, exact, atol=2e-5, rtol=1e-4)


@QUICK
@given(lengths=LENGTHS, seed=SEEDS, strength=st.sampled_from([0.0, 0.1, 5.0, 60.0]))
def test_packed_chunks_equal_each_document_token_by_token(lengths: list[int], seed: int, strength: float) -> None:
    inputs = draw(seed, sum(lengths), strength)
    borders = torch.tensor([0, *lengths]).cumsum(0)
    start = torch.randn(len(lengths), 2, 6, 5, generator=torch.Generator().manual_seed(seed))
    exact = kda.recurrent(*inputs, start, borders)
    for form in (kda.chunk.reference, kda.chunk.module("fused").chunk, kda.chunk):
        close(form(*inputs, start, borders, -5.0 if strength <= 5 else -float("inf")), exact)


@QUICK
@given(time=st.integers(1, 90), cut=st.integers(0, 90), seed=SEEDS)
def test_a_document_may_be_cut_anywhere(time: int, cut: int, seed: int) -> None:
    inputs, cut = draw(seed, time, 5.0), min(cut, time)
    whole, last = kda.chunk(*inputs)
    first, state = kda.chunk(*(x[:, :cut] for x in inputs))
    second, state = kda.chunk(*(x[:, cut:] for x in inputs), state)
    close((torch.cat([first, second], 1), state), (whole, last))


@QUICK
@given(lengths=st.lists(st.integers(1, 40), min_size=3, max_size=3), seed=SEEDS)
def test_segment_maps_compose_in_any_grouping(lengths: list[int], seed: int) -> None:
    _, k, v, g, beta = draw(seed, sum(lengths), 5.0)
    carried, added = kda.transition(k, v, g, beta, torch.tensor([0, *lengths]).cumsum(0))
    a, b, c = ((carried[s], added[s]) for s in range(3))
    close(kda.compose(c, kda.compose(b, a)), kda.compose(kda.compose(c, b), a))
    whole = kda.transition(k, v, g, beta)
    close(kda.compose(c, kda.compose(b, a)), (whole[0][0], whole[1][0]))


@QUICK
@given(time=st.integers(1, 50), seed=SEEDS, scale=st.floats(-4, 4))
def test_outputs_are_linear_in_the_values(time: int, seed: int, scale: float) -> None:
    q, k, v, g, beta = draw(seed, time, 5.0)
    other = torch.randn(v.shape, generator=torch.Generator().manual_seed(seed + 1))
    o, last = kda.chunk(q, k, v + scale * other, g, beta)
    parts = [kda.chunk(q, k, x, g, beta) for x in (v, other)]
    close((o, last), tuple(x + scale * y for x, y in zip(*parts, strict=True)))
