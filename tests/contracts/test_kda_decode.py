"""KDA between a layer's projections: new tokens of several sequences, their states, and taking back what was not accepted."""

import inspect
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.kda import cpu, reference

NEEDS_LIBRARY = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
LENGTHS = [1, 0, 5, 70, 1, 33]


def draw(lengths: list[int], heads: int = 2, width: int = 20, taps: int = 4) -> dict[str, Any]:
    """Rows, states and weights by the names of the operator's parameters."""
    count, channels = sum(lengths), 3 * heads * width
    return {
        "projected": torch.randn(count, channels),
        "raw_decay": torch.randn(count, heads, width),
        "raw_beta": torch.randn(count, heads),
        "gate": torch.randn(count, heads, width),
        "conv": torch.randn(len(lengths), taps - 1, channels),
        "matrix": torch.randn(len(lengths), heads, width, width),
        "conv_weight": torch.randn(channels, taps),
        "A_log": 0.3 * torch.randn(heads),
        "dt_bias": torch.randn(heads * width),
        "norm": torch.rand(width),
        "lower_bound": -5.0,
        "eps": 1e-5,
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
    }


def committing(inputs: dict[str, Any], prefix: list[int]) -> dict[str, Any]:
    """The same for `commit`."""
    return {**{n: x for n, x in inputs.items() if n not in ("gate", "norm", "eps")}, "prefix": torch.tensor(prefix)}


def double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()}


def part(inputs: dict[str, Any], rows: list[tuple[int, int, int]], states: tuple[Tensor, Tensor] | None = None) -> dict[str, Any]:
    """The stretches (sequence, first, last) of an input's rows, with these states or its own."""
    bounds = inputs["cu_seqlens"].tolist()
    index = torch.cat([torch.arange(bounds[s] + a, bounds[s] + b) for s, a, b in rows])
    taken = {n: inputs[n][index] for n in ("projected", "raw_decay", "raw_beta", "gate")}
    conv, matrix = states or (inputs["conv"], inputs["matrix"])
    which = [s for s, _, _ in rows]
    borders = torch.tensor([0, *(b - a for _, a, b in rows)]).cumsum(0)
    return {**inputs, **taken, "conv": conv[which], "matrix": matrix[which], "cu_seqlens": borders}


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))


@NEEDS_LIBRARY
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("heads", "width", "taps"), [(2, 20, 4), (1, 1, 2), (3, 16, 4), (1, 64, 3), (1, 128, 4), (2, 33, 1)])
def test_decode_in_cpp_is_decode(bound: float | None, heads: int, width: int, taps: int, poisoned: None) -> None:
    inputs = {**draw(LENGTHS, heads, width, taps), "lower_bound": bound}
    copies = torch.tensor([[0, 0], [1, 0], [2, 3], [2, 3], [3, 0], [3, 31], [3, 32], [3, 70], [5, 33]])
    exact = reference.decode(**double(inputs), copies=copies)
    for ours, theirs in zip(cpu.decode(**inputs, copies=copies), exact, strict=True):
        assert ours.shape == theirs.shape
        assert error(ours, theirs) < 2e-6


def test_the_reference_is_the_layer_token_by_token() -> None:
    """Written out for one head from the report: convolution, norms, decay, delta rule, gated norm."""
    x = double(draw([3], 1, 4))
    stream = torch.cat([x["conv"][0], x["projected"]])
    state, outputs = x["matrix"][0, 0].clone(), []
    for t in range(3):
        raw = (stream[t : t + 4] * x["conv_weight"].mT).sum(0)
        q, k, v = (raw / (1 + torch.exp(-raw))).view(3, 4)
        q, k = q / torch.sqrt((q * q).sum() + 1e-6) / 2, k / torch.sqrt((k * k).sum() + 1e-6)
        z = x["A_log"].exp() * (x["raw_decay"][t, 0] + x["dt_bias"])
        state = torch.exp(-5 / (1 + torch.exp(-z)))[:, None] * state
        state = state + torch.outer(k, v - state.mT @ k) / (1 + torch.exp(-x["raw_beta"][t, 0]))
        o = state.mT @ q
        outputs.append(o / torch.sqrt((o * o).mean() + 1e-5) * x["norm"] / (1 + torch.exp(-x["gate"][t, 0])))
    out, conv, matrix, *_ = reference.decode(**x)
    torch.testing.assert_close(out[:, 0], torch.stack(outputs))
    torch.testing.assert_close(conv[0], x["projected"])
    torch.testing.assert_close(matrix[0, 0], state)


@NEEDS_LIBRARY
@pytest.mark.parametrize("bound", [-5.0, None])
def test_a_prefix_that_is_committed_was_never_anything_else(bound: float | None, poisoned: None) -> None:
    inputs = {**draw(LENGTHS), "lower_bound": bound}
    for prefix in ([1, 0, 5, 70, 1, 33], [0, 0, 0, 0, 0, 0], [0, 0, 2, 32, 1, 7], [1, 0, 4, 69, 0, 33]):
        _, *states = cpu.decode(**part(inputs, [(s, 0, taken) for s, taken in enumerate(prefix)]))
        ours = cpu.commit(**committing(inputs, prefix))
        exact = reference.commit(**committing(double(inputs), prefix))
        for a, b, c in zip(ours, states[:2], exact, strict=True):
            assert torch.equal(a, b)
            assert error(a, c) < 2e-6


