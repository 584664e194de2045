"""Records, their bands, and the fit: coefficients come back from times they made, outliers do not lead, nonsense is refused."""

import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from gnomon.config import to_toml
from gnomon.errors import ConfigError
from gnomon.plan.calibration import EXPECTED, band, best_record, fit, read_record, record, record_names, scaled
from gnomon.plan.hardware import device
from gnomon.plan.step import WALLS, Coefficients, Demand, as_table, seconds, smooth_maximum, step_time


def some_demands(rows: int, seed: int = 0) -> Demand:
    """Demands that spread over every wall, as arrays."""
    rng = np.random.default_rng(seed)

    def spread(low: float, high: float) -> np.ndarray:
        return np.exp(rng.uniform(math.log(low), math.log(high), rows))
    return Demand(layers=rng.integers(20, 100, rows).astype(float), expert_layers=rng.choice([0.0, 50.0], rows), sequences=spread(1, 500),
                  hops=rng.choice([0.0, 120.0, 360.0], rows), link=spread(1e-5, 2e-2), weights=spread(1e-4, 2e-2),
                  cache=spread(1e-5, 2e-2), products=spread(1e-5, 2e-2), attention=spread(1e-6, 5e-3), prefill=spread(1e-5, 2e-2))


def test_fit_recovers_what_made_the_times() -> None:
    truth = Coefficients(layer_seconds=6e-5, expert_layer_seconds=2e-5, sequence_seconds=3e-5, collective_seconds=9e-6,
                         link_efficiency=0.35, read_efficiency=0.65, cache_efficiency=0.55, compute_efficiency=0.45)
    demand = some_demands(600)
    found = as_table(fit(demand, seconds(demand, as_table(truth)), weight=1e-3))
    for name, value in as_table(truth).items():
        assert found[name] == pytest.approx(value, rel=0.02), name


def test_single_rows_cannot_lead_the_fit() -> None:
    demand = some_demands(400, seed=1)
    times = seconds(demand, as_table(EXPECTED))
    times[:20] *= 20
    ratio = seconds(demand, as_table(fit(demand, times)))[20:] / times[20:]
    assert 0.9 < np.median(ratio) < 1.1


def test_without_rows_that_say_otherwise_the_prior_stays() -> None:
    one = Demand(**{f.name: np.array([getattr(some_demands(1), f.name)[0]]) for f in fields(Demand)})
    found = fit(one, seconds(one, as_table(EXPECTED)))
    assert as_table(found) == pytest.approx(as_table(EXPECTED), rel=1e-3)


def test_band_is_the_quantile_of_misses() -> None:
    misses = list(np.random.default_rng(2).normal(0, 0.2, 20_000))
    assert math.log1p(band(misses)) == pytest.approx(1.2816 * 0.2, rel=0.03)
    assert band([], pooled=0.3) == 0.3
    assert band([0.01], pooled=0.3) == pytest.approx(0.27, abs=0.03)
    with pytest.raises(ConfigError, match="no misses"):
        band([])


@pytest.mark.parametrize("wall", WALLS)
def test_the_largest_term_is_the_wall(wall: str) -> None:
    small = {f.name: 1e-6 for f in fields(Demand)}
    big = {"latency": {"layers": 1000.0}, "bandwidth": {"cache": 1.0}, "compute": {"prefill": 1.0}, "communication": {"link": 1.0}}
    found = step_time(Demand(**{**small, **big[wall]}), EXPECTED, 0.3, "validated")
    assert found.wall == wall
    assert found.total.low < getattr(found, wall).value <= found.total.value * 1.001
    assert found.total.high == pytest.approx(found.total.value * 1.3)


def test_overlap_is_never_faster_than_its_longer_part() -> None:
    assert smooth_maximum(1.0, 0.0) == 1.0
    assert 1.0 < smooth_maximum(1.0, 1.0) < 1.2


@pytest.mark.parametrize("name", record_names())
def test_records_that_come_with_the_package_hold(name: str) -> None:
    found = record(name)
    assert found.source and found.date
    assert found.spread_beyond >= found.spread
    for each in found.devices:
        device(each)


def test_a_record_reads_back_as_written(tmp_path: Path) -> None:
    made = replace(record("default"), title="mine", training={"fp32": 0.3})
    (tmp_path / "mine.toml").write_text(to_toml(made))
    assert read_record(tmp_path / "mine.toml") == made


def test_a_users_record_goes_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "gnomon" / "records"
    folder.mkdir(parents=True)
    (folder / "box.toml").write_text(to_toml(replace(record("default"), title="box")))
    assert record("box").title == "box"


def test_beyond_its_range_a_record_says_so() -> None:
    default = record("default")
    inside, outside = (default.trust(device("h200"), ranks, 8, 4096) for ranks in (8, 64))
    assert inside[1] == "validated" and outside[1] == "extrapolated" and outside[0] > inside[0]
    assert default.trust(device("mi355x"), 8, 8, 4096)[1] == "extrapolated"
    assert [default.trust(device("h200"), 8, 8, 4096, active)[1] for active in (1e9, 8e9)] == ["extrapolated", "validated"]


@pytest.mark.parametrize(("change", "words"), [
    ("spread = 0.0", "no record is exact"), ("source = ''", "'source' is empty"), ("sprad = 1", "did you mean 'spread'"),
    ("training.bf16 = 0.95", "share of peak"), ("coefficients.read_efficiency = 1.9", "1.2 at most"),
    ("coefficients.layer_seconds = 0.0", "must be positive"),
])
def test_bad_records_are_refused(tmp_path: Path, change: str, words: str) -> None:
    key = change.split(" ", maxsplit=1)[0]
    lines = [] if "." in key else [line for line in to_toml(record("default")).splitlines() if not line.startswith(f"{key} ")]
    text = "\n".join([change, *lines]) if lines else f"extends = 'whole.toml'\n{change}\n"
    (tmp_path / "whole.toml").write_text(to_toml(record("default")))
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_record(tmp_path / "bad.toml")


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(ConfigError, match="did you mean 'default'"):
        record("defualt")
    with pytest.raises(ConfigError, match="no record for stack"):
        best_record(device("h200"), "sglnag")
    with pytest.raises(ConfigError, match="did you mean 'layer_seconds'"):
        scaled(record("default"), {"layer_second": 2.0})
    assert scaled(record("default"), {"layer_seconds": 2.0}).coefficients.layer_seconds == 2 * record("default").coefficients.layer_seconds
