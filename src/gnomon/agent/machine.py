"""The machine of a task: what its sandbox is made of, the same for agents, for verifiers and for validation."""

from __future__ import annotations

import asyncio

from gnomon.agent.task import Task
from gnomon.errors import ConfigError
from gnomon.sandbox.sandbox import Backend, Limits, Network, Sandbox, Spec

WORKDIR = "/home/user"


def spec(task: Task, purpose: str, *, network: Network | None = None, ttl_seconds: float | None = 3600.0) -> Spec:
    """What to ask a backend for. `purpose` is for who lists sandboxes; `network` is none unless given, whatever the task would allow."""
    if task.image is None:
        raise ConfigError(f"task {task.id}: has no 'image', so there is no machine to make; `host` is one that is always there")
    return Spec(image=task.image, limits=task.limits or Limits(), network=network or Network(), env=dict(task.env), ttl_seconds=ttl_seconds,
                workdir=task.workdir or WORKDIR, user=task.user or "root", metadata={"purpose": purpose, "task": task.id})


async def made(task: Task, backend: Backend, wanted: Spec) -> Sandbox:
    """A sandbox with the task's files in it. Ended again if writing them fails; otherwise whoever called ends it."""
    box = await backend.create(wanted)
    try:
        for path, data in task.files.items():
            await box.write(path, data)
    except BaseException:
        await asyncio.shield(box.kill())
        raise
    return box
