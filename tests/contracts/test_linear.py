"""Linear maps that share an input: values and gradients against plain products, odd shapes, strides, threads, poisoned memory."""

import ctypes

import pytest
import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.linear import cpu, linears, reference

NEEDED = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
SHAPES = [(64, 1, (1,)), (65, 3, (5, 64)), (97, 70, (65, 1, 130)), (300, 128, (128, 32, 4)), (513, 33, (200,))]


def some(rows: int, width: int, outs: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """An input and weights."""
    return torch.randn(rows, width, requires_grad=True), [torch.randn(out, width, requires_grad=True) for out in outs]


def close(found: Tensor, exact: Tensor) -> None:
    """fp32 rounding of a sum, relative to the largest value."""
    assert found.dtype == torch.float32
    assert float((found.double() - exact).abs().max()) <= 3e-6 * float(exact.abs().max())


@NEEDED
@pytest.mark.parametrize(("rows", "width", "outs"), SHAPES, ids=str)
def test_values_and_gradients_are_those_of_fp64(rows: int, width: int, outs: tuple[int, ...]) -> None:
    x, weights = some(rows, width, outs)
    results = cpu.linears(x, weights)
    slopes = [torch.randn_like(y) for y in results]
    found = torch.autograd.grad(results, (x, *weights), slopes)
    exact_x, exact_weights = x.detach().double(), [w.detach().double() for w in weights]
    for y, w in zip(results, exact_weights, strict=True):
        close(y.detach(), exact_x @ w.T)
    close(found[0], sum(g.double() @ w for g, w in zip(slopes, exact_weights, strict=True)))
    for got, slope in zip(found[1:], slopes, strict=True):
        close(got, slope.double().T @ exact_x)


@NEEDED
def test_a_row_has_the_same_bits_whatever_stands_around_it() -> None:
    x, weights = some(300, 70, (65, 130))
    whole = cpu.linears(x, weights)
    part = cpu.linears(x[37:137], weights)
    assert all(torch.equal(a[37:137], b) for a, b in zip(whole, part, strict=True))


@NEEDED
def test_one_and_two_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    x, weights = some(700, 70, (65, 130))
    for threads in (1, 2):
        monkeypatch.setattr(native, "threads", lambda count=threads: count)
        results = cpu.linears(x, weights)
        found.append([*results, *torch.autograd.grad(sum(y.square().sum() for y in results), (x, *weights))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@NEEDED
def test_strided_inputs_and_gradients_and_results_that_nobody_used() -> None:
    base, weights = torch.randn(70, 2, 80), [torch.randn(out, 160)[:, ::4].requires_grad_() for out in (12, 7, 3)]
    x = base[:, 1, ::2].requires_grad_()
    results = {}
    for name, run in (("cpu", cpu.linears), ("reference", reference.linears)):
        y = run(x, weights)
        loss = (y[0].T.contiguous().T * 2.0).sum() + y[2].square().sum()
        results[name] = torch.autograd.grad(loss, (x, weights[0], weights[2]))
        assert torch.autograd.grad(run(x, weights)[0].sum(), weights[1], allow_unused=True) == (None,)
    for a, b in zip(results["cpu"], results["reference"], strict=True):
        close(a, b.double())


@NEEDED
def test_only_what_needs_a_gradient_gets_one() -> None:
    x, weights = some(80, 9, (4, 5))
    x, weights = x.detach(), [weights[0].detach(), weights[1]]
    sum(y.sum() for y in cpu.linears(x, weights)).backward()
    assert weights[1].grad is not None
    assert x.grad is None is weights[0].grad


@NEEDED
def test_outputs_are_written_completely_and_nothing_beside_them() -> None:
    rows, width, out = 101, 37, 67
    x, w, dy = torch.randn(rows, width), torch.randn(out, width), torch.randn(rows, out)
    outs = (ctypes.c_int64 * 1)(out)
    lib = native.library()
    for shape, call in (
        ((rows, out), lambda to: lib.gnomon_linear_forward(x.data_ptr(), rows, width, cpu._pointers([w]), outs, 1, cpu._pointers([to]), 2)),
        ((rows, width),
         lambda to: lib.gnomon_linear_backward_input(cpu._pointers([dy]), rows, width, cpu._pointers([w]), outs, 1, to.data_ptr(), 2)),
        ((out, width),
         lambda to: lib.gnomon_linear_backward_weights(x.data_ptr(), cpu._pointers([dy]), rows, width, outs, 1, cpu._pointers([to]), 2)),
    ):  # fmt: skip
        guarded = torch.full((shape[0] + 2, shape[1]), float("nan"))
        call(guarded[1:-1])
        assert torch.isfinite(guarded[1:-1]).all()
        assert guarded[[0, -1]].isnan().all()


@NEEDED
def test_the_gradient_of_a_weight_over_no_rows_is_zero() -> None:
    to, outs = torch.full((5, 3), float("nan")), (ctypes.c_int64 * 1)(5)
    native.library().gnomon_linear_backward_weights(
        torch.empty(0, 3).data_ptr(), cpu._pointers([torch.empty(0, 5)]), 0, 3, outs, 1, cpu._pointers([to]), 2
    )
    assert not to.any()


@NEEDED
def test_refuses_few_tokens_and_other_types_and_says_so() -> None:
    x, weights = some(8, 5, (3,))
    assert "8 tokens" in str(cpu.refuse_linears(x, weights))
    assert "float64" in str(cpu.refuse_linears(torch.randn(100, 5, dtype=torch.float64), weights))
    with pytest.raises(KernelError, match="width 6"):
        cpu._Linears.apply(torch.randn(100, 6), *weights)
    assert linears(x, weights)[0].shape == (8, 3)
