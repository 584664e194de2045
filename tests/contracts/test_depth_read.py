"""The depth read against a loop over tokens and sources, in value, gradient, dtype and edge cases."""

import inspect
import math

import pytest
import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import depth
from gnomon.kernels.depth import fused, reference

EPS = 1e-5
OPERATOR = depth.depth_read
IMPLEMENTATIONS = pytest.mark.parametrize("name", ["reference", *OPERATOR.candidates["cpu"]])


def implementation(name: str):
    """One implementation by name; it skips, with its reason, what it refuses."""
    module = OPERATOR.module(name)
    run, refuse = getattr(module, OPERATOR.name), getattr(module, f"refuse_{OPERATOR.name}", lambda *_: None)

    def checked(*arguments):
        if (reason := refuse(*arguments)) is not None:
            pytest.skip(f"{name}: {reason}")
        return run(*arguments)

    return checked


def by_hand(sources: list[Tensor], query: Tensor) -> Tensor:
    """One token at a time, in Python floats: the page of the report, not a tensor expression."""
    out = torch.zeros_like(sources[0], dtype=torch.float64)
    batch, time, width = out.shape
    for b in range(batch):
        for t in range(time):
            rows = [[float(x) for x in s[b, t]] for s in sources]
            scores = []
            for row in rows:
                rms = math.sqrt(sum(x * x for x in row) / width + EPS)
                scores.append(sum(x / rms * float(q) for x, q in zip(row, query, strict=True)))
            weights = [math.exp(s - max(scores)) for s in scores]
            for c in range(width):
                out[b, t, c] = sum(w * row[c] for w, row in zip(weights, rows, strict=True)) / sum(weights)
    return out


