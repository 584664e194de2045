"""Published laws: coefficients as printed, values as the papers state them, honest about range; your own runs give a law back."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from gnomon.errors import ConfigError, DataError
from gnomon.model.config import preset
from gnomon.plan import fit, laws
from gnomon.plan.laws import LAWS, Law, Scale, law
from gnomon.plan.shapes import shape

DENSE = Scale(active=1e9, total=1e9, tokens=2e10)
WITH_VALUE = [known for known in LAWS if known.value is not None]
WITHOUT = [known for known in LAWS if known.value is None]


def name(item: object) -> str:
    """How a law is called in a test's name."""
    return item.name if isinstance(item, Law) else str(item)


@pytest.mark.parametrize("known", LAWS, ids=name)
def test_each_law_says_where_it_is_from(known: Law) -> None:
    assert known.source and known.checked and known.formula and known.title
    assert "arXiv" in known.source or known.source == "none"
    assert law(known.name) is known
    assert known.coefficients or known.value is None


@pytest.mark.parametrize("known", WITH_VALUE, ids=name)
@pytest.mark.parametrize("scale", [DENSE, Scale(active=1e11, total=2.8e12, tokens=3e13, activation=0.02, granularity=4.7, kda_share=0.75,
                                                depth_reads=True)], ids=["dense 1B", "K3"])
def test_each_law_has_a_band_and_a_badge(known: Law, scale: Scale) -> None:
    estimate = known.at(scale)
    assert 0 < estimate.low <= estimate.value <= estimate.high
    if known.outside(scale):
        assert estimate.badge == "extrapolated" and "outside" in estimate.because


@pytest.mark.parametrize("known", WITHOUT, ids=name)
def test_a_law_that_does_not_exist_says_so(known: Law) -> None:
    with pytest.raises(ConfigError, match="fit one"):
        known.at(DENSE)


def test_values_that_the_papers_state() -> None:
    # 2404.10102: Chinchilla's 70B on 1.4T is the optimum of its own budget, about 20 tokens per parameter.
    parameters, tokens = laws.best_split(6 * 7e10 * 1.4e12)
    assert 15 < tokens / parameters < 25
    assert laws.additive(laws.REFIT, 7e10, 1.4e12) == pytest.approx(1.8172 + 482.01 / 7e10**0.3478 + 2085.43 / 1.4e12**0.3658)
    # 2507.17702: about 7 at an activation of 3.1 %, granularity 12 and 1e22 FLOPs, and 1 for a dense model.
    example = Scale(active=1e9, total=1.7e10, tokens=1e22 / 6e9, activation=0.031, granularity=12)
    leverage = law("leverage").at(example)
    assert leverage.low < 5.4 < leverage.high and leverage.high >= 6.9
    assert law("leverage").at(DENSE).value == 1
    assert law("kda-mix").at(Scale(active=1e9, total=1e9, tokens=1e9, kda_share=20 / 27)).value == 1.16
    # 2603.15031: 1.692 against 1.714 at 5.6 PFLOP/s-days.
    with_reads, plain = 1.870 * 5.6**-0.058, 1.891 * 5.6**-0.057
    assert with_reads == pytest.approx(1.692, abs=1e-3)
    assert (plain / with_reads) ** (1 / 0.057) == pytest.approx(laws.DEPTH_GAIN, abs=0.04)


def test_more_compute_never_hurts_and_guessing_is_the_ceiling() -> None:
    for size in (1e6, 1e8, 1e9):
        model = shape(size)
        losses = [laws.loss(model, tokens).value for tokens in (1e6, 1e8, 1e10, 1e12)]
        assert losses == sorted(losses, reverse=True)
        assert max(losses) <= math.log(model.vocab_size)
    assert laws.loss(preset("k3-2.8t"), 3e13).value < laws.loss(preset("kimi-linear-48b"), 5.7e12).value


@pytest.mark.parametrize("text", ["leverge", "dens"])
def test_unknown_law_suggests(text: str) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        law(text)


TRUTH = {"E": 1.5, "A": 300.0, "alpha": 0.33, "B": 900.0, "beta": 0.35}


