"""Muon where weights are cut, and checkpoints of several ranks: a run that changes its mesh after every step is that of one rank."""

from collections.abc import Callable
from typing import Any


def test_a_run_that_changes_its_mesh_after_every_step_is_that_of_one_rank(on_ranks: Callable[..., list[Any]]) -> None:
    """In fp64, over FSDP, expert, pipeline and context ranks; each mesh takes up its own checkpoint to the last bit.

    Decay and beta are fp32 in any model, and orthogonalising makes what they differ by larger where a direction is small.
    """
    every = on_ranks("state_ranks.py", 4)[0]["journey"]
    for rank in every:
        assert rank["model"] < 1e-5 and rank["optimizer"] < 1e-4, rank
        assert rank["files"] == 4  # everyone wrote
        assert all(share < 0.4 for share in rank["share"].values())  # of the layers, up to what does not divide
    # rows to owners and back: less than all matrices there and back, and somebody sends
    assert all(0 < sum(rank["sent"][mesh] for rank in every) < 2 * every[0]["matrices"] for mesh in ("0", "1"))
