"""Segments of one document side by side: the same outputs, states and gradients, and a model that says when it pays."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.kernels import native
from gnomon.kernels.kda import cpu, reference
from gnomon.kernels.kda.segments import chunk_in_segments, segments_per_document

NEEDS_LIBRARY = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
STATED = 3e-6  # of a tensor's norm, against the unsplit recurrence in fp64


def by_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor, borders: list[int]) -> Any:
    """The recurrence on rows of tokens."""
    o, last = reference.recurrent(*(x[None] for x in (q, k, v, g, beta)), initial, torch.tensor(borders))
    return o[0], last


def gradients(form: Any, inputs: list[Tensor], *rest: Any) -> list[Tensor]:
    """Outputs, last states and gradients of a fixed projection of both."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    o, last = form(*inputs, *rest)
    draws = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, dtype=torch.float64, generator=draws).to(x.dtype) for x in (o, last)]
    return [o.detach(), last.detach(), *torch.autograd.grad((o * weights[0]).sum() + (last * weights[1]).sum(), inputs)]


def draw(borders: list[int], strength: float) -> list[Tensor]:
    time = borders[-1]
    q, k = (x[0] for x in reference.prepare(torch.randn(1, time, 2, 12), torch.randn(1, time, 2, 12)))
    start = torch.randn(len(borders) - 1, 2, 12, 20)
    return [q, k, torch.randn(time, 2, 20), -strength * torch.rand(time, 2, 12), torch.rand(time, 2), start]


@pytest.mark.parametrize("counts", [[2, 1, 1, 1], [3, 1, 2, 1], [8, 1, 1, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize("strength", [0.0, 0.02, 5.0, 90.0])
@NEEDS_LIBRARY
def test_split_is_unsplit(counts: list[int], strength: float, poisoned: None) -> None:
    borders = [0, 97, 97, 150, 151]
    inputs = draw(borders, strength)
    exact = gradients(by_reference, [x.double() for x in inputs], borders)
    ours = gradients(lambda *x: chunk_in_segments(cpu._whole, list(x[:5]), x[5], borders, counts), inputs)
    for name, a, b in zip(("o", "last", "q", "k", "v", "g", "beta", "initial"), ours, exact, strict=True):
        size = float(b.norm())
        if name == "g":  # a sum of products of queries and keys with their gradients, which may cancel to almost nothing
            size += sum(float((x * d).norm()) for x, d in zip(inputs[:2], exact[2:4], strict=True))
        assert float((a.double() - b).norm()) < STATED * size, name


def test_split_of_the_reference_is_exact() -> None:
    borders = [0, 40]
    inputs = [x.double() for x in draw(borders, 1.0)]
    whole = gradients(by_reference, inputs, borders)
    for a, b in zip(gradients(lambda *x: chunk_in_segments(by_reference, list(x[:5]), x[5], borders, [3]), inputs), whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)  # its border states are fp32


def test_a_split_is_chosen_only_where_it_pays() -> None:
    split = segments_per_document
    for threads in (1, 2, 4, 8):  # eight slices of one head's columns already keep eight threads busy
        assert split([65536], 1, 128, 128, threads, 8) == [1]
    assert split([65536], 8, 128, 128, 64, 8) == [1]
    assert split([65536], 1, 128, 128, 64, 8)[0] > 4
    assert split([4096], 2, 16, 16, 16, 1)[0] > 2
    assert split([], 4, 128, 128, 64, 8) == []
    assert split([0, 5, 300], 1, 16, 16, 64, 1)[:2] == [1, 1]
    uneven = split([100_000, 1_000, 0], 1, 64, 64, 32, 4)
    assert uneven[0] > 2
    assert uneven[1:] == [1, 1]


@NEEDS_LIBRARY
def test_threads_beyond_the_columns_split_the_document() -> None:
    """The whole path, as a machine with many cores takes it."""
    time, heads, width = 1100, 1, 16
    q, k = reference.prepare(torch.randn(1, time, heads, width), torch.randn(1, time, heads, width))
    inputs = [q, k, torch.randn(1, time, heads, width), -torch.rand(1, time, heads, width), torch.rand(1, time, heads)]
    exact, last = reference.recurrent(*(x.double() for x in inputs))
    torch.set_num_threads(8)  # the next test goes back to one
    assert segments_per_document([time], heads, width, width, 8, 1) != [1]
    o, state = cpu.chunk(*inputs)
    torch.testing.assert_close(o.double(), exact, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(state.double(), last, atol=2e-6, rtol=1e-5)
