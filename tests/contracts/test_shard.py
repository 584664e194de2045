"""Pieces of parameters and their owners: everything has one, granules stay whole, nobody has much more than the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import ConfigError
from gnomon.parallel.shard import deal

PARAMETERS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=8)


@given(PARAMETERS, st.integers(1, 6))
def test_every_row_has_one_owner_and_shares_are_equal_up_to_a_granule(parts: list[tuple[int, int, int]], ranks: int) -> None:
    shapes = [(f"p{i}", (granule * count, width)) for i, (granule, count, width) in enumerate(parts)]
    granules = {f"p{i}": granule for i, (granule, _, _) in enumerate(parts)}
    pieces = deal(shapes, granules, ranks)
    for name, (rows, _) in shapes:
        own = [piece for piece in pieces if piece.name == name]
        assert [own[0].start, *(piece.stop for piece in own)] == [*(piece.start for piece in own), rows]
        assert all((piece.stop - piece.start) % granules[name] == 0 and piece.stop > piece.start for piece in own)
        assert len({piece.owner for piece in own}) == len(own)  # one stretch of a parameter each
    owners = [piece.owner for piece in pieces]
    assert owners == sorted(owners) and set(owners) <= set(range(ranks))
    widths = dict(shapes)
    shares = [sum((p.stop - p.start) * widths[p.name][1] for p in pieces if p.owner == rank) for rank in range(ranks)]
    largest = max(granule * width for granule, _, width in parts)
    assert max(shares) <= sum(shares) / ranks + largest


def test_granules_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="'w' has 10 rows, which granules of 4 do not divide"):
        deal([("w", (10, 3))], {"w": 4}, 2)