def runs(sizes: list[float], lengths: list[float], noise: float = 0.0, seed: int = 0) -> list[fit.Run]:
    """Runs of a law that is known, with noise on the loss."""
    random = np.random.default_rng(seed)
    return [fit.Run(name=f"{n:g}-{d:g}", active=n, tokens=d, loss=laws.additive(TRUTH, n, d) * (1 + noise * random.standard_normal()))
            for n in sizes for d in lengths]


def test_a_fit_finds_the_law_that_made_the_runs() -> None:
    found = fit.fit(runs([2e6, 5e6, 1e7, 3e7], [2e7, 1e8, 4e8, 1e9]), resamples=20)
    assert found.borrowed == ()
    for key in ("alpha", "beta"):
        assert found.coefficients[key] == pytest.approx(TRUTH[key], abs=0.02)
    inside, beyond = found.at(2e7, 5e8), found.at(3e8, 1e10)
    assert inside.badge == "calibrated" and inside.value == pytest.approx(laws.additive(TRUTH, 2e7, 5e8), rel=0.003)
    assert beyond.badge == "extrapolated" and beyond.value == pytest.approx(laws.additive(TRUTH, 3e8, 1e10), rel=0.03)


def test_bands_cover_the_truth_about_as_often_as_they_say() -> None:
    hits = 0
    for seed in range(20):
        estimate = fit.fit(runs([2e6, 5e6, 1e7, 3e7], [2e7, 1e8, 4e8], 0.005, seed), resamples=40, seed=seed).at(6e7, 8e8)
        hits += estimate.low <= laws.additive(TRUTH, 6e7, 8e8) <= estimate.high
    assert hits >= 13


def test_what_runs_cannot_tell_is_borrowed_or_refused() -> None:
    assert fit.fit(runs([2e6, 1e7], [2e7, 1e8, 4e8]), resamples=5).borrowed == ("alpha",)
    one_size = fit.fit(runs([2e6], [2e7, 1e8, 4e8, 1e9]), resamples=5)
    assert one_size.coefficients["A"] == 0
    for few in (runs([2e6], [2e7]), runs([2e6, 4e6], [2e7]), []):
        with pytest.raises(ConfigError, match="at least"):
            fit.fit(few)


def test_runs_are_read_from_their_folders(tmp_path: Path) -> None:
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "tour.toml"
    for index in range(2):
        folder = tmp_path / f"run{index}"
        folder.mkdir()
        (folder / "recipe.toml").write_text(recipe.read_text())
        rows = [{"step": s, "tokens": 1000 * s * (index + 1), "loss": 5.0 - 0.01 * s} for s in range(1, 101)]
        rows[-1]["held_out_loss"] = 4.5
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = fit.read_runs([tmp_path / "run0", tmp_path / "run1"])
    assert (first.tokens, second.tokens, first.loss) == (100_000, 200_000, 4.5)
    assert first.active > 1e6
    (tmp_path / "run0" / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="no finished step"):
        fit.read_runs([tmp_path / "run0"])


def test_a_table_gives_a_curve_where_no_law_exists(tmp_path: Path) -> None:
    table = tmp_path / "effort.csv"
    xs = [500, 1000, 2000, 4000, 8000, 16000]
    table.write_text("tokens,score\n" + "".join(f"{x},{0.9 - 40 * x**-0.7}\n" for x in xs))
    curve = fit.fit_table(table, resamples=10)
    assert curve.level == pytest.approx(0.9, abs=0.01) and curve.reach < 0
    assert curve.at(3000).value == pytest.approx(0.9 - 40 * 3000**-0.7, abs=0.005)
    assert curve.at(3000).badge == "calibrated" and curve.at(64000).badge == "extrapolated"
    table.write_text("tokens,score\n1,2\n3,4\n")
    with pytest.raises(ConfigError, match="four different"):
        fit.fit_table(table)
    table.write_text("tokens,score\n1,good\n")
    with pytest.raises(DataError, match="two numbers"):
        fit.fit_table(table)
