"""One attempt: a machine is made, the harness acts under a deadline, a verifier looks at what is left, the machine is ended.

This file owns the border between what may go wrong and what a score means. What the policy did, running out of budget or time included, is
judged. What the machine, the endpoint, the harness or the verifier did wrong is `failed` or a score without reward, and belongs in no
average. Read next: `evaluate.py`, which makes many.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import time
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from gnomon.agent import machine, steps, trajectory_file
from gnomon.agent.diagnosis import Diagnosis
from gnomon.agent.harness.harness import Fits, Harness
from gnomon.agent.policy import ContextFull, Policy
from gnomon.agent.record import BudgetSpent, Recorder
from gnomon.agent.task import Step, Task
from gnomon.agent.trajectory import Score, StepEnd, StopReason, Trajectory
from gnomon.agent.trajectory_file import TrajectoryFile
from gnomon.agent.verifier import judge
from gnomon.data.messages import Effort
from gnomon.errors import CapacityError, ConfigError, DataError, GnomonError, SandboxTimeout
from gnomon.sandbox.sandbox import Backend, Sandbox, Spec

T = TypeVar("T")

STOPS_EVERYTHING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE))
"""Errors of this machine that the next attempt would meet too: they are raised, not made the end of one attempt."""

_abandoned: set[asyncio.Future[Any]] = set()


class Overran(Exception):
    """Something did not end in its time. Not `TimeoutError`, which what runs may raise for reasons of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long each part of an attempt may take, in seconds. `install` is for what a harness needs in its machine, a program for instance:
    it is made once for many attempts, so it is in the seconds of none. `agent` is for tasks that name no time; `grace` is what something
    that was told to stop gets before nobody waits for it any more."""

    install: float = 7200.0
    machine: float = 300.0
    agent: float = 1800.0
    judge: float = 900.0
    grace: float = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """What is attempted, and by whom. `id` is unique in a run. `made_of` is JSON that says what the attempt rests on, digests for
    instance: a trajectory on disk with other values is of another attempt."""

    id: str
    task: Task
    harness: Harness
    policy: Policy
    model: str = ""
    effort: Effort | None = None
    group: str | None = None
    made_of: Mapping[str, Any] = field(default_factory=dict)

    def beginning(self) -> Trajectory:
        """The trajectory before its first turn."""
        made_of = {"task": digest(self.task.to_json()), **self.made_of}
        return Trajectory(id=self.id, task_id=self.task.id, harness=self.harness.name, model=self.model or self.policy.name,
                          effort=self.effort, group=self.group, metadata={"made_of": made_of})


def digest(value: Any) -> str:
    """A short name for JSON: equal values, equal names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def kept(rollout: Rollout, path: Path) -> Trajectory | None:
    """The trajectory of an attempt that came to its end earlier, if the file has it and it rests on the same task, harness and policy."""
    if not path.is_file() or not path.stat().st_size:
        return None
    try:
        found = trajectory_file.read(path)
    except DataError:
        return None
    begun = rollout.beginning()
    same = (found.id, found.task_id, found.metadata) == (begun.id, begun.task_id, begun.metadata)
    return found if same and found.stop_reason is not None and found.score is not None else None


