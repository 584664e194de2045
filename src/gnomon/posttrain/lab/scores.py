"""How good a model is in each cell, with 95 % intervals: every model answers the same problems with the same random numbers.

The score of a cell is the share of answers that are right *and* within the budget, for it is what an effort is for; plain accuracy would
let a model that ignores efforts look better than one that keeps to them. Read next: `report.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from gnomon.agent.evaluate_intervals import Z_975, wilson
from gnomon.model.transformer import Transformer
from gnomon.posttrain.effort import Budgets
from gnomon.posttrain.lab.recipe import LabRecipe
from gnomon.posttrain.lab.tasks import Cells, Split, Tasks
from gnomon.posttrain.policy import Sampler
from gnomon.posttrain.rl import SamplingConfig
from gnomon.posttrain.rollout import Rollout, seed_of

Cell = tuple[str, str]
RESAMPLES = 2000
"""Of a bootstrap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """A model in one cell. `right` and `within` (right and within budget) have one letter for each problem, 1, 0 or - for not graded."""

    right: str
    within: str
    in_budget: float
    tokens: float

    @property
    def count(self) -> int:
        """Graded answers."""
        return sum(letter != "-" for letter in self.right)

    @property
    def accuracy(self) -> float:
        """Share that is right."""
        return self.right.count("1") / max(1, self.count)

    @property
    def score(self) -> float:
        """Share that is right within the budget."""
        return self.within.count("1") / max(1, self.count)

    def interval(self, what: str = "within") -> tuple[float, float]:
        """Wilson's, of the score or of the accuracy."""
        return wilson(self.score if what == "within" else self.accuracy, max(1, self.count))

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads, and figures for people."""
        return {"right": self.right, "within": self.within, "in_budget": self.in_budget, "tokens": self.tokens, "count": self.count,
                "accuracy": self.accuracy, "score": self.score, "score_interval": self.interval(),
                "accuracy_interval": self.interval("right")}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """What `to_json` wrote."""
        return cls(**{name: record[name] for name in ("right", "within", "in_budget", "tokens")})

    @classmethod
    def of_multiples(cls, *, right: str, multiples: Sequence[float], tokens: float, tau: float) -> Self:
        """From what took so many times b0."""
        kept = [each <= tau for each in multiples]
        within = "".join(letter if letter == "-" or inside else "0" for letter, inside in zip(right, kept, strict=True))
        return cls(right=right, within=within, in_budget=sum(kept) / len(kept), tokens=tokens)


def answers(sampling: SamplingConfig, sampler: Sampler, tasks: Tasks, cells: Cells, *, seed: int, split: Split, each: int
            ) -> list[Rollout]:
    """Graded answers to the first `each` problems of each cell, in the order of the problems."""
    source = tasks.problems(cells, seed, split)
    problems = [source.problem(i) for i in range(each * len(cells))]
    rollouts = [Rollout(problem=problem, group=i, member=0, seed=seed_of(seed, 11, i // len(cells))) for i, problem in enumerate(problems)]
    return sampling.graded(sampler, rollouts)


def scored(rollouts: Sequence[Rollout], budgets: Budgets | None, taus: Mapping[Cell, float]) -> dict[Cell, Scores]:
    """The scores of answers, by cell."""
    by_cell: dict[Cell, list[Rollout]] = {}
    for rollout in rollouts:
        by_cell.setdefault(rollout.problem.cell, []).append(rollout)
    found = {}
    for cell, part in by_cell.items():
        kept = [budgets is None or not budgets.over(r, taus.get(cell, math.inf)) for r in part]
        graded = [r.score is not None and r.score.reward is not None for r in part]
        right = [r.score is not None and (r.score.reward or 0.0) > 0 for r in part]
        found[cell] = Scores(
            right="".join("-" if not g else str(int(x)) for g, x in zip(graded, right, strict=True)),
            within="".join("-" if not g else str(int(x and k)) for g, x, k in zip(graded, right, kept, strict=True)),
            in_budget=sum(kept) / len(kept), tokens=sum(r.spent for r in part) / len(part))
    return found


def evaluated(recipe: LabRecipe, model: Transformer, tasks: Tasks, cells: Cells, budgets: Budgets, *, seed: int,
              sampler: Sampler | None = None) -> dict[str, Any]:
    """A model's scores in some cells, as JSON by `domain/effort`."""
    sampler = sampler or recipe.expert.sampling.here(model, 0)
    rollouts = answers(recipe.expert.sampling, sampler, tasks, cells, seed=seed, split="test", each=recipe.evaluate.problems)
    found = scored(rollouts, budgets, {cell: recipe.tau(cell) for cell in cells})
    return {"/".join(cell): each.to_json() for cell, each in found.items()}


def mean_score(cells: Sequence[Scores]) -> tuple[float, float, float]:
    """The mean score over cells with its 95 % interval, the answers of each cell drawn independently."""
    mean = sum(each.score for each in cells) / len(cells)
    variance = sum((s := (each.score * each.count + 1) / (each.count + 2)) * (1 - s) / max(1, each.count) for each in cells)
    half = Z_975 * math.sqrt(variance) / len(cells)
    return mean, mean - half, mean + half


def ratio(student: Sequence[Scores], teacher: Sequence[Scores]) -> tuple[float, float, float]:
    """Mean score of one model as a share of another's over the same cells, with a 95 % interval by resampling the problems they share."""
    draw = np.random.default_rng(0)
    above, below = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for one, other in zip(student, teacher, strict=True):
        pairs = np.array([(a == "1", b == "1") for a, b in zip(one.within, other.within, strict=False) if "-" not in (a, b)], dtype=float)
        if not len(pairs):
            continue
        means = pairs[draw.integers(len(pairs), size=(RESAMPLES, len(pairs)))].mean(1)
        above, below = above + means[:, 0], below + means[:, 1]
    shares = above / np.maximum(below, 1e-9)
    total = sum(each.score for each in teacher)
    middle = sum(each.score for each in student) / total if total else math.nan
    low, high = np.quantile(shares, [0.025, 0.975]).tolist()
    return middle, low, high
