"""The short convolution: tap order, history, documents."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.short_conv import cpu, reference
from gnomon.kernels.short_conv import short_conv as operator

BORDERS = [0, 1, 1, 3, 20, 26]
NEEDS_LIBRARY = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


@pytest.fixture(params=[pytest.param(reference, id="reference"), pytest.param(cpu, id="cpu", marks=NEEDS_LIBRARY)])
def short_conv(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Each implementation."""
    return request.param.short_conv


def oracle(u: Tensor, weight: Tensor, history: Tensor) -> Tensor:
    """PyTorch's own grouped convolution over history and inputs, [1, T, C]."""
    if u.shape[1] == 0:
        return u
    stream = torch.cat([history, u], 1).mT
    return F.silu(F.conv1d(stream, weight[:, None], groups=u.shape[2])).mT


@pytest.mark.parametrize("time", [0, 1, 2, 3, 17])
@pytest.mark.parametrize("given", [False, True])
def test_is_the_grouped_convolution(short_conv: Callable[..., Any], time: int, given: bool) -> None:
    u, weight, history = torch.randn(2, time, 5), torch.randn(5, 4), torch.randn(2, 3, 5)
    out, last = short_conv(u, weight, history if given else None)
    past = history if given else torch.zeros_like(history)
    torch.testing.assert_close(out, oracle(u, weight, past))
    assert torch.equal(last, torch.cat([past, u], 1)[:, -3:])


def test_the_last_tap_multiplies_the_current_token(short_conv: Callable[..., Any]) -> None:
    u, weight = torch.randn(1, 6, 2), torch.zeros(2, 4)
    weight[:, -1] = 1.0
    torch.testing.assert_close(short_conv(u, weight)[0], F.silu(u))


def test_packed_documents_equal_documents_alone(short_conv: Callable[..., Any]) -> None:
    u, weight, history = torch.randn(1, 26, 3), torch.randn(3, 4), torch.randn(5, 3, 3)
    out, last = short_conv(u, weight, history, torch.tensor(BORDERS))
    for s, (a, b) in enumerate(zip(BORDERS, BORDERS[1:], strict=False)):
        alone, last_alone = short_conv(u[:, a:b], weight, history[s : s + 1])
        torch.testing.assert_close(out[:, a:b], alone)
        assert torch.equal(last[s : s + 1], last_alone)


def test_prefill_and_decode_agree(short_conv: Callable[..., Any]) -> None:
    u, weight = torch.randn(2, 12, 3), torch.randn(3, 4)
    whole, last = short_conv(u, weight)
    out, history = short_conv(u[:, :5], weight)
    outs = [out]
    for t in range(5, 12):
        out, history = short_conv(u[:, t : t + 1], weight, history)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    assert torch.equal(history, last)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_by_finite_differences(packed: bool) -> None:
    borders = torch.tensor(BORDERS) if packed else None
    u, weight, history = torch.randn(1 if packed else 2, 26, 2), torch.randn(2, 4), torch.randn(5 if packed else 2, 3, 2)
    inputs = [x.double().requires_grad_() for x in (u, weight, history)]
    assert torch.autograd.gradcheck(lambda *x: operator(*x, borders), inputs, fast_mode=True)


def test_bf16_sums_in_fp32_and_rounds_once() -> None:
    u, weight = torch.randn(1, 30, 8).bfloat16(), torch.randn(8, 4)
    out, last = operator(u, weight)
    assert out.dtype == last.dtype == torch.bfloat16
    assert torch.equal(out, oracle(u.float(), weight, torch.zeros(1, 3, 8)).bfloat16())


def test_packed_rows_are_refused_with_the_remedy(short_conv: Callable[..., Any]) -> None:
    with pytest.raises(KernelError, match="flatten it"):
        short_conv(torch.randn(2, 4, 3), torch.randn(3, 4), None, torch.tensor([0, 4, 8]))


def test_time_is_causal_to_the_last_bit(short_conv: Callable[..., Any]) -> None:
    u, weight = torch.randn(1, 40, 8), torch.randn(8, 4)
    out: Any = short_conv(u, weight)[0]
    changed = torch.cat([u[:, :21], torch.randn(1, 19, 8)], 1)
    assert torch.equal(short_conv(changed, weight)[0][:, :21], out[:, :21])


@NEEDS_LIBRARY
@pytest.mark.parametrize("channels", [1, 5, 64, 70, 144])
@pytest.mark.parametrize("taps", [1, 2, 4, 5])
@pytest.mark.parametrize("given", [False, True])
def test_cpp_equals_the_reference_with_gradients(channels: int, taps: int, given: bool, poisoned: None) -> None:
    u, weight, history = torch.randn(1, 26, channels), torch.randn(channels, taps), torch.randn(5, taps - 1, channels)
    results = []
    for form in (cpu.short_conv, reference.short_conv):
        inputs = [x.clone().requires_grad_() for x in (u, weight, *((history,) if given else ()))]
        out, last = form(inputs[0], inputs[1], inputs[2] if given else None, torch.tensor(BORDERS))
        loss = (out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum() + last.square().sum()
        results.append([out, last, *torch.autograd.grad(loss, inputs)])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, atol=2e-5, rtol=1e-5)