def put_aside(path: Path) -> Path | None:
    """Rename what an interrupted or failed attempt left, so that nothing is lost and the next begins anew; returns the new name."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


async def attempt(rollout: Rollout, path: Path, backend: Backend | None = None, deadlines: Deadlines | None = None) -> Trajectory:
    """Attempt a task and judge the result; the trajectory grows in `path` and is complete there when this returns.

    What an earlier attempt left in `path` is put aside: its machine is gone, so there is nothing to go on from. Raises only for what the
    next attempt would meet too: a full disk, a malformed check or diagnosis. Cancelled, it ends the machine first and leaves the file
    unfinished.
    """
    deadlines = deadlines or Deadlines()
    diagnosis = Diagnosis(rollout.task, backend) if rollout.task.diagnosis is not None else None
    put_aside(path)
    file = TrajectoryFile(path, rollout.beginning())
    try:
        await _Attempt(rollout, file, backend, deadlines, diagnosis).run()
        return file.trajectory
    finally:
        file.close()


class _Attempt:
    """The parts of one attempt, and how long each took."""

    def __init__(self, rollout: Rollout, file: TrajectoryFile, backend: Backend | None, deadlines: Deadlines,
                 diagnosis: Diagnosis | None) -> None:
        self.rollout, self.file, self.backend, self.deadlines, self.diagnosis = rollout, file, backend, deadlines, diagnosis
        self.seconds: dict[str, float] = {}
        self.box: Sandbox | None = None

    async def run(self) -> None:
        """All of it. Whatever happens, the machine is ended before this returns."""
        try:
            reason, score = await self._acted_and_judged()
        except BaseException:
            await self._end_machine()
            raise
        failure = await self._end_machine()
        if failure is not None:
            score = replace(score, evidence=(*score.evidence, failure))
        self.file.judge(score)
        self.file.end(reason, self.seconds)

    async def _acted_and_judged(self) -> tuple[StopReason, Score]:
        try:
            wanted = await self._wanted()
            with self._timed("machine"):
                await self._machine(wanted)
        except Exception as error:  # noqa: BLE001 - whatever a machine or what a harness installs raises is one attempt's failure
            return "failed", Score(reward=None, error=_explained(error))
        task = self.rollout.task
        return await self._stepwise(task) if task.steps else await self._part(task, None)

    async def _stepwise(self, task: Task) -> tuple[StopReason, Score]:
        """One step after the other, until one is not good enough for the next, or has no score."""
        reason: StopReason = "failed"
        for step, part in steps.parts(task):
            assert step is not None
            try:
                with self._timed("machine"):
                    await self._prepared(step)
            except Exception as error:  # noqa: BLE001 - as above
                return "failed", Score(reward=None, error=f"step '{step.name}': {_explained(error)}")
            reason, score = await self._part(part, step)
            self.file.step(StepEnd(name=step.name, turns=len(self.file.trajectory.turns), stop_reason=reason, score=score))
            if reason == "failed" or score.reward is None:
                return reason, Score(reward=None, error=f"step '{step.name}': {score.error}", evidence=score.evidence)
            if steps.too_low(step, score) is not None:
                break
        return reason, await self._judge(task, reason)

    async def _part(self, task: Task, step: Step | None) -> tuple[StopReason, Score]:
        """A task, or a step of one, attempted and judged."""
        try:
            with self._timed("agent"):
                reason = await self._act(task, step)
        except Exception as error:  # noqa: BLE001 - whatever a harness, an endpoint or a machine raises is one attempt's failure
            return "failed", Score(reward=None, error=_explained(error))
        if reason == "failed":
            return reason, Score(reward=None, error=f"the harness '{self.rollout.harness.name}' could not go on")
        with self._timed("judge"):
            return reason, await self._judge(task, reason)

    async def _wanted(self) -> Spec | None:
        """The machine that the task needs, and its harness in it; None where the task needs none. What the harness installs has a deadline
        of its own."""
        task, limits = self.rollout.task, self.deadlines
        if task.image is None:
            return None
        if self.backend is None:
            raise ConfigError(f"task {task.id} needs a machine ({task.image}) and there is no backend to make one")
        alive = limits.machine + 60.0 + sum((part.budget.seconds or limits.agent) + limits.judge + 4 * limits.grace +
                                            (limits.machine if step else 0.0) for step, part in steps.parts(task))
        wanted = machine.spec(task, "agent", network=task.network, ttl_seconds=alive)
        if not isinstance(self.rollout.harness, Fits):
            return wanted
        try:
            return await bounded(self.rollout.harness.fitted(wanted), limits.install, limits.grace)
        except Overran:
            raise SandboxTimeout(f"what the harness '{self.rollout.harness.name}' needs was not installed within {limits.install:g} s "
                                 "(the deadline 'install')") from None

    async def _machine(self, wanted: Spec | None) -> None:
        """That machine with the task's files. While this host is full, wait for room until the deadline."""
        limits = self.deadlines
        if wanted is None or self.backend is None:
            return
        ends, pause = time.monotonic() + limits.machine, 0.1
        while True:
            left = max(ends - time.monotonic(), 0.0)
            try:
                await bounded(self._made(self.backend, wanted), left, limits.grace)
                return
            except CapacityError:
                if left <= pause:
                    raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)
            except Overran:
                raise SandboxTimeout(f"its machine was not ready within {limits.machine:g} s") from None

    async def _made(self, backend: Backend, wanted: Spec) -> None:
        """Its machine is the attempt's from the moment it is there: one that comes too late is ended too."""
        self.box = await machine.made(self.rollout.task, backend, wanted)
        await steps.healthy(self.rollout.task, self.box)

    async def _prepared(self, step: Step) -> None:
        """The machine as a step wants it."""
        if self.box is None:
            return
        seconds = self.deadlines.machine
        try:
            await bounded(steps.prepare(self.rollout.task, step, self.box, seconds), seconds + self.deadlines.grace, self.deadlines.grace)
        except Overran:
            raise SandboxTimeout(f"its machine was not ready within {seconds:g} s") from None

    async def _act(self, task: Task, step: Step | None) -> StopReason:
        rollout, seconds = self.rollout, task.budget.seconds or self.deadlines.agent
        recorder = Recorder(rollout.policy, self.file, task.budget, diagnosis=self.diagnosis, part=step.name if step else None)
        running = rollout.harness.run(task.shown(), recorder, self.box, effort=rollout.effort)
        try:
            reason = await bounded(running, seconds, self.deadlines.grace)
        except BudgetSpent as spent:
            return "deadline" if spent.limit == "seconds" else "budget"
        except ContextFull:
            return "budget"
        except Overran:
            return "deadline"
        finally:
            await bounded(_closed(recorder), self.deadlines.grace, self.deadlines.grace)
        if reason not in get_args(StopReason):
            raise ConfigError(f"harness '{rollout.harness.name}' ended with {reason!r}, which is none of {', '.join(get_args(StopReason))}")
        return reason

    async def _judge(self, task: Task, reason: StopReason) -> Score:
        """The score, less the price of asking the public verifier. A verifier that does not come to an end is an error, not a 0."""
        ended = replace(self.file.trajectory, stop_reason=reason)
        try:
            score = await bounded(judge(task, ended, self.box, self.backend), self.deadlines.judge, self.deadlines.grace)
        except Overran:
            return Score(reward=None, error=f"verifier '{task.check.kind}' did not end within {self.deadlines.judge:g} s")
        return score if self.diagnosis is None else self.diagnosis.penalised(score)

    async def _end_machine(self) -> str | None:
        """End the machine, once more if that fails; what went wrong, for the score's evidence. The reaper gets what is still there."""
        box, self.box, failure = self.box, None, None
        for _ in range(2 if box is not None else 0):
            assert box is not None
            try:
                await asyncio.shield(bounded(box.kill(), 30.0 + self.deadlines.grace, self.deadlines.grace))
                return None
            except (GnomonError, OSError, Overran) as error:
                failure = f"the machine {box.id} could not be ended: {_explained(error)}"
        return failure

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = round(self.seconds.get(part, 0.0) + time.monotonic() - began, 6)


