"""A stream over 2 and 3 ranks, cut in every awkward way: outputs and gradients of one rank; what is sent does not grow with the length."""

from collections.abc import Callable
from typing import Any

import pytest

from gnomon.errors import ConfigError
from gnomon.parallel.context import Cut, stretches


@pytest.fixture(scope="module")
def by_ranks(on_ranks: Callable[..., list[Any]]) -> dict[int, Any]:
    """What ranks found, two of them and three."""
    return dict(zip((2, 3), on_ranks("context_ranks.py", 2, 3), strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stream_over_ranks_is_that_of_one(ranks: int, by_ranks: dict[int, Any]) -> None:
    found = by_ranks[ranks]
    assert len(found) == 8
    for name, every in found.items():
        exact = "float64" in name  # up to decay and beta, which are fp32 in any model
        assert max(rank["outputs"] for rank in every) < (1e-7 if exact else 2e-6), name
        assert max(rank["gradients"] for rank in every) < (1e-6 if exact else 2e-5), name
        # Three KDA layers with 4 heads of 32: maps of [32, 64] in fp32 or fp64 to each other rank, whatever the lengths are.
        size = 8 if exact else 4
        assert all(rank["states"] == 3 * 4 * 32 * 64 * size * (ranks - 1) for rank in every), name
        if name.startswith("one document"):  # three inputs of queries, keys and values, to the next rank alone
            assert [rank["history"] for rank in every] == [3 * 3 * 3 * 4 * 32 * size] * (ranks - 1) + [0], name


def test_the_past_of_a_stretch() -> None:
    cut = Cut(lengths=(10, 10, 10, 10), borders=(0, 5, 32, 40))
    assert [cut.past(rank) for rank in range(4)] == [[], [0], [0, 1], [0, 1, 2]]
    assert [cut.local_borders(rank) for rank in range(4)] == [(0, 5, 10), (0, 10), (0, 10), (0, 2, 10)]
    cut = Cut(lengths=(10, 10, 10), borders=(0, 10, 15, 30))
    assert [cut.past(rank) for rank in range(3)] == [[], [], [1]]
    assert [cut.last(rank) for rank in range(3)] == [0, 5, 0]
    assert stretches(11, 3) == (4, 4, 3)
    cut = Cut(lengths=(6, 2, 1, 5), borders=(0, 2, 14))
    assert [cut.recent(rank, 3) for rank in range(4)] == [{}, {0: 3}, {0: 1, 1: 2}, {1: 2, 2: 1}]
    assert cut.recent(1, 9) == {0: 4} and cut.recent(3, 0) == {}


def test_cuts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        Cut(lengths=(4, 0), borders=(0, 4))
    with pytest.raises(ConfigError, match="rise from 0 to the 8"):
        Cut(lengths=(4, 4), borders=(0, 4, 4, 8))
