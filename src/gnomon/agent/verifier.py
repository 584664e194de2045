"""Who judges: the contract of verifiers, and the machine that each gets, so that nothing the agent prepared counts (report §4.2).

`judge` gives a verifier a copy of the agent's machine or a fresh one with what the task says is carried over; processes of the agent are
in neither. A verifier that fails gives a `Score` without reward. Read next: `verifiers/tests.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from gnomon import extend
from gnomon.agent.fields import Fields
from gnomon.agent.task import Check, Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.errors import ConfigError, DataError, GnomonError, SandboxError, SandboxLost, SandboxTimeout, VerifierError
from gnomon.sandbox.cycles import graded
from gnomon.sandbox.sandbox import Backend, Limits, Sandbox, Spec

KINDS = "gnomon.agent.verifiers"
TOO_MUCH = frozenset(("/", "/etc", "/logs", "/usr", "/usr/local"))
DECIDING = ("/tests", "/solution", "/logs/verifier", "/bin", "/sbin", "/lib", "/lib64", "/usr/bin", "/usr/sbin", "/usr/lib",
            "/usr/local/bin", "/usr/local/sbin", "/usr/local/lib", "/etc/ld.so.preload", "/etc/ld.so.conf.d", "/proc", "/dev", "/sys")
"""What an agent could make there, or below, decides how a verifier runs; in a fresh machine it comes from the image."""

Machine = Literal["none", "fork", "fresh"]


class Verifier(Protocol):
    """How one kind judges. Built from the settings of a `Check`: `Verifier(settings)` raises `DataError` naming a wrong one.

    `machine` says what `score` gets: nothing, a copy of the agent's machine, or a fresh one of the same image with the task's artifacts.
    """

    machine: Machine

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """The score. Raises `VerifierError` where it cannot tell; a low score is for an agent that failed."""
        ...


def opened(check: Check, where: str) -> Verifier:
    """The verifier of a check. Raises `ConfigError` for an unknown kind, listing the choices, `DataError` for its settings."""
    kind = extend.find(KINDS, check.kind, "Verifier")
    try:
        return cast(Verifier, kind(check.settings))
    except (DataError, ConfigError) as error:
        raise DataError(f"{where}: verifier '{check.kind}': {error}") from None


async def judge(task: Task, trajectory: Trajectory, sandbox: Sandbox | None = None, backend: Backend | None = None) -> Score:
    """The score of an attempt; what fails on the way is the error of a `Score` without reward.

    `backend` makes the fresh machine where one is wanted. Raises only for a task whose check is malformed, which no attempt can help.
    """
    verifier = opened(task.check, f"task {task.id}")
    try:
        async with _machine(verifier.machine, task, sandbox, backend) as box:
            score = await _scored(verifier, task, trajectory, box)
    except (GnomonError, OSError, TimeoutError) as error:
        return Score(reward=None, error=f"{type(error).__name__}: {error}")
    return score


async def _scored(verifier: Verifier, task: Task, trajectory: Trajectory, box: Sandbox | None) -> Score:
    """A verifier's score; whatever it raises is a failure of judging, and so is a result that is no score."""
    try:
        score = await verifier.score(task, trajectory, box)
    except GnomonError:
        raise
    except Exception as error:
        raise VerifierError(f"verifier '{task.check.kind}' crashed: {type(error).__name__}: {error}") from error
    if not isinstance(score, Score) or (score.reward is None and score.error is None):
        raise VerifierError(f"verifier '{task.check.kind}' gave no score: {score!r}")
    return score


@contextlib.asynccontextmanager
async def _machine(machine: Machine, task: Task, sandbox: Sandbox | None, backend: Backend | None) -> AsyncIterator[Sandbox | None]:
    if machine == "none":
        yield None
        return
    if sandbox is None:
        raise VerifierError(f"verifier '{task.check.kind}' looks at the agent's machine, and there is none")
    if machine == "fork":
        async with graded(sandbox) as copy:
            yield copy
        return
    if backend is None or task.image is None:
        raise VerifierError(f"verifier '{task.check.kind}' needs a fresh machine: give a backend, and the task an image")
    spec = Spec(image=task.image, limits=task.limits or Limits(), env=dict(task.env), ttl_seconds=sandbox.spec.ttl_seconds,
                workdir=task.workdir or sandbox.spec.workdir, metadata={"purpose": "verifier", "task": task.id})
    box = await backend.create(spec)
    try:
        for path, data in task.files.items():
            await box.write(path, data)
        async with graded(sandbox) as still:  # nothing moves while it is carried
            for path in task.artifacts:
                await _carry(still, box, path)
        yield box
    finally:
        await asyncio.shield(box.kill())


async def _carry(source: Sandbox, target: Sandbox, path: str) -> None:
    """One artifact from the agent's machine to a fresh one, in place of what is there; what the agent removed is removed."""
    plain = os.path.normpath(path)
    if plain in TOO_MUCH or any(plain == place or plain.startswith(f"{place}/") for place in DECIDING):
        raise VerifierError(f"'artifacts': {path} decides how the verifier runs, so it is not carried; name what the agent makes")
    with tempfile.TemporaryDirectory(prefix="gnomon-artifacts-") as place:
        local = Path(place) / "artifact"
        try:
            await source.download(path, local)
        except (SandboxLost, SandboxTimeout):
            raise
        except SandboxError:
            pass  # it is not there
        if await _there(target, path):
            await target.remove(path)
        if local.exists() and not local.is_symlink():
            await asyncio.to_thread(without_ways_out, local)
            await target.upload(local, path)


async def _there(box: Sandbox, path: str) -> bool:
    try:
        entries = await box.list(os.path.dirname(path.rstrip("/")) or "/")
        return any(os.path.normpath(info.path) == os.path.normpath(path) for info in entries)
    except (SandboxLost, SandboxTimeout):
        raise
    except SandboxError:
        return False


def without_ways_out(root: Path) -> None:
    """Remove links below a folder that lead out of it: `answer -> /tests/expected` would read the solution in the verifier's machine."""
    inside = root.resolve()
    for place, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(place) / name
            if path.is_symlink() and (os.path.isabs(os.readlink(path)) or not path.resolve().is_relative_to(inside)):
                path.unlink()


def rewards(data: bytes, where: str) -> dict[str, float]:
    """What a reward file says: a number, or an object of numbers. Raises `VerifierError` for anything else: it is never read as 0."""
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise VerifierError(f"{where}: {data[:60]!r} is no number and no object of numbers") from None
    table: Mapping[str, Any] = value if isinstance(value, dict) else {"reward": value}
    if not table:
        raise VerifierError(f"{where}: an object without rewards")
    for name, item in table.items():
        if isinstance(item, bool) or not isinstance(item, (int, float)) or not math.isfinite(item):
            raise VerifierError(f"{where}: '{name}': {item!r} is no finite number")
    return {name: float(item) for name, item in table.items()}


def settings(table: Mapping[str, Any]) -> Fields:
    """The settings of a check while they are read; call `done` at the end."""
    return Fields(table, "settings")
