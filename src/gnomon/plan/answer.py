"""`ask`: from a question to everything that is printed: the plan, what each knob is worth, the knob to turn first, and its JSON.

This is the planner's Python interface; the command line only adds words. Read next: `report.py`.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gnomon.model.config import ModelConfig
from gnomon.plan import laws
from gnomon.plan.calibration import Record, best_record
from gnomon.plan.certainty import Doubt
from gnomon.plan.choice import Choice
from gnomon.plan.effects import Effect, Worth, effects, first_knob, hardware_worth
from gnomon.plan.fit import Fit
from gnomon.plan.knobs import KNOBS, Knob
from gnomon.plan.outcome import LossLaw, Outcome, evaluate, parts
from gnomon.plan.quantity import Estimate
from gnomon.plan.solve import Evaluate, Plan, Room, solve
from gnomon.plan.words import Question

SCHEMA = 1
"""Number of the JSON layout: raised when a key changes its meaning or goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A plan with its knobs, and what a tenth more of each thing its devices have would gain; `seconds` is what it took to find."""

    plan: Plan
    effects: tuple[Effect, ...]
    first: Effect | None
    record: Record
    seconds: float
    hardware_worth: Mapping[str, Worth] = field(default_factory=dict)

    @property
    def question(self) -> Question:
        """What was asked."""
        return self.plan.question

    @property
    def best(self) -> Outcome | None:
        """The best outcome; nothing where none is possible."""
        return self.plan.best


def coster(record: Record, loss_law: LossLaw = laws.loss) -> Evaluate:
    """The cost of a choice on a stack that was measured, with a law for the loss of a training."""
    def cost(choice: Choice) -> Outcome:
        return evaluate(choice, record, loss_law)
    return cost


def ask(question: Question, record: Record | None = None, knobs: Sequence[Knob] = KNOBS, law: Fit | None = None) -> Answer:
    """Solve a question and weigh the knobs. `record` says what the software makes of the machine (none: the best one known), `law` is a
    loss law fitted to runs of one's own (none: the published ones).

    Raises `ConfigError` for a question that contradicts itself or a model that cannot be laid out as asked.
    """
    began = time.perf_counter()
    record = record or best_record(question.device)
    loss = laws.loss if law is None else _fitted(law)
    cost, doubt = coster(record, loss), Doubt(record=record, loss_law=loss)
    plan = solve(question, cost, doubt)
    found = effects(question, plan.best, cost, knobs, doubt) if plan.best is not None else []
    worth = hardware_worth(question, plan.best, cost, doubt) if plan.best is not None else {}
    return Answer(plan=plan, effects=tuple(found), first=first_knob(found), record=record, seconds=time.perf_counter() - began,
                  hardware_worth=worth)


def _fitted(law: Fit) -> LossLaw:
    def loss(model: ModelConfig, tokens: float) -> Estimate:
        return law.at(laws.sizes(model)[0], tokens)
    return loss


def as_dict(answer: Answer) -> dict[str, Any]:
    """The answer for programs: plain numbers with units; every estimate has `value`, `low`, `high`, `unit`, `badge`, `because`."""
    question, best, refusal = answer.question, answer.best, answer.plan.refusal
    goal = question.goal.metric
    return {
        "schema": SCHEMA, "phase": question.phase, "feasible": best is not None, "assumptions": list(question.assumptions),
        "goal": {"metric": goal.name, "unit": goal.unit, "more_is_better": goal.more_is_better},
        "plan": None if best is None else outcome_dict(best),
        "limits": [_room_dict(room) for room in answer.plan.rooms],
        "binding": answer.plan.binding.limit.metric.name if answer.plan.binding else None,
        "hardware_worth": {name: worth.share for name, worth in answer.hardware_worth.items()},
        "hardware_worth_bands": {name: _ends((worth.low, worth.high)) for name, worth in answer.hardware_worth.items()},
        "knobs": [_effect_dict(effect) for effect in answer.effects],
        "first_knob": _effect_dict(answer.first) if answer.first else None,
        "refusal": None if refusal is None else {
            "because": refusal.because, "remedies": list(refusal.remedies),
            "nearest": outcome_dict(refusal.nearest) if refusal.nearest and refusal.nearest.metrics else None},
        "record": {"title": answer.record.title, "date": answer.record.date, "source": answer.record.source},
        "weighed": len(answer.plan.weighed), "seconds": answer.seconds,
    }


def outcome_dict(outcome: Outcome) -> dict[str, Any]:
    """A choice with its figures."""
    choice = outcome.choice
    return {
        "model": choice.name, "cluster": choice.cluster.name, "layout": str(choice.layout),
        "precision": {name: getattr(choice.precision, name) for name in ("experts", "rest", "kv", "activations", "state")},
        "metrics": {name: estimate.as_dict() for name, estimate in outcome.metrics.items()},
        "memory": {"needed": outcome.memory.as_dict(), "usable": outcome.usable_bytes, "parts": parts(choice)},
        "walls": {name: {"wall": step.wall, "total": step.total.as_dict(), **{part: getattr(step, part).as_dict() for part in (
            "latency", "bandwidth", "compute", "communication")}} for name, step in outcome.steps.items()},
    }


def _room_dict(room: Room) -> dict[str, Any]:
    found = room.limit.metric
    return {"metric": found.name, "bound": room.limit.bound, "unit": found.unit, "value": room.value, "slack": room.slack,
            "binds": room.binds, "shadow_price": room.price, "shadow_price_band": _ends(room.price_band),
            "next_bound": room.next_bound, "next_gain": room.next_gain}


def _effect_dict(effect: Effect) -> dict[str, Any]:
    return {
        "knob": effect.knob.name, "direction": "up" if effect.up else "down", "before": effect.before, "after": effect.after,
        "costs": effect.knob.costs, "contested": effect.knob.contested, "goal_change": effect.change,
        "goal_change_band": _ends(effect.band), "bill_change": effect.bill_change,
        "memory_change": effect.memory_change, "quality": effect.quality.as_dict() if effect.quality else None,
        "per_dollar": effect.per_dollar, "per_hour": effect.per_hour, "keeps_limits": effect.keeps_limits,
        "fits": effect.outcome is not None,
    }


def _ends(band: tuple[float, float] | None) -> list[float | None] | None:
    """A band for JSON, which has no infinity."""
    return None if band is None else [end if math.isfinite(end) else None for end in band]
