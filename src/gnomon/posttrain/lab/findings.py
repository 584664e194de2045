"""What one seed found, read from its jobs' folders, and which of the promised numbers it reaches.

A part that is not done yet is missing here, and what depends on it is neither met nor missed. Read next: `report.py`, which shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gnomon.posttrain.lab import plan
from gnomon.posttrain.lab.cold import ARMS, arm_folder
from gnomon.posttrain.lab.merged import TAIL
from gnomon.posttrain.lab.recipe import LEAST_PROBLEMS, LabRecipe
from gnomon.posttrain.lab.scores import Scores, mean_score, ratio
from gnomon.posttrain.lab.words import EFFORTS
from gnomon.train import metrics

Cell = tuple[str, str]
EQUAL = 0.95
"""Share of the compute of experts and student from which a comparator counts as compared at equal compute."""
CURVE = ("step", "accuracy", "score", "spent", "over_budget", "signal", "tau")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A promised number: what was asked, what was found, and whether that is enough; None: nothing was promised, or nothing is known."""

    what: str
    asked: str
    found: str
    met: bool | None


class Findings:
    """One seed."""

    def __init__(self, recipe: LabRecipe, seed: int, root: Path) -> None:
        self.recipe, self.seed, self.root = recipe, seed, root
        self.jobs = plan.jobs(recipe)
        marks = {name: plan.read(root / name, plan.DONE) for name in self.jobs}
        self.done = {name: found for name, found in marks.items() if found is not None and found["digest"] == self.jobs[name].digest}
        shut = self.done.get("gate", {}).get("shut", [])
        self.cells: list[Cell] = [cell for cell in recipe.cells if cell[0] not in shut]

    def scores(self, name: str, cell: Cell) -> Scores | None:
        """A model's scores in a cell: `gate` is the cold start, `teacher` who teaches the cell, else the job of that name."""
        key = "/".join(cell)
        if name == "teacher":
            name = "student" if self.recipe.taught_by(cell) else plan.expert_folder(cell)
            found = self.done.get(name, {}).get("taught" if name == "student" else "cells", {})
        else:
            found = self.done.get(name, {}).get("cold" if name == "gate" else "cells", {})
        if key not in found:
            return None
        return Scores.of_multiples(**found[key], tau=self.recipe.tau(cell)) if name == "gate" else Scores.from_json(found[key])

    def over_cells(self, name: str) -> list[Scores]:
        """In all open cells; empty while one is missing."""
        found = [self.scores(name, cell) for cell in self.cells]
        return [each for each in found if each is not None] if all(found) else []

    def curve(self, folder: str) -> dict[str, list[Any]]:
        """Metrics of a run by step."""
        path = self.root / folder
        rows = metrics.read(path) if (path / "metrics.jsonl").exists() else []
        return {key: [row.get(key) for row in rows] for key in (*CURVE, "kl") if rows and key in rows[0]}

    def costs(self) -> list[dict[str, Any]]:
        """Processor time, wall time, tokens and compute of each stage."""
        rows = []
        for stage in plan.STAGES:
            parts = [self.done[name] for name, job in self.jobs.items() if job.stage == stage and name in self.done]
            if parts:
                rows.append({"stage": stage, "jobs": len(parts), **{
                    key: sum(part.get(key, 0) for part in parts) for key in ("cpu_seconds", "wall_seconds", "tokens", "work")},
                    "peak_bytes": max(part["peak_bytes"] for part in parts)})
        return rows

    def alarms(self) -> dict[str, dict[str, int]]:
        """Jobs whose runs were warned about, and for how many steps of what."""
        return {name: found["alarms"] for name, found in self.done.items() if found.get("alarms")}

    @cached_property
    def matrix(self) -> dict[Cell, tuple[float, float, float]]:
        """Student's score as a share of its teacher's, with its 95 % interval."""
        pairs = {cell: (self.scores("student", cell), self.scores("teacher", cell)) for cell in self.cells}
        return {cell: ratio([mine], [theirs]) for cell, (mine, theirs) in pairs.items() if mine and theirs and theirs.score > 0}

    @cached_property
    def seesaw(self) -> list[dict[str, Any]]:
        """Mean score over cells of everything that wants to be one model for all of them."""
        rows = []
        teachers = self.over_cells("teacher")
        for name, words in (("gate", "cold start"), ("teacher", "the teachers"), ("student", "the student"), ("export", "its file"),
                            ("mixed", "mixed reinforcement"), ("sequential", "sequential reinforcement"), ("average", "weight average")):
            found = self.over_cells(name)
            if not found:
                continue
            mean, low, high = mean_score(found)
            job = self.done.get(name, {})
            row = {"name": words, "mean": mean, "interval": [low, high], "share": None, "compute": job.get("share"),
                   "work": job.get("work"), "cpu_seconds": job.get("cpu_seconds"), "alarms": job.get("alarms", {})}
            if any(each.score for each in teachers) and name != "teacher":
                row["share"] = list(ratio(found, teachers))
            rows.append(row)
        return rows

    @cached_property
    def claims(self) -> list[Claim]:
        """The promised numbers."""
        return [*self._gate(), *self._experts(), *self._efforts(), *self._student(), *self._compared(), *self._export(), *self._cost()]

    def _gate(self) -> list[Claim]:
        gate = self.done.get("gate")
        if gate is None:
            return []
        said = ", ".join(f"{each['domain']} {each['gain']:+.2f}" for each in gate["gates"])
        return [Claim(what="the gate: thinking helps the cold start", asked="in every domain", found=said, met=not gate["shut"])]

    def _experts(self) -> list[Claim]:
        pairs = [(self.scores("gate", cell), self.scores("teacher", cell)) for cell in self.cells]
        known, wanted = [(a, b) for a, b in pairs if a and b], len(self.recipe.cells)
        if not known or len(known) < len(pairs):
            return []
        least = -(-8 * wanted // 9)  # eight of nine
        left = f", {wanted - len(known)} left out" if len(known) < wanted else ""
        apart = sum(b.interval()[0] > a.interval()[1] for a, b in known)
        best = max(b.accuracy for _, b in known)
        kept = min(b.in_budget for _, b in known)
        fewest = min(b.count for _, b in known)
        return [
            Claim(what="experts above the cold start, intervals disjoint", asked=f"{least} of {wanted}",
                  found=f"{apart} of {len(known)}{left}", met=apart >= least),
            Claim(what="accuracy of the best cell", asked="≥ 0.93", found=f"{best:.3f}", met=best >= 0.93),
            Claim(what="answers within budget, worst expert", asked="≥ 0.95", found=f"{kept:.3f}", met=kept >= 0.95),
            Claim(what="graded problems of a cell", asked=f"≥ {LEAST_PROBLEMS}", found=f"{fewest}", met=fewest >= LEAST_PROBLEMS)]

    def _efforts(self) -> list[Claim]:
        made = []
        asked = "at each level more tokens and 0.10 more accuracy"
        for domain in dict.fromkeys(domain for domain, _ in self.recipe.cells):
            if (domain, EFFORTS[0]) not in self.cells:
                made.append(Claim(what=f"efforts of {domain}", asked=asked, met=False, found="left out, its gate is shut"))
                continue
            levels = [self.scores("teacher", (domain, effort)) for effort in EFFORTS]
            low, high, most = levels
            if low is None or high is None or most is None:
                continue
            met = low.tokens < high.tokens < most.tokens and min(high.accuracy - low.accuracy, most.accuracy - high.accuracy) >= 0.10
            found = " → ".join(f"{each.accuracy:.2f} at {each.tokens:.1f}" for each in (low, high, most))
            made.append(Claim(what=f"efforts of {domain}", asked=asked, met=met, found=found))
        return made

    def _student(self) -> list[Claim]:
        mine, theirs = self.over_cells("student"), self.over_cells("teacher")
        if not mine or not theirs:
            return []
        share, low, high = ratio(mine, theirs)
        matrix = self.matrix
        if not matrix:
            return [Claim(what="student's score as a share of its teachers'", asked="≥ 95 %", found="no teacher has a score", met=False)]
        worst, missing = min(matrix, key=lambda cell: matrix[cell][0]), len(self.cells) - len(matrix)
        left = f"; {missing} without a score of the teacher left out" if missing else ""
        length = max(abs(a.tokens / b.tokens - 1) if b.tokens else 0.0 for a, b in zip(mine, theirs, strict=True))
        divergence = self.done["student"]["divergence"]
        return [
            Claim(what="student's score as a share of its teachers'", asked="≥ 95 %", met=share >= 0.95,
                  found=f"{share:.1%} ({low:.1%} to {high:.1%}), over {len(mine)} cells"),
            Claim(what="its worst cell", asked="≥ 85 %", found=f"{matrix[worst][0]:.1%} ({'/'.join(worst)}){left}",
                  met=matrix[worst][0] >= 0.85),
            Claim(what="its lengths beside its teachers', worst cell", asked="within 5 %", found=f"{length:.1%}", met=length <= 0.05),
            Claim(what=f"reverse divergence per token, mean of the last {TAIL} steps", asked="< 0.06 nats", found=f"{divergence:.3f}",
                  met=divergence < 0.06)]

    def _compared(self) -> list[Claim]:
        made, mine = [], self.over_cells("student")
        for name, words in (("mixed", "mixed reinforcement"), ("sequential", "sequential reinforcement"), ("average", "weight average")):
            theirs = self.over_cells(name)
            if not mine or not theirs:
                continue
            share, low, high = ratio(theirs, mine)
            used = self.done[name].get("share")
            compute = "no compute of its own" if used is None else f"at {used:.0%} of the compute"
            made.append(Claim(what=f"{words}, as a share of the student's score", asked="below 100 %, interval too, at equal compute",
                              found=f"{share:.1%} ({low:.1%} to {high:.1%}), {compute}",
                              met=high < 1.0 and (used is None or used >= EQUAL)))
        return made

    def _export(self) -> list[Claim]:
        file = self.done.get("export")
        if file is None:
            return []
        same = "the same" if file["bits_equal"] else "they differ"
        return [Claim(what="forward of the exported file and of the trained model", asked="the same bits",
                      found=f"{same}, log-probabilities of {file['tokens_compared']} tokens", met=bool(file["bits_equal"])),
                Claim(what="largest gap of log-probability, sampler to trainer", asked="≤ 1e-4", found=f"{file['sampler_gap']:.1e}",
                      met=file["sampler_gap"] <= 1e-4),
                Claim(what="mean gap of a reader that does not round the experts' inputs", asked="said", met=None,
                      found=f"{file['unrounded_gap']:.1e} per token")]

    def _cost(self) -> list[Claim]:
        if len(self.done) < len(self.jobs):
            missing = ", ".join(name for name in self.jobs if name not in self.done)
            return [Claim(what="the whole of it", asked="done", found=f"not done yet: {missing}", met=False)]
        costs = self.costs()
        minutes = sum(row["cpu_seconds"] for row in costs) / 60
        peak = max(row["peak_bytes"] for row in costs) * max(1, self.recipe.workers) / 2**30
        return [Claim(what="processor time of all jobs, without sandboxes", asked="≤ 120 minutes: an hour of two cores, never idle",
                      found=f"{minutes:.1f} minutes", met=minutes <= 120),
                Claim(what="memory of the largest process, times their number", asked="≤ 6 GB", found=f"{peak:.2f} GiB",
                      met=peak <= 6e9 / 2**30)]

    def to_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        models = ("gate", "teacher", "student", "export", "mixed", "sequential", "average")
        cells = {"/".join(cell): {name: found.to_json() for name in models if (found := self.scores(name, cell)) is not None}
                 for cell in self.cells}
        runs = (*(name for name, job in self.jobs.items() if job.cell), "student")
        claims = [{"what": each.what, "asked": each.asked, "found": each.found, "met": each.met} for each in self.claims]
        gate, file = self.done.get("gate", {}), self.done.get("export", {})
        return {
            "seed": self.seed, "claims": claims, "cells": cells, "costs": self.costs(), "alarms": self.alarms(), "seesaw": self.seesaw,
            "gates": gate.get("gates"), "budgets": gate.get("budgets"), "measured_on": gate.get("measured_on"),
            "matrix": {"/".join(cell): list(value) for cell, value in self.matrix.items()},
            "divergences": self.done.get("student", {}).get("divergences"),
            "export": {key: value for key, value in file.items() if key not in ("cells", "digest")},
            "quantisation": self.done.get("quantisation", {}).get("rows"),
            "curves": {name: curve for name in runs if (curve := self.curve(name))},
            "quantisation_losses": [self.curve(f"quantisation/{arm_folder(arm)}") for arm in ARMS],
        }


def every(recipe: LabRecipe, roots: Sequence[tuple[int, Path]]) -> list[Findings]:
    """The findings of the seeds that have begun."""
    return [found for seed, root in roots if (found := Findings(recipe, seed, root)).done]
