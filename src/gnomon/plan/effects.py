"""What each knob is worth at a plan: turn it by a notch, cost the result, and compare goal, money, memory and expected quality.

A knob that changes the machines is given a new best layout; every other is turned with all else as it is. Read next: `report.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gnomon.errors import ConfigError
from gnomon.plan.certainty import Doubt, Side
from gnomon.plan.choice import Choice
from gnomon.plan.goals import Goal, Metric
from gnomon.plan.knobs import KNOBS, Knob
from gnomon.plan.laws import multiplier, scale_of
from gnomon.plan.outcome import Outcome
from gnomon.plan.quantity import Estimate
from gnomon.plan.search import choices
from gnomon.plan.solve import Evaluate, gain, keeps, pick, settle
from gnomon.plan.words import Question

WORTH = 0.03
"""Smaller gains are not worth a turn: they drown in the bands."""

MORE = 1.1
SIZE_AT_RELEASE = 20.0  # tokens per active parameter at which quality is compared where no training is planned


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """One notch of a knob: how the goal changes (as a share, more is better), what is paid, what is needed, what quality is expected.

    `band` is the 80 % band of the change, where there is a `Doubt` to ask. `quality` is the size of the dense model that is as good, after
    against before, by the published laws; none where they say nothing. `per_dollar` is the gain of the goal per dollar more on the hourly
    bill, `per_hour` per hour more of the whole work.
    """

    knob: Knob
    up: bool
    before: str
    after: str
    outcome: Outcome | None
    change: float | None
    band: tuple[float, float] | None
    bill_change: float | None
    memory_change: float
    quality: Estimate | None
    per_dollar: float | None
    per_hour: float | None
    keeps_limits: bool

    @property
    def counts(self) -> bool:
        """Whether the notch is possible, keeps the limits and gains something worth naming."""
        return self.change is not None and self.keeps_limits and self.change >= WORTH and self.knob.costs != "another question"


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """What a tenth more of something gains, as a share, with its 80 % band."""

    share: float
    low: float
    high: float


def effects(question: Question, best: Outcome, cost: Evaluate, knobs: Sequence[Knob] = KNOBS, doubt: Doubt | None = None) -> list[Effect]:
    """Every notch of every knob that turns, the largest effect on the watched metric first; with a `doubt` each has its band."""
    found = []
    for knob in knobs:
        for up in (True, False):
            turned = knob.turned(best.choice, up)
            if turned is not None:
                effect = _effect(question, best, (knob, up), turned, cost)
                found.append(effect if doubt is None else replace(effect, band=_band(question, best, effect, doubt)))
    return sorted(found, key=lambda effect: -abs(effect.change or 0.0))


def watched_metric(question: Question) -> Metric:
    """What knobs are judged by: the goal; where that is only what is paid for machines, the performance that is asked of them."""
    goal = question.goal.metric
    if goal.name not in ("bill", "devices"):
        return goal
    return next((limit.metric for limit in question.limits if limit.metric.is_goal and limit.metric.name not in ("bill", "devices")), goal)


def first_knob(found: Sequence[Effect]) -> Effect | None:
    """The knob to turn first: of those that cost nothing the one that gains most, agreed ones before contested ones; else of those that
    cost money the one that gains most per dollar; else the best that needs a new training. Nothing where no notch is worth it."""
    for costs, contested in (("free", False), ("free", True), ("money", False), ("retraining", False), ("retraining", True)):
        fitting = [e for e in found if e.counts and e.knob.costs == costs and (contested or not e.knob.contested)]
        if costs == "money":
            best = max(fitting, key=_per_dollar_first, default=None)
        else:
            best = max(fitting, key=lambda e: e.change or 0.0, default=None)
        if best is not None:
            return best
    return None


def hardware_worth(question: Question, best: Outcome, cost: Evaluate, doubt: Doubt | None = None) -> dict[str, Worth]:
    """What a tenth more of each thing a device has would gain of the watched metric, as a share, all else as it is: its elasticities.

    The layout stays, so this is what the machine's walls are worth, not what a new plan on a better machine would reach.
    """
    device = best.choice.cluster.device
    better = {
        "bandwidth": replace(device, bandwidth=MORE * device.bandwidth),
        "compute": replace(device, flops={name: MORE * rate for name, rate in device.flops.items()}),
        "links": replace(device, scale_up_bandwidth=MORE * device.scale_up_bandwidth,
                         scale_out_bandwidth=MORE * device.scale_out_bandwidth),
        "memory": replace(device, memory_bytes=int(MORE * device.memory_bytes)),
    }
    watched = Goal(metric=watched_metric(question))
    found = {}
    for name, improved in better.items():
        outcome = cost(replace(best.choice, cluster=replace(best.choice.cluster, device=improved)))
        settled = settle(outcome, question) if outcome.fits else None
        if settled is not None:
            share = gain(best, settled, watched) / abs(best.metrics[watched.metric.name].value)
            sides = _sides(question, best, settled)
            low, high = (share, share) if doubt is None else doubt.band(*sides, watched.metric, local=True)
            found[name] = Worth(share=share, low=min(low, share), high=max(high, share))
    return dict(sorted(found.items(), key=lambda item: -item[1].share))


def _per_dollar_first(effect: Effect) -> tuple[bool, float]:
    """Gains that also save money before all others, the largest first; then by gain per dollar."""
    saves = (effect.bill_change or 0.0) <= 0
    return saves, (effect.change or 0.0) if saves else (effect.per_dollar or 0.0)


def _effect(question: Question, best: Outcome, turn: tuple[Knob, bool], turned: Choice, cost: Evaluate) -> Effect:
    knob, up = turn
    outcome = _costed(question, knob, turned, cost)
    watched = Goal(metric=watched_metric(question))
    change = None if outcome is None else gain(best, outcome, watched) / abs(best.metrics[watched.metric.name].value)
    bill = None if outcome is None else _difference(best, outcome, "bill")
    hours = None if outcome is None else _difference(best, outcome, "time")
    absolute = None if outcome is None else gain(best, outcome, watched)
    return Effect(
        knob=knob, up=up, before=knob.shown(best.choice), after=knob.shown(outcome.choice if outcome else turned), outcome=outcome,
        change=change, band=None, bill_change=bill, memory_change=0.0 if outcome is None else outcome.memory.value - best.memory.value,
        quality=_quality(best.choice, turned) if knob.changes == "model" else None,
        per_dollar=absolute / bill if absolute is not None and bill else None,
        per_hour=absolute / (hours / 3600) if absolute is not None and hours else None,
        keeps_limits=outcome is not None and all(keeps(outcome, limit) for limit in question.limits))


def _sides(question: Question, best: Outcome, other: Outcome) -> tuple[Side, Side]:
    return (best, lambda outcome: settle(outcome, question)), (other, lambda outcome: settle(outcome, question))


def _band(question: Question, best: Outcome, effect: Effect, doubt: Doubt) -> tuple[float, float] | None:
    if effect.outcome is None or effect.change is None:
        return None
    if not effect.change:
        return 0.0, 0.0
    low, high = doubt.band(*_sides(question, best, effect.outcome), watched_metric(question))
    return min(low, effect.change), max(high, effect.change)


def _costed(question: Question, knob: Knob, turned: Choice, cost: Evaluate) -> Outcome | None:
    """The outcome after a notch, with a new layout where the machines changed; nothing where it does not fit."""
    tried = [turned]
    if knob.changes == "cluster":
        asked = replace(question, device=turned.cluster.device, devices=turned.cluster.count, layout={}, model=turned.model,
                        limits=tuple(limit for limit in question.limits if limit.metric.name != "devices"))
        try:
            tried = choices(asked, turned.model, turned.cluster.count, turned.cluster)
        except ConfigError:
            return None
        relaxed = replace(asked, limits=())
        free = question.phase == "train" and "tokens" not in question.work
        return pick([cost(choice) for choice in tried], asked if free else relaxed)
    outcome = cost(turned)
    if not outcome.fits:
        return None
    return settle(outcome, question)


def _difference(before: Outcome, after: Outcome, name: str) -> float | None:
    if name not in before.metrics or name not in after.metrics:
        return None
    return after.metrics[name].value - before.metrics[name].value


def _quality(before: Choice, after: Choice) -> Estimate | None:
    """Size of the dense model that is as good, after against before; the uncertainty that both share drops out of the ratio's band."""
    scales = [scale_of(choice.model, SIZE_AT_RELEASE * scale_of(before.model, 1.0).active) for choice in (before, after)]
    if scales[0] == scales[1]:
        return None
    gains = [multiplier(scale) for scale in scales]
    ratio = scales[1].active * gains[1].value / (scales[0].active * gains[0].value)
    ends = [scales[1].active * g1 / (scales[0].active * g0) for g0, g1 in ((gains[0].low, gains[1].low), (gains[0].high, gains[1].high))]
    return Estimate(value=ratio, low=min(ratio, *ends), high=max(ratio, *ends), unit="", badge="extrapolated",
                    because="published laws of sparsity, granularity, mixer mix and depth reads at equal tokens")
