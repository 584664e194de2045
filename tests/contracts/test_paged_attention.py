"""Latent attention over pages: against attention on expanded keys in fp64, and the promise that a row's bits are its own."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import mla, native
from gnomon.kernels.mla import cpu, reference

BF16, F32 = torch.bfloat16, torch.float32
IMPLEMENTATIONS = pytest.mark.parametrize("name", ["reference", *mla.paged.candidates["cpu"]])
PAGES = pytest.mark.parametrize("page", [1, 16, 64])


@dataclass(frozen=True)
class Layer:
    """Widths, weights and a scale."""

    heads: int = 3
    nope: int = 5
    rope: int = 3
    value: int = 6
    latent: int = 10
    weights: torch.dtype = F32

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5

    def kv_b(self) -> Tensor:
        draw = torch.Generator().manual_seed(1)
        size = (self.heads, self.nope + self.value, self.latent)
        return (torch.randn(size, generator=draw) * self.latent**-0.5).to(self.weights)


TINY, ODD = Layer(), Layer(heads=1, nope=1, rope=2, value=1, latent=17)
MEDIUM = Layer(heads=4, nope=32, rope=16, value=32, latent=64)
BROAD = Layer(heads=2, nope=128, rope=64, value=128, latent=512)


def draw(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Batch:
    """Sequences, each a history of rows and a query for each new token, laid out over shuffled pages."""

    layer: Layer
    past: list[int]
    news: list[int]
    seeds: list[int]
    page: int = 16
    dtype: torch.dtype = F32

    def rows(self, index: int) -> Tensor:
        """All rows of a sequence as they are stored."""
        layer = self.layer
        return draw(self.seeds[index], 2000, layer.latent + layer.rope)[: self.past[index] + self.news[index]].to(self.dtype)

    def queries(self, index: int) -> Tensor:
        """Queries of the new tokens; they depend on the token's position alone."""
        layer, past = self.layer, self.past[index]
        every = draw(1000 + self.seeds[index], 2000, layer.heads, layer.nope + layer.rope)
        return every[past : past + self.news[index]]

    def arguments(self) -> tuple[Any, ...]:
        """What the operator takes; every row that nobody owns is NaN."""
        counts = [-(-(past + new) // self.page) for past, new in zip(self.past, self.news, strict=True)]
        total, width = sum(counts) + 2, max(counts, default=0) + 1
        pages = torch.full((total, self.page, self.layer.latent + self.layer.rope), torch.nan, dtype=self.dtype)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(7)).tolist()
        table = torch.full((len(counts), width), 10**6, dtype=torch.int32)
        for index, count in enumerate(counts):
            own, rows = [order.pop() for _ in range(count)], self.rows(index)
            table[index, :count] = torch.tensor(own, dtype=torch.int32)
            for number, part in zip(own, rows.split(self.page)):
                pages[number, : len(part)] = part
        width = self.layer.nope + self.layer.rope
        q = torch.cat([self.queries(i) for i in range(len(counts))] or [torch.empty(0, self.layer.heads, width)])
        bounds = torch.tensor([0, *self.news]).cumsum(0)
        return q, pages, self.layer.kv_b(), table, torch.tensor(self.past, dtype=torch.int64), bounds, self.layer.scale

    def expected(self) -> Tensor:
        """Query by query in fp64 on keys and values of each head, from the values as stored."""
        layer, out = self.layer, []
        for index, (past, new) in enumerate(zip(self.past, self.news, strict=True)):
            rows, q = self.rows(index).double(), self.queries(index).double()
            kv = torch.einsum("lc,hxc->lhx", rows[:, : layer.latent], layer.kv_b().double())
            shared = rows[:, None, layer.latent :].expand(-1, layer.heads, -1)
            k = torch.cat((kv[..., : layer.nope], shared), dim=-1)
            for t in range(new):
                seen = past + t + 1
                p = torch.softmax(torch.einsum("hq,lhq->hl", q[t], k[:seen]) * layer.scale, dim=-1)
                out.append(torch.einsum("hl,lhv->hv", p, kv[:seen, :, layer.nope :]))
        return torch.stack(out) if out else torch.empty(0, layer.heads, layer.value, dtype=torch.float64)


def implementation(name: str):
    """One implementation by name; it skips, with its reason, what it refuses."""

    def checked(*arguments):
        if name != "reference" and (reason := cpu.refuse_paged(*arguments)) is not None:
            pytest.skip(reason)
        return mla.paged.module(name).paged(*arguments)

    return checked


def run(batch: Batch) -> Tensor:
    """The C++ implementation; skips where it is not built."""
    return implementation("cpu")(*batch.arguments())


def near(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    """Equal relative to the largest value."""
    assert ours.shape == exact.shape
    if exact.numel():
        assert float((ours.double() - exact).abs().max()) <= tolerance * max(1.0, float(exact.abs().max()))


MIXED = [([0, 9, 33, 0, 200], [1, 1, 4, 70, 3]), ([15, 16, 17, 0], [1, 1, 1, 0]), ([700, 0], [1, 130]), ([100], [300]), ([0], [0])]


@IMPLEMENTATIONS
@PAGES
@pytest.mark.parametrize("layer", [TINY, ODD, MEDIUM], ids=["tiny", "odd", "medium"])
@pytest.mark.parametrize(("past", "news"), MIXED, ids=str)
def test_equals_attention_on_expanded_keys(name, page, layer, past, news, poisoned) -> None:
    """Decode and prefill side by side, any page size; rows that nobody owns hold NaN."""
    batch = Batch(layer, past, news, list(range(len(past))), page)
    near(implementation(name)(*batch.arguments()), batch.expected(), 2e-6)


@pytest.mark.parametrize(("past", "news"), [([600, 0], [2, 130])], ids=str)
def test_at_the_released_width(past, news, poisoned) -> None:
    batch = Batch(BROAD, past, news, [3, 4])
    near(run(batch), batch.expected(), 5e-6)


@pytest.mark.parametrize(("stored", "weights", "tolerance"), [(BF16, F32, 2e-6), (F32, BF16, 2e-6), (BF16, BF16, 1.5e-2)], ids=str)
@pytest.mark.parametrize("layer", [TINY, MEDIUM], ids=["tiny", "medium"])
def test_bf16_pages_and_weights(stored, weights, tolerance, layer, poisoned) -> None:
    """Where only one of them is bf16 nothing is rounded; with both, operands are rounded once and sums stay fp32."""
    layer = Layer(**{**vars(layer), "weights": weights})
    batch = Batch(layer, [40, 300, 10], [1, 3, 120], [1, 2, 3], dtype=stored)
    near(run(batch), batch.expected(), tolerance)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layer", [TINY, MEDIUM], ids=["tiny", "medium"])
def test_a_row_does_not_depend_on_the_batch_pages_or_threads(dtype, layer) -> None:
    """Alone, in company, in another place, on other pages and on two threads: the same bits."""
    layer = Layer(**{**vars(layer), "weights": dtype})
    past, news, seeds = [40, 0, 700, 5], [1, 80, 2, 150], [1, 2, 3, 4]
    alone = [run(Batch(layer, [p], [n], [s], dtype=dtype)) for p, n, s in zip(past, news, seeds, strict=True)]
    order = [2, 0, 3, 1]
    batch = Batch(layer, [past[i] for i in order], [news[i] for i in order], [seeds[i] for i in order], 64, dtype)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        together = run(batch)
        torch.set_num_threads(1)
        assert torch.equal(together, torch.cat([alone[i] for i in order]))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_few_tokens_at_once_have_the_bits_of_one_at_a_time(dtype) -> None:
    """What checking a draft needs: a row of a short run equals the row decoded alone at its position."""
    layer = Layer(**{**vars(MEDIUM), "weights": dtype})
    together = run(Batch(layer, [509], [9], [6], dtype=dtype))
    single = [run(Batch(layer, [509 + t], [1], [6], dtype=dtype)) for t in range(9)]
    assert torch.equal(together, torch.cat(single))


def test_more_rows_than_one_round_holds_have_the_bits_of_few() -> None:
    """Partial results of many rows and long contexts do not stand in memory at once (csrc/attention_absorbed.cpp), which no bit shows."""
    layer = Layer(heads=48, nope=4, rope=4, value=4, latent=512)  # half a megabyte of them per row here, and rounds of 64
    past, news, seeds = [1900, 3, 1890, 700], [60, 1, 63, 40], [1, 2, 3, 4]
    together = run(Batch(layer, past, news, seeds)).split(news)
    for index, (p, n, s) in enumerate(zip(past, news, seeds, strict=True)):
        few = min(n, n % 7 + 1)
        assert torch.equal(together[index][-few:], run(Batch(layer, [p + n - few], [few], [s])))


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e4])
def test_scores_of_any_size(size: float) -> None:
    """Large scores do not overflow: the largest is subtracted before the exponential."""
    q, *rest = Batch(MEDIUM, [70, 0], [2, 90], [1, 2]).arguments()
    ours, exact = implementation("cpu")(q * size, *rest), reference.paged((q * size).double(), *rest)
    assert torch.isfinite(ours).all()
    near(ours, exact, 2e-6 if size <= 1 else 2e-2)


