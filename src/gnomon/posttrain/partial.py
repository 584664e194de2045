"""Partial rollouts exactly as the report has them (§4.1): a pool of N prompts with K completions each.

An iteration samples until a share lambda of the pool's rollouts has finished, and hands out each group whose K rollouts are all done. The
others stay in the pool and are resumed first in the next iteration, with newer weights: a rollout may span several versions, and every
span keeps the version and the log-probabilities that it was sampled with. What is too old is dropped and counted.
`state` is all that a checkpoint needs. Read next: `rl.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.config import setting
from gnomon.errors import CheckpointError, ConfigError
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


class Pool:
    """N groups at work; `first` and `stride` share the problems out among ranks."""

    def __init__(self, source: ProblemSource, config: PoolConfig, seed: int, *, first: int = 0, stride: int = 1) -> None:
        self.source, self.config, self.seed, self._first, self._stride = source, config, seed, first, stride
        self.next_number = 0
        self.problems: dict[int, Problem] = {}
        self.waiting: list[Rollout] = []  # unfinished, in the order in which they are resumed
        self.done: dict[int, list[Rollout]] = {}

    def iterate(self, sampler: AnySampler, grading: Grading | Ungraded) -> Iteration:
        """One iteration; at least one group is complete at its end, however long that takes."""
        self._fill()
        carried = sum(1 for rollout in self.waiting if rollout.spans)
        tokens = steps = 0
        groups: list[Group] = []
        dropped = self._drop_stale(sampler.version)
        while not groups:
            enough = math.ceil(self.config.share * len(self.waiting))
            made = sampler.sample(self.waiting, enough=enough, on_finished=grading.submit)
            self.waiting = list(made.unfinished)
            tokens, steps = tokens + made.tokens, steps + made.steps
            for rollout in grading.collect():
                self.done.setdefault(rollout.group, []).append(rollout)
            groups = self._complete()
        failed = sum(1 for group in groups for r in group.rollouts if r.score is not None and r.score.reward is None)
        return Iteration(groups=tuple(groups), carried=carried, dropped=dropped, failed=failed, sampled_tokens=tokens, steps=steps)

    def _fill(self) -> None:
        """New prompts behind those that are resumed, until the pool has N."""
        while len(self.problems) < self.config.prompts:
            number = self.next_number
            self.next_number += 1
            self._open(number)
            self.waiting += self._fresh(number, range(self.config.group_size))

    def _open(self, number: int) -> Problem:
        self.problems[number] = self.source.problem(self._first + number * self._stride)
        return self.problems[number]

    def _fresh(self, number: int, members: Sequence[int], attempt: int = 0) -> list[Rollout]:
        index = self._first + number * self._stride
        return [Rollout(problem=self.problems[number], group=number, member=m, seed=seed_of(self.seed, index, m, attempt), notes={
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
        self.waiting = [self._read(record) for record in state["waiting"]]
        for record in state["done"]:
            rollout = self._read(record)
            self.done.setdefault(rollout.group, []).append(rollout)

    def _read(self, record: Mapping[str, Any]) -> Rollout:
        problem = self.problems.get(record["group"])
        if problem is None or problem.id != record["problem"]:
            raise CheckpointError(f"the pool has a rollout of problem '{record['problem']}' in group {record['group']}, but its source now "
                                  f"gives '{None if problem is None else problem.id}'; resume with the problems that the run began with")
        return records.from_json(record, problem)
