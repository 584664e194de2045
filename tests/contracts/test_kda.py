"""KDA: every form of it means the same recurrence, whatever the lengths, the decay and the layout of documents."""

import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import kda, native
from gnomon.kernels.kda import cpu, fla, fused, reference

BORDERS = [0, 1, 1, 40, 70, 70, 133, 200]
NEEDS_LIBRARY = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
FORMS = [
    pytest.param(reference.chunk, id="reference"),
    pytest.param(fused.chunk, id="fused"),
    pytest.param(cpu.chunk, id="cpu", marks=NEEDS_LIBRARY),
]
GATES = {
    "bounded": lambda z: reference.decay(z, torch.zeros(z.shape[2], dtype=z.dtype), -5.0),
    "unbounded": lambda z: reference.decay(3 * z, torch.full(z.shape[2:3], 0.5, dtype=z.dtype), None),
    "at the bound": lambda z: torch.full_like(z, -5.0),
    "far below": lambda z: -50 * torch.rand_like(z),
    "none": torch.zeros_like,
}
BOUND = {"bounded": -5.0, "at the bound": -5.0, "none": 0.0}


def draw(
    batch: int, time: int, heads: int, keys: int, values: int, gate: str = "bounded", dtype: Any = torch.float32
) -> tuple[Tensor, ...]:
    """q, k, v, g, beta as a layer would hand them over."""
    q, k = reference.prepare(*(torch.randn(batch, time, heads, keys, dtype=dtype) for _ in range(2)))
    g = GATES[gate](torch.randn(batch, time, heads, keys, dtype=dtype))
    return q, k, torch.randn(batch, time, heads, values, dtype=dtype), g, torch.rand(batch, time, heads, dtype=dtype)