def test_a_value_that_is_not_a_number_stays_in_its_sequence() -> None:
    batch = Batch(TINY, [20, 20], [1, 70], [1, 2])
    q, pages, kv_b, table, *rest = batch.arguments()
    clean = implementation("cpu")(q, pages, kv_b, table, *rest)
    pages[table[1, 0], 3] = torch.nan
    dirty = implementation("cpu")(q, pages, kv_b, table, *rest)
    assert torch.equal(dirty[0], clean[0])
    assert dirty[1:].isnan().all()


def test_gradients_go_to_the_reference() -> None:
    q, *rest = Batch(TINY, [3], [2], [1]).arguments()
    assert "gradients" in str(cpu.refuse_paged(q.requires_grad_(), *rest))
    mla.paged(q, *rest).sum().backward()
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize(("change", "message"), [
    ({"cu_seqlens": [0, 1, 4]}, "must rise from 0 to 5"),
    ({"cu_seqlens": [0, 5]}, "has 1 sequences, past 2"),
    ({"past": [9, -1]}, r"past\[1\] is -1"),
    ({"past": [9, 400]}, r"sequence 1 has 404 tokens and needs 26 pages of 16; table has room for 2"),
    ({"table": [[0, 0], [9, 0]]}, r"table\[1\] names pages \[9\], but there are"),
    ({"table": [[0, 0], [-1, 0]]}, r"table\[1\] names pages \[-1\]"),
    ({"kv_b": torch.zeros(3, 11, 1)}, "do not fit"),
    ({"kv_b": torch.zeros(3, 4, 10)}, "do not fit"),
])  # fmt: skip
def test_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    names = ("q", "pages", "kv_b", "table", "past", "cu_seqlens", "scale")
    arguments = dict(zip(names, Batch(TINY, [9, 0], [1, 4], [1, 2]).arguments(), strict=True))
    for name, value in change.items():
        arguments[name] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=arguments[name].dtype)
    with pytest.raises(KernelError, match=message):
        mla.paged(**arguments)


def test_refusals_name_the_reason() -> None:
    if native.unavailable():
        pytest.skip(str(native.unavailable()))
    q, pages, *rest = Batch(TINY, [9], [1], [1]).arguments()
    assert "pages is torch.float64" in str(cpu.refuse_paged(q, pages.double(), *rest))
    assert "q is torch.float64" in str(cpu.refuse_paged(q.double(), pages, *rest))
    assert "strides" in str(cpu.refuse_paged(q, pages.transpose(0, 1), *rest))
