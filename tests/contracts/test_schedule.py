"""The learning-rate schedules at the points that define them."""

import itertools

import pytest

from gnomon.errors import ConfigError
from gnomon.train.schedule import Schedule


def test_cosine_warms_up_over_one_percent_then_falls_to_the_final_share():
    schedule, total = Schedule(), 1000
    factors = [schedule.factor(step, total) for step in range(total)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == 1.0
    assert factors[10] == 1.0
    assert factors[-1] == pytest.approx(0.1)
    assert factors[10 + 989 // 2] == pytest.approx(0.55, abs=2e-3)
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))


def test_wsd_is_flat_until_the_decay():
    schedule, total = Schedule(kind="wsd", decay=0.2, final=0.0), 100
    factors = [schedule.factor(step, total) for step in range(total)]
    assert factors[1:80] == [1.0] * 79
    assert factors[80] == pytest.approx(0.95)
    assert factors[-1] == pytest.approx(0.0)


@pytest.mark.parametrize("total", [1, 2, 3])
@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_very_short_runs_have_a_positive_finite_rate(kind, total):
    assert all(0 < Schedule(kind=kind).factor(step, total) <= 1 for step in range(total))


def test_shares_outside_their_range_are_named():
    with pytest.raises(ConfigError, match=r"'warmup' is 1\.5"):
        Schedule(warmup=1.5)
    with pytest.raises(ConfigError, match="overlap"):
        Schedule(kind="wsd", warmup=0.5, decay=0.6)
