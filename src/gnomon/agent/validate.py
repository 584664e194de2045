"""Is a task one? Its solution must score 1 and doing nothing 0; whatever fails is refused with the reason (report §4.2).

Every attempt has a machine of its own, judged exactly as an agent's would be. Read next: `task_source.py`, where tasks come from.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace

from gnomon.agent import steps
from gnomon.agent.machine import made, spec
from gnomon.agent.solution import Solution
from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, StepEnd, Trajectory, Turn
from gnomon.agent.verifier import judge
from gnomon.errors import GnomonError
from gnomon.sandbox.sandbox import Backend, Command, Sandbox

SETUP_SECONDS = 300.0  # for what prepares a step


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """What was found. `reason` says why the task is refused, None where it holds; `solved` and `nothing` are the scores, None where it did
    not come to one."""

    task_id: str
    solved: Score | None = None
    nothing: Score | None = None
    reason: str | None = None

    @property
    def holds(self) -> bool:
        """Whether the task may be used."""
        return self.reason is None


async def validate(task: Task, backend: Backend | None = None) -> Validation:
    """Try a task's solution, then nothing. `backend` makes the machines; without one, tasks that need none can be tried.

    A machine that cannot be made refuses the task too, with that reason.
    """
    for step, part in steps.parts(task):
        if part.solution is None:
            what = f"its step '{step.name}'" if step else "it"
            return Validation(task_id=task.id, reason=f"{what} has no solution, so nobody knows whether it can be solved")
    if task.image is not None and backend is None:
        return Validation(task_id=task.id, reason=f"it needs a machine ({task.image}) and there is no backend to make one")
    solved = await _attempt(task, backend, solving=True)
    if why := _refused(solved, 1.0, "its solution"):
        return Validation(task_id=task.id, solved=solved, reason=why)
    nothing = await _attempt(task, backend, solving=False)
    return Validation(task_id=task.id, solved=solved, nothing=nothing, reason=_refused(nothing, 0.0, "doing nothing"))


async def validated(tasks: Iterable[Task], backend: Backend | None = None, *, concurrency: int = 2
                    ) -> AsyncIterator[tuple[Task, Validation]]:
    """Each task with what was found, in the order of `tasks`, a few tried at a time; no more are made than are asked for."""
    waiting: list[tuple[Task, asyncio.Task[Validation]]] = []
    coming = iter(tasks)
    try:
        while True:
            while len(waiting) < max(concurrency, 1) and (task := next(coming, None)) is not None:
                waiting.append((task, asyncio.ensure_future(validate(task, backend))))
            if not waiting:
                return
            task, found = waiting[0]
            result = await found
            waiting.pop(0)
            yield task, result
    finally:
        for _, found in waiting:
            found.cancel()
        await asyncio.gather(*(found for _, found in waiting), return_exceptions=True)


async def _attempt(task: Task, backend: Backend | None, *, solving: bool) -> Score:
    """The score of what a task's solution does and says, step by step where it has steps; of nothing, if not `solving`."""
    purpose = "solution" if solving else "nothing"
    trajectory = Trajectory(id=purpose, task_id=task.id, harness=purpose)
    if task.image is None or backend is None:
        return await _walked(task, trajectory, None, backend, solving)
    try:
        box = await made(task, backend, spec(task, purpose))
        try:
            await steps.healthy(task, box)
            return await _walked(task, trajectory, box, backend, solving)
        finally:
            await asyncio.shield(box.kill())
    except (GnomonError, OSError) as error:
        return Score(reward=None, error=f"{type(error).__name__}: {error}")


async def _walked(task: Task, trajectory: Trajectory, box: Sandbox | None, backend: Backend | None, solving: bool) -> Score:
    """The score of a task in its machine: of the whole, or of all its steps, as an attempt would get it."""
    score = Score(reward=None, error="nothing was judged")
    for step, part in steps.parts(task):
        if step is not None and box is not None:
            await steps.prepare(task, step, box, SETUP_SECONDS)
        solution = part.solution if solving else None
        why = await _do(part, box, solution) if solution and box is not None else None
        if why is not None:
            return Score(reward=None, error=f"step '{step.name}': {why}" if step else why)
        if solution is not None and solution.messages:
            trajectory = trajectory.appended(Turn(messages=solution.messages))
        score = await _judged(part, replace(trajectory, stop_reason="finished"), box, backend)
        if step is None or score.reward is None:
            return score
        ended = StepEnd(name=step.name, turns=len(trajectory.turns), stop_reason="finished", score=score)
        trajectory = replace(trajectory, steps=(*trajectory.steps, ended))
        if steps.too_low(step, score) is not None:
            break
    return await _judged(task, replace(trajectory, stop_reason="finished"), box, backend)


async def _judged(task: Task, trajectory: Trajectory, box: Sandbox | None, backend: Backend | None) -> Score:
    try:
        return await judge(task, trajectory, box, backend)
    except GnomonError as error:  # a check that is malformed
        return Score(reward=None, error=f"{type(error).__name__}: {error}")


async def _do(task: Task, box: Sandbox, solution: Solution) -> str | None:
    """Do what a solution does; why it could not be done, else None."""
    for path, data in solution.files.items():
        await box.write(path, data, 0o755)
    if solution.script is None:
        return None
    result = await box.exec(Command(argv=("/bin/sh", "-c", solution.script), env=dict(solution.env), timeout_seconds=solution.seconds,
                                    cwd=task.workdir, user=task.user))
    if result.timed_out:
        return f"the script ran past {solution.seconds:g} s"
    if result.code != 0:
        return f"the script ended with status {result.code}: {(result.stdout + result.stderr)[-300:].decode('utf-8', 'replace')}"
    return None


def _refused(score: Score, wanted: float, what: str) -> str | None:
    """Why a score is not the one that it must be, else None."""
    if score.error is not None or score.reward is None:
        return f"{what} gave no score: {score.error}"
    if not math.isclose(score.reward, wanted, abs_tol=1e-9):
        return f"{what} scores {score.reward:g} and must score {wanted:g}: {'; '.join(score.evidence)[:300]}"
    return None
