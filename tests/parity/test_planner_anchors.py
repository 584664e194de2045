"""Published speeds, times and costs: the planner keeps the distance that `benchmarks/planner_anchors.py` reports."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest

from gnomon.plan.calibration import record

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The benchmark as a module."""
    sys.path.insert(0, BENCHMARKS)
    import planner_anchors

    yield planner_anchors
    sys.path.remove(BENCHMARKS)


@pytest.fixture(scope="module")
def errors(bench: ModuleType) -> dict[str, list[float]]:
    """Relative errors by kind of row, without any measurement of K3."""
    base = replace(record("default"), training=record("training").training)
    rows = bench.anchors()
    reached = bench.shares(rows, base)
    pairs = [(row, bench.uncalibrated(row, base, reached)) for row in rows]
    return {kind: bench.judged([pair for pair in pairs if pair[0].test == kind], print_rows=False) for kind in ("R", "C", "X")}


def test_limits_are_met_on_the_right_side(errors: dict[str, list[float]]) -> None:
    assert sum(abs(error) <= 0.30 for error in errors["R"]) >= len(errors["R"]) - 1


def test_without_k3_the_median_row_is_within_a_quarter(errors: dict[str, list[float]]) -> None:
    assert len(errors["C"]) >= 35
    assert median(map(abs, errors["C"])) <= 0.25


def test_one_record_per_stack_halves_the_distance(bench: ModuleType) -> None:
    base = replace(record("default"), training=record("training").training)
    rows = [row for row in bench.anchors() if row.test == "C"]
    checked = []
    for group in {row.group for row in rows}:
        members = [row for row in rows if row.group == group]
        found = bench.calibrated_record(group, members, base.at(members[0].date))
        checked += [(row, row.predict(found)) for row in members if found is not None and not row.calibrates]
    assert len(checked) >= 15
    assert median(map(abs, bench.judged(checked, print_rows=False))) <= 0.12
