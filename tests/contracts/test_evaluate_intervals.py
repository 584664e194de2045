"""Intervals of mean rewards: the unit is the task, what was not scored is left out, and 95 % means 95 %."""

import math
import random
import statistics

import pytest

from gnomon.agent.evaluate_intervals import difference, interval, student


def student_distribution(t: float, freedom: int, steps: int = 20_000) -> float:
    """The probability below t, by Simpson's rule over the density; no code in common with what is tested."""
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    width = t / steps
    heights = [constant * (1 + (i * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(steps + 1)]
    return 0.5 + width / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))


@pytest.mark.parametrize("freedom", [1, 2, 5, 10, 11, 12, 20, 50, 200])
def test_students_t(freedom: int) -> None:
    assert student_distribution(student(freedom), freedom) == pytest.approx(0.975, abs=2e-5)


def test_the_unit_is_the_task() -> None:
    """A thousand attempts at each of two tasks say no more about other tasks than two attempts."""
    few = interval({"a": [1.0, 0.5], "b": [0.0, 0.25]})
    many = interval({"a": [1.0, 0.5] * 500, "b": [0.0, 0.25] * 500})
    assert (few.mean, few.low, few.high) == (many.mean, many.low, many.high)
    means = [0.75, 0.125]
    half = 12.7062 * statistics.stdev(means) / math.sqrt(2)
    assert few.mean == 0.4375
    assert few.high == pytest.approx(0.4375 + half)


def test_each_task_counts_once() -> None:
    """What failed by the machine's fault makes a task's attempts fewer, not its weight smaller."""
    assert interval({"a": [1.0], "b": [0.0] * 9, "c": []}).mean == 0.5


def test_nothing_to_judge_by() -> None:
    assert interval({}).mean is None
    assert interval({"a": []}).mean is None
    alone = interval({"a": [1.0, 0.0, 1.0, 1.0]})
    assert (alone.mean, alone.low, alone.high, alone.tasks, alone.attempts) == (0.75, None, None, 1, 4)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_success_everywhere_is_not_certainty(value: float) -> None:
    found = interval({str(i): [value] * 3 for i in range(10)})
    assert found.low is not None
    assert found.high is not None
    assert 0.15 < found.high - found.low < 0.5
    assert (found.low if value == 0.0 else found.high) == pytest.approx(value)


def test_rewards_beyond_0_and_1_are_not_cut() -> None:
    found = interval({"a": [-1.0], "b": [-1.0], "c": [1.0]})
    assert found.low is not None
    assert found.low < -1.0


def test_intervals_hold_what_they_promise() -> None:
    """Tasks differ in difficulty, attempts by chance: about 95 of 100 intervals hold the true mean. Seeded, so always the same 600."""
    draw = random.Random(7)
    held = naive = 0
    for _ in range(600):
        data = {}
        for task in range(15):
            chance = draw.betavariate(0.8, 0.8)  # mean one half
            data[str(task)] = [float(draw.random() < chance) for _ in range(8)]
        found = interval(data)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.5 <= found.high
        every = [v for values in data.values() for v in values]
        naive += abs(statistics.mean(every) - 0.5) <= 1.96 * statistics.pstdev(every) / math.sqrt(len(every))
    assert 0.925 <= held / 600 <= 0.985
    assert naive / 600 < 0.8  # what counting attempts would promise


def test_a_difference_is_of_the_same_tasks() -> None:
    """Hard and easy tasks, the second always 0.1 better: the difference is certain though the means are not."""
    first = {str(i): [i / 20] for i in range(10)}
    second = {str(i): [i / 20 + 0.1] for i in range(10)} | {"only here": [0.0]}
    found = difference(first, second)
    assert found.tasks == 10
    assert (found.low, found.high) == pytest.approx((0.1, 0.1))
    wide = interval(first)
    assert wide.low is not None
    assert wide.high is not None
    assert wide.high - wide.low > 0.2
    assert difference({"a": [1.0]}, {"b": [1.0]}).mean is None
    assert difference({"a": [1.0]}, {"a": [0.0]}).low is None
