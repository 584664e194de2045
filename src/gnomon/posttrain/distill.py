"""Multi-teacher on-policy distillation: the student samples, the teacher of the prompt's (domain, effort) says how likely each id was
(report §4.1.3, eq. 15).

The advantage of a sampled id is A = clip(log pi_T - log pi, +-R), where log pi is the student's as it learns and not as it sampled, so
stale rollouts do no harm beyond the window on pi / pi_old. It enters the same objective as a reward does. `topk` and `full` minimise the
divergence itself. With `outcome` above 0 the task's own advantage is added, which needs groups of two or more.
Read next: `teachers.py`, `objective.py`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.parallel.mesh import Mesh
from gnomon.posttrain import effort, learner, objective
from gnomon.posttrain.grading import Grading, Ungraded
from gnomon.posttrain.keeping import KeepConfig, Kept
from gnomon.posttrain.learner import Document, Learner, LearnerConfig
from gnomon.posttrain.objective import ObjectiveConfig
from gnomon.posttrain.partial import Group, Iteration, Pool, PoolConfig
from gnomon.posttrain.rl import SamplingConfig, Start
from gnomon.posttrain.rollout import Rollout, seed_of
from gnomon.posttrain.teachers import Cell, Mode, Said, Teachers, all_scores

LEAST_WEIGHT, MOST_WEIGHT = 0.25, 4.0
"""Of a cell when cells are weighted by how far the student is from their teachers."""
MEMORY = 0.9
"""Share of a cell's divergence that is kept from step to step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """A run of distillation."""

    steps: int = setting(100, "iterations of sampling and learning")
    updates: int = setting(2, "updates of the weights per iteration")
    pool: PoolConfig = setting(PoolConfig(prompts=240, group_size=1), "prompts over all cells; one rollout each is enough")
    sampling: SamplingConfig = setting(SamplingConfig(), "sampler and graders")
    mode: Mode = setting("sampled", "sampled ids as a reward, the teacher's likeliest ids with correction, or the whole vocabulary")
    k: int = setting(64, "topk: ids per place")
    limit: float = setting(5.0, "sampled: R, the clip of the teacher's log-ratio")
    outcome: float = setting(0.0, "weight of the task's own advantage; 0: nothing is graded")
    reweigh: bool = setting(False, "weigh cells by their divergence from the teacher, between a quarter and four times the average")
    objective: ObjectiveConfig = setting(ObjectiveConfig(), "window and penalty on pi / pi_old")
    learner: LearnerConfig = setting(LearnerConfig(), "optimiser")
    keep: KeepConfig = setting(KeepConfig(), "checkpoints")

    def __post_init__(self) -> None:
        if self.steps < 1 or self.updates < 1 or self.k < 1:
            raise ConfigError(f"'steps' {self.steps}, 'updates' {self.updates} and 'k' {self.k} must be at least 1")
        if self.limit <= 0 or self.outcome < 0:
            raise ConfigError(f"'limit' {self.limit} must be positive and 'outcome' {self.outcome} not negative")
        if self.outcome and self.pool.group_size < 2:
            raise ConfigError(f"'outcome' is {self.outcome} with groups of {self.pool.group_size}; an outcome needs groups of 2 or more")
        if self.outcome and self.mode != "sampled":
            raise ConfigError(f"'outcome' is {self.outcome} in mode '{self.mode}'; rewards belong to mode 'sampled'")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lesson:
    """A rollout with what its teacher said (None: another rank learns from it), its outcome's advantage, and its weight."""

    rollout: Rollout
    document: Document
    said: Said | None
    advantage: float
    weight: float


