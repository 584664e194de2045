"""Newton-Schulz against the singular value decomposition."""

import pytest
import torch

from gnomon.kernels.newton_schulz import newton_schulz


@pytest.mark.parametrize("shape", [(8, 8), (4, 20), (20, 4), (1, 7), (3, 16, 6), (2, 3, 5, 9)], ids=str)
def test_singular_values_move_to_one_and_the_vectors_stay(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(gradient, full_matrices=False)
    scalar = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):  # the iteration acts on each singular value alone
        scalar = 3.4445 * scalar - 4.7750 * scalar**3 + 2.0315 * scalar**5
    torch.testing.assert_close(newton_schulz(gradient), u @ (scalar.unsqueeze(-1) * vh), rtol=1e-6, atol=1e-6)


def test_a_batch_is_its_matrices_one_by_one() -> None:
    gradient = torch.randn(5, 12, 7)
    torch.testing.assert_close(newton_schulz(gradient), torch.stack([newton_schulz(g) for g in gradient]))


def test_scale_does_not_matter_and_zero_stays_zero() -> None:
    gradient = torch.randn(6, 9)
    torch.testing.assert_close(newton_schulz(1e3 * gradient), newton_schulz(gradient), rtol=1e-4, atol=1e-5)
    assert not newton_schulz(torch.zeros(6, 9)).any()


def test_bf16_products_stay_near_and_keep_the_dtype_of_the_gradient() -> None:
    gradient = torch.randn(32, 64)
    out = newton_schulz(gradient, 5, torch.bfloat16)
    assert out.dtype == torch.float32
    exact = newton_schulz(gradient)
    assert 0.0 < float((out - exact).norm() / exact.norm()) < 0.05

