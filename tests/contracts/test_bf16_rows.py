"""What belongs to tokens may be bf16: the C++ kernels read it as it is and give the reference in fp64, rounded where the type says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.kernels import gated_norm, kda, native, short_conv

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

F32, HALF = torch.float32, torch.bfloat16
BORDERS = torch.tensor([0, 1, 1, 3, 40, 111])


def rows(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """Values that bf16 holds, so that both sides begin with the same."""
    return (torch.randn(*shape) * 1.5).to(HALF).to(dtype)


CASES: dict[str, tuple[Any, Callable[..., Any], tuple[Any, ...]]] = {
    "prepare": (kda.prepare, kda.prepare.module("cpu").prepare, (rows(2, 9, 3, 40), rows(2, 9, 3, 40))),
    "norm": (gated_norm.rms_norm, gated_norm.rms_norm.module("cpu").rms_norm, (rows(300, 72), rows(72), 1e-5)),
    "norm, weight in fp32": (gated_norm.rms_norm, gated_norm.rms_norm.module("cpu").rms_norm, (rows(7, 72), rows(72, dtype=F32), 1e-5)),
    "gated norm": (gated_norm.gated_norm, gated_norm.gated_norm.module("cpu").gated_norm,
                   (rows(5, 3, 24, dtype=F32), rows(24), rows(5, 3, 24), 1e-5)),
    "gated norm, all in bf16": (gated_norm.gated_norm, gated_norm.gated_norm.module("cpu").gated_norm,
                                (rows(5, 3, 24), rows(24), rows(5, 3, 24), 1e-5)),
    "convolution": (short_conv.short_conv, short_conv.short_conv.module("cpu").short_conv,
                    (rows(1, 111, 70), rows(70, 4), rows(5, 3, 70), BORDERS)),
    "convolution, taps in fp32": (short_conv.short_conv, short_conv.short_conv.module("cpu").short_conv,
                                  (rows(1, 111, 70), rows(70, 5, dtype=F32), None, BORDERS)),
}


def tensors(value: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [value] if isinstance(value, Tensor) else [t for item in value if item is not None for t in tensors(item)]


def learning(arguments: tuple[Any, ...], dtype: torch.dtype | None = None) -> list[Any]:
    """The arguments, asking for gradients; in another type where one is given."""
    floats = [isinstance(x, Tensor) and x.is_floating_point() for x in arguments]
    return [x.to(dtype or x.dtype).clone().requires_grad_() if real else x for x, real in zip(arguments, floats, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_bf16_goes_to_the_library_and_gives_the_reference(case: str) -> None:
    operator, ours, arguments = CASES[case]
    mine, exact = learning(arguments), learning(arguments, torch.float64)
    assert operator.choices(*mine)[0] == ("cpu", None)
    got, want, types = tensors(ours(*mine)), tensors(operator.reference(*exact)), tensors(operator.reference(*arguments))
    for a, b, like in zip(got, want, types, strict=True):
        assert a.dtype == like.dtype
        close(a, b, 3)
    upstream = [torch.randn(b.shape, dtype=F32).to(like.dtype) for b, like in zip(want, types, strict=True)]
    asked = [i for i, x in enumerate(mine) if isinstance(x, Tensor) and x.requires_grad]
    d_got = torch.autograd.grad(got[:1], [mine[i] for i in asked], upstream[:1], allow_unused=True)
    d_want = torch.autograd.grad(want[:1], [exact[i] for i in asked], [u.double() for u in upstream[:1]], allow_unused=True)
    for i, a, b in zip(asked, d_got, d_want, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == arguments[i].dtype
            close(a, b, 3)


def close(a: Tensor, b: Tensor, roundings: int) -> None:
    """Within so many roundings to bf16 of a value, and of fp32 of the largest."""
    limit = roundings * 2.0**-8 * b.abs() + 1e-4 * b.abs().max()
    assert bool(((a.double() - b).abs() <= limit).all()), float(((a.double() - b).abs() - limit).max())


def test_no_input_is_copied_to_fp32() -> None:
    """The results of a bf16 norm and convolution are the only new arrays of their size."""
    x, weight, seen = rows(64, 256), rows(256), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            seen.extend(t for t in tensors([made] if isinstance(made, Tensor) else []) if t.dtype == F32 and t.numel() >= x.numel())
            return made

    with torch.no_grad(), Watch():
        gated_norm.rms_norm(x, weight, 1e-5)
        short_conv.short_conv(x[None], rows(256, 4))
    assert not seen


def test_a_norm_in_bf16_rounds_before_its_weight() -> None:
    x, weight = rows(33, 64), rows(64)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    ours = gated_norm.rms_norm.module("cpu").rms_norm(x, weight, 1e-5)
    twice = (exact.to(HALF) * weight).float()
    assert (ours.float() == twice).float().mean() > 0.99  # the same but for norms that lie between two bf16 values


def test_what_is_not_a_number_stays_so() -> None:
    x = rows(4, 16)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    y = gated_norm.rms_norm.module("cpu").rms_norm(x, rows(16), 1e-5)
    assert y[1].isnan().all() and y[2, 5].isnan() and y[[0, 3]].isfinite().all()
