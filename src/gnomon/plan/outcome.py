"""`Outcome`: what a choice comes to, as metrics by name; whether it fits; and for training the cost of a token, so that tokens can be free.

Read next: `cost.py` for the times, `solve.py` for what is done with them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gnomon.errors import CapacityError
from gnomon.model.config import ModelConfig
from gnomon.plan import laws
from gnomon.plan.calibration import Record
from gnomon.plan.choice import Choice
from gnomon.plan.cost import Deployment, deployment, price
from gnomon.plan.footprint import Room, weights
from gnomon.plan.learning import training_bytes
from gnomon.plan.quantity import Estimate, exact
from gnomon.plan.rl import rl_iteration
from gnomon.plan.serving import serve
from gnomon.plan.step import StepTime
from gnomon.plan.training import train
from gnomon.plan.workload import RL, Serving, Training

LossLaw = Callable[[ModelConfig, float], Estimate]
"""Expected loss of a model after so many tokens."""


NO_LAW_HERE = "no published loss law reaches this scale: the loss only ranks plans; fit your own runs with --fit RUN RUN … for a figure"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A choice with its figures. Where it does not `fit`, `missing` says what is short and there are no metrics.

    `steps` are those whose walls are known, `phases` the parts of an iteration; `per_token` holds seconds (`time`) and dollars (`budget`)
    of one token of training.
    """

    choice: Choice
    fits: bool
    memory: Estimate
    usable_bytes: float
    missing: str = ""
    metrics: Mapping[str, Estimate] = field(default_factory=dict)
    steps: Mapping[str, StepTime] = field(default_factory=dict)
    phases: Mapping[str, Estimate] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    per_token: Mapping[str, Estimate] = field(default_factory=dict)
    loss_law: LossLaw = laws.loss

    @property
    def left_bytes(self) -> float:
        """Bytes of the fullest device that stay free; negative where something does not fit."""
        return self.usable_bytes - self.memory.value

    @property
    def active(self) -> int:
        """Parameters at work for each token."""
        return laws.sizes(self.choice.model)[0]

    @property
    def total(self) -> int:
        """All parameters."""
        return laws.sizes(self.choice.model)[1]


def trained(outcome: Outcome, tokens: float) -> Outcome:
    """The same training for another number of tokens: time and money in proportion, loss by the law."""
    sums = {name: each * tokens for name, each in outcome.per_token.items()}
    beyond = outcome.loss_law is laws.loss and laws.far(laws.scale_of(outcome.choice.model, tokens))
    return replace(outcome, notes=(NO_LAW_HERE,) if beyond else (), metrics={**outcome.metrics, **sums, "tokens": exact(tokens, "token"),
                                     "loss": outcome.loss_law(outcome.choice.model, tokens)})


def evaluate(choice: Choice, record: Record, loss_law: LossLaw = laws.loss) -> Outcome:
    """Cost a choice on a stack that was measured. What does not fit is no error but an outcome that says so."""
    plan = deployment(choice.model, choice.cluster, choice.layout, choice.precision, record)
    return {"serve": _served, "train": _trained, "rl": _learned}[choice.phase](choice, plan, loss_law)


def _served(choice: Choice, plan: Deployment, _: LossLaw) -> Outcome:
    work = choice.work
    assert isinstance(work, Serving)
    room = plan.room
    try:
        found = serve(plan, work)
    except CapacityError as error:
        return _refused(choice, plan, _held(room, 1.0, work.final_context), error)
    metrics = {
        "speed": found.speed, "throughput": found.throughput, "first_token": found.first_token, "tasks_per_day": found.tasks_per_day,
        **_machines(choice, plan),
    }
    if found.cost_per_million is not None:
        metrics["cost"] = found.cost_per_million
    held = _held(room, found.running, work.mean_context)
    metrics["memory"] = exact(held, "B")
    notes = []
    if found.wall == "capacity":
        notes.append(f"capacity: memory holds {found.fits:.3g} requests of each copy's {work.concurrency}"
                     + (f", {found.hit_share:.0%} of prompts are found in the cache" if work.cached_share else "; the others wait"))
    if found.saturated:
        notes.append("more requests arrive than leave: the queue never drains")
    return Outcome(choice=choice, fits=True, memory=metrics["memory"], usable_bytes=room.usable, metrics=metrics,
                   steps={"decode": found.step}, notes=tuple(notes))


