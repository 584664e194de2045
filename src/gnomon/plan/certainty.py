"""How sure is a difference between two plans? A ratio of two times has a band of its own, narrower than that of either.

What a stack makes of a machine is uncertain, but mostly the same uncertainty on both sides. So each factor of the record is made a little
slower on both sides at once, and what then moves is the *ratio*: D, the root of the squared sensitivities. A pair of measured steps misses
its predicted ratio by more than that explains, so a part that does not depend on D is added, unless the two sides are one plan.
The shares below are fitted to pairs of measured servers that differ in one thing (`benchmarks/planner_silicon.py`). Read next:
`effects.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gnomon.plan.calibration import Record, scaled
from gnomon.plan.calibration import record as named_record
from gnomon.plan.choice import Choice
from gnomon.plan.goals import Metric
from gnomon.plan.outcome import LossLaw, Outcome, evaluate
from gnomon.plan.quantity import Estimate
from gnomon.plan.step import as_table

ALIKE = {"formats": 0.8, "device": 0.5, "other": 0.39}
"""Share of the record's band, as a logarithm, by which a ratio is off even where D is 0, by what the two sides differ in: kernels for
another format, or on another device, are other kernels."""

APART = 1.64
"""The same per unit of D."""

SMALL = 0.1
"""Logarithm of the factor by which each coefficient is varied."""

MONEY = frozenset({"bill", "budget", "cost"})

UNTIMED = frozenset({"devices", "bill", "loss"})
"""Figures that no time enters directly."""

Side = tuple[Outcome, Callable[[Outcome], Outcome | None]]
"""An outcome with its tokens, and how another outcome of the same choice gets its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubt:
    """What is uncertain about costs: the record's factors, and the band of the loss law."""

    record: Record
    loss_law: LossLaw
    _seen: dict[tuple[str, int], tuple[Outcome, Outcome]] = field(default_factory=dict)
    _slower: dict[tuple[str, bool], dict[str, Record]] = field(default_factory=dict)

    def band(self, before: Side, after: Side, metric: Metric, *, local: bool = False) -> tuple[float, float]:
        """The 80 % band of a change of a metric, as a share of what it was, positive for better: its low and its high end.

        `local` is for derivatives: the two sides are one plan, a little of something apart.
        """
        name, sign = metric.name, 1 if metric.more_is_better else -1
        ratio = _logarithm(before[0], after[0], name)
        if ratio is None:
            return -math.inf, math.inf
        half = math.sqrt(self._times(before, after, name, local) + _law(before[0], after[0], name) + _prices(before[0], after[0], name))
        ends = sorted(sign * math.expm1(ratio + way * half) for way in (-1, 1))
        return ends[0], ends[1]

    def _times(self, before: Side, after: Side, name: str, local: bool) -> float:
        """Square of the half-width that comes from the record."""
        width = math.log1p(max(_spread(before[0], name), _spread(after[0], name)))
        ratio = _logarithm(before[0], after[0], name)
        key = before[0].choice.phase, name == "first_token"
        if key not in self._slower:
            self._slower[key] = slowed(self.record, *key)
        moved = (self._moved(slower, before, after, name) for slower in self._slower[key].items())
        apart = sum(x**2 for x in moved) / SMALL**2
        still = local or name in UNTIMED or (abs(ratio or 0.0) < 1e-9 and apart == 0)
        alike = 0.0 if still else ALIKE[_difference(before[0].choice, after[0].choice)] * width
        return alike**2 + (APART * width) ** 2 * apart

    def _moved(self, slower: tuple[str, Record], before: Side, after: Side, name: str) -> float:
        """By how much the logarithm of the ratio moves under another record."""
        sides = [settle(self._under(slower, outcome)) for outcome, settle in (before, after)]
        moved = None if sides[0] is None or sides[1] is None else _logarithm(sides[0], sides[1], name)
        return 0.0 if moved is None else moved - (_logarithm(before[0], after[0], name) or 0.0)

    def _under(self, slower: tuple[str, Record], outcome: Outcome) -> Outcome:
        """An outcome's choice costed under another record; kept, since the plan in use is one side of every comparison."""
        key = slower[0], id(outcome)
        if key not in self._seen:
            # The outcome is kept beside it so that its id stays its own.
            self._seen[key] = outcome, evaluate(outcome.choice, slower[1], self.loss_law)
        return self._seen[key][1]


def slowed(record: Record, phase: str, first_token: bool) -> dict[str, Record]:
    """The record with one of its factors slower each, by the factor's name: longer fixed times, smaller shares of the sheet's rates.

    Only factors that enter a phase's figures; those of the first token only where it is asked for.
    """
    factor = math.exp(SMALL)

    def slow(name: str, value: float) -> float:
        return value / factor if name.endswith("efficiency") else value * factor

    found = {name: scaled(record, {name: slow(name, 1.0)}) for name in as_table(record.coefficients)}
    if first_token or phase == "rl":
        found |= {f"first_token.{name}": replace(record, first_token=replace(record.first_token, **{name: slow(name, value)}))
                  for name, value in as_table(record.first_token).items() if name != "spread"}
    if phase != "serve":
        shares = record.training or named_record("training").training
        found["training"] = replace(record, training={name: share / factor for name, share in shares.items()})
        if (steps := record.training_step) is not None:
            found |= {f"training_step.{name}": replace(record, training_step=replace(steps, **{name: slow(name, value)}))
                      for name, value in as_table(steps).items()}
    if record.drawing:
        found["drawing"] = replace(record, drawing={size: taken * factor for size, taken in record.drawing.items()})
    return found


def _difference(before: Choice, after: Choice) -> str:
    if before.precision != after.precision:
        return "formats"
    return "other" if before.cluster.device.name == after.cluster.device.name else "device"


def _logarithm(before: Outcome, after: Outcome, name: str) -> float | None:
    if name not in before.metrics or name not in after.metrics:
        return None
    a, b = before.metrics[name].value, after.metrics[name].value
    return math.log(b / a) if a > 0 and b > 0 and math.isfinite(a) and math.isfinite(b) else None


def _spread(outcome: Outcome, name: str) -> float:
    """The band of an outcome's times: money has a band of prices besides, which two plans on one machine share."""
    if name == "first_token":
        return outcome.metrics[name].spread
    times: list[Estimate] = [step.total for step in outcome.steps.values()] + list(outcome.phases.values())
    return max((time.spread for time in times if math.isfinite(time.spread)), default=0.0)


def _prices(before: Outcome, after: Outcome, name: str) -> float:
    """Square of the half-width that comes from prices; devices of one kind have one price on both sides."""
    devices = [outcome.choice.cluster.device for outcome in (before, after)]
    if name not in MONEY or devices[0].name == devices[1].name:
        return 0.0
    return sum(math.log(device.price_per_hour[2] / device.price_per_hour[0]) ** 2 / 4 for device in devices if device.price_per_hour)


def _law(before: Outcome, after: Outcome, name: str) -> float:
    """Square of the half-width that comes from the loss law, which is off on both sides alike."""
    if name != "loss":
        return 0.0
    a, b = before.metrics[name], after.metrics[name]
    ratio = math.log(b.value / a.value)
    return max([abs(math.log(y / x) - ratio) for x, y in ((a.low, b.low), (a.high, b.high)) if x > 0 and y > 0], default=0.0) ** 2
