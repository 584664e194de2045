"""Newton-Schulz in C++: shapes wide, tall, square and odd, ill-conditioned matrices, threads, poisoned memory, what it refuses."""

import pytest
import torch
from torch import Tensor

from gnomon.kernels import native
from gnomon.kernels.newton_schulz import cpu, newton_schulz, reference

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
SHAPES = [(1, 1), (1, 9), (9, 1), (7, 130), (130, 7), (48, 64), (64, 64), (65, 97), (97, 65), (3, 50, 180), (2, 3, 20, 20), (0, 4, 5)]


def graded(*shape: int) -> Tensor:
    """A matrix whose singular values fall from one to 1e-4."""
    u, _, v = torch.linalg.svd(torch.randn(*shape, dtype=torch.float64), full_matrices=False)
    return (u * torch.logspace(0, -4, min(shape[-2:]), dtype=torch.float64) @ v).float()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, 7])
def test_equals_the_reference_in_fp64(shape: tuple[int, ...], steps: int) -> None:
    x = torch.randn(shape)
    exact, found = reference.newton_schulz(x.double(), steps), cpu.newton_schulz(x, steps)
    assert found.shape == x.shape
    if x.numel():
        assert float((found.double() - exact).abs().max()) <= 2e-5 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("shape", [(40, 200), (200, 40), (64, 70)], ids=str)
def test_small_singular_values_survive(shape: tuple[int, ...]) -> None:
    """On the square alone they are squared; without forming the matrix again they would be lost."""
    x = graded(*shape)
    exact = torch.linalg.svdvals(reference.newton_schulz(x.double()))
    found = torch.linalg.svdvals(cpu.newton_schulz(x).double())
    assert float((found - exact).abs().max()) <= 1e-5


def test_one_and_two_threads_and_any_batch_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = torch.randn(5, 70, 150), []
    for threads in (1, 2, 4):
        monkeypatch.setattr(native, "threads", lambda count=threads: count)
        found.append(cpu.newton_schulz(x))
        assert torch.equal(found[0], found[-1])
    assert torch.equal(torch.stack([cpu.newton_schulz(each) for each in x]), found[0])


def test_every_output_is_written_and_a_zero_matrix_stays_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t: empty_like(t).fill_(float("nan")))
    x = torch.randn(3, 33, 50)
    x[1] = 0.0
    found = cpu.newton_schulz(x)
    assert torch.isfinite(found).all()
    assert not found[1].any()


def test_a_strided_matrix_is_the_matrix_that_one_sees() -> None:
    x = torch.randn(4, 60, 30)
    assert torch.equal(cpu.newton_schulz(x[::2].mT), cpu.newton_schulz(x[::2].mT.contiguous()))


def test_refuses_other_products_and_gradients() -> None:
    x = torch.randn(4, 5)
    assert "bfloat16" in str(cpu.refuse_newton_schulz(x, compute_dtype=torch.bfloat16))
    assert "backward" in str(cpu.refuse_newton_schulz(x.requires_grad_()))
    assert newton_schulz(x).requires_grad
