"""How sure a mean reward is: 95 % intervals whose unit is the task, since attempts at one task resemble each other.

Attempts at 20 tasks, eight each, are 20 observations and not 160: each task counts once, with the mean of its scored attempts. What was
not scored is left out; it is no 0. Read next: `evaluate_results.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""Student's t at 0.975 for 1 to 10 degrees of freedom; from there on a series is as good."""

Z_975 = 1.959964


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean over tasks and its 95 % interval; `low` and `high` are None where one task or none leaves nothing to judge by."""

    mean: float | None
    low: float | None = None
    high: float | None = None
    tasks: int = 0
    attempts: int = 0

    def to_json(self) -> dict[str, float | int | None]:
        """All fields."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "tasks": self.tasks, "attempts": self.attempts}


def student(freedom: int) -> float:
    """Student's t at 0.975. Beyond the table: the expansion in 1/ν of Abramowitz and Stegun, 26.7.5."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z, v = Z_975, float(freedom)
    return (z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3))


def interval(rewards: Mapping[str, Sequence[float]]) -> Interval:
    """The mean reward over tasks, from the scored rewards of each; tasks without any are left out.

    Where all rewards are 0 or 1 the interval is Wilson's, with as many observations as explain the variance between tasks, so that ten
    tasks that all succeed do not look certain; elsewhere it is Student's.
    """
    scored = [list(values) for values in rewards.values() if values]
    if not scored:
        return Interval(mean=None)
    every = [value for values in scored for value in values]
    means = [sum(values) / len(values) for values in scored]
    mean, tasks = sum(means) / len(means), len(means)
    if tasks == 1:
        return Interval(mean=mean, tasks=1, attempts=len(every))
    error, t = _standard_error(means), student(tasks - 1)
    low, high = mean - t * error, mean + t * error
    if all(value in (0.0, 1.0) for value in every):
        low, high = _clustered(mean, error, (tasks, len(every)), t)
    return Interval(mean=mean, low=low, high=high, tasks=tasks, attempts=len(every))


def _standard_error(means: Sequence[float]) -> float:
    mean = sum(means) / len(means)
    return math.sqrt(sum((value - mean) ** 2 for value in means) / (len(means) - 1) / len(means))


def _clustered(share: float, error: float, counts: tuple[int, int], t: float) -> tuple[float, float]:
    """Wilson's interval for a share of clusters. `counts` are tasks and attempts: the latter are the most observations there can be."""
    tasks, attempts = counts
    spread = share * (1 - share)
    seen = float(tasks) if spread <= 0 else float(attempts) if error <= 0 else min(float(attempts), spread / error**2)
    return wilson(share, seen, t)


def wilson(share: float, seen: float, t: float = Z_975) -> tuple[float, float]:
    """Wilson's interval: where a share may lie that was found in so many observations; `t` is in deviations."""
    spread = t * t / seen
    middle = (share + spread / 2) / (1 + spread)
    half = t * math.sqrt(share * (1 - share) / seen + spread / (4 * seen)) / (1 + spread)
    return 0.0 if share <= 0 else max(0.0, middle - half), 1.0 if share >= 1 else min(1.0, middle + half)  # exact at the ends


def difference(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> Interval:
    """How much better `second` is than `first`, task by task over those that both have scored: much of the chance in tasks cancels."""
    shared = [name for name in first if first[name] and second.get(name)]
    gains = [sum(second[n]) / len(second[n]) - sum(first[n]) / len(first[n]) for n in shared]
    attempts = sum(len(first[n]) + len(second[n]) for n in shared)
    if not gains:
        return Interval(mean=None)
    mean = sum(gains) / len(gains)
    if len(gains) == 1:
        return Interval(mean=mean, tasks=1, attempts=attempts)
    half = student(len(gains) - 1) * _standard_error(gains)
    return Interval(mean=mean, low=mean - half, high=mean + half, tasks=len(gains), attempts=attempts)
