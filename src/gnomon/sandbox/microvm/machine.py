"""One virtual machine: our agent as process 1 of a guest under qemu, stopped, kept on disk and copied through qemu's own migration.

What a guest writes is in its memory, so a checkpoint is one stream of the machine's state into a file; unlike others, a machine goes on by
itself after it was written down. What does not depend on qemu is in `gnomon.sandbox.guest.machine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Protocol

from gnomon.errors import SandboxError, SandboxLost, SandboxTimeout
from gnomon.sandbox.guest import machine
from gnomon.sandbox.microvm import qemu
from gnomon.sandbox.microvm.qmp import Monitor
from gnomon.sandbox.sandbox import Spec

SAVE_SECONDS = 600.0
START_SECONDS = 300.0
SAID_BYTES = 4000


class Home(machine.Home, Protocol):
    """What a virtual machine asks of the backend that made it."""

    @property
    def program(self) -> str:
        """The qemu that runs it."""
        ...

    @property
    def slots(self) -> asyncio.Semaphore:
        """How many may start at a time."""
        ...


class Machine(machine.Machine):
    """A sandbox in a virtual machine; see `gnomon.sandbox.sandbox.Sandbox`."""

    home: Home
    shape: qemu.Shape

    def __init__(self, identifier: str, spec: Spec, folder: Path, home: Home, key: bytes | None = None) -> None:
        super().__init__(identifier, spec, folder, home, key)
        self.guest.patience_seconds = START_SECONDS
        self.child: subprocess.Popen[bytes] | None = None
        self.monitor: Monitor | None = None
        self.console: asyncio.Task[bytes] | None = None

    @property
    def files(self) -> Path:
        """Hard links to its kernel and drives, so that they stay as long as it does."""
        return self.folder / "files"

    async def boot(self, image: Path | None = None, **identity: object) -> None:
        """Start; an instance that does not get as far as its agent is told of with what it said."""
        try:
            async with self.home.slots:
                await super().boot(image, **({"hostname": self.spec.hostname} if image is None else {}), **identity)
        except SandboxLost as error:
            raise SandboxError(f"{error}; qemu said: {await self._said()}") from error

    async def _said(self) -> str:
        """The last words of qemu and of the guest's kernel, from before there was an agent."""
        words = b""
        with contextlib.suppress(OSError):
            words = (self.folder / "errors").read_bytes()[-SAID_BYTES:]
        if self.console is not None:
            with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                words += await asyncio.wait_for(self.console, 5.0)
        return words.decode("utf-8", "replace").strip() or "nothing"

    async def _launch(self, image: Path | None) -> tuple[int, int]:
        self.group = self.home.group(self)
        started = await qemu.launch(self.home.program, self.shape, self.files, self.group, None if image is None else image / "state")
        self.child, self.handle, self.processes = started.process, started.handle, (started.process.pid,)
        self.monitor = Monitor(started.monitor, self.id)
        self.console = asyncio.create_task(_listen(started.console))
        source = started.agent.detach()
        try:
            await self.monitor.begin()
            if image is not None:
                await self._arrive(self.monitor)
            return source, source
        except BaseException:
            os.close(source)
            raise

    async def _arrive(self, monitor: Monitor) -> None:
        """Wait until the checkpoint is read, then let it run."""
        limit = time.monotonic() + START_SECONDS
        while (await monitor.call("query-status"))["status"] == "inmigrate":
            if time.monotonic() > limit:
                raise SandboxTimeout(f"sandbox {self.id}: its checkpoint was not read within {START_SECONDS:g} s")
            await asyncio.sleep(0.005)
        await monitor.call("cont")

    async def _greet(self, **identity: object) -> None:
        await super()._greet(**identity)
        if self.console is not None:  # nobody reads what root inside writes there
            self.console.cancel()

    def _told(self) -> dict[str, object]:
        """The time, and random bytes: a kernel that starts from a checkpoint has those of the one that was written down."""
        return {"time": time.time(), "seed": os.urandom(64).hex()}

    async def _halt(self) -> None:
        await self._orders().call("stop")

    async def _continue(self) -> None:
        await self._orders().call("cont")
        await self.guest.call({"op": "clock", "time": time.time()})

    def _orders(self) -> Monitor:
        if self.monitor is None:
            raise SandboxLost(f"sandbox {self.id}: its qemu has ended")
        return self.monitor

    async def _save(self, image: Path) -> None:
        monitor = self._orders()
        await monitor.call("stop")
        try:
            state = os.open(image / "state", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                await monitor.call("getfd", handle=state, fdname="state")
            finally:
                os.close(state)
            await monitor.call("migrate-set-parameters", max_bandwidth=1 << 40)
            await monitor.call("migrate", uri="fd:state")
            await self._written(monitor)
            (image / "shape.json").write_text(json.dumps(dataclasses.asdict(self.shape)))
            (image / "files").mkdir()
            for file in self.files.iterdir():
                os.link(file, image / "files" / file.name)
        except BaseException:
            with contextlib.suppress(SandboxError):
                await monitor.call("migrate_cancel")
                await monitor.call("cont")
            raise

    async def _written(self, monitor: Monitor) -> None:
        limit = time.monotonic() + SAVE_SECONDS
        while (found := await monitor.call("query-migrate")).get("status") != "completed":
            if found.get("status") in ("failed", "cancelled"):
                raise SandboxError(f"sandbox {self.id}: qemu could not write its state: {found.get('error-desc', 'no reason given')}")
            if time.monotonic() > limit:
                raise SandboxTimeout(f"sandbox {self.id}: its state was not written within {SAVE_SECONDS:g} s")
            await asyncio.sleep(0.005)

    async def _return(self, image: Path, *, frozen: bool) -> None:
        """The machine is still there and goes on; from its checkpoint only if that fails."""
        try:
            await self._orders().call("cont")
            self.guest.parting = False
            await self._greet()
            self.home.hurry(self, fast=False)
            if frozen:
                await self._freeze()
        except SandboxError:
            await super()._return(image, frozen=frozen)

    def weight(self, folder: Path) -> int:
        """Bytes of the checkpoints below a folder; drives are shared."""
        return sum(state.stat().st_blocks * 512 for state in folder.rglob("state"))

    async def _end_processes(self) -> None:
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            monitor.close()
        if self.console is not None:
            self.console.cancel()
        child, self.child = self.child, None
        await super()._end_processes()
        if child is not None:
            child.poll()  # it has ended, and now its number is free


async def _listen(console: socket.socket) -> bytes:
    """The last that comes from a guest's console, until it ends."""
    console.setblocking(False)
    kept = b""
    with console, contextlib.suppress(OSError):
        while data := await asyncio.get_running_loop().sock_recv(console, 1 << 16):
            kept = (kept + data)[-SAID_BYTES:]
    return kept
