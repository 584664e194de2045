"""Shadow prices are what solving again gives; more room is never worse; the plan that is named keeps every limit.

The cost of a choice is a formula of this file, so that nothing of the planner's own times takes part.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.plan import laws
from gnomon.plan.choice import Choice
from gnomon.plan.effects import effects, first_knob, hardware_worth
from gnomon.plan.goals import Goal, Limit, metric
from gnomon.plan.hardware import Cluster
from gnomon.plan.outcome import Outcome, trained
from gnomon.plan.quantity import banded, exact
from gnomon.plan.search import choices, layouts
from gnomon.plan.shapes import shape
from gnomon.plan.solve import NUDGE, Plan, gain, keeps, solve
from gnomon.plan.words import Question, question

FEW = settings(max_examples=5, deadline=None)
PRICE = 2.0


def cost(choice: Choice) -> Outcome:
    """Serving: more tensor ranks read faster and talk more. Training: FLOPs over a third of the peak. Memory: weights over ranks."""
    layout, device = choice.layout, choice.cluster.device
    active, total = laws.sizes(choice.model)
    ranks = layout.tensor * layout.pipeline
    held = 2.0 * total / ranks
    common = {"choice": choice, "memory": exact(held, "B"), "usable_bytes": 0.9 * device.memory_bytes}
    if held > 0.9 * device.memory_bytes:
        return Outcome(fits=False, missing="weights are too large", **common)
    sums = {"devices": exact(layout.ranks, ""), "memory": exact(held, "B"), "bill": exact(PRICE * layout.ranks, "$/h")}
    if choice.phase == "serve":
        step = held / device.bandwidth + 2e-5 * math.log2(2 * layout.tensor) * choice.model.num_hidden_layers
        speed = 1 / step
        written = speed * choice.work.concurrency * layout.data
        return Outcome(fits=True, metrics={
            **sums, "speed": banded(speed, "token/s", 0.2, "calibrated"), "throughput": banded(written, "token/s", 0.2, "calibrated"),
            "first_token": banded(50 * step, "s", 0.2, "calibrated"),
            "cost": banded(PRICE * layout.ranks / written / 3600 * 1e6, "$", 0.2, "calibrated")}, **common)
    seconds = 6 * active / (layout.ranks * device.peak("bf16") * (0.4 if layout.tensor == 1 else 0.3))
    dollars = seconds / 3600 * PRICE * layout.ranks
    per_token = {"time": banded(seconds, "s", 0.2, "calibrated"), "budget": banded(dollars, "$", 0.2, "calibrated")}
    return trained(Outcome(fits=True, metrics=sums, per_token=per_token, **common), choice.work.tokens)


def asked(text: str, hardware: str = "h100:8", model: str | None = "small") -> Question:
    """The question of a command line."""
    cluster = Cluster.parse(hardware)
    return question(text.split(), (cluster.device, cluster.count if ":" in hardware else None), model)


def value(plan: Plan) -> float:
    """The goal that a plan reaches, more is better."""
    assert plan.best is not None
    goal = plan.question.goal.metric
    return plan.best.metrics[goal.name].value * (1 if goal.more_is_better else -1)


def with_bound(asked_for: Question, name: str, bound: float) -> Question:
    """The same question with another bound."""
    return replace(asked_for, limits=tuple(Limit(metric=x.metric, bound=bound) if x.metric.name == name else x for x in asked_for.limits))


@FEW
@given(hours=st.floats(0.5, 200), dollars=st.floats(5, 5000))
def test_shadow_prices_are_finite_differences_and_derivatives(hours: float, dollars: float) -> None:
    asked_for = asked(f"train time={hours}h budget=${dollars:.2f}")
    plan = solve(asked_for, cost)
    assert plan.best is not None and plan.binding is not None
    for room in plan.rooms:
        name = room.limit.metric.name
        again = solve(with_bound(asked_for, name, room.limit.bound * (1 + NUDGE)), cost)
        difference = (value(again) - value(plan)) / (NUDGE * room.limit.bound)
        assert room.price == pytest.approx(difference, rel=1e-6, abs=1e-15)
        if room.binds and room.slack < 1e-9:
            tokens = plan.best.metrics["tokens"].value
            ends = [laws.loss(plan.best.choice.model, tokens * factor).value for factor in (0.999, 1.001)]
            slope = (ends[0] - ends[1]) / (0.002 * tokens) / plan.best.per_token[name].value
            assert room.price == pytest.approx(slope, rel=0.05) or room.price <= slope  # the other limit may cut the gain short


@FEW
@given(bound=st.floats(2, 400), factor=st.floats(1.05, 20))
def test_more_money_time_or_patience_is_never_worse(bound: float, factor: float) -> None:
    for text, name in ((f"train time={bound}h budget=$100", "time"), (f"train time=50h budget=${bound:.2f}", "budget")):
        tight = solve(asked(text), cost)
        loose = solve(with_bound(tight.question, name, factor * tight.question.limit(name)), cost)
        assert value(loose) >= value(tight) - 1e-12


@FEW
@given(speed=st.floats(20, 4000), factor=st.floats(0.05, 0.95))
def test_asking_for_less_speed_never_costs_more(speed: float, factor: float) -> None:
    strict = solve(asked(f"serve concurrency=8 speed={speed:.3f}", "h100"), cost)
    mild = solve(with_bound(strict.question, "speed", factor * speed), cost)
    if strict.best is None:
        assert strict.refusal is not None and strict.refusal.because
        return
    assert value(mild) >= value(strict)


@FEW
@given(devices=st.sampled_from([1, 2, 4, 8, 16, 64]), budget=st.floats(1, 1000))
def test_a_plan_keeps_its_limits(devices: int, budget: float) -> None:
    plan = solve(asked(f"train devices={devices} budget=${budget:.2f} time=30h", "h100"), cost)
    if plan.best is not None:
        assert all(keeps(plan.best, limit) for limit in plan.question.limits)
        assert plan.best.metrics["devices"].value <= devices


def test_the_best_is_the_best_of_all_that_were_weighed() -> None:
    plan = solve(asked("serve concurrency=8", "h100:8"), cost)
    assert plan.best is not None
    best = max(outcome.metrics["speed"].value for outcome in plan.weighed if outcome.fits)
    assert plan.best.metrics["speed"].value == best
    tried = {str(outcome.choice.layout) for outcome in plan.weighed}
    assert len(tried) == len(plan.weighed) == len(list(layouts(plan.question.model, 8, plan.question)))


def test_a_target_makes_the_cheapest_plan() -> None:
    fast = solve(asked("serve concurrency=8", "h100:8"), cost)
    assert fast.best is not None
    reachable = 0.5 * fast.best.metrics["speed"].value
    plan = solve(asked(f"serve concurrency=8 speed={reachable}", "h100"), cost)
    assert plan.best is not None and plan.question.goal.metric.name == "bill"
    cheaper = [o for o in plan.weighed if o.fits and o.metrics["bill"].value < plan.best.metrics["bill"].value]
    assert all(o.metrics["speed"].value < reachable for o in cheaper)


def test_a_loss_to_reach_takes_the_fewest_tokens_that_reach_it() -> None:
    plan = solve(asked("train loss=3.3 time=1000h", "h100:8", "small"), cost)
    assert plan.best is not None
    tokens = plan.best.metrics["tokens"].value
    model = plan.best.choice.model
    assert laws.loss(model, tokens).value <= 3.3 < laws.loss(model, 0.98 * tokens).value


def test_the_size_that_is_chosen_beats_its_neighbours() -> None:
    plan = solve(asked("train time=20h", "h100:1", None), cost)
    assert plan.best is not None
    chosen = plan.best.active
    for factor in (0.5, 2.0):
        model = shape(factor * chosen)
        other = solve(replace(plan.question, model=model, name="other"), cost)
        assert value(other) <= value(plan) + 1e-3


def test_no_because_with_the_nearest_thing_that_works() -> None:
    plan = solve(asked("serve", "h100:8", "k3-2.8t"), cost)
    assert plan.best is None and plan.refusal is not None
    assert "too large" in plan.refusal.because
    assert any("h100:8x" in remedy for remedy in plan.refusal.remedies)
    plan = solve(asked("serve speed=1e7", "h100:8", "small"), cost)
    assert plan.refusal is not None and "speed of one user" in plan.refusal.because
    assert any(remedy.startswith("speed=") for remedy in plan.refusal.remedies)


def test_knobs_are_weighed_by_turning_them() -> None:
    asked_for = asked("serve concurrency=8", "h100:8", "1B")
    plan = solve(asked_for, cost)
    assert plan.best is not None
    found = effects(asked_for, plan.best, cost)
    assert {effect.knob.name for effect in found} >= {"experts", "depth", "devices", "device-kind"}
    for effect in found:
        if effect.outcome is not None and effect.knob.changes != "cluster":
            turned = effect.knob.turned(plan.best.choice, effect.up)
            assert turned is not None
            expected = gain(plan.best, cost(turned), Goal(metric=metric("speed", "serve"))) / plan.best.metrics["speed"].value
            assert effect.change == pytest.approx(expected)
    worth = hardware_worth(asked_for, plan.best, cost)
    assert 0 < worth["bandwidth"].share < 0.1  # serving reads weights in this file
    assert worth["compute"].share == worth["links"].share == worth["memory"].share == 0
    first = first_knob(found)
    assert first is None or (first.change or 0) > 0
    assert choices(asked_for, asked_for.model, 8)
