"""Estimates: bands and badges survive arithmetic, units cancel, what cannot be added is refused."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.plan.quantity import BADGES, Badge, Estimate, banded, exact, independent_sum, largest, unit_product, weakest, written

numbers = st.floats(0.01, 1e6)
spreads = st.floats(0.0, 2.0)
badges = st.sampled_from(BADGES[1:])
estimates = st.builds(lambda v, s, b: banded(v, "s", s, b), numbers, spreads, badges)


@given(estimates, estimates)
def test_results_hold_their_value_and_every_corner(a: Estimate, b: Estimate) -> None:
    for result, operation in ((a + b, float.__add__), (a - b, float.__sub__), (a * b, float.__mul__), (a / b, float.__truediv__)):
        assert result.low <= result.value <= result.high
        slack = 1e-9 * max(abs(result.low), abs(result.high), 1e-12)
        for x in (a.low, a.value, a.high):
            for y in (b.low, b.value, b.high):
                assert result.low - slack <= operation(x, y) <= result.high + slack
        assert result.badge == weakest(a.badge, b.badge)


@given(st.lists(estimates, min_size=1, max_size=6))
def test_independent_parts_make_a_narrower_band(parts: list[Estimate]) -> None:
    together = parts[0]
    for part in parts[1:]:
        together = together + part
    apart = independent_sum(parts)
    assert apart.value == pytest.approx(together.value)
    slack = 1e-9 * together.high  # sums and roots round
    assert together.low <= apart.low + slack and apart.high <= together.high + slack
    assert apart.high - apart.value >= max(part.high - part.value for part in parts) - slack


@given(estimates, estimates)
def test_the_largest(a: Estimate, b: Estimate) -> None:
    top = largest(a, b)
    assert (top.value, top.low, top.high) == (max(a.value, b.value), max(a.low, b.low), max(a.high, b.high))


@given(estimates, st.floats(0.01, 100))
def test_plain_numbers_scale(a: Estimate, factor: float) -> None:
    for scaled in (a * factor, factor * a):
        assert scaled.badge == a.badge and scaled.unit == "s" and scaled.low == pytest.approx(a.low * factor)
    assert (factor / a).unit == "1/s" and (factor / a).high == pytest.approx(factor / a.low)


@pytest.mark.parametrize(("a", "b", "product"), [
    ("B/s", "s", "B"), ("B", "1/s", "B/s"), ("$/h", "h", "$"), ("", "s", "s"), ("s", "1/s", ""), ("token/s", "s/token", ""),
    ("FLOP", "1/s", "FLOP/s"),
])
def test_units(a: str, b: str, product: str) -> None:
    assert unit_product(a, b) == product


def test_bytes_over_bandwidth_are_seconds() -> None:
    time = exact(137e9, "B") / banded(8e12, "B/s", 0.1, "calibrated", "the record of one stack")
    assert time.unit == "s" and time.badge == "calibrated" and time.because == "the record of one stack"
    assert time.low == pytest.approx(137 / 8800) and time.high == pytest.approx(137 / 8000 * 1.1)
    assert str(time) == "17.1 ms (15.6 ms to 18.8 ms, calibrated)"


@pytest.mark.parametrize(("make", "message"), [
    (lambda: exact(1, "B") + exact(1, "s"), "cannot add 'B' and 's'"),
    (lambda: exact(1, "B") - exact(1, "GiB"), "cannot subtract"),
    (lambda: largest(exact(1, "B"), exact(1, "s")), "cannot compare"),
    (lambda: exact(1, "") / Estimate(value=1, low=-1, high=2, unit="s", badge="calibrated"), "holds zero"),
    (lambda: Estimate(value=3, low=1, high=2, unit="s", badge="calibrated"), "does not hold its value"),
    (lambda: Estimate(value=1, low=1, high=2, unit="s", badge="exact"), "exact figure has no band"),
    (lambda: Estimate(value=1, low=1, high=2, unit="s", badge="guessed"), "badge 'guessed'"),
    (lambda: banded(1, "s", -0.1, "calibrated"), "narrower than nothing"),
    (lambda: independent_sum([]), "no estimates"),
    (lambda: exact(math.nan, "s"), "does not hold"),
])
def test_what_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_json_and_words() -> None:
    figure = Estimate(value=2.0, low=1.0, high=math.inf, unit="s", badge="extrapolated", because="no data")
    assert json.loads(json.dumps(figure.as_dict())) == {
        "value": 2.0, "low": 1.0, "high": None, "unit": "s", "badge": "extrapolated", "because": "no data"}
    assert str(exact(1_560_860_324_864, "B")) == "1.42 TiB (exact)"
    assert written(25.6e-6, "s") == "25.6 us" and written(2.78e12, "") == "2.78T" and written(3.5, "$/h") == "$3.50/h"
    assert figure.spread == math.inf and banded(4, "s", 0.25, "calibrated").spread == pytest.approx(0.25) and exact(1, "s").spread == 0


@pytest.mark.parametrize("badge", BADGES)
def test_nothing_improves_a_badge(badge: Badge) -> None:
    assert weakest("exact", badge) == badge and weakest(badge, "extrapolated") == "extrapolated"
