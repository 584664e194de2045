"""What a job of the lab has at hand: its recipe, its folders, what jobs before it found; and how compute is counted.

Read next: `cold.py`, `reinforced.py`, `merged.py`, which work at it; `work.py`, which gives it to them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon.errors import TrainingError
from gnomon.model import runs
from gnomon.model.transformer import Transformer
from gnomon.posttrain.effort import Budgets
from gnomon.posttrain.lab import plan
from gnomon.posttrain.lab.plan import Job
from gnomon.posttrain.lab.recipe import LabRecipe
from gnomon.posttrain.lab.scores import evaluated
from gnomon.posttrain.lab.tasks import Cells, Tasks
from gnomon.posttrain.policy import Sampler
from gnomon.posttrain.rollout import seed_of
from gnomon.posttrain.teachers import TeacherConfig
from gnomon.train import metrics


@dataclass(kw_only=True, slots=True, eq=False)
class Desk:
    """What a job has at hand."""

    recipe: LabRecipe
    seed: int
    root: Path  # of the seed
    job: Job
    tasks: Tasks
    say: Callable[[str], None]

    @property
    def folder(self) -> Path:
        """The job's own."""
        return self.root / self.job.name

    @property
    def draws(self) -> int:
        """A seed for this job alone."""
        return seed_of(self.seed, zlib.crc32(self.job.name.encode()))

    def found(self, name: str) -> dict[str, Any]:
        """What a finished job found."""
        found = plan.read(self.root / name, plan.DONE)
        if found is None:
            raise TrainingError(f"{self.root / name} is not done yet, and '{self.job.name}' needs it; start the same command again")
        return found

    @property
    def cold(self) -> Path:
        """The run folder of the finished cold start."""
        return last_round(self.root / f"cold/{len(self.recipe.cold)}")

    def cold_model(self) -> Transformer:
        """A fresh copy of it."""
        return runs.load_model(self.cold)[0]

    def budgets(self) -> Budgets:
        """b0, frozen with the cold start."""
        return Budgets.load(self.root / "gate" / "budgets.json")

    @property
    def open_cells(self) -> Cells:
        """The cells of domains whose gate opened."""
        shut = set(self.found("gate")["shut"])
        return tuple(cell for cell in self.recipe.cells if cell[0] not in shut)

    def teachers(self) -> tuple[TeacherConfig, ...]:
        """Who teaches each open cell."""
        return tuple(TeacherConfig(domain=d, effort=e, run=self.recipe.taught_by((d, e)) or self.root / plan.expert_folder((d, e)))
                     for d, e in self.open_cells)

    def scores(self, model: Transformer, cells: Cells, sampler: Sampler | None = None) -> dict[str, Any]:
        """How good a model is in some cells under the frozen b0, as JSON by `domain/effort`."""
        return evaluated(self.recipe, model, self.tasks, cells, self.budgets(), seed=self.seed, sampler=sampler)


def round_folder(number: int) -> str:
    """Where a round of a phase is, in the phase's folder: the first one is there itself."""
    return "." if number == 1 else f"round-{number}"


def last_round(phase: Path) -> Path:
    """The run folder in which a finished phase ended."""
    number = 1
    while (phase / round_folder(number + 1)).exists():
        number += 1
    return phase / round_folder(number)


def work(rows: Sequence[Mapping[str, Any]]) -> int:
    """Compute of a loop's rows in tokens of a forward pass: what was read while sampling, three times what went through the trainer, and
    what teachers read."""
    return sum(row["read_tokens"] + 3 * row["trained_tokens"] + row.get("teacher_tokens", 0) for row in rows)


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What every loop reports of its rows: steps, compute, tokens, alarms."""
    return {"steps": len(rows), "work": work(rows), "tokens": sum(row["read_tokens"] for row in rows), "alarms": alarms(rows)}


def history(*folders: Path) -> list[dict[str, Any]]:
    """The metrics of run folders one after the other."""
    return [row for folder in folders for row in metrics.read(folder)]


def alarms(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Steps of each alarm."""
    found: dict[str, int] = {}
    for row in rows:
        for name in row.get("alarm", "").split(", "):
            if name:
                found[name] = found.get(name, 0) + 1
    return found
