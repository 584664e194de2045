"""What is wanted and what is allowed: metrics with a direction, a goal to push or to reach, limits that must hold.

A bound is a floor for what should be high (speed, throughput, tasks per day) and a ceiling for everything else. Read next: `solve.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gnomon.errors import ConfigError
from gnomon.extend import suggestion
from gnomon.plan.choice import Phase
from gnomon.units import parse_bytes, parse_count, parse_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A figure by which plans are compared: its unit, whether more of it is better, and how a user's bound is read."""

    name: str
    title: str
    unit: str
    more_is_better: bool
    phases: tuple[Phase, ...]
    read: Callable[[str], float]
    is_goal: bool = True
    words: tuple[str, ...] = ()


def dollars(text: str) -> float:
    """`"$500"`, `"2.5k$"`, `"1200"` → dollars; raises `ConfigError` for anything else."""
    plain = text.strip().removeprefix("$").removesuffix("$/h").removesuffix("/h").removesuffix("$")
    try:
        return float(parse_count(plain)) if not plain.replace(".", "", 1).isdigit() else float(plain)
    except (ConfigError, ValueError):
        raise ConfigError(f"'{text}' is not an amount of money; write it like $500 or 2.5k") from None


def number(text: str) -> float:
    """`"30"`, `"1.5k"` → a plain number; raises `ConfigError` for anything else, infinities and `nan` included."""
    try:
        found = float(text)
    except ValueError:
        found = float(parse_count(text))
    if not math.isfinite(found):
        raise ConfigError(f"'{text}' is not a number to plan with; write one like 30 or 1.5k")
    return found


def duration(text: str) -> float:
    """Seconds of a duration that says its unit; raises `ConfigError` for a bare number."""
    if text.strip().replace(".", "", 1).isdigit():
        raise ConfigError(f"'{text}' has no unit; write it like {text.strip()}s, {text.strip()}h or {text.strip()}d")
    return parse_seconds(text)


def size(text: str) -> float:
    """Bytes of a size that says its unit; raises `ConfigError` for a bare number."""
    if text.strip().replace(".", "", 1).isdigit():
        raise ConfigError(f"'{text}' has no unit; write it like {text.strip()}GB (10^9) or {text.strip()}GiB (2^30)")
    return float(parse_bytes(text))


EVERY: tuple[Phase, ...] = ("serve", "train", "rl")
METRICS: tuple[Metric, ...] = (
    Metric(name="speed", title="speed of one user", unit="token/s", more_is_better=True, phases=("serve",), read=number),
    Metric(name="throughput", title="tokens written, all users", unit="token/s", more_is_better=True, phases=EVERY, read=number),
    Metric(name="first_token", title="time to the first token", unit="s", more_is_better=False, phases=("serve",), read=duration,
           words=("latency", "ttft")),
    Metric(name="cost", title="cost per million tokens written", unit="$", more_is_better=False, phases=("serve",), read=dollars),
    Metric(name="tasks_per_day", title="tasks per day", unit="1/day", more_is_better=True, phases=("serve", "rl"), read=number),
    Metric(name="time", title="time", unit="s", more_is_better=False, phases=("train", "rl"), read=duration),
    Metric(name="budget", title="money in all", unit="$", more_is_better=False, phases=("train", "rl"), read=dollars, words=("money",)),
    Metric(name="loss", title="loss", unit="nat/token", more_is_better=False, phases=("train",), read=number),
    Metric(name="bill", title="money per hour", unit="$/h", more_is_better=False, phases=EVERY, read=dollars, words=("hourly",)),
    Metric(name="devices", title="devices", unit="", more_is_better=False, phases=EVERY, read=number),
    Metric(name="memory", title="memory of the fullest device", unit="B", more_is_better=False, phases=EVERY, read=size, is_goal=False),
)
DEFAULT_GOAL: dict[Phase, str] = {"serve": "speed", "train": "time", "rl": "time"}


def metric(name: str, phase: Phase) -> Metric:
    """A metric by name or by another word for it. Raises `ConfigError` for an unknown one, or one that the phase does not have."""
    for known in METRICS:
        if name in (known.name, *known.words):
            if phase not in known.phases:
                raise ConfigError(f"'{name}' means nothing for '{phase}'; it has {', '.join(m.name for m in METRICS if phase in m.phases)}")
            return known
    names = [word for known in METRICS if phase in known.phases for word in (known.name, *known.words)]
    raise ConfigError(f"unknown goal or limit '{name}'{suggestion(name, names)} (for {phase}: {', '.join(names)})")


ROUNDING = 1e-9
LARGEST_BOUND = 1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A bound that a plan must keep: a floor where more of the metric is better, else a ceiling."""

    metric: Metric
    bound: float
    given: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.bound < LARGEST_BOUND:
            raise ConfigError(f"'{self.metric.name}' is {self.bound:g}; no plan is bounded by that; give a positive number "
                              f"below {LARGEST_BOUND:g}")

    def keeps(self, value: float) -> bool:
        """Whether a value respects the bound, up to rounding: what was made to fill a limit keeps it."""
        return self.slack(value) >= -ROUNDING

    def slack(self, value: float) -> float:
        """Room left as a share of the bound: 0 at the bound, negative beyond it."""
        return (value - self.bound) / self.bound * (1 if self.metric.more_is_better else -1)

    def relaxed(self, share: float) -> "Limit":
        """The same limit with a share more room."""
        return Limit(metric=self.metric, bound=self.bound * (1 - share if self.metric.more_is_better else 1 + share), given=self.given)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What to push as far as the limits let it. With a `target`, reaching it is enough and the cheapest way of doing so is wanted."""

    metric: Metric
    target: float | None = None


def checked(goal: Goal, limits: Sequence[Limit]) -> None:
    """Raise `ConfigError` where goal and limits contradict each other or say one thing twice."""
    seen: dict[str, float] = {}
    for limit in limits:
        name = limit.metric.name
        if name in seen:
            raise ConfigError(f"'{name}' is bounded twice, by {seen[name]:g} and by {limit.bound:g}; keep one")
        seen[name] = limit.bound
    if goal.target is None and goal.metric.name in seen:
        bound = "at least" if goal.metric.more_is_better else "at most"
        raise ConfigError(f"'{goal.metric.name}' is the goal and also a limit ({bound} {seen[goal.metric.name]:g}); "
                          f"leave the limit out, or push something else within it, e.g. goal=bill")
    if not goal.metric.is_goal:
        raise ConfigError(f"'{goal.metric.name}' can be a limit but no goal")
