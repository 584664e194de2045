"""SiTU-GLU against its formula in Python floats, its limits, its gradients and its bounds."""

import math

import pytest
import torch

from gnomon.kernels import situ
from gnomon.kernels.situ import fused, reference

OPERATOR = situ.situ_glu
IMPLEMENTATIONS = pytest.mark.parametrize("name", ["reference", *OPERATOR.candidates["cpu"]])
BETAS = pytest.mark.parametrize("betas", [(4.0, 25.0), (4.0, None), (None, 25.0), (None, None), (1.0, 0.5)], ids=str)


def implementation(name: str):
    """One implementation by name; it skips, with its reason, what it refuses."""
    module = OPERATOR.module(name)
    run, refuse = getattr(module, OPERATOR.name), getattr(module, f"refuse_{OPERATOR.name}", lambda *_: None)

    def checked(*arguments):
        if (reason := refuse(*arguments)) is not None:
            pytest.skip(f"{name}: {reason}")
        return run(*arguments)

    return checked


@IMPLEMENTATIONS
@BETAS
def test_equals_the_formula(name: str, betas: tuple[float | None, float | None]) -> None:
    situ_glu = implementation(name)
    beta1, beta2 = betas
    gate, up = (torch.randn(7, 3, dtype=torch.float64) * 6.0 for _ in range(2))
    out = situ_glu(gate, up, beta1, beta2)
    for y, g, u in zip(out.flatten().tolist(), gate.flatten().tolist(), up.flatten().tolist(), strict=True):
        capped = g if beta1 is None else beta1 * math.tanh(g / beta1)
        linear = u if beta2 is None else beta2 * math.tanh(u / beta2)
        assert y == pytest.approx(capped / (1.0 + math.exp(-g)) * linear, rel=1e-12)


@IMPLEMENTATIONS
@BETAS
def test_gradients_are_those_of_the_function(name: str, betas: tuple[float | None, float | None]) -> None:
    situ_glu = implementation(name)
    inputs = [torch.randn(4, 3, dtype=torch.float64).mul(3.0).requires_grad_() for _ in range(2)]
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, *betas), inputs)


@IMPLEMENTATIONS
def test_the_output_is_bounded_by_the_product_of_the_caps(name: str) -> None:
    situ_glu = implementation(name)
    gate, up = torch.tensor([1e30, 80.0, -1e30, torch.inf, 0.0]), torch.tensor([1e30, -1e30, 1e30, -torch.inf, 3.0])
    out = situ_glu(gate, up, 4.0, 25.0)
    assert out.abs().max() <= 100.0
    torch.testing.assert_close(out, torch.tensor([100.0, -100.0, 0.0, -100.0, 0.0]))


@IMPLEMENTATIONS
def test_wide_caps_recover_swiglu(name: str) -> None:
    situ_glu = implementation(name)
    gate, up = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    torch.testing.assert_close(situ_glu(gate, up, 1e7, 1e7), torch.nn.functional.silu(gate) * up, rtol=1e-12, atol=1e-12)


@IMPLEMENTATIONS
def test_bf16_is_computed_in_fp32_and_rounded_once(name: str) -> None:
    situ_glu = implementation(name)
    gate, up = (torch.randn(1000).mul(5.0).bfloat16().requires_grad_() for _ in range(2))
    out = situ_glu(gate, up, 4.0, 25.0)
    assert torch.equal(out, reference.situ_glu(gate.float(), up.float(), 4.0, 25.0).bfloat16())
    out.sum().backward()
    assert gate.grad.dtype == torch.bfloat16


@IMPLEMENTATIONS
def test_tiles_and_strides_do_not_show(name: str) -> None:
    """More elements than one tile, not contiguous, with a gradient that is a broadcast view."""
    wide = [torch.randn(3, 90, 700) for _ in range(2)]
    assert wide[0].numel() > 2 * fused.TILE
    results = []
    for situ_glu in (reference.situ_glu, implementation(name)):
        gate, up = (x.transpose(0, 1).detach().requires_grad_() for x in wide)
        out = situ_glu(gate, up, 4.0, 25.0)
        out.mean(dim=0).sum().backward()
        results.append((out, gate.grad, up.grad))
    torch.testing.assert_close(*results)


@IMPLEMENTATIONS
@BETAS
def test_fp32_values_and_gradients_are_those_of_fp64(name: str, betas: tuple[float | None, float | None]) -> None:
    """Relative to each value, from the linear range near zero to saturation."""
    size = torch.logspace(-6.0, 1.4, 333, dtype=torch.float64)
    exact_inputs = [size * torch.randn(333, dtype=torch.float64).sign() for _ in range(2)]
    results = []
    for dtype, situ_glu in ((torch.float64, reference.situ_glu), (torch.float32, implementation(name))):
        gate, up = (x.float().to(dtype).requires_grad_() for x in exact_inputs)
        out = situ_glu(gate, up, *betas)
        results.append([out.double(), *(g.double() for g in torch.autograd.grad(out.sum(), (gate, up)))])
    torch.testing.assert_close(results[1][0], results[0][0], rtol=2e-6, atol=1e-30)
    for exact, found in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=4e-6 * float(exact.abs().max()))


@IMPLEMENTATIONS
def test_nan_stays_visible_in_either_input(name: str) -> None:
    situ_glu = implementation(name)
    for betas in ((4.0, 25.0), (None, None)):
        gate, up = torch.ones(2, 20), torch.ones(2, 20)
        gate[0, 3], up[1, 7] = torch.nan, torch.nan
        assert situ_glu(gate, up, *betas).isnan().nonzero().tolist() == [[0, 3], [1, 7]]


@IMPLEMENTATIONS
def test_nothing_in_nothing_out(name: str) -> None:
    gate = torch.zeros(0, 4, requires_grad=True)
    out = implementation(name)(gate, torch.zeros(0, 4), 4.0, 25.0)
    out.sum().backward()
    assert out.shape == gate.grad.shape == (0, 4)