def _trained(choice: Choice, plan: Deployment, loss_law: LossLaw) -> Outcome:
    work = choice.work
    assert isinstance(work, Training)
    try:
        found = train(plan, work)
    except CapacityError as error:
        return _refused(choice, plan, sum(parts(choice).values()), error)
    fixed = found.step - found.bubble - found.optimiser
    none = found.step * 0.0
    step = StepTime(latency=fixed if found.wall == "latency" else none, bandwidth=found.optimiser, compute=found.compute + found.bubble,
                    communication=found.communication, total=found.step, wall=found.wall)
    per_token = {"time": found.total / (found.steps * work.global_batch_tokens)}
    if found.cost is not None:
        per_token["budget"] = found.cost / (found.steps * work.global_batch_tokens)
    metrics = {"throughput": found.tokens_per_second, "memory": exact(found.bytes_per_device, "B"),
               "share_of_peak": replace(found.step, value=found.utilisation, low=found.utilisation / (1 + found.step.spread),
                                        high=found.utilisation * (1 + found.step.spread), unit=""), **_machines(choice, plan)}
    outcome = Outcome(choice=choice, fits=True, memory=metrics["memory"], usable_bytes=plan.room.usable, metrics=metrics,
                      steps={"training": step}, per_token=per_token, loss_law=loss_law)
    return trained(outcome, work.tokens)


def _learned(choice: Choice, plan: Deployment, _: LossLaw) -> Outcome:
    work = choice.work
    assert isinstance(work, RL)
    room = plan.room
    held = _held(room, min(float(work.concurrency), max(1.0, room.sequences(work.final_context))), work.final_context)
    try:
        found = rl_iteration(plan, work)
    except CapacityError as error:
        return _refused(choice, plan, held, error)
    metrics = {"time": found.iteration, "throughput": found.tokens_per_second, "memory": exact(held, "B"),
               "tasks_per_day": replace(found.trajectories_per_day / float(work.group), unit="1/day"), **_machines(choice, plan)}
    if found.cost is not None:
        metrics["budget"] = found.cost
    return Outcome(choice=choice, fits=True, memory=metrics["memory"], usable_bytes=room.usable, metrics=metrics,
                   phases={"rollout": found.rollout, "grading": found.grading, "update": found.update, "sync": found.sync},
                   notes=(f"time and money are of one iteration: {work.rollouts:,} rollouts and their update",
                          *((f"a sandbox works {found.sandbox_share:.1%} of a rollout's life",) if work.sandbox_seconds else ())))


def parts(choice: Choice) -> dict[str, float]:
    """Bytes on the fullest rank by part: of the weights, and while training of optimiser and activations too."""
    work = choice.work
    if isinstance(work, Training):
        return dict(training_bytes(choice.model, choice.precision, choice.layout, tokens=work.micro_batch * work.context,
                                   recompute=work.recompute, micro_batches=work.micro_batches(choice.layout),
                                   optimiser=work.optimiser).parts)
    return dict(weights(choice.model, choice.precision, choice.layout).parts)


def _machines(choice: Choice, plan: Deployment) -> dict[str, Estimate]:
    hourly = price(plan)
    return {"devices": exact(choice.layout.ranks, ""), **({"bill": hourly} if hourly is not None else {})}


def _held(room: Room, sequences: float, context: float) -> float:
    """Bytes on the fullest rank with so many sequences of a context in its caches."""
    return max(w + sequences * (context * token + state)
               for w, token, state in zip(room.weights, room.per_token, room.per_sequence, strict=True))


def _refused(choice: Choice, plan: Deployment, held: float, error: CapacityError) -> Outcome:
    return Outcome(choice=choice, fits=False, memory=exact(held, "B"), usable_bytes=plan.room.usable, missing=str(error))
