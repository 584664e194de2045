"""Tasks × policies × harnesses × efforts, several attempts each, so many at a time; stopped anywhere, the same again goes on.

Each attempt has a file of its own and is finished or does not count, so there is no other state to keep. What an attempt rests on is in its
file: where a task, a policy or a harness has changed since, the attempt begins anew. Read next: `rollout.py` for one attempt,
`evaluate_results.py` for what is made of them, `evaluate_assembly.py` for how a recipe becomes an `Entrants`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gnomon import whole
from gnomon.agent import evaluate_page
from gnomon.agent.evaluate_recipe import EvalRecipe
from gnomon.agent.evaluate_results import Column, Results, Row, row, summary
from gnomon.agent.harness.harness import Harness
from gnomon.agent.policy import Policy
from gnomon.agent.rollout import Deadlines, Rollout, attempt, digest, kept
from gnomon.agent.task import Task
from gnomon.agent.trajectory import Trajectory
from gnomon.config import to_dict
from gnomon.errors import ConfigError
from gnomon.sandbox.sandbox import Backend


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrants:
    """Who takes part, opened and ready. `made_of` says for a policy or a harness, by name, what it rests on: JSON that changes when it
    does."""

    tasks: Sequence[Task]
    policies: Mapping[str, Policy]
    harnesses: Mapping[str, Harness]
    backend: Backend | None = None
    made_of: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One attempt that there is to be, and where it goes, relative to the evaluation's folder."""

    column: Column
    rollout: Rollout
    sample: int
    path: Path
    page: Path


class Watch(Protocol):
    """Whoever wants to see how it goes."""

    def begins(self, planned: Sequence[Planned], finished: Sequence[Row]) -> None:
        """What there is to be, and what an earlier run finished."""
        ...

    def attempt_begins(self, planned: Planned) -> None:
        """An attempt begins."""
        ...

    def attempt_ends(self, planned: Planned, row: Row | None) -> None:
        """It has ended; None: it was stopped, or is not attempted."""
        ...

    def notice(self, text: str) -> None:
        """Something that people should know."""
        ...


def plan(recipe: EvalRecipe, entrants: Entrants) -> list[Planned]:
    """Every attempt, in order: all tasks once before any of them again."""
    columns = [Column(policy=policy, harness=harness, effort=effort)
               for policy in entrants.policies for harness in entrants.harnesses for effort in recipe.efforts]
    return [_planned(entrants, column, task, sample) for sample in range(recipe.samples) for task in entrants.tasks for column in columns]


def _planned(entrants: Entrants, column: Column, task: Task, sample: int) -> Planned:
    made_of = {name: digest(entrants.made_of.get(name, name)) for name in (column.policy, column.harness)}
    folder, name = slug(column.name), f"{slug(task.id)}-{sample + 1}"
    rollout = Rollout(
        id=f"{column.name}/{task.id}/{sample + 1}", task=task, harness=entrants.harnesses[column.harness],
        policy=entrants.policies[column.policy], model=column.policy,
        effort=None if column.effort == "none" else column.effort,  # type: ignore[arg-type]
        group=f"{column.name}/{task.id}", made_of=made_of)
    return Planned(column=column, rollout=rollout, sample=sample, path=Path("attempts", folder, f"{name}.jsonl"),
                   page=Path("pages", folder, f"{name}.html"))


