"""Ranks as cells of a box: places, numbers and groups fit together for any sides; what does not fit is said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import ConfigError
from gnomon.parallel.axes import COPIES, NAMES, ROWS, TOKENS, Axes

SIDES = st.integers(1, 4)


@given(SIDES, SIDES, SIDES)
def test_groups_partition_the_ranks_in_the_order_of_their_numbers(data: int, expert: int, context: int) -> None:
    axes = Axes(data=data, expert=expert, context=context)
    world = data * expert * context
    for names in (*((name,) for name in NAMES), ROWS, COPIES, TOKENS):
        groups = axes.groups(names)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        for group in groups:
            assert len(group) == axes.size(names) and group == sorted(group)
            assert [axes.index(rank, names) for rank in group] == list(range(len(group)))
            others = [{name: at for name, at in axes.place(rank).items() if name not in names} for rank in group]
            assert all(other == others[0] for other in others)


def test_experts_are_closest_and_copies_farthest() -> None:
    axes = Axes(data=2, expert=2, context=2)
    assert axes.groups(["expert"])[0] == [0, 1]
    assert axes.groups(["context"])[0] == [0, 2]
    assert axes.groups(["data"])[0] == [0, 4]


def test_open_data_takes_what_is_left() -> None:
    assert Axes(expert=2).over(8) == Axes(data=4, expert=2)
    assert Axes().over(1) == Axes(data=1)
    assert Axes(data=2, context=2).over(4).size(NAMES) == 4


def test_boxes_that_the_ranks_cannot_form_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"asks for expert 3, which 4 ranks cannot form; start a multiple of 3"):
        Axes(expert=3).over(4)
    with pytest.raises(ConfigError, match=r"data 2 x context 4, which 4 ranks cannot form; start 8"):
        Axes(data=2, context=4).over(4)
    with pytest.raises(ConfigError, match=r"expert 2, which 1 rank cannot form"):
        Axes(expert=2).over(1)
    with pytest.raises(ConfigError, match=r"'mesh.context' is 0"):
        Axes(context=0)
