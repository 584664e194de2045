"""What backends of machines with a kernel of their own have in common: who lives, under which record, until when, and what is kept of it.

A backend adds what a machine starts from (`_furnish`), which class it is (`_machine`), and what a checkpoint depends on (`_made_with`).
Read next: `gnomon.sandbox.guest.machine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon.errors import SandboxError, SandboxTimeout, Unsupported
from gnomon.sandbox import owners
from gnomon.sandbox.guest.machine import Machine
from gnomon.sandbox.images import Image
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.ns.cgroups import Cgroups, Group
from gnomon.sandbox.ns.door import PORT
from gnomon.sandbox.registry import Registry, Traces
from gnomon.sandbox.sandbox import Network, Snapshot, Spec
from gnomon.sandbox.ways import Ways

FULL_SPEED = 100 * max(2, os.cpu_count() or 2)
STATES = {
    "new": "creating", "running": "running", "frozen": "paused", "hibernated": "hibernated", "stopped": "hibernated", "ended": "ending",
}  # fmt: skip


class Housing(ABC):
    """The part of a backend that makes machines and lets them go; see `gnomon.sandbox.sandbox.Backend`."""

    name = ""

    def __init__(self, store: LayerStore | None = None, registry: Registry | None = None) -> None:
        self._store, self._registry = store, registry
        self._groups: Cgroups | None = None
        self.machines: dict[str, Machine] = {}
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.ways = Ways()

    @property
    def store(self) -> LayerStore:
        """Images and snapshots; opened when first needed."""
        self._store = self._store or (self._registry.store if self._registry else LayerStore())
        return self._store

    @property
    def registry(self) -> Registry:
        """Who owns which sandbox; opened when first needed."""
        self._registry = self._registry or Registry(self.store)
        return self._registry

    @property
    def groups(self) -> Cgroups:
        """The control groups that this process may make."""
        self._groups = self._groups or Cgroups()
        return self._groups

    @abstractmethod
    def _machine(self, identifier: str, spec: Spec, folder: Path, key: bytes | None) -> Machine:
        """A machine of this backend's, not started."""

    @abstractmethod
    async def _furnish(self, machine: Machine, image: Image, parent: Machine | None) -> None:
        """Lay out in its folder what a machine starts from: what its parent has, else the image. Raises `Unsupported`."""

    @abstractmethod
    def _made_with(self) -> dict[str, str]:
        """What a checkpoint depends on."""

    def _check(self, name: str, known: dict[str, Any]) -> None:  # noqa: B027  # most have nothing to check
        """Raise `SandboxError` for a checkpoint that cannot go on here; none is known of a machine that starts afresh."""

    @abstractmethod
    def _room(self, spec: Spec) -> tuple[int, int]:
        """Bytes of memory and number of tasks that a control group allows, with what the kernel in it needs."""

    def group(self, machine: Machine) -> Group | None:
        """A control group with the machine's limits and room for the kernel in it, for its next instance."""
        if not self.groups.folders:
            return None
        memory, tasks = self._room(machine.spec)
        return self.groups.make(machine.name, memory, FULL_SPEED, tasks)

    def hurry(self, machine: Machine, fast: bool) -> None:
        """Lift the machine's bound on processors while its kernel starts, saves or restores, or set it again."""
        if machine.group is not None:
            percent = FULL_SPEED if fast else max(1, round(machine.spec.limits.cpus * 100))
            machine.group.limit("cpu", "cpu.cfs_quota_us", "cpu.max", str(percent * 1000), f"{percent * 1000} 100000")

    async def create(self, spec: Spec) -> Machine:
        """A new sandbox, or the machine of a snapshot."""
        image = self.store.resolve(spec.image)
        if image.snapshot is not None and image.memory is None and image.snapshot.backend == self.name:
            raise SandboxError(f"snapshot {spec.image} has lost its checkpoint")
        if image.memory is not None and (image.snapshot is None or image.snapshot.backend != self.name):
            raise Unsupported(f"{self.name}: {spec.image} holds the processes of another backend's sandbox")
        spec = replace(spec, env={**image.env, **spec.env})
        known = json.loads((image.memory / "gnomon.json").read_text()) if image.memory is not None else {}
        if known and "key" not in known:
            raise SandboxError(f"snapshot {spec.image} is of an older version, whose agent had no key; make it anew")
        self._check(spec.image, known)
        machine = await self._place(spec, image, bytes.fromhex(known["key"]) if known else None)
        if machine.state != "new":
            return machine
        try:
            if image.memory is None:
                await machine.boot(env=dict(spec.env), workdir=spec.workdir, owner=spec.user)
                await machine.set_network(spec.network)
            else:
                await machine.born(image.memory, memory=bool(known["memory"]))
        except BaseException:
            await machine.kill()
            raise
        self.expire(machine, spec.ttl_seconds)
        return machine

    async def _place(self, spec: Spec, image: Image, key: bytes | None, parent: Machine | None = None) -> Machine:
        """A record and a furnished folder for a new machine; or the machine that lives under the same idempotency key."""
        identifier = secrets.token_hex(8)
        folder = await asyncio.to_thread(self.store.scratch)
        record = self.registry.claim(identifier, self.name, spec, traces=Traces(files=(str(folder),)))
        if record.id != identifier:
            self.store.discard(folder)
            return await self._existing(record.id)
        machine = self._machine(identifier, spec, folder, key)
        self.machines[identifier] = machine
        try:
            await self._furnish(machine, image, parent)
        except BaseException:
            await machine.kill()
            raise
        return machine

    async def _existing(self, identifier: str) -> Machine:
        """The machine that was made with the same key, once it is ready."""
        for _ in range(600):
            machine = self.machines.get(identifier)
            if machine is None:
                raise SandboxError(f"sandbox {identifier} was made with this idempotency key by another process")
            if machine.state != "new":
                return machine
            await asyncio.sleep(0.05)
        raise SandboxTimeout(f"sandbox {identifier}, made with the same idempotency key, does not get ready")

    async def sibling(self, parent: Machine, spec: Spec) -> Machine:
        """A new machine like `parent`, recorded and furnished, not started."""
        machine = await self._place(spec, self.store.resolve(spec.image), parent.guest.seal.key, parent)
        self.expire(machine, spec.ttl_seconds)
        return machine

    async def keep(self, machine: Machine, image: Path, name: str | None, *, memory: bool) -> Snapshot:
        """A finished checkpoint becomes a sealed folder of the store, and a name for it."""
        identifier = secrets.token_hex(8)
        start = self.store.resolve(machine.spec.image)
        known = {"memory": memory, **self._made_with(), "key": machine.guest.seal.key.hex()}
        (image / "gnomon.json").write_text(json.dumps(known))
        (image / "gnomon.json").chmod(0o600)
        size = machine.weight(image)
        layer = await asyncio.to_thread(self.store.seal, image, durable=True)
        snapshot = Snapshot(
            id=identifier,
            name=name or f"snapshot-{identifier}",
            backend=self.name,
            memory=memory,
            bytes=size,
            created_seconds=time.time(),
            parent=machine.spec.image,
        )
        try:
            self.store.keep(replace(start, name=snapshot.name, memory=layer, snapshot=snapshot, env=dict(machine.spec.env)))
        finally:
            self.store.release([layer])
        return snapshot

    async def connect(self, machine: Machine, network: Network) -> None:
        """The machine's door leads where these rules allow."""
        await machine.guest.lead(PORT, await self.ways.lead(machine.id, network))

    def note(self, machine: Machine) -> None:
        """Tell the registry what the machine is now and which processes it has."""
        pairs = [(process, owners.start_ticks(process)) for process in machine.processes]
        traces = Traces(
            processes=tuple((process, ticks) for process, ticks in pairs if ticks is not None),
            cgroups=tuple(str(group) for group in machine.groups),
            files=(str(machine.folder),),
        )
        with contextlib.suppress(SandboxError):
            self.registry.update(machine.id, state=STATES[machine.state], traces=traces)

    def expire(self, machine: Machine, seconds: float | None) -> None:
        """End the machine this long from now."""
        timer = self.timers.pop(machine.id, None)
        if timer is not None:
            timer.cancel()
        with contextlib.suppress(SandboxError):
            self.registry.expire(machine.id, seconds)
        if seconds is not None:
            self.timers[machine.id] = asyncio.get_running_loop().call_later(max(0.0, seconds), self._expired, machine)

    def _expired(self, machine: Machine) -> None:
        task = asyncio.create_task(machine.kill("its time is over"))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def discard(self, machine: Machine) -> None:
        """Give back everything that a machine had."""
        self.machines.pop(machine.id, None)
        await self.ways.end(machine.id)
        timer = self.timers.pop(machine.id, None)
        if timer is not None:
            timer.cancel()
        await asyncio.to_thread(self.store.discard, machine.folder)
        self.registry.release(machine.id)

    async def close(self) -> None:
        """End all sandboxes that this object made."""
        await asyncio.gather(*(machine.kill() for machine in list(self.machines.values())), return_exceptions=True)
        for task in list(self.tasks):
            await asyncio.gather(task, return_exceptions=True)
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        if self._registry is not None:
            self._registry.close()
