"""The cheapest plan for a goal under limits: what binds, how much room there is, what one more unit of a limit buys, or "no, because".

Every choice is costed once; limits then only sift the table, so that a shadow price is a difference between two siftings and agrees with
solving again. Where tokens are free, time and money buy tokens and tokens buy loss, along one curve. Read next: `effects.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from gnomon.errors import CapacityError, ConfigError
from gnomon.model.config import ModelConfig
from gnomon.plan.certainty import Doubt
from gnomon.plan.choice import Choice
from gnomon.plan.goals import Goal, Limit
from gnomon.plan.inventory import ByValue
from gnomon.plan.outcome import LossLaw, Outcome, trained
from gnomon.plan.quantity import written
from gnomon.plan.search import choices, counts, precision_of
from gnomon.plan.shapes import LARGEST, SMALLEST, shape
from gnomon.plan.words import Question
from gnomon.plan.workload import Training
from gnomon.units import format_count

Evaluate = Callable[[Choice], Outcome]
NUDGE = 0.01
"""How far a limit is relaxed to see what a little more of it buys."""

HOPE = 0.95
"""A doubling of devices that breaks limits by more than this share of the last is no progress."""

GOLDEN = (math.sqrt(5) - 1) / 2
SIZE_STEPS = 9  # steps of the search for the best size, each narrowing it by the golden ratio: about 15 % at the end
SHORTEST_RUN, LONGEST_RUN = 1e5, 1e16  # tokens between which a loss is sought


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """A limit beside what the plan reaches: slack as a share of the bound, and what relaxing the limit buys.

    `price` is the gain of the goal per unit of the limit at the bound (0: it does not bind), with its 80 % band; `next_bound` is the first
    bound at which a different plan becomes the best, and `next_gain` what that plan gains.
    """

    limit: Limit
    value: float
    slack: float
    price: float
    next_bound: float | None = None
    next_gain: float = 0.0
    price_band: tuple[float, float] | None = None

    @property
    def binds(self) -> bool:
        """Whether a little more room would give a better plan."""
        return self.price > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why nothing fits, the nearest plan that was tried, and changes that would make one fit, the least first."""

    because: str
    nearest: Outcome | None
    remedies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The answer: the best outcome with the room at every limit, all outcomes that were weighed, or a refusal."""

    question: Question
    best: Outcome | None
    rooms: tuple[Room, ...]
    weighed: tuple[Outcome, ...]
    refusal: Refusal | None = None

    @property
    def binding(self) -> Room | None:
        """The limit that stops the goal most: the binding one with the least slack."""
        binding = [room for room in self.rooms if room.binds]
        return min(binding, key=lambda room: room.slack) if binding else None


def solve(question: Question, cost: Evaluate, doubt: Doubt | None = None) -> Plan:
    """Answer a question. `cost` gives the outcome of one choice; with a `doubt` prices have bands.

    Raises `ConfigError` for a question that no layout could serve.
    """
    weighed = _weigh(question, cost)
    best = pick(weighed, question)
    if best is None:
        return Plan(question=question, best=None, rooms=(), weighed=tuple(weighed), refusal=_refuse(question, weighed, cost))
    return Plan(question=question, best=best, rooms=rooms(weighed, question, best, doubt), weighed=tuple(weighed))


def pick(weighed: Sequence[Outcome], question: Question) -> Outcome | None:
    """The best of the outcomes that keep every limit; nothing where none does."""
    settled = (settle(outcome, question) for outcome in weighed if outcome.fits)
    kept = [outcome for outcome in settled if outcome is not None and all(keeps(outcome, limit) for limit in question.limits)]
    return min(kept, key=lambda outcome: rank(outcome, question), default=None)


def keeps(outcome: Outcome, limit: Limit) -> bool:
    """Whether an outcome respects a limit. Raises `ConfigError` for a limit on money where the device has no price."""
    value = outcome.metrics.get(limit.metric.name)
    if value is None:
        raise ConfigError(f"'{limit.metric.name}' is limited, but '{outcome.choice.cluster.device.name}' has no price; "
                          f"give one with price=2.5 ($ per device and hour)")
    return limit.keeps(value.value)


def gain(before: Outcome, after: Outcome, goal: Goal) -> float:
    """How much better the second is, in the goal's unit; negative where it is worse."""
    name = goal.metric.name
    return (after.metrics[name].value - before.metrics[name].value) * (1 if goal.metric.more_is_better else -1)


def rank(outcome: Outcome, question: Question) -> tuple[float, ...]:
    """What the best outcome has least of: the goal, then the bill, then the second wish, then ranks that must talk to each other."""
    goal = question.goal.metric
    value = outcome.metrics[goal.name].value * (-1 if goal.more_is_better else 1)
    second = {"serve": "speed", "train": "time", "rl": "time"}[question.phase]
    other = outcome.metrics[second].value * (-1 if second == "speed" else 1)
    layout = outcome.choice.layout
    return (value, outcome.metrics["devices"].value, other, layout.tensor * layout.pipeline * layout.context + layout.zero)


