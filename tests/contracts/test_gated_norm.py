"""The norms: their formula, and where they round."""

import pytest
import torch

from gnomon.kernels import native
from gnomon.kernels.gated_norm import cpu, gated_norm, reference, rms_norm


def test_rms_norm_is_the_formula() -> None:
    x, weight = torch.randn(3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight)
    tiny = torch.full((1, 4), 1e-3, dtype=torch.float64)  # mean square 1e-6: eps decides
    torch.testing.assert_close(rms_norm(tiny, torch.ones(4, dtype=torch.float64), 1e-5), tiny / (1.1e-5) ** 0.5)


def test_rms_norm_rounds_before_the_weight() -> None:
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(32).bfloat16()
    wide = x.float()
    rounded = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(reference.rms_norm(x, weight, 1e-5), rounded * weight)
    once = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()).bfloat16()
    assert not torch.equal(reference.rms_norm(x, weight, 1e-5), once)  # the two are different models


def test_gated_norm_norms_then_gates_and_rounds_once() -> None:
    o, weight, gate = torch.randn(2, 5, 3, 16), torch.randn(16), torch.randn(2, 5, 3, 16).bfloat16()
    wide = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight / (1 + torch.exp(-gate.float()))
    ours = gated_norm(o, weight, gate, 1e-5)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, wide.bfloat16(), rtol=1 / 128, atol=1e-6)
    torch.testing.assert_close(gated_norm(o, weight, gate.float(), 1e-5), wide)


def test_gradients_by_finite_differences() -> None:
    inputs = [torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda o, w, r: gated_norm(o, w, r, 1e-5), (inputs[0], weight, inputs[1]), fast_mode=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (inputs[0], weight), fast_mode=True)


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
@pytest.mark.parametrize("width", [1, 7, 16, 33, 128])
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("gated", [False, True])
def test_cpp_equals_the_reference_with_gradients(width: int, rows: int, gated: bool, poisoned: None) -> None:
    x, weight, gate = torch.randn(2, rows, width), torch.randn(width), 4 * torch.randn(2, rows, width)
    results = []
    for module in (cpu, reference):
        inputs = [t.clone().requires_grad_() for t in ((x, weight, gate) if gated else (x, weight))]
        out = (module.gated_norm if gated else module.rms_norm)(*inputs, 1e-5)
        results.append([out, *torch.autograd.grad((out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum(), inputs)])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_threads_share_the_sum_of_the_weight_s_gradient() -> None:
    x, weight = torch.randn(50, 12), torch.randn(12)
    grads = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)  # the next test goes back to one
        inputs = [t.clone().requires_grad_() for t in (x, weight)]
        grads.append(torch.autograd.grad(cpu.rms_norm(*inputs, 1e-5).square().sum(), inputs))
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0], atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_threads_do_not_change_a_bit_of_the_weights_gradient() -> None:
    o, gate, weight = torch.randn(1000, 2, 24), torch.randn(1000, 2, 24), torch.rand(24, requires_grad=True)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)  # the next test goes back to one
        results.append(torch.autograd.grad(cpu.gated_norm(o, weight, gate, 1e-5).square().sum(), weight)[0])
    assert torch.equal(*results)
