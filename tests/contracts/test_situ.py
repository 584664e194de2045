"""SiTU-GLU against its formula in Python floats, its limits, its gradients and its bounds."""

import math

import pytest
import torch

from gnomon.kernels.situ import fused, reference

IMPLEMENTATIONS = pytest.mark.parametrize("situ_glu", [reference.situ_glu, fused.situ_glu], ids=["reference", "fused"])
BETAS = pytest.mark.parametrize("betas", [(4.0, 25.0), (4.0, None), (None, 25.0), (None, None), (1.0, 0.5)], ids=str)


@IMPLEMENTATIONS
@BETAS
def test_equals_the_formula(situ_glu, betas: tuple[float | None, float | None]) -> None:
    beta1, beta2 = betas
    gate, up = (torch.randn(7, 3, dtype=torch.float64) * 6.0 for _ in range(2))
    out = situ_glu(gate, up, beta1, beta2)
    for y, g, u in zip(out.flatten().tolist(), gate.flatten().tolist(), up.flatten().tolist(), strict=True):
        capped = g if beta1 is None else beta1 * math.tanh(g / beta1)
        linear = u if beta2 is None else beta2 * math.tanh(u / beta2)
        assert y == pytest.approx(capped / (1.0 + math.exp(-g)) * linear, rel=1e-12)


@IMPLEMENTATIONS
@BETAS
def test_gradients_are_those_of_the_function(situ_glu, betas: tuple[float | None, float | None]) -> None:
    inputs = [torch.randn(4, 3, dtype=torch.float64).mul(3.0).requires_grad_() for _ in range(2)]
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, *betas), inputs)


@IMPLEMENTATIONS
def test_the_output_is_bounded_by_the_product_of_the_caps(situ_glu) -> None:
    gate, up = torch.tensor([1e30, 80.0, -1e30, torch.inf, 0.0]), torch.tensor([1e30, -1e30, 1e30, -torch.inf, 3.0])
    out = situ_glu(gate, up, 4.0, 25.0)
    assert out.abs().max() <= 100.0
    torch.testing.assert_close(out, torch.tensor([100.0, -100.0, 0.0, -100.0, 0.0]))


@IMPLEMENTATIONS
def test_wide_caps_recover_swiglu(situ_glu) -> None:
    gate, up = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    torch.testing.assert_close(situ_glu(gate, up, 1e7, 1e7), torch.nn.functional.silu(gate) * up, rtol=1e-12, atol=1e-12)


@IMPLEMENTATIONS
def test_bf16_is_computed_in_fp32_and_rounded_once(situ_glu) -> None:
    gate, up = (torch.randn(1000).mul(5.0).bfloat16().requires_grad_() for _ in range(2))
    out = situ_glu(gate, up, 4.0, 25.0)
    assert torch.equal(out, reference.situ_glu(gate.float(), up.float(), 4.0, 25.0).bfloat16())
    out.sum().backward()
    assert gate.grad.dtype == torch.bfloat16


def test_tiles_and_strides_do_not_show() -> None:
    """More elements than one tile, not contiguous, with a gradient that is a broadcast view."""
    wide = [torch.randn(3, 90, 700) for _ in range(2)]
    assert wide[0].numel() > 2 * fused.TILE
    results = []
    for situ_glu in (reference.situ_glu, fused.situ_glu):
        gate, up = (x.transpose(0, 1).detach().requires_grad_() for x in wide)
        out = situ_glu(gate, up, 4.0, 25.0)
        out.mean(dim=0).sum().backward()
        results.append((out, gate.grad, up.grad))
    torch.testing.assert_close(*results)