def settle(outcome: Outcome, question: Question) -> Outcome | None:
    """The outcome with its tokens: those asked for, or where they are free those that reach the loss or fill time and money."""
    if question.phase != "train" or "tokens" in question.work:
        return outcome
    wanted = question.limit("loss")
    if wanted is not None:
        tokens = tokens_for_loss(outcome.choice.model, outcome.loss_law, wanted)
        return None if tokens is None else trained(outcome, tokens)
    amounts = [bound / outcome.per_token[name].value for name, bound in ((n, question.limit(n)) for n in ("time", "budget"))
               if bound is not None and name in outcome.per_token]
    if not amounts:
        raise ConfigError("nothing bounds the training: give time=7d, a budget=$500, tokens=20B or loss=2.5")
    work = outcome.choice.work
    assert isinstance(work, Training)
    return trained(outcome, min(amounts)) if min(amounts) >= work.global_batch_tokens else None  # less than one step is no training


def tokens_for_loss(model: ModelConfig, law: LossLaw, wanted: float) -> float | None:
    """The fewest tokens after which the law expects a loss; nothing where no number of tokens gets there."""
    return _tokens_for_loss(ByValue(model), law, wanted)


@lru_cache(maxsize=512)
def _tokens_for_loss(key: ByValue, law: LossLaw, wanted: float) -> float | None:
    low, high = math.log(SHORTEST_RUN), math.log(LONGEST_RUN)
    if law(key.config, LONGEST_RUN).value > wanted:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if law(key.config, math.exp(middle)).value <= wanted else (middle, high)
    return math.exp(high)


def _weigh(question: Question, cost: Evaluate, patience: int = 2) -> list[Outcome]:
    """The outcomes of everything that is tried; devices stop doubling after `patience` doublings that are no better.

    While nothing keeps the limits, better is what breaks them less.
    """
    if question.model is None:
        return _weigh_sizes(question, cost)
    found: list[Outcome] = []
    best: Outcome | None = None
    least, stale = math.inf, 0
    for count in counts(question):
        here = [cost(choice) for choice in _choices(question, question.model, count)]
        found += here
        better = pick(here, question)
        if better is not None and (best is None or rank(better, question) < rank(best, question)):
            best, stale = better, 0
        elif best is not None:
            stale += 1
        elif (broken := min((_violation(o, question) for o in _settled(here, question)), default=math.inf)) < HOPE * least:
            least, stale = broken, 0
        elif least < math.inf:
            stale += 1
        if stale == patience:
            break
    return found


def _choices(question: Question, model: ModelConfig, count: int) -> list[Choice]:
    """The choices for a number of devices; none where the model cannot be spread over it, unless the number or layout was given."""
    try:
        return choices(question, model, count)
    except ConfigError:
        if question.devices is not None or question.layout:
            raise
        return []


def _weigh_sizes(question: Question, cost: Evaluate) -> list[Outcome]:
    """Golden-section search over the size of the model: the loss within given time and money first falls with size, then rises."""
    found: dict[float, list[Outcome]] = {}

    def weigh(logarithm: float) -> float:
        if logarithm not in found:
            model = shape(math.exp(logarithm))
            found[logarithm] = list(_weigh(replace(question, model=model, name="K3's shape"), cost, patience=1))
        best = pick(found[logarithm], question)
        return math.inf if best is None else rank(best, question)[0]

    low, high = math.log(SMALLEST), math.log(min(LARGEST, _largest(question)))
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    for _ in range(SIZE_STEPS):
        if weigh(left) <= weigh(right):
            high, right = right, left
            left = high - GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + GOLDEN * (high - low)
    return [outcome for outcomes in found.values() for outcome in outcomes]


def _largest(question: Question) -> float:
    """A size of which nobody would train more: its bare weights fill all devices, or 20 FLOPs per parameter fill the time."""
    memory = question.device.memory_bytes * max(counts(question))
    return max(4 * SMALLEST, memory / 2)


def rooms(weighed: Sequence[Outcome], question: Question, best: Outcome, doubt: Doubt | None = None) -> tuple[Room, ...]:
    """The room at each limit, tightest first."""
    found = []
    for limit in question.limits:
        value = best.metrics[limit.metric.name].value
        eased = _eased(question, limit, NUDGE)
        near = pick(weighed, eased)
        unit = NUDGE * limit.bound
        price = 0.0 if near is None else max(0.0, gain(best, near, question.goal)) / unit
        band = None
        if doubt is not None and near is not None and price > 0:
            sides = (best, partial(settle, question=question)), (near, partial(settle, question=eased))
            ends = doubt.band(*sides, question.goal.metric, local=near.choice == best.choice)
            scale = abs(best.metrics[question.goal.metric.name].value) / unit
            band = min(price, ends[0] * scale), max(price, ends[1] * scale)
        next_bound, next_gain = _next(weighed, question, best, limit)
        found.append(Room(limit=limit, value=value, slack=limit.slack(value), price=price, next_bound=next_bound, next_gain=next_gain,
                          price_band=band))
    return tuple(sorted(found, key=lambda room: (not room.binds, room.slack)))


