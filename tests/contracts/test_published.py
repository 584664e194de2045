"""Every published figure that needs no clock: within 1 %, or equal as it was rounded, or listed with the reason."""

import dataclasses

import pytest

from gnomon.plan.footprint import weights
from gnomon.plan.published import TOLERANCE, Published, static, table
from gnomon.units import format_bytes, parse_bytes

ROWS = static()
STUDY = {*(f"K{n:02}" for n in (1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15, 16, 19)), "L02", "L05", "S06", "S12", "T09"}
EXACT = {"K01", "K03", "K10", "K13", "K14", "K15", "K19", "S12"}
WORST_MISS = 0.031


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.id} {row.what}")
def test_figures(row: Published) -> None:
    assert row.agrees == (not row.miss), f"{row.what}: {row.ours} {row.unit} against {row.value}"
    assert row.agrees or abs(row.deviation) <= WORST_MISS
    if row.id in EXACT and not row.rounded:
        assert row.ours == row.value


def test_every_figure_of_the_study_is_here() -> None:
    assert {row.id for row in ROWS} - {"—"} == STUDY
    assert {row.id for row in ROWS if row.miss} == {"K16", "L02", "—"}


def test_the_table_names_what_disagrees() -> None:
    text = table(ROWS)
    assert len(text.splitlines()) == len(ROWS) + 1 and text.count("miss: ") == 3


@pytest.mark.parametrize("factor", [2**40 / 10**12, 10**12 / 2**40, 2**30 / 10**9, 2**20 / 10**6])
def test_binary_and_decimal_units_cannot_pass_for_each_other(factor: float) -> None:
    """A figure of four digits taken in the other system of units is never within the tolerance, nor equal as rounded."""
    sizes = [row for row in ROWS if row.unit in ("B", "MB", "GB", "TB", "MiB", "GiB", "TiB") and row.rounded <= row.value / 500]
    assert len(sizes) >= 10
    for row in sizes:
        confused = dataclasses.replace(row, get=lambda row=row: row.ours * factor)
        assert not confused.agrees and abs(factor - 1) > 4 * TOLERANCE


def test_the_figure_called_1_42_terabytes_is_in_tebibytes() -> None:
    from gnomon.plan.families import family
    from gnomon.plan.workload import Precision

    k3 = family("k3").config
    size = weights(k3, Precision.released(k3)).whole_bytes
    assert format_bytes(size) == "1.42 TiB" and size == pytest.approx(parse_bytes("1.561 TB"), rel=1e-3)
    assert abs(size - parse_bytes("1.42 TB")) > 0.09 * size
