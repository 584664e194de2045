"""Reinforcement learning in one domain at one effort; read `train` from top to bottom (report §4.1).

A step: the sampler takes the weights; the pool gives the groups that are complete; rewards beyond the budget become -1; advantages are
rewards less the mean of their group; the groups go through a few updates, each normalised by all the tokens that its share of the groups
has sampled. Groups whose rewards are all equal teach nothing, cost nothing and stay in that count. What the machine failed at is in
neither.
Read next: `objective.py`, `partial.py`, `effort.py`, `learner.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.model.transformer import Transformer
from gnomon.parallel.mesh import Mesh
from gnomon.posttrain import effort, learner, objective
from gnomon.posttrain.collecting import CollectConfig, collect
from gnomon.posttrain.effort import Budgets, CellTau, Tau, TauConfig
from gnomon.posttrain.grading import Grading
from gnomon.posttrain.keeping import KeepConfig, Kept, Setup
from gnomon.posttrain.learner import Document, Learner, LearnerConfig, Routes
from gnomon.posttrain.objective import ObjectiveConfig
from gnomon.posttrain.partial import Group, Iteration, Pool, PoolConfig
from gnomon.posttrain.policy import WORLD_SECONDS, AnySampler, Sampler
from gnomon.posttrain.problem import ProblemSource
from gnomon.posttrain.remote import RemoteConfig, RemoteSampler
from gnomon.posttrain.rollout import Rollout, seed_of
from gnomon.posttrain.tournament import Tournament
from gnomon.posttrain.watch import Watch

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How rollouts are sampled and graded."""

    temperature: float = setting(1.0, "of sampling; the trainer's log-probabilities are of the same")
    slots: int = setting(256, "rollouts at work at a time")
    cache_tokens: int = setting(65_536, "ids of all rollouts at work; more wait until some have finished")
    cache_share: float = setting(0.9, "the next rollout begins while the cache is not fuller; where it runs out, the last one waits again")
    graders: int = setting(2, "threads that grade")
    grader_seconds: float = setting(60.0, "a grader that takes longer is given up; its rollout is left out")
    world_seconds: float | None = setting(None, "a world that takes longer for one answer is given up and its rollout left out; none: 600")
    remote: RemoteConfig | None = setting(None, "servers that sample in the place of this process")

    def sampler(self, model: Transformer, version: int, run: Path, mesh: Mesh, record: bool = False) -> AnySampler:
        """A sampler of these settings; `run` is the folder of the run, which servers take weights from. `record`: one in this process
        writes down where ids are sent."""
        if self.remote is None:
            return self.here(model, version, record)
        return RemoteSampler(model, self.remote, run, temperature=self.temperature, version=version, mesh=mesh)

    def here(self, model: Transformer, version: int, record: bool = False) -> Sampler:
        """A sampler in this process. Raises `ConfigError` where servers are named."""
        if self.remote is not None:
            raise ConfigError("'sampling.remote' is set, and nothing is sampled from servers here; leave it out")
        made = Sampler(model, slots=self.slots, cache_tokens=self.cache_tokens, temperature=self.temperature, version=version,
                       world_seconds=self.world_seconds or WORLD_SECONDS, cache_share=self.cache_share)
        made.record = record and model.config.moe is not None
        return made

    def graded(self, sampler: AnySampler, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts, finished and graded, by group and member."""
        with Grading(self.graders, self.grader_seconds) as grading:
            sampler.sample(rollouts, on_finished=grading.submit)
            return grading.collect()


@dataclass(frozen=True, kw_only=True, slots=True)
class RLConfig:
    """A run of reinforcement learning."""

    steps: int = setting(40, "iterations of sampling and learning")
    updates: int = setting(2, "updates of the weights per iteration")
    pool: PoolConfig = setting(PoolConfig(), "prompts, group size, partial rollouts")
    sampling: SamplingConfig = setting(SamplingConfig(), "sampler and graders")
    objective: ObjectiveConfig = setting(ObjectiveConfig(), "what is minimised")
    learner: LearnerConfig = setting(LearnerConfig(), "optimiser")
    tau: TauConfig = setting(TauConfig(), "budget over the run")
    cells: tuple[CellTau, ...] = setting((), "cells with a tau of their own, for a run over several")
    replay: Literal["experts"] | None = setting(None, "experts: the trainer sends ids to the experts that they went to when sampled")
    largest_gap: float = setting(1e-3, "alarm when trainer and sampler differ by more than this log-probability on average")
    keep: KeepConfig = setting(KeepConfig(), "checkpoints")
    collect: CollectConfig | None = setting(None, "rollouts that are kept for a further fine-tuning")

    def __post_init__(self) -> None:
        if self.steps < 1 or self.updates < 1:
            raise ConfigError(f"'steps' {self.steps} and 'updates' {self.updates} must be at least 1")
        if self.pool.group_size < 2:
            raise ConfigError(f"'pool.group_size' is {self.pool.group_size}; the mean of a group needs at least 2 rollouts")

    @property
    def bound(self) -> bool:
        """Whether any budget binds."""
        return any(each.target is not None for each in (self.tau, *(cell.tau for cell in self.cells)))

    def tau_at(self, step: int) -> Tau:
        """tau of each cell at a 0-based step."""
        own = {(each.domain, each.effort): each.tau.at(step, self.steps) for each in self.cells}
        return Tau(default=self.tau.at(step, self.steps), cells=own)


@dataclass(kw_only=True, slots=True, eq=False)
class Start:
    """What a run begins with: weights, problems, the budgets of its cold start (None: no budget binds), and the seed of every draw.

    `sampler` makes the sampler of (model, version, run folder, ranks) where the settings' own will not do, and `tournament` judges problems
    that have no grader.
    """

    model: Transformer
    source: ProblemSource
    budgets: Budgets | None = None
    seed: int = 0
    say: Say = field(default=lambda _: None)
    sampler: Callable[[Transformer, int, Path, Mesh], AnySampler] | None = None
    tournament: Tournament | None = None
    setup: Setup = field(default_factory=Setup)

    def decides(self, config: Any) -> dict[str, Any]:
        """All that a run's results depend on beside seed and weights."""
        budgets = {} if self.budgets is None else {"/".join(key): value for key, value in self.budgets.tokens.items()}
        return {"train": config, "budgets": budgets, **self.setup.decides}


def train(start: Start, config: RLConfig, folder: Path) -> list[dict[str, Any]]:
    """Train, or go on where the folder stands; returns the rows of metrics of the steps that this call took.

    Raises `ConfigError` for a budget without measured b0, `TrainingError` for numbers that are not finite.
    """
    if config.bound and start.budgets is None:
        targets = [each.target for each in (config.tau, *(cell.tau for cell in config.cells)) if each.target is not None]
        raise ConfigError(f"'tau.target' is {', '.join(map(str, targets))}, but no b0 was measured; measure it "
                          "on the cold-start checkpoint first")
    made = Learner(start.model, config.learner, config.steps * config.updates, start.setup.mesh)
    pool, watch = Pool(start.source, config.pool, start.seed, made.mesh), Watch(config.largest_gap)
    kept = Kept(folder=folder, config=config.keep, learner=made, seed=start.seed, memory={"pool": pool, "watch": watch},
                decides=start.decides(config), recipe=start.setup.recipe)
    done, offset = kept.begin()
    rows = []
    make = start.sampler or partial(config.sampling.sampler, record=config.replay is not None)
    with (kept.metrics(offset, done) as metrics, Grading(config.sampling.graders, config.sampling.grader_seconds) as grading,
          closing(make(made.model, done, folder, made.mesh)) as sampler):
        for step in range(done, config.steps):
            began = time.perf_counter()
            sampler.load(made.model, step)
            iteration, kept_out = apart(pool.iterate(sampler, grading), start.tournament)
            sampled = time.perf_counter() - began
            tau = config.tau.at(step, config.steps)
            row = {"step": step + 1, "tau": None if math.isinf(tau) else tau, **learn(made, iteration, start, config, step)}
            row |= held_out(kept_out, start.budgets, config.tau_at(step)) | watch.look(row, start.say)
            if config.collect is not None and made.mesh.is_main:
                collect(iteration.groups, config.collect, folder, step + 1, config.steps)
            row |= {"sampling_seconds": sampled, "seconds": time.perf_counter() - began}
            kept.note(metrics, row)
            rows.append(row)
            if kept.due(step + 1, config.steps):
                kept.save(step + 1, metrics)
    return rows


def apart(iteration: Iteration, tournament: Tournament | None) -> tuple[Iteration, Iteration]:
    """What is learnt from and what is held out, both with rewards. Raises `ConfigError` for a problem that nobody can judge."""
    if tournament is not None:
        judged = tuple(tournament.judged(iteration.groups))
        failed = sum(1 for group in judged for r in group.rollouts if r.score is None or r.score.reward is None)
        iteration = replace(iteration, groups=judged, failed=failed)
    elif unjudged := [group.problem.id for group in iteration.groups if group.problem.grade is None]:
        raise ConfigError(f"problem {unjudged[0]} has no grader; give it one, or let its group be judged ('tournament')")
    learnt, kept = (tuple(group for group in iteration.groups if group.problem.held_out == out) for out in (False, True))
    return replace(iteration, groups=learnt), replace(iteration, groups=kept)


def held_out(iteration: Iteration, budgets: Budgets | None, tau: Tau) -> dict[str, Any]:
    """How good the answers were that are held out, beside those that are learnt from."""
    if not iteration.groups:
        return {}
    found = _measured(iteration, budgets, tau)
    return {f"held_out_{name}": found[name] for name in ("accuracy", "reward", "score", "spent", "groups", "tokens")}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """Rollouts of one forward pass: advantage and weight of each one's tokens, whether the weights as they are sampled all of it, and the
    experts that its tokens go to, where those are not to be chosen anew."""

    documents: list[Document]
    advantages: Tensor
    weights: Tensor
    fresh: Tensor
    routes: Routes = ()


@dataclass(slots=True, eq=False)
class Seen:
    """What the updates of one iteration saw on this rank: sums over `count` learnt ids, how many ids the trainer read, gaps between trainer
    and sampler over `compared` ids, gradient norms."""

    loss: float = 0.0
    kept: float = 0.0
    log_ratio: float = 0.0
    count: int = 0
    trained: int = 0
    gap: float = 0.0
    compared: int = 0
    largest: float = 0.0
    norms: list[float] = field(default_factory=list)

    def note(self, outcome: objective.Outcome, count: int) -> None:
        """The objective of so many ids."""
        self.loss += outcome.loss.item()
        self.kept += outcome.kept * count
        self.log_ratio += outcome.log_ratio * count
        self.count += count

    def compare(self, gaps: Tensor) -> None:
        """Differences of log-probabilities, trainer against sampler."""
        if len(gaps):
            self.gap += gaps.double().sum().item()
            self.largest = max(self.largest, gaps.max().item())
            self.compared += len(gaps)

    def row(self, mesh: Mesh) -> dict[str, Any]:
        """As metrics, over all ranks."""
        sums = torch.tensor([self.loss, self.kept, self.log_ratio, self.count, self.trained, self.gap, self.compared], dtype=torch.float64)
        sums, largest = sums.to(mesh.device), torch.tensor(self.largest, dtype=torch.float64, device=mesh.device)
        mesh.sum(sums)
        mesh.max(largest)
        loss, kept, log_ratio, count, trained, gap, compared = sums.tolist()
        return {
            "loss": loss, "gradient_norm": sum(self.norms) / max(1, len(self.norms)), "kept": kept / count if count else 1.0,
            "log_ratio": log_ratio / max(1.0, count), "gap": gap / max(1.0, compared), "largest_gap": largest.item(),
            "trained_tokens": int(trained),
        }


def learn(made: Learner, iteration: Iteration, start: Start, config: RLConfig, step: int) -> dict[str, Any]:
    """The updates of one iteration; returns its metrics."""
    tau, groups, seen = config.tau_at(step), iteration.groups, Seen()
    rewards = torch.tensor([[_reward(r, start, tau, step, config) for r in group.rollouts] for group in groups], dtype=torch.float64)
    rewards = rewards.reshape(len(groups), config.pool.group_size)  # also where all that came is held out
    advantages = objective.group_advantages(rewards, config.objective)
    order = np.random.default_rng(seed_of(start.seed, step, 1)).permutation(len(groups)).tolist()
    rate = made.rate()
    parts = [order[part :: config.updates] for part in range(config.updates)]
    pieces = [_pieces(made, [groups[i] for i in part], advantages[part], rewards[part], config, step) for part in parts]
    if config.replay is not None:
        pieces = [[replace(piece, routes=_routes(made, piece, part > 0)) for piece in some] for part, some in enumerate(pieces)]
    for part, some in enumerate(pieces):
        seen.norms.append(made.update(some, lambda piece, part=part: _loss(made, piece, config, seen, part == 0),  # type: ignore[misc]
                                      lambda piece: piece.routes))
    signal = (advantages != 0).any(1).double().mean().item() if groups else 0.0
    return _measured(iteration, start.budgets, tau) | seen.row(made.mesh) | {"signal": signal, "learning_rate": rate}


def _pieces(made: Learner, groups: Sequence[Group], advantages: Tensor, rewards: Tensor, config: RLConfig, step: int) -> list[Piece]:
    """This rank's share of the rollouts that teach something, in pieces of bounded size, weighted by all that count on any rank."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    flat, valid = advantages.flatten(), rewards.flatten().isfinite()
    lengths = torch.tensor([len(r.sampled) for r in rollouts], dtype=torch.int64) * valid
    weights = objective.token_weights(lengths, config.objective)
    chosen = made.share([i for i in range(len(rollouts)) if flat[i] != 0 and lengths[i] > 0])
    sizes = [len(rollouts[i].token_ids) for i in chosen]
    return [Piece(documents=[learner.document(rollouts[i]) for i in part], advantages=flat[part].float(), weights=weights[part],
                  fresh=torch.tensor([rollouts[i].oldest == step for i in part]))
            for part in learner.in_pieces(chosen, sizes, config.learner.micro_tokens)]


def _routes(made: Learner, piece: Piece, later: bool) -> Routes:
    """Where the sampler sent the ids. Servers do not tell: then where the weights before the first update, which are theirs, send them."""
    found = learner.sampled_routes(piece.documents, made.mesh.device)
    return found or (made.routes_of(piece.documents) if later else ())


def _loss(made: Learner, piece: Piece, config: RLConfig, seen: Seen, first: bool) -> Tensor:
    laid = learner.stream(piece.documents, made.mesh.device)
    logprobs = learner.token_logprobs(made.model, laid, config.sampling.temperature)
    outcome = objective.policy_loss(logprobs, laid.behaviour, piece.advantages.to(laid.owner.device)[laid.owner],
                                    piece.weights.to(laid.owner.device)[laid.owner], config.objective)
    if first:  # before the first update the trainer's policy is the one that sampled
        seen.compare((logprobs.detach() - laid.behaviour).abs()[piece.fresh.to(laid.owner.device)[laid.owner]])
    seen.note(outcome, len(laid.targets))
    seen.trained += laid.tokens.shape[1]
    return outcome.loss


def _reward(rollout: Rollout, start: Start, tau: Tau, step: int, config: RLConfig) -> float:
    if rollout.oldest is not None and step - rollout.oldest >= config.pool.most_stale:
        return math.nan
    return effort.reward(rollout, start.budgets, tau.of(rollout))


def _measured(iteration: Iteration, budgets: Budgets | None, tau: Tau) -> dict[str, Any]:
    """How good and how long the answers were."""
    scored = [r for group in iteration.groups for r in group.rollouts if r.score is not None and r.score.reward is not None]
    count = max(1, len(scored))
    over = [budgets is not None and budgets.over(r, tau.of(r)) for r in scored]
    rewards = [r.score.reward for r in scored if r.score is not None and r.score.reward is not None]
    sampled = sum(len(r.sampled) for r in scored)
    return {
        "accuracy": sum(reward > 0 for reward in rewards) / count, "reward": sum(rewards) / count,
        "score": sum(reward > 0 and not late for reward, late in zip(rewards, over, strict=True)) / count,
        "over_budget": sum(over) / count, "spent": sum(r.spent for r in scored) / count, "unfinished_answers": sum(
            r.end == "length" for r in scored) / count,
        "entropy": -sum(sum(r.logprobs) for r in scored) / max(1, sampled), "groups": len(iteration.groups), "tokens": sampled,
        "read_tokens": sum(len(r.token_ids) for group in iteration.groups for r in group.rollouts),
        "sampled_tokens": iteration.sampled_tokens, "carried": iteration.carried, "dropped": iteration.dropped, "failed": iteration.failed,
        "set_back": iteration.set_back,
    }
