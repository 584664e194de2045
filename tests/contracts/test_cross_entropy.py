"""Cross-entropy without all logits: values and gradients against fp64, sizes around a chunk, threads, memory, what it refuses."""

import inspect
import resource
import sys

import pytest
import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.cross_entropy import chunked, cpu, reference

NEEDED = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
SHAPES = [(1, 1, 1), (3, 5, 7), (47, 20, 130), (193, 33, 1000), (400, 17, 5001)]


def some(rows: int, width: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight that ask for gradients, and targets."""
    hidden, weight = torch.randn(rows, width, requires_grad=True), torch.randn(words, width, requires_grad=True)
    return hidden, weight, torch.randint(0, words, (rows,))


def run(function, hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """The loss and the gradients of a third of it."""
    loss = function(hidden, weight, targets)
    return [loss.detach(), *torch.autograd.grad(loss / 3, (hidden, weight))]


@NEEDED
@pytest.mark.parametrize(("rows", "width", "words"), SHAPES)
def test_values_and_gradients_are_those_of_fp64(rows: int, width: int, words: int) -> None:
    hidden, weight, targets = some(rows, width, words)
    exact = run(reference.cross_entropy_sum, hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), targets)
    for found, wanted in zip(run(cpu.cross_entropy_sum, hidden, weight, targets), exact, strict=True):
        assert found.dtype == torch.float32
        assert float((found.double() - wanted).abs().max()) <= 1e-5 * max(1e-3, float(wanted.abs().max()))


@NEEDED
def test_one_and_two_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, found = some(500, 33, 4000), []
    for threads in (1, 2):
        monkeypatch.setattr(native, "threads", lambda count=threads: count)
        found.append(run(cpu.cross_entropy_sum, *inputs))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@NEEDED
def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = some(300, 20, 700)
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t: empty_like(t).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty", lambda *size, dtype: empty(*size, dtype=dtype).fill_(float("nan")))
    assert all(torch.isfinite(result).all() for result in run(cpu.cross_entropy_sum, *inputs))


@NEEDED
def test_large_logits_no_rows_strides_and_an_evaluation() -> None:
    hidden, weight, targets = some(60, 16, 40)
    assert cpu.cross_entropy_sum(torch.full((2, 4), 1e3), torch.eye(4)[:3] * 1e3, torch.tensor([0, 1])).item() == pytest.approx(2.1972246)
    none = run(cpu.cross_entropy_sum, hidden[:0], weight, targets[:0])
    assert not none[0]
    assert not none[2].any()
    wide, plain = weight.detach().repeat_interleave(2, 1)[:, ::2], weight.detach()
    with torch.no_grad():
        assert torch.equal(cpu.cross_entropy_sum(hidden, wide, targets), cpu.cross_entropy_sum(hidden, plain, targets))
    assert torch.equal(cpu.cross_entropy_sum(hidden.detach(), plain, targets), cpu.cross_entropy_sum(hidden, weight, targets).detach())


@NEEDED
def test_what_is_not_a_number_reaches_the_loss() -> None:
    hidden, weight, targets = some(60, 16, 40)
    broken = hidden.detach().clone()
    broken[50, 3] = float("nan")
    assert cpu.cross_entropy_sum(broken, weight.detach(), targets).isnan()


@NEEDED
@pytest.mark.parametrize("wrong", [-1, 40])
def test_refuses_a_target_that_is_no_word(wrong: int) -> None:
    hidden, weight, targets = some(60, 16, 40)
    targets[30] = wrong
    with pytest.raises(KernelError, match=r"rows 0\.\.39"):
        cpu.cross_entropy_sum(hidden, weight, targets)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
@pytest.mark.parametrize("module", [chunked, pytest.param(cpu, marks=NEEDED)])
def test_the_logits_are_never_all_in_memory(module) -> None:
    """4,096 rows against 20,000 words are 328 MB of logits; the peak may rise by a quarter of that."""
    hidden, weight, targets = some(4096, 16, 20_000)
    run(module.cross_entropy_sum, hidden[:64], weight, targets[:64])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(module.cross_entropy_sum, hidden, weight, targets)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 4096 * 20_000


@NEEDED
def test_refuses_shapes_that_do_not_fit() -> None:
    hidden, weight, targets = some(5, 6, 7)
    for wrong in ((hidden, weight[:, :5], targets), (hidden, weight, targets[:4]), (hidden[:0], weight[:0], targets[:0])):
        with pytest.raises(KernelError, match="do not fit together"):
            inspect.unwrap(cpu.cross_entropy_sum)(*wrong)
