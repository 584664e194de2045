"""gVisor: another kernel between the program and the host, checkpoints of whole machines, N-way forks; as root or as an ordinary user.

`runsc` runs each sandbox with a kernel of its own in user space, so that a fault of the host's kernel is out of a program's reach. What it
costs is system calls. Facts and pitfalls: docs/sandbox.md. Read next: `gnomon.sandbox.gvisor.machine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path

from gnomon.errors import SandboxError, SandboxTimeout, Unsupported
from gnomon.sandbox import owners
from gnomon.sandbox.gvisor import account, bundle, runsc
from gnomon.sandbox.gvisor.machine import Machine
from gnomon.sandbox.images import Image
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.ns.cgroups import Cgroups, Group
from gnomon.sandbox.ns.door import PORT
from gnomon.sandbox.registry import Registry, Traces
from gnomon.sandbox.sandbox import MEGABYTE, Capabilities, Command, Network, Snapshot, Spec
from gnomon.sandbox.ways import Ways

PROBE_SECONDS = 100.0
NEVER_HELD = frozenset({"disk_bytes", "inodes", "processes"})
KERNEL_BYTES = 96 * MEGABYTE
KERNEL_TASKS = 256
FULL_SPEED = 100 * max(2, os.cpu_count() or 2)
TASKS_PER_PROCESS = 16
STATES = {
    "new": "creating", "running": "running", "frozen": "paused", "hibernated": "hibernated", "stopped": "hibernated", "ended": "ending",
}  # fmt: skip
HELD_BY = {"memory": "memory_bytes", "cpu": "cpus"}
"""Which controller holds which limit. Files are in memory, so that `memory_bytes` bounds them all, and `disk_bytes` each. One process
inside is several tasks of the host, more or fewer from one version to the next: their number is bounded, not that of `processes`."""


class Backend:
    """Sandboxes under `runsc`; see `gnomon.sandbox.sandbox.Backend`."""

    name = "gvisor"

    def __init__(self, store: LayerStore | None = None, registry: Registry | None = None) -> None:
        self._store, self._registry = store, registry
        self._runsc: runsc.Runsc | None = None
        self._found: Capabilities | None = None
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
    def runsc(self) -> runsc.Runsc:
        """The program. Raises `Unsupported` where there is none."""
        if self._runsc is None:
            found = runsc.Runsc(runsc.find(), self.store.root / "gvisor" / "bin")
            found.prepare()
            self._runsc = found
        return self._runsc

    @property
    def groups(self) -> Cgroups:
        """The control groups that this process may make."""
        self._groups = self._groups or Cgroups()
        return self._groups

    def group(self, machine: Machine) -> Group | None:
        """A control group with the machine's limits and room for the kernel in it, for its next instance."""
        if not self.groups.folders:
            return None
        limits = machine.spec.limits
        memory, tasks = limits.memory_bytes + KERNEL_BYTES, TASKS_PER_PROCESS * limits.processes + KERNEL_TASKS
        return self.groups.make(machine.name, memory, FULL_SPEED, tasks)

    def hurry(self, machine: Machine, fast: bool) -> None:
        """Lift the machine's bound on processors while its kernel starts, saves or restores, or set it again."""
        if machine.group is not None:
            percent = FULL_SPEED if fast else max(1, round(machine.spec.limits.cpus * 100))
            machine.group.limit("cpu", "cpu.cfs_quota_us", "cpu.max", str(percent * 1000), f"{percent * 1000} 100000")

    async def probe(self) -> Capabilities:
        """Make a sandbox, run a program, hibernate and resume it; the answer is kept."""
        if self._found is not None:
            return self._found
        said = runsc.version(self.runsc.binary)
        notes = [f"runsc {said} at {self.runsc.binary}", "what reaches its memory limit, or far too many processes, ends as a whole"]
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                async with await self.create(Spec(ttl_seconds=120.0)) as machine:
                    result = await machine.exec(Command(argv=("true",), timeout_seconds=10.0))
                    if result.code != 0:
                        raise Unsupported(f"gvisor: `true` ended with status {result.code} inside")
                    if (await machine.exec(Command(argv=("stat", "/"), timeout_seconds=10.0))).code != 0:
                        notes.append("this version refuses a flag of statx: `ls` and `stat` fail inside; set RUNSC_PATH to a current build")
                    checkpoints = await _checkpoints(machine, notes)
        except (SandboxError, OSError, TimeoutError) as error:
            raise Unsupported(f"gvisor: runsc {said} cannot run a sandbox here: {str(error) or 'it hangs'}") from error
        levels = ("freeze", "stop", "hibernate") if checkpoints else ("freeze",)
        self._found = Capabilities(
            backend=self.name,
            isolation="strong",
            pause=frozenset(levels),  # type: ignore[arg-type]
            snapshot_files=checkpoints,
            snapshot_memory=checkpoints,
            live_fork=checkpoints,
            network=True,
            rootless=os.geteuid() != 0,
            unenforced=frozenset(limit for held, limit in HELD_BY.items() if held not in self.groups.folders) | NEVER_HELD,
            notes=tuple(notes),
        )
        return self._found

    async def create(self, spec: Spec) -> Machine:
        """A new sandbox, or the machine of a snapshot."""
        image = self.store.resolve(spec.image)
        if image.snapshot is not None and image.memory is None and image.snapshot.backend == self.name:
            raise SandboxError(f"snapshot {spec.image} has lost its checkpoint")
        if image.memory is not None and (image.snapshot is None or image.snapshot.backend != self.name):
            raise Unsupported(f"gvisor: {spec.image} holds the processes of another backend's sandbox")
        spec = replace(spec, env={**image.env, **spec.env})
        known = json.loads((image.memory / "gnomon.json").read_text()) if image.memory is not None else {}
        if known and "key" not in known:
            raise SandboxError(f"snapshot {spec.image} is of an older version, whose agent had no key; make it anew")
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

    async def _place(self, spec: Spec, image: Image, key: bytes | None) -> Machine:
        """A record, a folder and a bundle for a new machine; or the machine that lives under the same idempotency key."""
        identifier = secrets.token_hex(8)
        folder = await asyncio.to_thread(self.store.scratch)
        record = self.registry.claim(identifier, self.name, spec, traces=Traces(files=(str(folder),)))
        if record.id != identifier:
            self.store.discard(folder)
            return await self._existing(record.id)
        machine = Machine(identifier, spec, folder, self, key)
        self.machines[identifier] = machine
        try:
            root, agent = await asyncio.to_thread(self._folders, image)
            bundle.write(folder / "bundle", bundle.configuration(spec, root, agent, host=image.host))
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

    def _folders(self, image: Image) -> tuple[Path, Path]:
        """The root folder of an image and the agent's folder."""
        place = self.store.root / "gvisor"
        agent = bundle.agent_folder(place)
        if not image.layers:
            if not image.host:
                raise Unsupported("gvisor: an empty image has nothing to run")
            return bundle.host_root(place), agent
        if image.host:
            raise Unsupported(f"gvisor: image {image.name} has layers over the host's /usr; snapshot inside gvisor, or use a full image")
        return self.store.flat(image), agent

    async def sibling(self, parent: Machine, spec: Spec) -> Machine:
        """A new machine like `parent`, recorded and with a bundle, not started."""
        machine = await self._place(spec, self.store.resolve(spec.image), parent.guest.seal.key)
        self.expire(machine, spec.ttl_seconds)
        return machine

    async def keep(self, machine: Machine, image: Path, name: str | None, *, memory: bool) -> Snapshot:
        """A finished checkpoint becomes a sealed folder of the store, and a name for it."""
        identifier = secrets.token_hex(8)
        start = self.store.resolve(machine.spec.image)
        known = {"memory": memory, "runsc": runsc.version(self.runsc.binary), "key": machine.guest.seal.key.hex()}
        (image / "gnomon.json").write_text(json.dumps(known))
        (image / "gnomon.json").chmod(0o600)
        size = account.disk(image)
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


async def _checkpoints(machine: Machine, notes: list[str]) -> bool:
    """Whether hibernating and resuming works with this `runsc`."""
    try:
        await machine.pause("hibernate")
        await machine.resume()
    except SandboxError as error:
        notes.append(f"no checkpoints: {error}")
        return False
    return True