def some(count: int, *, width: int = 6, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Sources of very different size, and a query."""
    sources = [torch.randn(2, 3, width, dtype=torch.float64).mul(10.0 ** (j - 1)).to(dtype) for j in range(count)]
    return sources, torch.randn(width, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))


@IMPLEMENTATIONS
@pytest.mark.parametrize("count", [1, 2, 9])
def test_equals_the_loop(name: str, count: int) -> None:
    read = implementation(name)
    sources, query = some(count)
    torch.testing.assert_close(read(sources, query, EPS), by_hand(sources, query), rtol=1e-12, atol=1e-12)


@IMPLEMENTATIONS
def test_gradients_are_those_of_the_function(name: str) -> None:
    read = implementation(name)
    sources, query = some(3)
    sources[2] = sources[2] * 0.0 + 1e-3  # small against eps: the gradient of the norm is then not the textbook one
    inputs = [*(s.requires_grad_() for s in sources), query.requires_grad_()]
    assert torch.autograd.gradcheck(lambda *a: read(a[:-1], a[-1], EPS), inputs)


def test_a_source_without_gradient_gets_none_and_the_others_are_unchanged() -> None:
    sources, query = some(3)
    query.requires_grad_()
    sources[0].requires_grad_()
    fused.depth_read(sources, query, EPS).sum().backward()
    mine = sources[0].grad.clone(), query.grad.clone()
    sources[0].grad = query.grad = None
    reference.depth_read(sources, query, EPS).sum().backward()
    torch.testing.assert_close(mine, (sources[0].grad, query.grad))
    assert sources[1].grad is None


@IMPLEMENTATIONS
def test_the_same_tensor_twice_collects_both_gradients(name: str) -> None:
    read = implementation(name)
    (v,), query = some(1)
    v.requires_grad_()
    read([v, v], query, EPS).sum().backward()  # two equal sources mix to themselves
    torch.testing.assert_close(v.grad, torch.ones_like(v))


@IMPLEMENTATIONS
def test_a_zero_query_is_the_mean_of_the_raw_sources(name: str) -> None:
    read = implementation(name)
    sources, query = some(4)
    torch.testing.assert_close(read(sources, query * 0.0, EPS), torch.stack(sources).mean(dim=0))


@IMPLEMENTATIONS
def test_bf16_is_computed_in_fp32_and_rounded_once(name: str) -> None:
    read = implementation(name)
    sources, query = some(5, width=64, dtype=torch.bfloat16)
    out = read(sources, query, EPS)
    assert out.dtype == torch.bfloat16
    exact = reference.depth_read([s.double() for s in sources], query.double(), EPS)
    error = (out.double() - exact).abs() / exact.abs().clamp(min=1e-3 * float(exact.abs().max()))
    assert float(error.max()) < 2.0**-8  # half a unit in the last place of bf16, plus fp32 noise


@IMPLEMENTATIONS
def test_zero_sources_and_huge_sources_stay_finite(name: str) -> None:
    read = implementation(name)
    sources = [torch.zeros(1, 2, 4), torch.full((1, 2, 4), 1e15), torch.full((1, 2, 4), -1e-30)]
    leaves = [s.requires_grad_() for s in sources]
    out = read(leaves, torch.ones(4), EPS)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(s.grad).all() for s in leaves)


@IMPLEMENTATIONS
@pytest.mark.parametrize("width", [1, 17, 100, 256])
def test_fp32_values_and_gradients_are_those_of_fp64(name: str, width: int) -> None:
    """Every width, in rows and tails of vectors, with sources of different size."""
    sources = [3.0 ** (j - 2) * torch.randn(2, 3, width) for j in range(5)]
    query, projection = torch.randn(width) * width**-0.5, torch.randn(2, 3, width)
    results = []
    for dtype, read in ((torch.float64, reference.depth_read), (torch.float32, implementation(name))):
        inputs = [x.to(dtype).requires_grad_() for x in (*sources, query)]
        out = read(inputs[:-1], inputs[-1], EPS)
        results.append([out.detach(), *torch.autograd.grad((out * projection.to(dtype)).sum(), inputs)])
    for exact, found in zip(*results, strict=True):
        assert float((found.double() - exact).abs().max()) <= 1e-5 * max(1e-3, float(exact.abs().max()))


@IMPLEMENTATIONS
def test_sources_may_be_views_and_nan_stays_visible(name: str) -> None:
    read = implementation(name)
    sources = [torch.randn(3, 2, 8).transpose(0, 1) for _ in range(2)]
    query = torch.randn(16)[::2]
    torch.testing.assert_close(read(sources, query, EPS), reference.depth_read([s.contiguous() for s in sources], query.clone(), EPS))
    sources[1][1, 2, 3] = torch.nan
    assert read(sources, query, EPS).isnan().any(dim=-1).nonzero().tolist() == [[1, 2]]


@IMPLEMENTATIONS
def test_no_tokens(name: str) -> None:
    read = implementation(name)
    sources = [torch.zeros(2, 0, 4, requires_grad=True) for _ in range(2)]
    out = read(sources, torch.ones(4), EPS)
    out.sum().backward()
    assert out.shape == sources[0].grad.shape == (2, 0, 4)


def test_weights_sum_to_one_and_rebuild_the_read() -> None:
    sources, query = some(4)
    p = depth.depth_weights(sources, query, EPS)
    torch.testing.assert_close(p.sum(dim=-1), torch.ones(2, 3, dtype=torch.float64))
    torch.testing.assert_close(torch.einsum("btn,nbtd->btd", p, torch.stack(sources)), depth.depth_read(sources, query, EPS))


@pytest.mark.parametrize("live_size", [1e-6, 1.0, 1e6])
def test_two_phases_equal_the_direct_read(live_size: float) -> None:
    bank, query = some(4)
    queries = torch.stack((query, -40.0 * query, 0.0 * query))
    live = live_size * torch.randn(2, 3, 6, dtype=torch.float64)
    largest, denominator, numerator = depth.bank_partials(bank, queries, EPS)
    for r in range(3):
        merged = depth.merge((largest[r], denominator[r], numerator[r]), live, queries[r], EPS)
        torch.testing.assert_close(merged, depth.depth_read([*bank, live], queries[r], EPS), rtol=1e-12, atol=1e-12)


def test_two_phases_are_differentiable_in_every_part() -> None:
    bank, query = some(2, width=3)
    live = torch.randn(2, 3, 3, dtype=torch.float64)

    def both(a: Tensor, b: Tensor, live: Tensor, query: Tensor) -> Tensor:
        largest, denominator, numerator = reference.bank_partials([a, b], query.unsqueeze(0), EPS)
        return reference.merge((largest[0], denominator[0], numerator[0]), live, query, EPS)

    assert torch.autograd.gradcheck(both, [x.requires_grad_() for x in (*bank, live, query)])


@pytest.mark.parametrize(("sources", "width", "message"), [
    ([], 4, "no sources"),
    ([(1, 2, 4), (1, 3, 4)], 4, "source 1 is"),
    ([(1, 2, 4)], 5, "query has shape"),
])  # fmt: skip
def test_refuses_what_does_not_fit(sources: list[tuple[int, ...]], width: int, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        reference.check_sources([torch.zeros(shape) for shape in sources], torch.zeros(width))


# ---- inference: with the norm that follows, and in two phases


def inference(name: str, operator):
    """One implementation of an inference operator by name; it skips, with its reason, what it refuses."""
    module = operator.module(name)

    def checked(*arguments):
        if name != "reference" and (reason := getattr(module, f"refuse_{operator.name}")(*arguments)) is not None:
            pytest.skip(f"{name}: {reason}")
        return getattr(module, operator.name)(*arguments)

    return checked


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize(("count", "width"), [(1, 6), (2, 1), (9, 33), (4, 1024)])
def test_read_and_norm_are_the_two_one_after_the_other(name: str, count: int, width: int, poisoned) -> None:
    sources, query = some(count, width=width, dtype=torch.float32)
    weight = torch.rand(width) + 0.5
    mixed, normed = inference(name, depth.read_norm)(sources, query, EPS, weight)
    exact = reference.depth_read([s.double() for s in sources], query.double(), EPS)
    torch.testing.assert_close(mixed.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
    expected = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_row_of_the_inference_read_is_its_own_for_any_batch_and_threads() -> None:
    """Large enough to be cut into runs."""
    sources, weight, query = torch.randn(5, 1, 700, 257), torch.rand(257), torch.randn(257)
    run = inference("cpu", depth.read_norm)
    whole = run(list(sources), query, EPS, weight)
    torch.set_num_threads(2)
    assert all(torch.equal(a, b) for a, b in zip(whole, run(list(sources), query, EPS, weight), strict=True))
    torch.set_num_threads(1)
    some_rows = run(list(sources[:, :, 300:303]), query, EPS, weight)
    assert all(torch.equal(a[:, 300:303], b) for a, b in zip(whole, some_rows, strict=True))


@pytest.mark.parametrize("live_size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("width", [3, 40])
def test_two_phases_in_fp32_equal_the_direct_read(live_size: float, width: int, poisoned) -> None:
    bank, query = some(4, width=width, dtype=torch.float32)
    queries, live = torch.stack((query, -40.0 * query, 0.0 * query)), live_size * torch.randn(2, 3, width)
    largest, denominator, numerator = inference("cpu", depth.bank_partials)(bank, queries, EPS)
    for r in range(3):
        merged = inference("cpu", depth.merge)((largest[r], denominator[r], numerator[r]), live, queries[r], EPS)
        exact = reference.depth_read([s.double() for s in (*bank, live)], queries[r].double(), EPS)
        torch.testing.assert_close(merged.double(), exact, rtol=0.0, atol=3e-5 * float(exact.abs().max()))


def test_a_norm_of_another_width_is_refused() -> None:
    sources, query = some(2, width=6, dtype=torch.float32)
    with pytest.raises(KernelError, match="weight has shape"):
        inspect.unwrap(depth.read_norm.module("cpu").read_norm)(sources, query, EPS, torch.rand(5))