def _eased(question: Question, limit: Limit, share: float) -> Question:
    return replace(question, limits=tuple(limit.relaxed(share) if other is limit else other for other in question.limits))


def _next(weighed: Sequence[Outcome], question: Question, best: Outcome, limit: Limit) -> tuple[float | None, float]:
    """The bound at which the next better plan comes in, and its gain."""
    for share in (0.1, 0.25, 0.5, 0.9) if limit.metric.more_is_better else (0.1, 0.25, 0.5, 1.0, 3.0, 9.0):
        after = pick(weighed, _eased(question, limit, share))
        if after is not None and after.choice != best.choice and gain(best, after, question.goal) > 0:
            return after.metrics[limit.metric.name].value, gain(best, after, question.goal)
    return None, 0.0


def _refuse(question: Question, weighed: Sequence[Outcome], cost: Evaluate) -> Refusal:
    """Say why nothing fits: memory first, then the limits that the best tries break; and what would help."""
    fitting = _settled(weighed, question)
    if not fitting:
        nearest = max(weighed, key=lambda outcome: outcome.left_bytes, default=None)
        because = "no layout is possible" if nearest is None else nearest.missing or _unreached(question)
        return Refusal(because=because, nearest=nearest, remedies=tuple(_larger(question, cost, nearest)))
    nearest = min(fitting, key=lambda outcome: _violation(outcome, question))
    broken = [limit for limit in question.limits if not keeps(nearest, limit)]
    said = [f"{limit.metric.title} is {written(nearest.metrics[limit.metric.name].value, limit.metric.unit)}, "
            f"{'below' if limit.metric.more_is_better else 'above'} {written(limit.bound, limit.metric.unit)}" for limit in broken]
    remedies = []
    for limit in question.limits:
        others = [other for other in question.limits if other is not limit]
        possible = [o for o in fitting if all(keeps(o, other) for other in others)]
        if possible:
            values = [o.metrics[limit.metric.name].value for o in possible]
            reach = max(values) if limit.metric.more_is_better else min(values)
            if not limit.keeps(reach):
                remedies.append(f"{limit.metric.name}={_shown(limit, reach)} instead of {_shown(limit, limit.bound)}")
    because = "; ".join(said) or "the limits exclude each other"
    return Refusal(because=because, nearest=nearest, remedies=(*remedies, *_larger(question, cost, nearest)))


def _unreached(question: Question) -> str:
    """Why no number of tokens does, where memory is not what is short."""
    loss = question.limit("loss")
    if loss is not None:
        return f"no training of up to {format_count(LONGEST_RUN)} tokens reaches a loss of {loss:g} by the laws"
    return "time or money end before one optimiser step does; give more of them, or a smaller batch"


def _settled(weighed: Sequence[Outcome], question: Question) -> list[Outcome]:
    return [outcome for outcome in (settle(o, question) for o in weighed if o.fits) if outcome is not None]


def _violation(outcome: Outcome, question: Question) -> float:
    return sum(max(0.0, -limit.slack(outcome.metrics[limit.metric.name].value)) for limit in question.limits)


def _shown(limit: Limit, value: float) -> str:
    rounded = float(f"{value:.2g}")
    step = 10 ** (math.floor(math.log10(abs(value))) - 1)
    if limit.metric.more_is_better and rounded > value:
        rounded -= step
    if not limit.metric.more_is_better and rounded < value:
        rounded += step
    shown = {"B": f"{rounded / 1e9:g}GB", "s": f"{rounded:g}s", "$": f"${rounded:g}", "$/h": f"${rounded:g}"}
    return shown.get(limit.metric.unit, f"{rounded:g}")


def _larger(question: Question, cost: Evaluate, nearest: Outcome | None) -> list[str]:
    """The least number of the same devices that answers the question, and narrower formats that do on as many as the nearest plan has."""
    if question.model is None or (question.devices is None and nearest is None):
        return []
    remedies = []
    now = question.devices or (nearest.choice.cluster.count if nearest is not None else 1)
    for count in (now * factor for factor in (2, 4, 8, 16) if question.devices is not None):
        more = replace(question, devices=count, layout={}, limits=tuple(x for x in question.limits if x.metric.name != "devices"))
        try:
            outcome = pick([cost(choice) for choice in choices(more, question.model, count)], more)
        except (ConfigError, CapacityError):
            continue
        if outcome is not None:
            remedies.append(f"{outcome.choice.cluster.name} ({outcome.choice.layout})")
            break
    current = precision_of(question, question.model)
    for asked in ({"rest": "fp8"}, {"experts": "mxfp4"}, {"experts": "mxfp4", "rest": "fp8"}, {"experts": "mxfp4", "rest": "mxfp4"}):
        formats = {part: name for part, name in asked.items() if getattr(current, part) != name}
        if question.phase != "serve" or not formats:
            continue
        narrower = replace(question, precision={**question.precision, **formats})
        outcome = pick([cost(choice) for choice in choices(narrower, question.model, now)], narrower)
        if outcome is not None:
            remedies.append(" ".join(f"{part}={name}" for part, name in formats.items()))
            break
    return remedies
