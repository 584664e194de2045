"""A whole step on four ranks, routing pinned: the loss and every gradient are those of one rank, on all pairs of axes."""

from collections.abc import Callable
from typing import Any

import pytest


def check(found: dict[str, Any]) -> None:
    """Equality is a matter of fp64, up to decay and beta, which are fp32 in any model. In fp32 a mesh is as exact as one rank is."""
    for name, every in found.items():
        assert sorted(set().union(*(rank["names"] for rank in every))) == every[0]["all"], name  # no gradient is lost
        loss, (worst, together) = max(rank["loss"] for rank in every), (max(rank["gradients"][i] for rank in every) for i in (0, 1))
        if "float64" in name:
            assert loss < 1e-12 and worst < 1e-6 and together < 1e-7, (name, loss, worst, together)
        else:
            one = [max(rank["one's gradients"][i] for rank in every) for i in (0, 1)]
            assert loss < 1e-6 and worst < 4 * one[0] and together < 4 * one[1], (name, loss, worst, together, one)


def test_a_step_on_any_pair_of_axes_is_that_of_one_rank(on_ranks: Callable[..., list[Any]]) -> None:
    found = on_ranks("mesh_ranks.py", 4)[0]
    assert len(found) == 7
    check(found)


@pytest.mark.slow
def test_a_step_on_any_mesh_is_that_of_one_rank_in_either_precision(on_ranks: Callable[..., list[Any]]) -> None:
    found = on_ranks("mesh_ranks.py", 4, "all")[0]
    assert len(found) == 36
    check(found)
