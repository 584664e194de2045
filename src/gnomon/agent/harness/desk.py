"""What an agent has before it in one attempt: its machine, where it stands in it, what it noted, and what it started.

Tools work on a desk. Files are read and written with the rights of the task's user, so that a tool can do no more than a command could.
Read next: `loop.py`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gnomon.agent.diagnosis import Diagnosis
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.skills import Skill
from gnomon.agent.harness.spec import HarnessSpec
from gnomon.agent.policy import Completion, Sampling
from gnomon.agent.task import Task
from gnomon.data.messages import Conversation
from gnomon.errors import SandboxError, SandboxLost, SandboxTimeout, Unsupported
from gnomon.sandbox.sandbox import Command, Result, Sandbox

MOST_BYTES = 8 << 20  # of a file that a tool reads or changes
SUPERUSER = ("root", "0", "")
LEFT_TO_THE_MACHINE = (SandboxLost, SandboxTimeout, Unsupported)
"""Failures of a machine that are not for the policy to read: they end the attempt."""

_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'


class Model(Protocol):
    """The one way to a policy: what a `Recorder` offers. `diagnosis` is the attempt's public verifier, None where it has none."""

    diagnosis: Diagnosis | None

    async def complete(self, conversation: Conversation, sampling: Sampling | None = None, *,
                       purpose: Literal["compaction", "agent"] | None = None) -> Completion:
        """The next message, put on record; `purpose` is for a conversation that begins a context of its own."""
        ...


@dataclass(kw_only=True, slots=True)
class Desk:
    """The state of one agent. `plan` and `notes` are what it wrote down, `state` what tools remember; `closing` is done when it ends.

    `ask` runs another agent: its task, then what it should know; it gives that agent's last message. `depth` counts agents above this one.
    """

    spec: HarnessSpec
    task: Task
    model: Model
    box: Sandbox | None
    workdir: str = "/"
    depth: int = 0
    plan: list[Any] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    skills: Mapping[str, Skill] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    closing: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    ask: Callable[[str, str], Coroutine[Any, Any, str]] | None = None

    @property
    def sampling(self) -> Sampling:
        """How every answer is drawn, summaries and answers to code among them."""
        draws = self.spec.sampling
        return Sampling(max_tokens=draws.max_tokens, temperature=draws.temperature, top_p=draws.top_p)

    @property
    def machine(self) -> Sandbox:
        """The machine. Raises `Fault` where the task has none."""
        if self.box is None:
            raise Fault("this task has no machine")
        return self.box

    @property
    def user(self) -> str | None:
        """Who the agent is in its machine."""
        return self.task.user or (self.box.spec.user if self.box is not None else None)

    def path(self, path: str) -> str:
        """A path of the policy's as an absolute one. Raises `Fault` for one that no system has."""
        if not path or "\0" in path or len(path) > 4000:
            raise Fault(f"{path[:80]!r} is no path")
        if path == "~" or path.startswith("~/"):
            path = "/home/user" + path[1:]
        return posixpath.normpath(posixpath.join(self.workdir, path))

    async def run(self, argv: tuple[str, ...], *, seconds: float = 60.0, stdin: bytes | None = None, cwd: str | None = None,
                  max_bytes: int = 1 << 20) -> Result:
        """A program's end, with the rights of the task's user. Raises `Fault` where it cannot be started."""
        command = Command(argv=argv, timeout_seconds=seconds, stdin=stdin, cwd=cwd or self.workdir, user=self.task.user,
                          max_output_bytes=max_bytes)
        try:
            return await self.machine.exec(command)
        except LEFT_TO_THE_MACHINE:
            raise
        except SandboxError as error:
            raise Fault(str(error)) from None

    async def read(self, path: str) -> bytes:
        """A file. Raises `Fault` where there is none, or where it is too large."""
        place = self.path(path)
        if self.user in (None, *SUPERUSER):
            try:
                return await self.machine.read(place, MOST_BYTES)
            except LEFT_TO_THE_MACHINE:
                raise
            except SandboxError as error:
                raise Fault(str(error)) from None
        result = await self.run(("cat", "--", place), max_bytes=MOST_BYTES)
        if result.code or result.truncated:
            raise Fault(result.stderr.decode("utf-8", "replace").strip()[:500] or f"{place} cannot be read, or is too large")
        return result.stdout

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file, and the folders above it. Raises `Fault` where that cannot be done."""
        place = self.path(path)
        if self.user in (None, *SUPERUSER):
            try:
                return await self.machine.write(place, data)
            except LEFT_TO_THE_MACHINE:
                raise
            except SandboxError as error:
                raise Fault(str(error)) from None
        result = await self.run(("sh", "-c", _WRITE, "sh", place), stdin=data)
        if result.code:
            raise Fault(result.stderr.decode("utf-8", "replace").strip()[:500] or f"{place} cannot be written")
        return None

    async def text(self, path: str) -> str:
        """A file that is text. Raises `Fault` for one that is not."""
        data = await self.read(path)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise Fault(f"{path} is no UTF-8 text ({len(data)} bytes)") from None

    async def close(self) -> None:
        """End what the agent started."""
        while self.closing:
            await self.closing.pop()()
