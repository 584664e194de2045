"""What it takes to scale a run: a hundred times its compute (ten times the parameters, ten times the tokens), here and on rented machines.

The speed that the run had on its machine is the calibration: more of the same work at the same share of the machine's arithmetic.
Read next: `answer.py` for any other question.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig
from gnomon.plan.calibration import best_record
from gnomon.plan.hardware import device
from gnomon.plan.laws import sizes
from gnomon.plan.learning import training_bytes
from gnomon.plan.outcome import Outcome, evaluate
from gnomon.plan.quantity import Estimate, banded
from gnomon.plan.search import choices, default_batch
from gnomon.plan.shapes import LARGEST, SMALLEST, shape
from gnomon.plan.solve import pick
from gnomon.plan.words import question
from gnomon.plan.workload import Layout, Precision

TIMES = 100
"""How much more compute is asked for."""

SPREAD_HERE = 0.3
"""Band of the time on the machine that was measured: larger products run at another share of its arithmetic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The scaled run on one machine: seconds, bytes on the fullest device, dollars where it has a price, and the wall that comes first."""

    machine: str
    seconds: Estimate
    memory_bytes: float
    memory_share: float
    dollars: Estimate | None
    wall: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """A model with the square root of the factor more active parameters, as many more tokens, and what that takes."""

    model: ModelConfig
    tokens: int
    context: int
    rows: tuple[Row, ...]


def scaled(model: ModelConfig, context: int, measured: tuple[float, float], memory_bytes: float,
           machines: Sequence[str] = ("rtx-4090:1", "h200:8"), times: int = TIMES) -> Scaled:
    """The run at `times` its compute. `measured` are its tokens and tokens per second, `memory_bytes` what its machine has."""
    tokens, speed = measured
    active = sizes(model)[0]
    larger = shape(min(LARGEST, max(SMALLEST, active * times**0.5)))
    more = int(tokens * times * active / sizes(larger)[0])
    rate = speed * model.flops_per_token(context // 2)
    seconds = more * larger.flops_per_token(context // 2) / rate
    batch = default_batch(more, context)
    held = training_bytes(larger, Precision(experts="fp32", rest="fp32", activations="fp32"), Layout(), tokens=batch).bytes
    wall = "memory" if held > memory_bytes else "compute"
    here = Row(machine="this machine", seconds=banded(seconds, "s", SPREAD_HERE, "calibrated", "this run's own speed"), memory_bytes=held,
               memory_share=held / memory_bytes, dollars=None, wall=wall)
    rented = (_rented(larger, (more, context, batch), machine) for machine in machines)
    return Scaled(model=larger, tokens=more, context=context, rows=(here, *(row for row in rented if row is not None)))


def _rented(model: ModelConfig, run: tuple[int, int, int], machine: str) -> Row | None:
    """The fastest plan on a machine; nothing where the model cannot be laid out there."""
    name, _, count = machine.partition(":")
    kind = device(name)
    words = [f"{name}={size}" for name, size in zip(("tokens", "context", "batch"), run, strict=True)]
    asked = question(["train", *words], (kind, int(count)), "tiny")
    record = best_record(kind)
    try:
        outcomes = [evaluate(choice, record) for choice in choices(asked, model, int(count))]
    except ConfigError:
        return None
    best = pick(outcomes, asked)
    return None if best is None else _row(best)


def _row(best: Outcome) -> Row:
    return Row(machine=best.choice.cluster.name, seconds=best.metrics["time"], memory_bytes=best.memory.value,
               memory_share=best.memory.value / best.usable_bytes, dollars=best.metrics.get("budget"), wall=best.steps["training"].wall)
