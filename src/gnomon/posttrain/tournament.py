"""Rewards where no program can judge: within a group every answer is compared with every other one (report §4.2, the agentic judge).

A model compares pairs, each in both orders, by a rubric that it writes after reading (`agent/rubric_judge.py`); a reward is the share of
its comparisons that an answer won. Length is kept down by another rule than the token budgets of effort: l0 is the length of the cold
start's answers, and an answer longer than sigma l0 loses each comparison unread. A judge that fails leaves its whole group without
rewards, since the others' shares rest on it. Off unless a recipe has the table. Read next: `rl.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.agent import policy as policies
from gnomon.agent.policy import Policy
from gnomon.agent.rubric_judge import compare
from gnomon.agent.trajectory import Score
from gnomon.config import setting
from gnomon.errors import ConfigError, GnomonError
from gnomon.parallel.mesh import Mesh
from gnomon.posttrain.effort import Budgets, measure
from gnomon.posttrain.partial import Group
from gnomon.posttrain.rollout import Rollout

if TYPE_CHECKING:
    from gnomon.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TournamentConfig:
    """How groups of problems without a grader are judged."""

    judge: dict[str, Any] = setting(doc="the policy that compares: `kind`, and the settings of that kind, as in recipes/eval.toml")
    sigma: float = setting(2.0, "an answer of more than sigma l0 ids loses")
    lengths: Path | None = setting(None, "file of l0, measured on the cold start if it is not there yet; none: no length loses")
    at_once: int = setting(8, "comparisons under way at a time")

    def __post_init__(self) -> None:
        if not isinstance(self.judge.get("kind"), str):
            raise ConfigError("'judge' has no 'kind'; write a table with the kind of a policy and its settings")
        if self.sigma <= 0 or self.at_once < 1:
            raise ConfigError(f"'sigma' {self.sigma} must be positive and 'at_once' {self.at_once} at least 1")


def answer(rollout: Rollout) -> tuple[int, ...]:
    """The ids that a reader sees: what was sampled after the thinking, without the id that ended it."""
    ids, problem = rollout.sampled, rollout.problem
    if problem.think_end is not None:
        ids = ids[ids.index(problem.think_end) + 1 :] if problem.think_end in ids else ()
    return ids[:-1] if ids and ids[-1] in problem.stop_ids else ids


def lengths(rollouts: Sequence[Rollout], measured_on: str = "") -> Budgets:
    """l0 of each class of problems: the mean length of the cold start's answers."""
    return measure(rollouts, measured_on, lambda each: len(answer(each)))


class Tournament:
    """Judges groups. `l0` None: no length loses. `policy` is the one of the settings, if it was opened already."""

    def __init__(self, config: TournamentConfig, tokenizer: Tokenizer, l0: Budgets | None = None, policy: Policy | None = None,
                 mesh: Mesh | None = None) -> None:
        self.config, self._tokenizer, self._l0, self._mesh = config, tokenizer, l0, mesh or Mesh()
        settings: Mapping[str, Any] = {name: value for name, value in config.judge.items() if name != "kind"}
        self._policy = policies.opened(config.judge["kind"], settings) if policy is None else policy

    def judged(self, groups: Sequence[Group]) -> list[Group]:
        """The groups; those whose problem has no grader have rewards from their tournament now. Of several ranks, which all know the same
        groups, the first one asks the judge, and all hear what it said."""
        found = asyncio.run(self._judged(groups)) if self._mesh.is_main else []
        scores = self._mesh.gather([[each.score for each in group.rollouts] for group in found])[0]
        return [group if group.problem.grade is not None else replace(group, rollouts=tuple(map(_scored, group.rollouts, its)))
                for group, its in zip(groups, scores, strict=True)]

    async def _judged(self, groups: Sequence[Group]) -> list[Group]:
        room = asyncio.Semaphore(self.config.at_once)
        return list(await asyncio.gather(*(self._group(group, room) for group in groups)))

    async def _group(self, group: Group, room: asyncio.Semaphore) -> Group:
        if group.problem.grade is not None:
            return group
        try:
            scores = await self._scores(group.rollouts, room)
        except GnomonError as error:
            scores = [Score(reward=None, error=f"the judge of problem {group.problem.id} failed: {error}")] * len(group.rollouts)
        return replace(group, rollouts=tuple(each.graded(score) for each, score in zip(group.rollouts, scores, strict=True)))

    async def _scores(self, rollouts: Sequence[Rollout], room: asyncio.Semaphore) -> list[Score]:
        """Shares of comparisons won. What is too long loses, to one that is too long as well; what is empty does not read better."""
        words = [self._tokenizer.decode(answer(each)) for each in rollouts]
        task = self._tokenizer.decode(rollouts[0].problem.prompt)
        lost = [self._too_long(each) or not text.strip() for each, text in zip(rollouts, words, strict=True)]
        points = [0.0] * len(rollouts)

        async def one(a: int, b: int) -> None:
            async with room:
                winner = (await compare(self._policy, task, (words[a], words[b]))).winner
            for place, which in enumerate((a, b)):
                points[which] += 0.5 if winner is None else float(winner == place)

        matches = []
        for a, b in combinations(range(len(rollouts)), 2):
            if lost[a] or lost[b]:
                points[a], points[b] = points[a] + 2.0 * (not lost[a]), points[b] + 2.0 * (not lost[b])
            else:
                matches += [one(a, b), one(b, a)]
        await asyncio.gather(*matches)
        most = 2.0 * (len(rollouts) - 1)
        return [Score(reward=won / most, metrics={"too_long": float(out)}) for won, out in zip(points, lost, strict=True)]

    def _too_long(self, rollout: Rollout) -> bool:
        return self._l0 is not None and len(answer(rollout)) > self.config.sigma * self._l0.of(rollout)


def _scored(rollout: Rollout, score: Score | None) -> Rollout:
    return replace(rollout, score=score)
