"""A machine with a kernel of its own and our agent as its process 1: everything that does not depend on what runs the kernel.

`gnomon.sandbox.gvisor.machine` and `gnomon.sandbox.microvm.machine` say how one is started, stopped for a moment and written to a folder; a
checkpoint there takes everything (processes, memory, files) and going on is a start from it. So snapshot and fork are one checkpoint, and
one start for each machine that goes on. Before it the agent is told to `hold`: then nothing is on its way, and background programs, their
output and their input survive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

from gnomon.errors import SandboxError, SandboxLost
from gnomon.sandbox.guest import account, files
from gnomon.sandbox.guest.channel import Guest
from gnomon.sandbox.guest.process import GuestProcess
from gnomon.sandbox.ns.cgroups import Group
from gnomon.sandbox.ns.door import VARIABLES
from gnomon.sandbox.sandbox import MEGABYTE, Command, FileEvent, FileInfo, Network, PauseLevel, Result, Snapshot, Spec, Usage


class Home(Protocol):
    """What a machine asks of the backend that made it."""

    async def sibling(self, parent: Machine, spec: Spec) -> Machine:
        """A new machine like `parent`, recorded and with all that it starts from, not started."""
        ...

    async def keep(self, machine: Machine, image: Path, name: str | None, *, memory: bool) -> Snapshot:
        """A finished checkpoint becomes a named snapshot."""
        ...

    def group(self, machine: Machine) -> Group | None:
        """A control group with the machine's limits for its next instance, where there are any."""
        ...

    def hurry(self, machine: Machine, fast: bool) -> None:
        """Lift the machine's bound on processors for a moment, or set it again."""
        ...

    def note(self, machine: Machine) -> None:
        """The machine's state or processes have changed."""
        ...

    async def connect(self, machine: Machine, network: Network) -> None:
        """The machine's door leads where these rules allow."""
        ...

    def expire(self, machine: Machine, seconds: float | None) -> None:
        """The machine is to end this long from now."""
        ...

    async def discard(self, machine: Machine) -> None:
        """The machine has ended: give back its folder."""
        ...