async def _closed(recorder: Recorder) -> None:
    """End the recorder; an endpoint that cannot be told to forget a session is no reason to fail."""
    with contextlib.suppress(GnomonError, OSError):
        await recorder.close()


def _explained(error: Exception) -> str:
    """An error in one line. Raises it where the next attempt would meet it too."""
    if isinstance(error, OSError) and error.errno in STOPS_EVERYTHING:
        raise error
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def bounded(work: Coroutine[Any, Any, T], seconds: float, grace: float) -> T:
    """The result of `work`, or `Overran` after `seconds`, also where it does not stop when told: then nobody waits for it any more.

    Cancelled itself, it stops the work first.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await asyncio.shield(_stopped(task, grace))
        raise
    if not task.done():
        await _stopped(task, grace)
        raise Overran(f"did not end within {seconds:g} s")
    if task.cancelled():
        raise RuntimeError("cancelled itself")
    return task.result()


async def _stopped(task: asyncio.Task[Any], grace: float) -> None:
    """Stop a task: by cancelling, then by closing its coroutine, which one that swallows cancellation does not survive."""
    task.cancel()
    await asyncio.wait({task}, timeout=grace)
    if not task.done():
        coroutine = task.get_coro()
        with contextlib.suppress(RuntimeError, ValueError):
            if coroutine is not None:
                coroutine.close()
        task.cancel()
        await asyncio.wait({task}, timeout=min(grace, 1.0))
    if task.done():
        if not task.cancelled():
            task.exception()  # taken note of, so that nobody complains that it was never looked at
    else:
        _abandoned.add(task)
        task.add_done_callback(_abandoned.discard)