def slug(name: str) -> str:
    """A name as part of a path: itself where its letters allow it, else something like it with a digest."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80]
    return plain if plain == name else f"{plain}-{digest(name)[:8]}".strip("-")


class Evaluation:
    """One evaluation in its folder; `results` is what is known so far."""

    def __init__(self, recipe: EvalRecipe, entrants: Entrants, watch: Watch) -> None:
        self.recipe, self.entrants, self.watch = recipe, entrants, watch
        self.planned = plan(recipe, entrants)
        self.notices: list[str] = []
        self._rows: dict[str, Row] = {}
        self._failures: Counter[str] = Counter()
        self._given_up: set[str] = set()
        limits = recipe.deadlines
        self._deadlines = Deadlines(install=limits.install, machine=limits.machine, agent=limits.agent, judge=limits.judge,
                                    grace=limits.grace)

    @property
    def results(self) -> Results:
        """What is known so far."""
        rows = [self._rows[each.rollout.id] for each in self.planned if each.rollout.id in self._rows]
        tasks = tuple(task.id for task in self.entrants.tasks)
        counts = Counter(each.column for each in self.planned)
        columns = tuple(summary(column, [r for r in rows if r.column == column], tasks, count, self.recipe.solved_at)
                        for column, count in counts.items())
        return Results(columns=columns, rows=tuple(rows), tasks=tasks, planned=len(self.planned), notices=tuple(self.notices))

    async def run(self) -> Results:
        """Attempt what is left. However this ends, the results so far are written.

        Raises `ConfigError` while another evaluation runs in the folder, and what no attempt can help, a full disk for instance.
        """
        folder = self.recipe.folder
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            left = self._take_up()
            try:
                await self._work(left)
            finally:
                self.write()
        return self.results

    def _take_up(self) -> list[Planned]:
        """What earlier runs did not finish. Attempts that failed, by no fault of the policy, begin anew."""
        left, changed = [], 0
        for each in self.planned:
            path = self.recipe.folder / each.path
            found = kept(each.rollout, path)
            if found is not None and found.score is not None and found.score.scored:
                done = self._finished(each, found)
                if not (self.recipe.folder / each.page).exists():
                    evaluate_page.write_attempt(self.recipe.folder, each.page, done, found, each.rollout.task)
            else:
                changed += found is None and path.exists()
                left.append(each)
        if changed:
            self._notice(f"{changed} attempts begin anew: they were interrupted, or their task, policy or harness has changed since")
        self.watch.begins(self.planned, tuple(self._rows.values()))
        return left

    async def _work(self, left: Sequence[Planned]) -> None:
        coming: Iterator[Planned] = iter(left)

        async def worker() -> None:
            for each in coming:
                await self._one(each)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.recipe.concurrency, len(left))):
                    group.create_task(worker())
        except BaseExceptionGroup as errors:  # what stops everything, once for each worker
            raise errors.exceptions[0] from None

    async def _one(self, each: Planned) -> None:
        if each.column.policy in self._given_up:
            self.watch.attempt_ends(each, None)
            return
        self.watch.attempt_begins(each)
        done: Row | None = None
        try:
            trajectory = await self._attempted(each)
            done = self._finished(each, trajectory)
            await asyncio.to_thread(evaluate_page.write_attempt, self.recipe.folder, each.page, done, trajectory, each.rollout.task)
        finally:
            self.watch.attempt_ends(each, done)
        self._count(each.column.policy, done)

    async def _attempted(self, each: Planned) -> Trajectory:
        path = self.recipe.folder / each.path
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(self.recipe.retries):
            trajectory = await attempt(each.rollout, path, self.entrants.backend, self._deadlines)
            if trajectory.stop_reason != "failed" or each.column.policy in self._given_up:
                return trajectory
        return await attempt(each.rollout, path, self.entrants.backend, self._deadlines)

    def _finished(self, each: Planned, trajectory: Trajectory) -> Row:
        done = row(trajectory, each.column, each.sample + 1, str(each.path), str(each.page))
        self._rows[each.rollout.id] = done
        return done

    def _count(self, policy: str, done: Row) -> None:
        """A policy whose attempts keep failing is given up: a dead endpoint would only be asked again and again."""
        self._failures[policy] = self._failures[policy] + 1 if done.stop_reason == "failed" else 0
        if self._failures[policy] >= self.recipe.give_up_after and policy not in self._given_up:
            self._given_up.add(policy)
            self._notice(f"policy '{policy}' is given up after {self._failures[policy]} failures in a row: {done.error}")

    def _notice(self, text: str) -> None:
        self.notices.append(text)
        self.watch.notice(text)

    def write(self) -> None:
        """`eval.json` and the pages of what is known so far."""
        results, folder = self.results, self.recipe.folder
        record = {"recipe": to_dict(self.recipe), **results.to_json()}
        whole.write(folder / "eval.json", json.dumps(record, indent=2, allow_nan=False) + "\n")
        evaluate_page.write(folder, results)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another evaluation runs in {folder}; wait for it, or use another 'folder'") from None
        yield