class Machine(ABC):
    """A sandbox with a kernel of its own; see `gnomon.sandbox.sandbox.Sandbox`. What runs the kernel is said by `_launch` and its like."""

    def __init__(self, identifier: str, spec: Spec, folder: Path, home: Home, key: bytes | None = None) -> None:
        """`key` is that of the agent in the checkpoint that it will start from."""
        self.id, self.spec, self.folder, self.home = identifier, spec, folder, home
        self.network = Network()
        self.guest = Guest(identifier, key)
        self.guest.on_lost = self._lost
        self.state = "new"
        self.generation = 0
        self.processes: tuple[int, ...] = ()
        self.group: Group | None = None
        self.handle = -1
        self.lock = asyncio.Lock()
        self.endings: set[asyncio.Task[None]] = set()

    async def boot(self, image: Path | None = None, **identity: object) -> None:
        """Start, from a checkpoint if `image` is one, under an identity of its own: instance, and what `identity` adds."""
        self.generation += 1
        await self.guest.connect(*await self._launch(image))
        self.home.note(self)
        self.guest.resting = False
        await self._greet(**identity)
        self.home.hurry(self, fast=False)
        self.state = "running"
        self.home.note(self)

    async def _greet(self, **identity: object) -> None:
        """The agent learns who the machine is from now on, and what its kernel cannot know."""
        await self.guest.go(instance=secrets.token_hex(16), **self._told(), **identity)

    @abstractmethod
    async def _launch(self, image: Path | None) -> tuple[int, int]:
        """Start an instance, from a checkpoint if `image` is one; the ends of the channel to its agent, to read from and to write to."""

    @abstractmethod
    async def _halt(self) -> None:
        """Let nothing of it run; memory stays."""

    @abstractmethod
    async def _continue(self) -> None:
        """The opposite of `_halt`."""

    @abstractmethod
    async def _save(self, image: Path) -> None:
        """Write all of it into a folder; it stands still, or is gone, from then on. After an error it runs."""

    def _told(self) -> dict[str, object]:
        """What its kernel cannot know after a start from a checkpoint."""
        return {}

    def weight(self, folder: Path) -> int:
        """Bytes that what it has in a folder of the host's takes."""
        return account.disk(folder)

    @property
    def groups(self) -> tuple[Path, ...]:
        """The control groups that hold its host processes."""
        return tuple(Path(folder) for folder in self.group.folders) if self.group is not None else ()

    @property
    def name(self) -> str:
        """What the present instance is called."""
        return f"gnomon-{self.id}-{self.generation}"

    def _ready(self) -> None:
        if self.state == "ended":
            raise self.guest.lost or SandboxLost(f"sandbox {self.id}: it has ended")
        if self.state != "running":
            raise SandboxError(f"sandbox {self.id} is paused ({self.state}): call resume() first")

    async def exec(self, command: Command) -> Result:
        """Run a program to its end."""
        self._ready()
        return await self.guest.run(self._connected(command), (self.spec.workdir, self.spec.user))

    async def start(self, command: Command, *, stdin: bool = False) -> GuestProcess:
        """Run a program in the background."""
        self._ready()
        return await self.guest.start(self._connected(command), (self.spec.workdir, self.spec.user), stdin=stdin)

    def _connected(self, command: Command) -> Command:
        """A command that finds the network, if there is one, in its environment."""
        if self.network == Network():
            return command
        return replace(command, env={name: text for name, text in VARIABLES.items() if name not in self.spec.env} | dict(command.env))

    async def read(self, path: str, max_bytes: int = 16 * MEGABYTE) -> bytes:
        """The content of a regular file."""
        self._ready()
        return await files.read(self.guest, path, max_bytes)

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Make or replace a file, and the directories above it."""
        self._ready()
        await files.write(self.guest, path, data, mode)

    async def list(self, path: str, depth: int = 1) -> Sequence[FileInfo]:
        """What a directory holds."""
        self._ready()
        return await files.listing(self.guest, path, depth)

    async def remove(self, path: str) -> None:
        """Remove a file, or a directory and all below it."""
        self._ready()
        await files.remove(self.guest, path)

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or folder of the host into the sandbox."""
        self._ready()
        await files.upload(self.guest, source, path)

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or folder out."""
        self._ready()
        await files.download(self.guest, path, target)

    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileEvent]:
        """Changes below a directory, as they happen."""
        self._ready()
        async for event in self.guest.watch(path, recursive=recursive):
            yield event

    async def pause(self, level: PauseLevel = "freeze") -> None:
        """Stop: `freeze` in memory; the others by a checkpoint that leaves no process behind, `stop` without programs."""
        async with self.lock:
            if self.state == "frozen" and level != "freeze":
                await self._thaw()
            self._ready()
            if level == "freeze":
                await self._freeze()
            else:
                await self._checkpoint(self.resting, stop=level == "stop")
                await self._leave()
                if level == "stop":
                    self.guest.abandon("its programs were ended by pause('stop')")
                self.state = "stopped" if level == "stop" else "hibernated"
            self.home.note(self)

    @property
    def resting(self) -> Path:
        """Where its checkpoint is while it hibernates."""
        return self.folder / "hibernated"

    async def _freeze(self) -> None:
        self.guest.resting = True
        await self._halt()
        self.state = "frozen"

    async def _thaw(self) -> None:
        await self._continue()
        self.guest.resting = False
        self.state = "running"

    async def resume(self) -> None:
        """Go on after `pause`; from disk as a new instance of the same machine."""
        async with self.lock:
            if self.state == "frozen":
                await self._thaw()
            elif self.state in ("hibernated", "stopped"):
                ended = self.state == "stopped"
                await self.boot(self.resting, forget=ended, end=ended)
                await asyncio.to_thread(shutil.rmtree, self.resting, True)
            elif self.state == "ended":
                self._ready()
            self.home.note(self)

    async def _checkpoint(self, image: Path, *, stop: bool) -> None:
        """Everything goes into `image`, and this instance stands still. On a failure it goes on as before, and the error is raised."""
        shutil.rmtree(image, ignore_errors=True)
        image.mkdir(parents=True)
        await self.guest.hold(stop=stop)
        self.home.hurry(self, fast=True)
        self.guest.parting = True
        try:
            await self._save(image)
        except BaseException:
            shutil.rmtree(image, ignore_errors=True)
            self.guest.parting = False
            self.home.hurry(self, fast=False)
            with contextlib.suppress(SandboxError):
                await self.guest.go()
            raise

    async def _leave(self) -> None:
        """This instance ends; what it was is in a checkpoint."""
        await self.guest.disconnect()
        await self._end_processes()

    async def snapshot(self, name: str | None = None, *, memory: bool = False) -> Snapshot:
        """Keep the present state; without `memory` the snapshot's processes are ended before anyone can call it."""
        async with self.lock, self._image(memory) as (image, going_on):
            await going_on
            copy = self.folder / "kept"
            await asyncio.to_thread(shutil.copytree, image, copy, copy_function=os.link)
            return await self.home.keep(self, copy, name, memory=memory)

    @contextlib.asynccontextmanager
    async def _image(self, memory: bool) -> AsyncIterator[tuple[Path, Awaitable[None]]]:
        """A checkpoint of the present state, and the task of going on from it, which ends as paused as it was."""
        if self.state in ("hibernated", "stopped"):
            yield self.resting, asyncio.create_task(asyncio.sleep(0))
            return
        frozen = self.state == "frozen"
        if frozen:
            await self._thaw()
        self._ready()
        image = self.folder / "checkpoint"
        await self._checkpoint(image, stop=not memory)
        going_on = asyncio.create_task(self._return(image, frozen=frozen))
        try:
            yield image, going_on
        finally:
            await asyncio.gather(going_on, return_exceptions=True)
            await asyncio.to_thread(shutil.rmtree, image, True)

    async def _return(self, image: Path, *, frozen: bool) -> None:
        """This machine goes on from its own checkpoint; tried twice, as nothing else is left of it."""
        await self._leave()
        try:
            try:
                await self.boot(image)
            except SandboxError:
                await self._end_processes()
                await self.boot(image)
            if frozen:
                await self._freeze()
        except SandboxError as error:
            self.guest.end(f"it could not go on after a checkpoint: {error}")
            raise

    async def fork(self, count: int = 1, *, memory: bool = False) -> Sequence[Machine | Exception]:
        """`count` machines from one checkpoint; without `memory` they have its files and none of its processes."""
        if count < 1:
            raise SandboxError(f"fork of {count}: at least one child")
        async with self.lock, self._image(memory) as (image, going_on):
            births = [asyncio.create_task(self._child(image, memory)) for _ in range(count)]
            try:
                await going_on
            finally:
                children = await asyncio.gather(*births, return_exceptions=True)
        return [child if isinstance(child, (Machine, Exception)) else SandboxError(str(child)) for child in children]

    async def _child(self, image: Path, memory: bool) -> Machine:
        child = await self.home.sibling(self, replace(self.spec, idempotency_key=None, network=self.network))
        await child.born(image, memory=memory)
        return child

    async def born(self, image: Path, *, memory: bool) -> None:
        """Start as a copy: a name of its own, no ties to the parent's programs, and none of them at all without `memory`."""
        hostname = f"{self.spec.hostname[:40]}-{self.id[-6:]}"
        try:
            await self.boot(image, forget=True, end=not memory, hostname=hostname, env=dict(self.spec.env))
            await self.set_network(self.spec.network)
        except BaseException:
            await self.kill()
            raise

    async def set_timeout(self, seconds: float | None) -> None:
        """End the sandbox this long from now unless told otherwise."""
        if self.state == "ended":
            self._ready()
        self.home.expire(self, seconds)

    async def set_network(self, network: Network) -> None:
        """Replace the rules; connections that they no longer allow are cut. A paused machine learns of them when it goes on."""
        if self.state == "ended":
            self._ready()
        if network == self.network:
            return
        frozen = self.state == "frozen"
        if frozen:
            await self._thaw()
        await self.home.connect(self, network)
        self.network = network
        if frozen:
            await self._freeze()

    async def usage(self) -> Usage:
        """What it uses now; the disk is its checkpoints, and the files that it wrote although they are in its memory."""
        if self.state == "ended":
            self._ready()
        inside: dict[str, Any] = {}
        if self.state == "running":
            inside = await self.guest.call({"op": "usage"})
        memory, seconds = await asyncio.to_thread(account.use, self.processes, self.groups)
        disk = await asyncio.to_thread(self.weight, self.folder) + int(inside.get("disk", 0))
        return Usage(memory_bytes=memory, disk_bytes=disk, processes=int(inside.get("processes", 0)), cpu_seconds=seconds)

    async def kill(self, why: str = "it was killed") -> None:
        """End it and all that runs in it, and give back everything it used."""
        if self.state == "ended":
            return
        self.state = "ended"
        self.guest.end(why)
        await self.guest.disconnect()
        await self._end_processes()
        await self.home.discard(self)

    def _lost(self) -> None:
        """The agent's channel broke while nobody was taking a checkpoint: nothing of the machine can be trusted."""
        if self.state not in ("ended", "new"):
            task = asyncio.create_task(self.kill())
            self.endings.add(task)
            task.add_done_callback(self.endings.discard)

    async def _end_processes(self) -> None:
        """Kill what runs the instance's kernel, and wait until it is gone."""
        handle, self.handle = self.handle, -1
        if handle >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            gone = asyncio.Event()
            asyncio.get_running_loop().add_reader(handle, gone.set)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await gone.wait()
            asyncio.get_running_loop().remove_reader(handle)
            os.close(handle)
        self.processes = ()
        group, self.group = self.group, None
        if group is not None:
            await asyncio.to_thread(group.remove)

    async def __aenter__(self) -> Self:
        """The sandbox itself."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """`kill`."""
        await self.kill()

