"""The gradients of KDA in C++: chunks of dense products, cut where the decay is strong, shared by any number of threads."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.kernels import native
from gnomon.kernels.kda import cpu, reference

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
NAMES = ("o", "last", "q", "k", "v", "g", "beta", "initial")


def every(z: Tensor, period: int, place: int, there: float, elsewhere: float) -> Tensor:
    """One value at a place of every period of tokens, another at all other tokens."""
    return torch.where(torch.arange(z.shape[1])[:, None, None] % period == place, there, elsewhere).expand_as(z)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "a cut in every second chunk": lambda z: torch.where(z > 2.5, -60.0, -0.1),
    "all of the decay in one token of a chunk": lambda z: every(z, 16, 3, -40.0, 0.0),
    "some channels are erased": lambda z: torch.where(z > 2, -math.inf, -0.5),
    "all channels are erased at times": lambda z: every(z, 9, 4, -math.inf, -0.01),
    "denormal factors": lambda z: -86.0 - 3 * torch.rand_like(z),
    "growth": lambda z: 0.3 * torch.rand_like(z),
    "tiny": lambda z: -1e-6 * torch.rand_like(z),
}


def draw(borders: list[int], heads: int, keys: int, values: int) -> list[Tensor]:
    """q, k, v, g, beta and initial states."""
    time, documents = borders[-1], len(borders) - 1
    q, k = reference.prepare(*(torch.randn(1, time, heads, keys) for _ in range(2)))
    g = reference.decay(torch.randn(1, time, heads, keys), torch.zeros(heads), -5.0)
    start = torch.randn(documents, heads, keys, values)
    return [q, k, torch.randn(1, time, heads, values), g, torch.rand(1, time, heads), start]


def run(form: Callable[..., Any], inputs: list[Tensor], borders: list[int], scale: float = 1.0) -> list[Tensor]:
    """Outputs, last states and the gradients of a fixed projection of both, times `scale`."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    o, last = form(*inputs, torch.tensor(borders))
    draws = torch.Generator().manual_seed(1)
    weights = [scale * torch.randn(x.shape, dtype=torch.float64, generator=draws) for x in (o, last)]
    loss = (o * weights[0].to(o.dtype)).sum() + (last * weights[1].to(o.dtype)).sum()
    return [o.detach(), last.detach(), *torch.autograd.grad(loss, inputs)]


def compare(inputs: list[Tensor], borders: list[int], tolerance: float = 3e-6, scale: float = 1.0) -> None:
    """The library in fp32 against the recurrence in fp64."""
    ours, exact = run(cpu.chunk, inputs, borders, scale), run(reference.recurrent, [x.double() for x in inputs], borders, scale)
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        size = float(b.norm())
        if name == "g":  # a sum of products of queries and keys with their gradients, which may cancel to almost nothing
            size += sum(float((x * d).norm()) for x, d in zip(inputs[:2], exact[2:4], strict=True))
        distance = float((a.double() - b).norm()) / max(size, 1e-30)
        assert distance < tolerance, (name, distance)


@pytest.mark.parametrize("gate", GATES)
def test_any_decay(gate: str, poisoned: None) -> None:
    borders = [0, 130, 131, 131, 200]
    inputs = draw(borders, 2, 20, 36)
    inputs[3] = GATES[gate](torch.randn_like(inputs[3]))
    compare(inputs, borders)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 80, 127, 129])
def test_any_length(length: int, poisoned: None) -> None:
    borders = [0, 0, length, length]
    inputs = draw(borders, 1, 5, 3)
    compare(inputs, borders)


@pytest.mark.parametrize(("keys", "values"), [(1, 1), (16, 128), (128, 16), (33, 65), (64, 64)])
def test_any_width(keys: int, values: int, poisoned: None) -> None:
    borders = [0, 70, 100]
    inputs = draw(borders, 2, keys, values)
    compare(inputs, borders)


def test_large_magnitudes() -> None:
    borders = [0, 100]
    inputs = draw(borders, 1, 16, 16)
    inputs[3] = torch.full_like(inputs[3], -5.0)
    inputs[2], inputs[5] = 1e10 * inputs[2], 1e10 * inputs[5]
    compare(inputs, borders, scale=1e8)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    """One head of one document is shared by the threads; of several, each takes its own."""
    for borders, heads in (([0, 150], 1), ([0, 150, 150, 163], 1), ([0, 150, 163], 4)):
        inputs = draw(borders, heads, 24, 100)
        alone = run(cpu.chunk, inputs, borders)
        torch.set_num_threads(threads)  # the next test goes back to one
        together = run(cpu.chunk, inputs, borders)
        torch.set_num_threads(1)
        for name, a, b in zip(NAMES, alone, together, strict=True):
            assert torch.equal(a, b), name


def test_bf16_is_read_as_it_is() -> None:
    """The same bits as from inputs that were cast before, gradients rounded once at the end."""
    borders = [0, 90, 100]
    exact = draw(borders, 2, 20, 36)
    for which in ((0, 1, 2, 3, 4), (2,), (0, 4), (1, 3)):
        half = [x.bfloat16() if i in which else x for i, x in enumerate(exact)]
        assert cpu.refuse_chunk(*half) is None
        ours, theirs = run(cpu.chunk, half, borders), run(cpu.chunk, [x.float() for x in half], borders)
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            assert torch.equal(a, b)
        for i, (a, b) in enumerate(zip(ours[2:], theirs[2:], strict=True)):
            assert torch.equal(a, b.to(half[i].dtype))
    assert "bfloat16" in str(cpu.refuse_chunk(*exact[:5], exact[5].bfloat16()))


def test_the_process_keeps_its_floating_point_mode() -> None:
    """Denormals are neither flushed by the library nor for anybody who runs after it."""
    borders = [0, 40]
    inputs = draw(borders, 1, 16, 16)
    tiny = torch.tensor([1e-40])
    for scale in (1.0, 1e-38):
        inputs[2], inputs[5] = scale * inputs[2], scale * inputs[5]
        run(cpu.chunk, inputs, borders)
        assert float(tiny * 0.5) > 0
        assert float(torch.tensor([1.5e-38]) * 0.5) > 0
    inputs[2][:] = 0
    inputs[5][:] = 1e-40
    inputs[3][:] = 0
    inputs[4][:] = 0
    assert torch.equal(cpu.chunk(*inputs)[1], inputs[5])
