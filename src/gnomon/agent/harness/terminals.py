"""Programs that go on while the policy does other things: started, watched, written to, ended; none outlives its attempt.

What a program prints is kept up to a limit, its newest end; what nobody read before it was dropped is counted. Read next: `tools/bash.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from gnomon.agent.harness.desk import LEFT_TO_THE_MACHINE, Desk
from gnomon.agent.harness.fault import Fault
from gnomon.errors import SandboxError
from gnomon.sandbox.sandbox import Command, Process, Result

KEPT_BYTES = 1 << 20
MOST = 16
WRITE_SECONDS = 10.0


@dataclass(kw_only=True, slots=True)
class Terminal:
    """One program. `kept` is the newest of its output, `total` how many bytes there were, `seen` how many of them the policy was shown."""

    id: int
    command: str
    process: Process
    kept: bytearray = field(default_factory=bytearray)
    total: int = 0
    seen: int = 0
    result: Result | None = None
    failure: SandboxError | None = None
    reading: asyncio.Task[None] | None = None
    more: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        """Take output until the program ends."""
        try:
            async for chunk in self.process.output():
                self.kept += chunk.data
                self.total += len(chunk.data)
                del self.kept[: max(0, len(self.kept) - KEPT_BYTES)]
                self.more.set()
            self.result = await self.process.wait()
        except SandboxError as error:
            self.failure = error
        finally:
            self.more.set()

    @property
    def running(self) -> bool:
        """Whether the program goes on."""
        return self.result is None and self.failure is None

    async def ended(self, seconds: float) -> bool:
        """Wait for its end, at most so long. Raises what the machine raised where it failed."""
        if self.reading is not None:
            await asyncio.wait({self.reading}, timeout=seconds)
        if isinstance(self.failure, LEFT_TO_THE_MACHINE):
            raise self.failure
        return not self.running

    def news(self) -> str:
        """What it printed since the policy was last shown something."""
        dropped = max(0, self.total - len(self.kept) - self.seen)
        text = bytes(self.kept[len(self.kept) - min(len(self.kept), self.total - self.seen) :]).decode("utf-8", "replace")
        self.seen = self.total
        return (f"[… {dropped} bytes are lost …]\n" if dropped else "") + text

    @property
    def state(self) -> str:
        """How it stands, in words."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        return "running" if self.result is None else "ended by the clock" if self.result.timed_out else f"exit status {self.result.code}"

    async def write(self, data: bytes) -> None:
        """Bytes for its standard input. Raises `Fault` where it takes none."""
        if not self.running:
            raise Fault(f"session {self.id} has ended ({self.state})")
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self.process.write(data)
        except TimeoutError:
            raise Fault(f"session {self.id} does not read its input") from None
        except LEFT_TO_THE_MACHINE:
            raise
        except SandboxError as error:
            raise Fault(str(error)) from None

    async def kill(self) -> None:
        """End it; twice is no error."""
        with contextlib.suppress(SandboxError):
            await self.process.kill()


class Terminals:
    """The programs of one attempt, by number."""

    def __init__(self) -> None:
        self.all: dict[int, Terminal] = {}
        self._count = 0

    def find(self, id: object) -> Terminal:
        """The program of a number. Raises `Fault` listing those that there are."""
        with contextlib.suppress(ValueError, OverflowError):
            number = int(str(id).strip().removesuffix(".0")[:20])
            if number in self.all:
                return self.all[number]
        raise Fault(f"there is no session {str(id)[:40]!r} (there are: {', '.join(map(str, self.all)) or 'none'})")

    async def start(self, desk: Desk, command: str, argv: tuple[str, ...], seconds: float | None, cwd: str | None) -> Terminal:
        """Start a program; `seconds` ends it. Raises `Fault` where too many run, or where it cannot be started."""
        running = [each for each in self.all.values() if each.running]
        if len(running) >= MOST:
            raise Fault(f"{MOST} programs are running; end one first")
        try:
            process = await desk.machine.start(Command(argv=argv, timeout_seconds=seconds, cwd=cwd or desk.workdir, user=desk.task.user),
                                               stdin=True)
        except LEFT_TO_THE_MACHINE:
            raise
        except SandboxError as error:
            raise Fault(str(error)) from None
        self._count += 1
        terminal = Terminal(id=self._count, command=command, process=process)
        terminal.reading = asyncio.create_task(terminal.read())
        self.all[terminal.id] = terminal
        return terminal

    async def any(self, seconds: float) -> list[Terminal]:
        """Wait for the first to end, at most so long; those that were running."""
        running = [each for each in self.all.values() if each.running]
        reading = {each.reading for each in running if each.reading is not None}
        if reading:
            await asyncio.wait(reading, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in running:
            await each.ended(0.0)
        return running

    async def close(self) -> None:
        """End all of them."""
        for each in self.all.values():
            if each.running:
                await each.kill()
            if each.reading is not None:
                each.reading.cancel()
                await asyncio.gather(each.reading, return_exceptions=True)


def terminals(desk: Desk) -> Terminals:
    """Those of an attempt; they end with it."""
    found = desk.state.get("terminals")
    if not isinstance(found, Terminals):
        found = desk.state["terminals"] = Terminals()
        desk.closing.append(found.close)
    return found
