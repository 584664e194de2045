"""Who makes which matrix whole: everything has one owner, who holds much of it already, and nobody has much more to do than others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import ConfigError
from gnomon.parallel.axes import Axes
from gnomon.parallel.owners import deal
from gnomon.parallel.weights import start_of

STACKS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=8)


@given(STACKS, st.integers(1, 6))
def test_every_matrix_has_one_owner_among_those_that_hold_most_of_it(parts: list[tuple[int, int, int]], ranks: int) -> None:
    shapes = {f"p{i}": (units * height, width) for i, (units, height, width) in enumerate(parts)}
    spans = {f"p{i}": [(unit * height, (unit + 1) * height) for unit in range(units)] for i, (units, height, _) in enumerate(parts)}
    tasks = deal(shapes, spans, ranks)
    assert sorted((task.name, task.start, task.stop) for task in tasks) == sorted((n, a, b) for n, some in spans.items() for a, b in some)
    for task in tasks:
        whole = torch.arange(shapes[task.name][0])
        chunks = [set(chunk.tolist()) for chunk in whole.chunk(ranks)]
        chunks += [set() for _ in range(ranks - len(chunks))]
        held = [len(chunk & set(range(task.start, task.stop))) for chunk in chunks]
        assert held[task.owner] == max(held)


@given(st.integers(0, 50), st.integers(1, 9))
def test_shards_are_those_of_torch(rows: int, ranks: int) -> None:
    chunks = torch.arange(rows).chunk(ranks) if rows else ()
    starts = [start_of(rows, rank, ranks) for rank in range(ranks + 1)]
    assert [b - a for a, b in zip(starts, starts[1:], strict=False)] == [len(c) for c in chunks] + [0] * (ranks - len(chunks))


def test_matrices_that_nobody_holds_alone_are_shared_out() -> None:
    """Whole projections, of which each rank has a quarter: as many for each."""
    tasks = deal({f"o{i}": (8, 4) for i in range(12)}, {f"o{i}": [(0, 8)] for i in range(12)}, 4)
    assert sorted(task.owner for task in tasks) == sorted(list(range(4)) * 3)


def test_stages_of_zero_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'mesh.zero' is 2; use 0 .*, 1 .* or 3"):
        Axes(zero=2)
    with pytest.raises(ConfigError, match=r"'mesh.gradients_on_host' is for gradients that are cut over ranks, but 'mesh.zero' is 1"):
        Axes(zero=1, gradients_on_host=True)
