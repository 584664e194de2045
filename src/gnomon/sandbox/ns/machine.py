"""A sandbox of the `namespaces` backend as its owner holds it: the contract's calls, turned into frames for the agent and the zygote."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self

from gnomon.errors import SandboxError, SandboxLost, Unsupported
from gnomon.sandbox.ns import running, transfer, wire
from gnomon.sandbox.ns.channel import Channel, Refused
from gnomon.sandbox.sandbox import (
    MEGABYTE,
    Command,
    FileEvent,
    FileInfo,
    Network,
    PauseLevel,
    Process,
    Result,
    Sandbox,
    Snapshot,
    Spec,
    Usage,
)  # fmt: skip

if TYPE_CHECKING:
    from gnomon.sandbox.ns.host import Zygote

GRACE_SECONDS = 20.0
LONG_INPUT = 1 << 19
EVENTS: tuple[Literal["create", "write", "remove", "rename", "chmod"], ...] = ("create", "write", "remove", "rename", "chmod")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULTS = {"PATH": PATH, "LANG": "C.UTF-8"}


@dataclasses.dataclass(kw_only=True, slots=True)
class Root:
    """What a sandbox stands on: its own writable layer by name, and the sealed ones below, top first; `image` is as the store has it."""

    upper: str
    below: tuple[str, ...]
    host: bool
    image: object = None


def wake(done: asyncio.Future[wire.Frame], queue: asyncio.Queue[FileEvent | None]) -> None:
    """Let the reader of a watch see that it has ended."""
    if not done.cancelled():
        done.exception()
    if not queue.full():
        queue.put_nowait(None)


class Owner(Protocol):
    """What a machine asks of the backend that made it."""

    def forget(self, machine: Machine) -> None:
        """It has ended by itself."""
        ...

    def environment(self, machine: Machine) -> dict[str, str]:
        """Variables that its programs get from its image and its network."""
        ...

    async def revive(self, machine: Machine) -> None:
        """A first process again for a stopped one."""
        ...

    async def keep(self, machine: Machine, name: str | None) -> Snapshot:
        """Its files under a name."""
        ...

    async def multiply(self, machine: Machine, count: int) -> Sequence[Sandbox | Exception]:
        """More of it."""
        ...

    async def connect(self, machine: Machine, network: Network) -> None:
        """Other rules for its network."""
        ...

    def note(self, machine: Machine) -> None:
        """Its state has changed."""
        ...

    async def end(self, machine: Machine) -> None:
        """Its end; twice is no error."""
        ...


class Machine:
    """One sandbox; see the contract `Sandbox`. It is made by the backend, which also knows how to end, keep and multiply it."""

    def __init__(self, *, id: str, spec: Spec, zygote: Zygote, root: Root, owner: Owner) -> None:
        self.id, self.spec, self.zygote, self.root, self.owner = id, spec, zygote, root, owner
        self.network = spec.network
        self.first = 0
        self.channel: Channel
        self.ready: asyncio.Future[wire.Frame]
        self.state: Literal["running", "frozen", "stopped", "gone"] = "running"
        self.reason = ""
        self.lock = asyncio.Lock()
        self.timer: asyncio.TimerHandle | None = None
        self.ending: asyncio.Task[None] | None = None

    def lost(self, reason: str) -> None:
        """The channel has closed: expected when stopped, else the end."""
        if self.state in ("running", "frozen") and self.ending is None:
            self.state, self.reason = "gone", self.reason or reason
            self.owner.forget(self)

    def _gone(self) -> str:
        return f"sandbox {self.id} is gone: {self.reason}"

    def _awake(self) -> Channel:
        if self.state == "gone":
            raise SandboxLost(self._gone())
        if self.state != "running":
            raise SandboxError(f"sandbox {self.id} is paused ({self.state}); resume() first")
        return self.channel

    async def _call(self, kind: int, numbers: Sequence[int], strings: Sequence[bytes], doing: str,
                    on_frame: Callable[[wire.Frame], None] | None = None) -> wire.Frame:  # fmt: skip
        channel = self._awake()
        try:
            return await channel.request(kind, numbers, strings, on_frame)
        except Refused as error:
            raise SandboxError(f"{doing}: {error}") from None

    def _order(self, command: Command, window: int, open_input: bool) -> tuple[list[int], list[bytes]]:
        user = command.user or self.spec.user
        if self.zygote.rootless and user not in ("root", "0"):
            raise Unsupported(f"user {user}: without root on the host a sandbox has one user, root")
        env = {**DEFAULTS, **self.owner.environment(self), **self.spec.env, **command.env}
        if len(command.stdin or b"") > LONG_INPUT:
            command, open_input = dataclasses.replace(command, stdin=None), True
        try:
            return running.order(command, env, user, window, open_input)
        except ValueError as error:
            raise SandboxError(f"{command.argv[0]}: {error}") from None

    async def exec(self, command: Command) -> Result:
        """Run a program to its end."""
        channel = self._awake()
        if command.stdin is not None and len(command.stdin) > LONG_INPUT:
            process = running.start(channel, command, self._order(command, running.WINDOW, True))
            feeding = asyncio.ensure_future(self._feed(process, command.stdin))
            try:
                return await process.wait()
            finally:
                feeding.cancel()
                with contextlib.suppress(asyncio.CancelledError, SandboxError):
                    await process.kill()
                    await feeding
        try:
            return await running.collect(channel, command, self._order(command, 0, False), GRACE_SECONDS)
        except ValueError as error:
            raise SandboxError(f"{command.argv[0]}: {error}") from None

    @staticmethod
    async def _feed(process: running.Running, data: bytes) -> None:
        with contextlib.suppress(SandboxError):  # a program need not read its input
            await process.write(data)
            await process.close_stdin()

    async def start(self, command: Command, *, stdin: bool = False) -> Process:
        """Run a program in the background."""
        channel = self._awake()
        return running.start(channel, command, self._order(command, running.WINDOW, stdin))

    async def read(self, path: str, max_bytes: int = 16 * MEGABYTE) -> bytes:
        """The content of a regular file."""
        content = bytearray()

        def on_frame(frame: wire.Frame) -> None:
            if frame[0] == wire.DATA and frame[3]:
                content.extend(frame[3][0])
                if len(content) > max_bytes:
                    self.channel.close("the sandbox sends more than was asked for")

        await self._call(wire.READ, (max_bytes,), (transfer.checked(path),), f"reading {path}", on_frame)
        return bytes(content)

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Make or replace a file, and the directories above it."""
        await transfer.write(self._awake(), path, data, -1 if mode is None else mode)

    async def list(self, path: str, depth: int = 1) -> Sequence[FileInfo]:
        """What a directory holds, sorted by path; a depth of 0 is the entry itself."""
        found = transfer.Listing(self._awake())
        await self._call(wire.LIST, (depth,), (transfer.checked(path),), f"listing {path}", found.on_frame)
        return sorted(found.entries, key=lambda entry: entry.path)

    async def remove(self, path: str) -> None:
        """Remove a file, or a directory and all below it."""
        await self._call(wire.REMOVE, (), (transfer.checked(path),), f"removing {path}")

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or folder of the host into the sandbox."""
        await transfer.upload(self._awake(), source, path)

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or folder out."""
        await transfer.download(self, path, target)

    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileEvent]:
        """Changes below a directory, as they happen."""
        channel = self._awake()
        queue: asyncio.Queue[FileEvent | None] = asyncio.Queue(10_000)

        def on_frame(frame: wire.Frame) -> None:
            if frame[0] == wire.EVENT and frame[2] and frame[3] and 0 <= frame[2][0] < len(EVENTS):
                if queue.full():
                    channel.close("more changes than the reader takes")
                else:
                    queue.put_nowait(FileEvent(path=frame[3][0].decode("utf-8", "surrogateescape"), kind=EVENTS[frame[2][0]]))

        call = channel.number()
        answer = channel.expect(call, on_frame)
        answer.add_done_callback(lambda done: wake(done, queue))
        channel.send(wire.pack(wire.WATCH, call, (int(recursive),), (transfer.checked(path),)))
        try:
            while not (answer.done() and queue.empty()):
                event = await queue.get()
                if event is not None:
                    yield event
            await self._watched(answer, path)
        finally:
            if channel.calls.pop(call, None) is not None and not channel.closed:
                channel.send(wire.pack(wire.CANCEL, 0, (call,)))

    @staticmethod
    async def _watched(answer: Awaitable[wire.Frame], path: str) -> None:
        try:
            await answer
        except Refused as error:
            raise SandboxError(f"watching {path}: {error}") from None

    async def pause(self, level: PauseLevel = "freeze") -> None:
        """`freeze` stops the programs; `stop` ends them and keeps the files. Twice is no error."""
        async with self.lock:
            if self.state == "gone":
                self._awake()
            if level == "hibernate":
                raise Unsupported("namespaces keep no memory of processes: pause('freeze') keeps them in memory, pause('stop') ends them "
                                  "and keeps the files; the gvisor backend hibernates")  # fmt: skip
            if level == "freeze" and self.state == "running":
                await self._freeze()
                self.state = "frozen"
            elif level == "stop" and self.state != "stopped":
                self.state = "stopped"
                await self.zygote.ask(wire.SEAL, (), self.root.upper, doing=f"stopping {self.id}")
                self.channel.close("the sandbox is stopped")
            self.owner.note(self)

    async def _freeze(self) -> None:
        channel = self._awake()
        if "freezer" in self.zygote.controllers:
            await self.zygote.freeze(self.root.upper, True)
        else:
            _, _, numbers, _ = await channel.request(wire.STOP_ALL)
            if numbers[:1] != (1,):
                await channel.request(wire.CONTINUE_ALL)
                raise SandboxError(f"the programs of {self.id} do not stand still")

    async def _thaw(self) -> None:
        if "freezer" in self.zygote.controllers:
            await self.zygote.freeze(self.root.upper, False)
        else:
            await self.channel.request(wire.CONTINUE_ALL)

    async def resume(self) -> None:
        """Go on: frozen programs run, a stopped sandbox gets a first process again."""
        async with self.lock:
            if self.state == "gone":
                self._awake()
            elif self.state == "frozen":
                await self._thaw()
            elif self.state == "stopped":
                await self.owner.revive(self)
            self.state = "running"
            self.owner.note(self)

    async def snapshot(self, name: str | None = None, *, memory: bool = False) -> Snapshot:
        """Keep the files. Of a stopped sandbox nothing is copied; of another one the writable layer is, while its programs stand still."""
        async with self.lock:
            self._memory(memory)
            return await self.owner.keep(self, name)

    async def fork(self, count: int = 1, *, memory: bool = False) -> Sequence[Sandbox | Exception]:
        """`count` sandboxes that start from the present files."""
        async with self.lock:
            self._memory(memory)
            return await self.owner.multiply(self, count)

    def _memory(self, memory: bool) -> None:
        if self.state == "gone":
            self._awake()
        if memory:
            raise Unsupported("namespaces keep no memory of processes; the gvisor backend does")

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """For as long as the block takes, no program runs."""
        moving = self.state == "running"
        if moving:
            await self._freeze()
        try:
            yield
        finally:
            if moving and not self.channel.closed:
                await self._thaw()

    async def set_timeout(self, seconds: float | None) -> None:
        """End the sandbox this long from now."""
        if self.state == "gone":
            self._awake()
        if self.timer is not None:
            self.timer.cancel()
        loop = asyncio.get_running_loop()
        self.timer = None if seconds is None else loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self.reason = "its time was over"
        self.ending = asyncio.ensure_future(self.kill())

    async def set_network(self, network: Network) -> None:
        """Replace the rules; connections that they no longer allow are cut."""
        async with self.lock:
            if self.state == "gone":
                self._awake()
            await self.owner.connect(self, network)
            self.network = network

    async def usage(self) -> Usage:
        """What it uses now; counted by control groups where there are some."""
        if self.state in ("gone", "stopped"):
            self._awake()
        try:
            _, _, numbers, _ = await self.channel.request(wire.USAGE)
            memory, disk, processes, micros = numbers
            if self.zygote.controllers:
                counted = await self.zygote.ask(wire.COUNT, (), self.root.upper, doing="counting")
                pairs = zip(counted[:3], (memory, processes, micros), strict=True)
                memory, processes, micros = (ours if ours >= 0 else theirs for ours, theirs in pairs)
        except (Refused, ValueError) as error:
            raise SandboxError(f"counting what {self.id} uses: {error}") from None
        return Usage(memory_bytes=memory, disk_bytes=disk, processes=processes, cpu_seconds=micros / 1e6)

    async def kill(self) -> None:
        """End it and all that runs in it, and give back everything it used."""
        self.state = "gone"
        self.reason = self.reason or "it was killed"
        self.channel.ending = self._gone()
        if self.timer is not None:
            self.timer.cancel()
        await self.owner.end(self)

    async def __aenter__(self) -> Self:
        """The sandbox itself."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """`kill`."""
        await self.kill()
