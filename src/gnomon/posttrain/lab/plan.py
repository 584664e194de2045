"""The jobs of one seed: what each does, what it waits for, and a digest of all that it depends on.

A job has a folder of its own and is done when `done.json` is in it, which is written in one move. Its digest covers its own settings and
those of the jobs before it, so a changed recipe is noticed at the first job that it concerns and nowhere else.
Read next: `work.py`, which does a job; `run.py`, which hands them out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gnomon import config as toml
from gnomon import whole
from gnomon.errors import ConfigError, DataError
from gnomon.posttrain.lab.recipe import LabRecipe

Stage = Literal["cold start", "gate", "experts", "student", "export", "see-saw", "quantisation"]
STAGES: tuple[Stage, ...] = ("cold start", "gate", "experts", "student", "export", "see-saw", "quantisation")
DONE, BEGUN, METER = "done.json", "begun.json", "meter.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One piece of work: `name` is also its folder under the seed's. `steps` is about what it takes, for the display; 0: not known."""

    name: str
    stage: Stage
    after: tuple[str, ...] = ()
    cell: tuple[str, str] | None = None
    phase: int = 0
    steps: int = 0
    digest: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    before: tuple[str, ...] = ()  # digests of `after`


def jobs(recipe: LabRecipe) -> dict[str, Job]:
    """All jobs of a seed by name, each after those that it waits for. Those that are ready go first in this order."""
    made: dict[str, Job] = {}

    def add(name: str, stage: Stage, after: tuple[str, ...], settings: Any, **more: Any) -> None:
        plain = {key: toml.to_dict(value) for key, value in settings.items()}
        before = tuple(made[each].digest for each in after)
        made[name] = Job(name=name, stage=stage, after=after, digest=_digest(name, plain, before), settings=plain, before=before, **more)

    last: tuple[str, ...] = ()
    for phase, each in enumerate(recipe.cold):
        settings = {"tasks": recipe.tasks, "model": recipe.model, "phase": each}
        add(f"cold/{phase + 1}", "cold start", last, settings, phase=phase)
        last = (f"cold/{phase + 1}",)
    names = [each.name for each in recipe.domains]
    add("gate", "gate", last, {"gate": recipe.gate, "domains": names, "evaluate": recipe.evaluate, "sampling": recipe.expert.sampling})
    _experts(recipe, add)
    experts = tuple(expert_folder(cell) for cell in recipe.cells if recipe.taught_by(cell) is None)
    add("student", "student", experts or ("gate",), {"student": recipe.student, "teachers": recipe.teachers},
        steps=recipe.student.steps)
    add("export", "export", ("student",), {})
    _rest(recipe, add, experts, last)
    return made


def _digest(name: str, settings: Mapping[str, Any], before: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([name, settings, list(before)], sort_keys=True).encode()).hexdigest()[:16]


def expert_folder(cell: tuple[str, str]) -> str:
    """The job, and the folder under the seed's, that trains a cell's expert."""
    return f"experts/{cell[0]}-{cell[1]}"


def _experts(recipe: LabRecipe, add: Any) -> None:
    for effort in ("max", "high", "low"):  # the order in which they can begin
        for each in recipe.domains:
            cell = (each.name, effort)
            if recipe.taught_by(cell) is None:
                own = each.cell(effort)
                before = (expert_folder((each.name, "max")),) if own.early else ("gate",)
                early = sorted({each.high.early, each.low.early}) if effort == "max" else []
                if own.early and recipe.taught_by((each.name, "max")) is not None:
                    raise ConfigError(f"domain '{each.name}': '{effort}.early' is {own.early}, but max has a teacher of its own; use 0")
                settings = {"expert": recipe.expert, "cell": own, "early": early}
                add(expert_folder(cell), "experts", before, settings, cell=cell, steps=own.steps)


def _rest(recipe: LabRecipe, add: Any, experts: tuple[str, ...], last: tuple[str, ...]) -> None:
    """What the student is compared with."""
    wanted = recipe.seesaw
    if recipe.quantisation.texts:
        add("quantisation", "quantisation", last, {"quantisation": recipe.quantisation, "evaluate": recipe.evaluate, "domains": [
            each.name for each in recipe.domains], "sampling": recipe.expert.sampling})
    if wanted.average:
        add("average", "see-saw", experts or ("gate",), {"teachers": recipe.teachers})
    if wanted.mixed:
        add("mixed", "see-saw", ("student",), {"seesaw": wanted})
    if wanted.sequential:
        add("sequential", "see-saw", ("student",), {})


def mark(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write a JSON file in one move: it is there whole, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    whole.write(folder / name, json.dumps(content), sync=True)


def read(folder: Path, name: str) -> dict[str, Any] | None:
    """What `mark` wrote, or None. Raises `DataError` for a file that is something else."""
    try:
        content: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / name} cannot be read ({error}); remove the folder to do this part again") from None
    return content


def result(root: Path, job: Job) -> dict[str, Any] | None:
    """What a job found, or None while it is not done. Raises `ConfigError` where it was done with other settings."""
    check(root, job)
    return read(root / job.name, DONE)


def check(root: Path, job: Job) -> None:
    """Raises `ConfigError` for a folder that was begun with other settings. Those that it says nothing of, since fewer were noted then, are
    not held against it."""
    begun = read(root / job.name, BEGUN)
    if begun is None:
        return
    known = {key: value for key, value in job.settings.items() if key in begun["settings"]}
    if begun["digest"] not in (job.digest, _digest(job.name, known, job.before)):
        own = {key for key in {*begun["settings"], *job.settings} if begun["settings"].get(key) != job.settings.get(key)}
        what = f"{', '.join(repr(key) for key in sorted(own))} differ" if own else "a part before it has changed"
        raise ConfigError(f"{root / job.name} was begun with other settings ({what}); set them back, remove that folder to do this part "
                          "again, or name another folder with run=…")
