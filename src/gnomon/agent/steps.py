"""Tasks with several steps: one machine, and for each step a request of its own, an agent that begins anew, and a verifier when it ends.

What a step leaves in the machine is there for the next. `part` makes a plain task of a step, which a harness attempts and a verifier judges
like any other. Read next: `rollout.py`, which walks through them, and `verifiers/steps.py`, which makes one reward of theirs.
"""

from __future__ import annotations

import asyncio
import posixpath
import time
from collections.abc import Iterator
from dataclasses import replace

from gnomon.agent.task import Step, Task
from gnomon.agent.trajectory import Score
from gnomon.errors import SandboxError
from gnomon.sandbox.sandbox import Command, Sandbox

TAIL = 300  # characters of what a script said


def parts(task: Task) -> Iterator[tuple[Step | None, Task]]:
    """Each step with its task; the task itself, and None, where there are no steps."""
    if not task.steps:
        yield None, task
    for step in task.steps:
        yield step, part(task, step)


def part(task: Task, step: Step) -> Task:
    """A step as a task: its words, verifier, time and solution, in the machine of the whole."""
    return replace(
        task, prompt=step.prompt, check=step.check, steps=(), solution=step.solution, user=step.user or task.user,
        network=task.network if step.network is None else step.network, artifacts=(*task.artifacts, *step.artifacts), health=step.health,
        budget=task.budget if step.seconds is None else replace(task.budget, seconds=step.seconds))


async def prepare(whole: Task, step: Step, box: Sandbox, seconds: float) -> None:
    """Make a machine ready for a step: its network, its files, its setup within `seconds`, its health.

    Raises `SandboxError` where its setup fails or it does not become healthy.
    """
    task = part(whole, step)
    if any(each.network is not None for each in whole.steps):
        await box.set_network(task.network)
    folder = task.workdir or box.spec.workdir
    for path, data in step.files.items():
        await box.write(posixpath.join(folder, path), data, 0o755 if path in step.programs else 0o644)
    if step.setup is not None:
        argv = ("/bin/bash", f"./{step.setup}")
        result = await box.exec(Command(argv=argv, timeout_seconds=seconds, cwd=folder, user=task.user))
        if result.timed_out or result.code != 0:
            how = f"ran past {seconds:g} s" if result.timed_out else f"ended with status {result.code}"
            raise SandboxError(f"its setup {how}: {(result.stdout + result.stderr)[-TAIL:].decode('utf-8', 'replace')}")
    await healthy(task, box)


async def healthy(task: Task, box: Sandbox) -> None:
    """Wait until a machine is as healthy as its task wants it. Raises `SandboxError` when too many tries in a row have failed."""
    health = task.health
    if health is None:
        return
    began, failed = time.monotonic(), 0
    command = Command(argv=("/bin/sh", "-c", health.command), timeout_seconds=health.timeout, cwd=task.workdir, user=task.user)
    while True:
        result = await box.exec(command)
        if result.code == 0 and not result.timed_out:
            return
        failed += time.monotonic() - began >= health.grace
        if failed > 0 and failed >= health.retries:
            said = (result.stdout + result.stderr)[-TAIL:].decode("utf-8", "replace")
            raise SandboxError(f"it did not become healthy in {failed} tries of `{health.command[:100]}`: {said}")
        await asyncio.sleep(health.interval)


def too_low(step: Step, score: Score) -> str | None:
    """Which reward of a step is below what it must be for the next to be attempted, in words; None where all are enough."""
    rewards = {**score.metrics, **({"reward": score.reward} if score.reward is not None else {})}
    for name, least in step.least.items():
        if name not in rewards or rewards[name] < least:
            return f"'{name}' is {rewards[name]:g}, below {least:g}" if name in rewards else f"there is no '{name}'"
    return None