class Cells:
    """Running divergence of each cell from its teacher."""

    def __init__(self) -> None:
        self.divergence: dict[Cell, float] = {}

    def observe(self, cell: Cell, value: float) -> None:
        """A step's mean of log pi - log pi_T over the sampled ids of a cell."""
        self.divergence[cell] = value if cell not in self.divergence else MEMORY * self.divergence[cell] + (1 - MEMORY) * value

    def weights(self) -> dict[Cell, float]:
        """Of each cell that was seen: its divergence over the average, bounded."""
        known = sorted(self.divergence.items())  # a sum in any other order may differ in its last bit after a resume
        mean = sum(value for _, value in known) / max(1, len(known))
        return {cell: min(MOST_WEIGHT, max(LEAST_WEIGHT, value / mean if mean > 0 else 1.0)) for cell, value in known}

    def state(self) -> list[list[Any]]:
        """As plain JSON."""
        return [[*cell, value] for cell, value in sorted(self.divergence.items())]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Go on from `state`."""
        self.divergence = {(domain, name): value for domain, name, value in state}


def distill(start: Start, teachers: Teachers, config: DistillConfig, folder: Path) -> list[dict[str, Any]]:
    """Distill, or go on where the folder stands; returns the rows of metrics of the steps that this call took.

    Raises `ConfigError` for a prompt whose cell has no teacher, `TrainingError` for numbers that are not finite.
    """
    made = Learner(start.model, config.learner, config.steps * config.updates, start.setup.mesh)
    pool, cells = Pool(start.source, config.pool, start.seed, made.mesh), Cells()
    kept = Kept(folder=folder, config=config.keep, learner=made, seed=start.seed, memory={"pool": pool, "cells": cells},
                decides=start.decides(config) | {"teachers": teachers.names()}, recipe=start.setup.recipe)
    done, offset = kept.begin()
    rows = []
    graders: Any = Grading(config.sampling.graders, config.sampling.grader_seconds) if config.outcome else nullcontext(Ungraded())
    with kept.metrics(offset, done) as metrics, graders as grading:
        sampler = config.sampling.sampler(made.model, done, folder, made.mesh)
        for step in range(done, config.steps):
            began = time.perf_counter()
            sampler.load(made.model, step)
            iteration = pool.iterate(sampler, grading)
            sampled = time.perf_counter() - began
            lessons = prepare(made, iteration, teachers, cells, config)
            asked = time.perf_counter() - began - sampled
            read = sum(len(each.document.token_ids) for each in lessons)
            row = {"step": step + 1, **learn(made, lessons, cells, start.seed, config, step), "read_tokens": read, "trained_tokens": read,
                   "teacher_tokens": read, "carried": iteration.carried, "failed": iteration.failed,
                   "dropped": iteration.dropped, "sampled_tokens": iteration.sampled_tokens, "sampling_seconds": sampled,
                   "teacher_seconds": asked, "seconds": time.perf_counter() - began}
            kept.note(metrics, row)
            rows.append(row)
            if kept.due(step + 1, config.steps):
                kept.save(step + 1, metrics)
    return rows


def prepare(made: Learner, iteration: Iteration, teachers: Teachers, cells: Cells, config: DistillConfig) -> list[Lesson]:
    """Each rollout that says anything; this rank's share of them with their teachers' word."""
    rollouts = [r for group in iteration.groups for r in group.rollouts if r.sampled and r.end != "failed"]
    outcomes = _outcomes(iteration.groups, config)
    documents = [learner.document(r) for r in rollouts]
    own = made.share(range(len(rollouts)))
    said = dict(zip(own, teachers.score([(rollouts[i].problem.cell, documents[i]) for i in own], config.mode, config.k), strict=True))
    weights = cells.weights() if config.reweigh else {}
    return [Lesson(rollout=r, document=documents[i], said=said.get(i), advantage=outcomes.get((r.group, r.member), 0.0),
                   weight=weights.get(r.problem.cell, 1.0)) for i, r in enumerate(rollouts)]


def _outcomes(groups: Sequence[Group], config: DistillConfig) -> Mapping[tuple[int, int], float]:
    if not config.outcome or not groups:
        return {}
    rewards = torch.tensor([[effort.reward(r, None, float("inf")) for r in group.rollouts] for group in groups], dtype=torch.float64)
    advantages = config.outcome * objective.group_advantages(rewards, config.objective)
    return {(r.group, r.member): advantages[i, j].item() for i, group in enumerate(groups) for j, r in enumerate(group.rollouts)}


@dataclass(slots=True, eq=False)
class Seen:
    """What one step saw, by cell: (tokens, sum of log pi - log pi_T, clipped tokens, sum of -log pi, rollouts, sum of T)."""

    cells: dict[Cell, np.ndarray] = field(default_factory=lambda: defaultdict(lambda: np.zeros(6)))
    kept: list[tuple[float, int]] = field(default_factory=list)
    loss: float = 0.0

    def of_all(self, mesh: Mesh) -> Seen:
        """What all ranks saw."""
        if mesh.world == 1:
            return self
        whole = Seen()
        for cells, kept, loss in mesh.gather((dict(self.cells), self.kept, self.loss)):
            for cell in sorted(cells):
                whole.cells[cell] += cells[cell]
            whole.kept += kept
            whole.loss += loss
        return whole

    def row(self) -> dict[str, Any]:
        """As metrics: over all cells, and each cell under `kl/domain/effort` and so on."""
        row: dict[str, Any] = {"loss": self.loss, "kept": sum(k * n for k, n in self.kept) / max(1, sum(n for _, n in self.kept))}
        total = sum(self.cells.values(), np.zeros(6))
        for name, sums in [("", total), *(("/" + "/".join(cell), self.cells[cell]) for cell in sorted(self.cells))]:
            tokens, kl, clipped, entropy, rollouts, spent = sums.tolist()
            row |= {f"kl{name}": kl / max(1.0, tokens), f"clipped{name}": clipped / max(1.0, tokens),
                    f"entropy{name}": entropy / max(1.0, tokens), f"spent{name}": spent / max(1.0, rollouts)}
        return row | {"tokens": int(total[0])}


def learn(made: Learner, lessons: Sequence[Lesson], cells: Cells, seed: int, config: DistillConfig, step: int) -> dict[str, Any]:
    """The updates of one iteration; returns its metrics."""
    order = np.random.default_rng(seed_of(seed, step, 2)).permutation(len(lessons)).tolist()
    seen, norms, rate = Seen(), [], made.rate()
    for part in range(config.updates):
        chosen = [lessons[i] for i in order[part :: config.updates]]
        count = max(1, sum(len(each.rollout.sampled) for each in chosen))
        own = [each for each in chosen if each.said is not None]
        pieces = list(learner.in_pieces(own, [len(each.document.token_ids) for each in own], config.learner.micro_tokens))
        norms.append(made.update(pieces, lambda piece, count=count: _loss(made, piece, count, config, seen)))  # type: ignore[misc]
    seen = seen.of_all(made.mesh)
    for cell, sums in seen.cells.items():
        cells.observe(cell, float(sums[1] / max(1.0, sums[0])))
    return seen.row() | {"gradient_norm": sum(norms) / len(norms), "learning_rate": rate}


def _loss(made: Learner, lessons: list[Lesson], count: int, config: DistillConfig, seen: Seen) -> Tensor:
    """The loss of some lessons as a share of an update's `count` tokens."""
    laid = learner.stream([each.document for each in lessons], made.mesh.device)
    teacher = torch.cat([said.logprobs for said in _said(lessons)]).to(laid.behaviour)
    weights = torch.tensor([each.weight for each in lessons]).to(laid.behaviour)[laid.owner] / count
    temperature = config.sampling.temperature
    if config.mode == "sampled":
        student = learner.token_logprobs(made.model, laid, temperature)
        advantages = objective.teacher_advantages(teacher, student, config.limit)
        advantages = advantages + torch.tensor([each.advantage for each in lessons]).to(laid.behaviour)[laid.owner]
        outcome = objective.policy_loss(student, laid.behaviour, advantages, weights, config.objective)
        loss, kept = outcome.loss, outcome.kept
    else:
        scores = all_scores(made.model, learner.hidden_states(made.model, laid), temperature)
        student = scores.gather(1, laid.targets[:, None])[:, 0]
        inside = objective.in_window(student - laid.behaviour, config.objective)
        loss, kept = (weights * inside * _divergence(scores, lessons)).sum(), inside.double().mean().item()
    _note(lessons, laid.owner, student.detach(), teacher, config.limit, seen)
    seen.kept.append((kept, len(laid.targets)))
    seen.loss += loss.item()
    return loss


def _divergence(scores: Tensor, lessons: Sequence[Lesson]) -> Tensor:
    said = _said(lessons)
    theirs = torch.cat([s.scores for s in said if s.scores is not None]).to(scores)
    if said[0].ids is None:
        return objective.reverse_kl(scores, theirs)
    ids = torch.cat([s.ids for s in said if s.ids is not None]).to(scores.device)
    return objective.corrected_top_k(scores.gather(1, ids), theirs)


def _said(lessons: Sequence[Lesson]) -> list[Said]:
    return [each.said for each in lessons if each.said is not None]


def _note(lessons: Sequence[Lesson], owner: Tensor, student: Tensor, teacher: Tensor, limit: float, seen: Seen) -> None:
    ratio = (student - teacher).double()
    columns = torch.stack([torch.ones_like(ratio), ratio, (ratio.abs() > limit).double(), -student.double()], 1)
    sums = torch.zeros(len(lessons), 4, dtype=torch.float64, device=ratio.device).index_add_(0, owner, columns).cpu().numpy()
    for each, row in zip(lessons, sums, strict=True):
        seen.cells[each.rollout.problem.cell] += np.array([*row, 1.0, each.rollout.spent])