@NEEDS_LIBRARY
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_neither_company_nor_cuts_nor_threads_change_a_bit(threads: int) -> None:
    for heads, width in ((1, 128), (3, 33)):
        inputs = draw(LENGTHS, heads, width)
        out, conv, matrix, *_ = cpu.decode(**inputs)
        torch.set_num_threads(threads)  # the next test goes back to one
        bounds = inputs["cu_seqlens"].tolist()
        again = cpu.decode(**inputs)
        assert all(torch.equal(a, b) for a, b in zip(again[:3], (out, conv, matrix), strict=True))
        for s, (a, b) in enumerate(pairwise(bounds)):
            states = inputs["conv"], inputs["matrix"]
            for first, last in pairwise(sorted({0, b - a, *(cut for cut in (1, 2, 31, 40) if cut < b - a)})):
                alone, c, m, *_ = cpu.decode(**part(inputs, [(s, first, last)], states))
                assert torch.equal(alone, out[a + first : a + last])
                states = c.expand(len(bounds), -1, -1), m.expand(len(bounds), -1, -1, -1)
            assert torch.equal(states[0][s], conv[s])
            assert torch.equal(states[1][s], matrix[s])
        torch.set_num_threads(1)


def through_slots(inputs: dict[str, Any], slots: Tensor, commit: bool, record: Tensor | None) -> Tensor:
    """The library's own call, with states in the slots of pools."""
    weights = [inputs["conv_weight"].mT.contiguous(), inputs["A_log"], inputs["dt_bias"], inputs["norm"]]
    rows = [inputs[n] for n in ("projected", "raw_decay", "raw_beta", "gate")]
    out, sizes = torch.full_like(rows[3], math.nan), (*rows[1].shape[1:], inputs["conv_weight"].shape[1])
    states = [inputs[n].data_ptr() for n in ("conv", "matrix")]
    native.library().gnomon_kda_decode(
        *(x.data_ptr() for x in weights), inputs["lower_bound"], inputs["eps"], *sizes, inputs["cu_seqlens"].data_ptr(), len(slots),
        *(x.data_ptr() for x in rows), *states, slots.data_ptr(), int(commit), None, 0, None, None, native.address(record),
        out.data_ptr(), 1,
    )  # fmt: skip
    return out


@NEEDS_LIBRARY
def test_states_stay_in_their_slots_until_they_are_committed() -> None:
    inputs = draw(LENGTHS)
    expected, conv, matrix, *_ = cpu.decode(**inputs)
    slots = torch.tensor([4, 0, 7, 1, 6, 3])
    pools = {n: torch.randn(9, *inputs[n].shape[1:]).index_copy(0, slots, inputs[n]) for n in ("conv", "matrix")}
    before = {n: x.clone() for n, x in pools.items()}
    recorded = torch.full((sum(LENGTHS), 4 * 2 * 20 + 2), math.nan)
    assert torch.equal(through_slots({**inputs, **pools}, slots, False, recorded), expected)
    assert all(torch.equal(pools[n], before[n]) for n in pools)
    assert torch.equal(recorded, torch.cat([inputs[n].flatten(1) for n in ("projected", "raw_decay", "raw_beta")], 1))
    assert torch.equal(through_slots({**inputs, **pools}, slots, True, None), expected)
    assert torch.equal(pools["conv"][slots], conv)
    assert torch.equal(pools["matrix"][slots], matrix)
    others = torch.tensor([2, 5, 8])
    assert all(torch.equal(pools[n][others], before[n][others]) for n in pools)


@NEEDS_LIBRARY
def test_extreme_inputs_stay_finite_and_what_is_not_a_number_shows() -> None:
    for bound in (-5.0, None):
        for size in (0.0, 1e-20, 1e4, 1e15):
            inputs = {**draw([40]), "lower_bound": bound}
            for name in ("projected", "raw_decay", "raw_beta", "gate"):
                inputs[name] = size * inputs[name]
            for ours, exact in zip(cpu.decode(**inputs), reference.decode(**double(inputs)), strict=True):
                assert torch.isfinite(ours).all()
                assert error(ours, exact) < 1e-4
    for name in ("projected", "raw_decay", "raw_beta", "gate"):
        inputs = draw([40])
        inputs[name][20] = math.nan
        out, *_ = cpu.decode(**inputs)
        assert out[20].isnan().any(), name
        assert not out[:20].isnan().any()


@NEEDS_LIBRARY
def test_refusals_say_why() -> None:
    inputs, run = draw([3, 2]), inspect.unwrap(cpu.decode)  # as users run it, without the shape checks of the tests
    assert "float64" in str(cpu.refuse_decode(**double(inputs)))
    assert "gradients" in str(cpu.refuse_decode(**{**inputs, "gate": inputs["gate"].clone().requires_grad_()}))
    assert "gradients" in str(cpu.refuse_commit(**committing({**inputs, "matrix": inputs["matrix"].clone().requires_grad_()}, [0, 0])))
    with pytest.raises(KernelError, match="matrix has shape"):
        run(**{**inputs, "matrix": inputs["matrix"][:1]})
    with pytest.raises(KernelError, match="gate has shape"):
        run(**{**inputs, "gate": inputs["gate"][:4]})
    with pytest.raises(KernelError, match="conv has shape"):
        run(**{**inputs, "cu_seqlens": torch.tensor([0, 5])})
    with pytest.raises(KernelError, match="conv has shape"):
        inspect.unwrap(cpu.commit)(**{**committing(inputs, [1]), "cu_seqlens": torch.tensor([0, 5])})
    with pytest.raises(KernelError, match="conv_weight has shape"):
        run(**{**inputs, "conv_weight": inputs["conv_weight"][1:]})
    with pytest.raises(KernelError, match="rising pairs"):
        run(**inputs, copies=torch.tensor([[1, 2], [0, 1]]))
    with pytest.raises(KernelError, match="rising pairs"):
        run(**inputs, copies=torch.tensor([[1, 3]]))
    with pytest.raises(KernelError, match="prefix"):
        inspect.unwrap(cpu.commit)(**committing(inputs, [4, 0]))