def error(ours: Tensor, exact: Tensor) -> float:
    """The distance relative to the exact tensor's norm."""
    return float((ours.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def with_gradients(form: Callable[..., Any], inputs: list[Tensor], *rest: Any) -> list[Tensor]:
    """Outputs, last states, and the gradients of a fixed projection of both."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    o, last = form(*inputs, *rest)
    draws = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, dtype=torch.float64, generator=draws).to(x.dtype) for x in (o, last)]
    grads = torch.autograd.grad((o * weights[0]).sum() + (last * weights[1]).sum(), inputs)
    return [o.detach(), last.detach(), *grads]


def test_recurrence_is_the_matrix_form_of_the_report() -> None:
    q, k, v, g, beta = (x[0, :, 0].numpy() for x in draw(1, 9, 1, 6, 4, dtype=torch.float64))
    state, outputs = np.zeros((6, 4)), []
    for t in range(9):
        erase = np.eye(6) - beta[t] * np.outer(k[t], k[t])
        state = erase @ np.diag(np.exp(g[t])) @ state + beta[t] * np.outer(k[t], v[t])
        outputs.append(state.T @ q[t])
    o, last = reference.recurrent(*(torch.from_numpy(x)[None, :, None] for x in (q, k, v, g, beta)))
    np.testing.assert_allclose(o[0, :, 0], outputs, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(last[0, 0], state, rtol=1e-12, atol=1e-14)


def test_prepare_adds_eps_to_the_sum_of_squares() -> None:
    x = torch.full((1, 1, 1, 16), 1e-3)  # the sum of squares is 16e-6, of the size of eps
    q, k = reference.prepare(x, x)
    torch.testing.assert_close(k, x / math.sqrt(16e-6 + 1e-6))
    torch.testing.assert_close(q, k / 4)
    assert reference.prepare(x.bfloat16(), x.bfloat16())[0].dtype == torch.float32


@NEEDS_LIBRARY
@pytest.mark.parametrize("width", [1, 7, 16, 33, 128])
def test_prepare_in_cpp_is_prepare_with_gradients(width: int, poisoned: None) -> None:
    q, k = torch.randn(2, 5, 3, width), 1e-3 * torch.randn(2, 5, 3, width)
    results = []
    for module in (cpu, reference):
        inputs = [x.clone().requires_grad_() for x in (q, k)]
        outputs = module.prepare(*inputs)
        loss = sum((x * torch.linspace(-1, 2, x.numel()).view_as(x)).sum() for x in outputs)
        results.append([*outputs, *torch.autograd.grad(loss, inputs)])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-4)


def test_decay_has_one_rate_per_head() -> None:
    z, rate = torch.randn(2, 3, 2, 5), torch.tensor([1.0, 4.0])
    bounded, free = reference.decay(z, rate.log(), -5.0), reference.decay(z, rate.log(), None)
    for head in range(2):
        torch.testing.assert_close(bounded[:, :, head], -5 / (1 + torch.exp(-rate[head] * z[:, :, head])))
        torch.testing.assert_close(free[:, :, head], -rate[head] * torch.log1p(torch.exp(z[:, :, head])))
    assert (bounded > -5).all()
    assert (bounded < 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("packed", [False, True])
def test_form_equals_the_recurrence_with_gradients(form: Callable[..., Any], gate: str, packed: bool, poisoned: None) -> None:
    borders = torch.tensor(BORDERS) if packed else None
    inputs = [*draw(1 if packed else 3, 200 if packed else 65, 2, 12, 20, gate), torch.randn(7 if packed else 3, 2, 12, 20)]
    exact = with_gradients(reference.recurrent, [x.double() for x in inputs], borders)
    for bound in {-math.inf, BOUND.get(gate, -math.inf)}:
        ours = with_gradients(form, inputs, borders, bound)
        for name, a, b in zip(("o", "last", "q", "k", "v", "g", "beta", "initial"), ours, exact, strict=True):
            # The sum behind the decay's gradient cancels where the decay is so strong that the gradient is almost nothing.
            assert error(a, b) < (2e-4 if name == "g" else 2e-6), (name, bound)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (2, 1, 3, 4, 4), (1, 31, 1, 5, 3), (2, 32, 1, 64, 64), (1, 33, 2, 16, 70), (2, 0, 2, 4, 4)]
)
def test_any_shape(form: Callable[..., Any], shape: tuple[int, ...], poisoned: None) -> None:
    inputs, initial = draw(*shape), torch.randn(shape[0], *shape[2:])
    for given in (None, initial):
        ours, exact = form(*inputs, given), reference.recurrent(*inputs, given)
        for a, b in zip(ours, exact, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bound", [-5.0, -math.inf])
def test_causal_to_the_last_bit(form: Callable[..., Any], bound: float) -> None:
    first, second = draw(1, 100, 2, 32, 32), draw(1, 100, 2, 32, 32)
    o, _ = form(*first, None, None, bound)
    for t in (0, 6, 15, 16, 31, 32, 63, 64, 90):
        changed = [torch.cat([a[:, : t + 1], b[:, t + 1 :]], 1) for a, b in zip(first, second, strict=True)]
        assert torch.equal(form(*changed, None, None, bound)[0][:, : t + 1], o[:, : t + 1])


@pytest.mark.parametrize("form", FORMS)
def test_documents_do_not_see_each_other(form: Callable[..., Any]) -> None:
    inputs, initial = draw(1, 200, 2, 8, 8), torch.randn(7, 2, 8, 8)
    o, last = form(*inputs, initial, torch.tensor(BORDERS))
    for s, (a, b) in enumerate(zip(BORDERS, BORDERS[1:], strict=False)):
        alone, last_alone = form(*(x[:, a:b] for x in inputs), initial[s : s + 1])
        torch.testing.assert_close(o[:, a:b], alone, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(last[s : s + 1], last_alone, atol=1e-6, rtol=1e-5)
        if a == b:
            assert torch.equal(last[s], initial[s])


@pytest.mark.parametrize("form", FORMS)
def test_prefill_hands_over_to_decode(form: Callable[..., Any]) -> None:
    """K = V, so that a transposed state would go unnoticed by its shape."""
    inputs = draw(2, 48, 2, 8, 8)
    whole, last = reference.recurrent(*inputs)
    o, state = form(*(x[:, :41] for x in inputs))
    for t in range(41, 48):
        one, state = kda.step(*(x[:, t] for x in inputs), state)
        torch.testing.assert_close(one, whole[:, t], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(o, whole[:, :41], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_equal_keys_without_decay(form: Callable[..., Any]) -> None:
    """The hardest triangular system: all keys alike, β = 1; a Neumann series would cancel to nothing here."""
    q, k, v, g, beta = draw(1, 96, 1, 8, 8, "none")
    k, beta = k[:, :1].expand_as(k), torch.ones_like(beta)
    exact, _ = reference.recurrent(*(x.double() for x in (q, k, v, g, beta)))
    assert error(form(q, k, v, g, beta)[0], exact) < 1e-5


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("bound", [-5.0, -math.inf])
def test_gradients_by_finite_differences(form: Callable[..., Any], bound: float) -> None:
    inputs = [x.requires_grad_() for x in (*draw(1, 40, 1, 3, 2, dtype=torch.float64), torch.randn(3, 1, 3, 2, dtype=torch.float64))]
    assert torch.autograd.gradcheck(lambda *x: form(*x, torch.tensor([0, 3, 36, 40]), bound), inputs, fast_mode=True)


@NEEDS_LIBRARY
def test_step_in_cpp_is_the_step(poisoned: None) -> None:
    for shape in ((3, 1, 2, 16, 16), (1, 1, 3, 5, 9), (2, 1, 1, 64, 70)):
        inputs, state = [x[:, 0] for x in draw(*shape)], torch.randn(shape[0], *shape[2:])
        kept = state.clone()
        for a, b in zip(cpu.step(*inputs, state), reference.step(*inputs, state), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        assert torch.equal(state, kept)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", range(5))
def test_what_is_not_a_number_is_not_hidden(form: Callable[..., Any], which: int) -> None:
    inputs = [x.clone() for x in draw(1, 40, 1, 16, 16)]
    inputs[which][0, 20] = math.nan
    o, last = form(*inputs)
    assert o[0, 20].isnan().any()
    assert which == 0 or last.isnan().any()


@NEEDS_LIBRARY
def test_threads_do_not_change_a_bit() -> None:
    inputs = [*draw(1, 200, 3, 16, 70), torch.randn(7, 3, 16, 70)]
    alone = with_gradients(cpu.chunk, inputs, torch.tensor(BORDERS))
    torch.set_num_threads(2)  # the next test goes back to one
    together = with_gradients(cpu.chunk, inputs, torch.tensor(BORDERS))
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a, b)


@NEEDS_LIBRARY
def test_any_strides_are_taken() -> None:
    inputs = draw(2, 20, 3, 8, 8)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    for a, b in zip(with_gradients(cpu.chunk, turned), with_gradients(cpu.chunk, list(inputs)), strict=True):
        assert torch.equal(a, b)


@NEEDS_LIBRARY
def test_every_instruction_set_computes_the_same_and_import_loads_nothing(repository: Any) -> None:
    program = (
        "import torch\nfrom gnomon.kernels import native\nfrom gnomon.kernels.kda import cpu, reference\n"
        "assert native._load.cache_info().currsize == 0\n"
        "torch.manual_seed(0)\nq, k = reference.prepare(torch.randn(1, 50, 2, 20), torch.randn(1, 50, 2, 20))\n"
        "x = [t.requires_grad_() for t in (q, k, torch.randn(1, 50, 2, 27), -5 * torch.rand(1, 50, 2, 20), torch.rand(1, 50, 2))]\n"
        "results = []\n"
        "for f in (cpu.chunk, reference.chunk):\n    o, s = f(*x)\n"
        "    results.append([o, s, *torch.autograd.grad(o.square().sum() + s.sum(), x)])\n"
        "for a, b in zip(*results):\n    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", program], env={**environment, "GNOMON_INSTRUCTION_SET": level}, cwd=repository)
        for level in ("0", "3")
    ]
    assert [run.wait() for run in runs] == [0, 0]


def test_segments_compose_exactly() -> None:
    inputs, start = draw(1, 90, 2, 8, 6), torch.randn(1, 2, 8, 6)
    parts = [reference.transition(*(x[:, a:b] for x in inputs[1:])) for a, b in ((0, 33), (33, 34), (34, 90))]
    carried, added = reference.compose(parts[2], reference.compose(parts[1], parts[0]))
    _, last = reference.recurrent(*inputs, start)
    torch.testing.assert_close(carried @ start + added, last, atol=1e-5, rtol=1e-5)
    together = kda.transition(*inputs[1:], torch.tensor([0, 33, 34, 90]))
    for s, part in enumerate(parts):
        torch.testing.assert_close((together[0][s : s + 1], together[1][s : s + 1]), part, atol=1e-6, rtol=1e-5)


def test_refusals_say_why() -> None:
    single, double = draw(1, 4, 1, 2, 2), draw(1, 4, 1, 2, 2, dtype=torch.float64)
    assert "float64" in str(cpu.refuse_chunk(*double))
    assert "gradients" in str(cpu.refuse_step(*(x[:, 0].requires_grad_() for x in single), torch.zeros(1, 1, 2, 2)))
    assert "CUDA" in str(fla.refuse_chunk(*single))
    assert fused.refuse_chunk(*double) is None
    names = [name for name, _ in kda.chunk.choices(*double)]
    assert names == ["cpu", "fused", "reference"]


@pytest.mark.parametrize("form", FORMS)
def test_bad_documents_are_refused(form: Callable[..., Any]) -> None:
    with pytest.raises(KernelError, match="must rise from 0 to the number of tokens, 10"):
        form(*draw(1, 10, 1, 2, 2), None, torch.tensor([0, 4, 9]))
    with pytest.raises(KernelError, match="one packed row"):
        form(*draw(2, 10, 1, 2, 2), None, torch.tensor([0, 4, 20]))


@NEEDS_LIBRARY
def test_shapes_are_checked_before_the_pointers() -> None:
    q, k, v, g, beta = draw(1, 10, 1, 4, 4)
    chunk = inspect.unwrap(cpu.chunk)  # as users run it, without the shape checks of the tests
    with pytest.raises(KernelError, match="k has shape"):
        chunk(q, k[:, :9], v, g, beta)
    with pytest.raises(KernelError, match="state has shape"):
        chunk(q, k, v, g, beta, torch.zeros(2, 1, 4, 4))
