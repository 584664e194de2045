"""Partial rollouts exactly as the report has them (§4.1): a pool of N prompts with K completions each.

An iteration samples until a share lambda of the pool's rollouts has finished, and hands out each group whose K rollouts are all done. The
others stay in the pool and are resumed first in the next iteration, with newer weights: a rollout may span several versions, and every
span keeps the version and the log-probabilities that it was sampled with. What is too old is dropped and counted.
`state` is all that a checkpoint needs. Under torchrun every rank knows the whole pool; each samples and grades the rollouts that are its
own, and all tell each other what became of them. Read next: `rl.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.config import setting
from gnomon.errors import CheckpointError, ConfigError
from gnomon.parallel.mesh import Mesh
from gnomon.posttrain import rollout as records
from gnomon.posttrain.grading import Grading, Ungraded
from gnomon.posttrain.policy import AnySampler
from gnomon.posttrain.problem import Problem, ProblemSource
from gnomon.posttrain.rollout import Rollout, seed_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """The active pool of an iteration."""

    prompts: int = setting(32, "N: groups in the pool")
    group_size: int = setting(8, "K: rollouts of each prompt")
    share: float = setting(1.0, "lambda: an iteration stops when this share of the pool's rollouts has finished; 1 waits for all")
    most_stale: int = setting(4, "a rollout whose oldest span is this many versions behind or more is dropped")

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.group_size < 1 or self.most_stale < 1:
            raise ConfigError(f"'prompts' {self.prompts}, 'group_size' {self.group_size} and 'most_stale' {self.most_stale}: "
                              "each must be at least 1")
        if not 0 < self.share <= 1:
            raise ConfigError(f"'share' is {self.share}; it must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """A prompt and its rollouts, all graded."""

    number: int
    problem: Problem
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Iteration:
    """What an iteration gave: the groups that are complete, and how it went."""

    groups: tuple[Group, ...]
    carried: int
    dropped: int
    failed: int
    sampled_tokens: int
    steps: int
    set_back: int = 0


class Pool:
    """N groups at work, the same on every rank of `mesh`."""

    def __init__(self, source: ProblemSource, config: PoolConfig, seed: int, mesh: Mesh | None = None) -> None:
        self.source, self.config, self.seed, self.mesh = source, config, seed, mesh or Mesh()
        self.next_number = 0
        self.problems: dict[int, Problem] = {}
        self.waiting: list[Rollout] = []  # unfinished, in the order in which they are resumed
        self.done: dict[int, list[Rollout]] = {}

    def iterate(self, sampler: AnySampler, grading: Grading | Ungraded) -> Iteration:
        """One iteration; at least one group is complete at its end, however long that takes."""
        self._fill()
        carried = sum(1 for rollout in self.waiting if rollout.spans)
        tokens = steps = set_back = 0
        groups: list[Group] = []
        dropped = self._drop_stale(sampler.version)
        while not groups:
            own = [rollout for rollout in self.waiting if self._is_own(rollout)]
            made = sampler.sample(own, enough=math.ceil(self.config.share * len(own)), on_finished=grading.submit)
            tokens += sum(self.mesh.gather(made.tokens))
            steps += max(self.mesh.gather(made.steps))
            set_back += sum(self.mesh.gather(made.set_back))
            graded = exchanged(self.mesh, grading.collect(), self.problems)
            self.waiting = exchanged(self.mesh, made.unfinished, self.problems)
            for rollout in sorted(graded, key=lambda r: (r.group, r.member)):
                self.done.setdefault(rollout.group, []).append(rollout)
            groups = self._complete()
        failed = sum(1 for group in groups for r in group.rollouts if r.score is not None and r.score.reward is None)
        return Iteration(groups=tuple(groups), carried=carried, dropped=dropped, failed=failed, sampled_tokens=tokens, steps=steps,
                         set_back=set_back)

    def _is_own(self, rollout: Rollout) -> bool:
        """Whether this rank samples it; who began one goes on with it, since its world may be on that machine."""
        return (rollout.group * self.config.group_size + rollout.member) % self.mesh.world == self.mesh.rank

    def _fill(self) -> None:
        """New prompts behind those that are resumed, until the pool has N."""
        while len(self.problems) < self.config.prompts:
            number = self.next_number
            self.next_number += 1
            self._open(number)
            self.waiting += self._fresh(number, range(self.config.group_size))

    def _open(self, number: int) -> Problem:
        self.problems[number] = self.source.problem(number)
        return self.problems[number]

    def _fresh(self, number: int, members: Sequence[int], attempt: int = 0) -> list[Rollout]:
        return [Rollout(problem=self.problems[number], group=number, member=m, seed=seed_of(self.seed, number, m, attempt), notes={
            "attempt": attempt} if attempt else {}) for m in members]

    def _drop_stale(self, version: int) -> int:
        """What is too old begins again from its prompt, before anything else."""
        stale = [r for r in self.waiting if r.oldest is not None and version - r.oldest >= self.config.most_stale]
        if stale:
            kept = [r for r in self.waiting if r not in stale]
            again = [fresh for r in stale for fresh in self._fresh(r.group, [r.member], r.notes.get("attempt", 0) + 1)]
            self.waiting = [*again, *kept]
        return len(stale)

    def _complete(self) -> list[Group]:
        whole = sorted(n for n, rollouts in self.done.items() if len(rollouts) == self.config.group_size)
        return [Group(number=n, problem=self.problems.pop(n), rollouts=tuple(sorted(self.done.pop(n), key=lambda r: r.member)))
                for n in whole]

    def state(self) -> dict[str, Any]:
        """All that is needed to go on, as plain JSON."""
        finished = [rollout.to_json() for number in sorted(self.done) for rollout in self.done[number]]
        return {"next": self.next_number, "open": sorted(self.problems), "waiting": [r.to_json() for r in self.waiting], "done": finished}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a state. Raises `CheckpointError` where the source gives other problems than it did."""
        self.next_number, self.problems, self.done = state["next"], {}, {}
        for number in state["open"]:
            self._open(number)
        self.waiting = [_read(record, self.problems) for record in state["waiting"]]
        for record in state["done"]:
            rollout = _read(record, self.problems)
            self.done.setdefault(rollout.group, []).append(rollout)


def exchanged(mesh: Mesh, own: Sequence[Rollout], problems: Mapping[int, Problem]) -> list[Rollout]:
    """The rollouts of all ranks, those of the first one first, on every rank; `problems` are those of each group."""
    if mesh.world == 1:
        return list(own)
    return [_read(record, problems) for records in mesh.gather([rollout.to_json() for rollout in own]) for record in records]


def _read(record: Mapping[str, Any], problems: Mapping[int, Problem]) -> Rollout:
    problem = problems.get(record["group"])
    if problem is None or problem.id != record["problem"]:
        raise CheckpointError(f"the pool has a rollout of problem '{record['problem']}' in group {record['group']}, but its source now "
                              f"gives '{None if problem is None else problem.id}'; resume with the problems that the run began with")
    return records.from_json(record, problem)
