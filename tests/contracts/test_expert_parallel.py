"""Experts over 2 and 4 ranks: outputs and gradients of one rank, equal buffers, bytes as counted, for even and for hopeless routing."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def by_ranks(on_ranks: Callable[..., list[Any]]) -> dict[int, Any]:
    """What ranks found, two of them and four."""
    return dict(zip((2, 4), on_ranks("expert_ranks.py", 2, 4), strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_over_ranks_are_those_of_one(ranks: int, by_ranks: dict[int, Any]) -> None:
    found = by_ranks[ranks]
    assert len(found) == 18
    for name, every in found.items():
        assert max(rank["worst"] for rank in every) < 1e-6, name
        assert all(rank["reads"] == ["cpu", "numpy"] for rank in every), name  # the counts, once, forward; nothing else comes to the host
        rows = [rank["rows"] for rank in every]
        assert sum(rows) == every[0]["moved"], name
        assert all(rank["bytes"] == rank["expected_bytes"] for rank in every), name  # there and back
        if "planned" in name:
            assert max(rows) - min(rows) <= 1, name
            assert all(rank["copies"] <= 4 for rank in every), name
        else:
            assert not any(rank["copies"] or rank["weights"] for rank in every), name
    hopeless = found[f"same, planned, {[40] * ranks}"], found[f"same, at home, {[40] * ranks}"]
    assert max(rank["rows"] for rank in hopeless[0]) == 120 and max(rank["rows"] for rank in hopeless[1]) == 120 * ranks
    assert sum(rank["weights"] for rank in hopeless[0]) > 0
