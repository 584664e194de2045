"""The default backend: Linux namespaces by plain system calls; no daemon, no package, no root.

Isolation is the kernel's own: see `docs/sandbox.md` for what that is worth. A zygote, a small process of its own, forks sandboxes; each has
an agent inside that runs programs and does file calls. As root every sandbox has a range of users of its own and control groups hold its
limits; as an ordinary user it has one user and limits per process. Read next: `ns/zygote.py`, `ns/birth.py`, then `ns/machine.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gnomon.errors import CapacityError, ConfigError, SandboxError, SandboxLost, Unsupported
from gnomon.sandbox import owners
from gnomon.sandbox.images import Image
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.ns import door
from gnomon.sandbox.ns.channel import Channel, Refused
from gnomon.sandbox.ns.host import Zygote, explained
from gnomon.sandbox.ns.keeping import Keeping
from gnomon.sandbox.ns.machine import Machine, Root
from gnomon.sandbox.registry import Registry, Traces
from gnomon.sandbox.sandbox import Capabilities, Command, Network, Sandbox, Snapshot, Spec
from gnomon.sandbox.ways import Ways

BIRTH_SECONDS = 60.0
MIN_MEMORY, MIN_DISK, MIN_PROCESSES, MIN_FILES, MIN_INODES = 16 << 20, 1 << 20, 4, 16, 64


class Backend(Keeping):
    """Sandboxes of one owner. Layers and names come from `store`, which is opened when first needed; `registry` is told what exists."""

    name = "namespaces"

    def __init__(self, store: LayerStore | None = None, registry: Registry | None = None) -> None:
        super().__init__(store)
        self.registry = registry
        self.machines: dict[str, Machine] = {}
        self.doors: dict[str, door.Door] = {}
        self.ways = Ways()
        self.keys: dict[str, asyncio.Task[Machine]] = {}
        self.starting: asyncio.Task[Zygote] | None = None
        self.known: Capabilities | None = None

    async def ready(self) -> Zygote:
        """The zygote, started if there is none that lives."""
        if self.zygote is not None and self.zygote.alive:
            return self.zygote
        if self.starting is None or self.starting.done():
            self.starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self.starting)

    async def _start(self) -> Zygote:
        if self.zygote is not None:
            with contextlib.suppress(SandboxError):
                await self.zygote.close()
        self.lose_snapshots()
        zygote = Zygote(self.store.root if self.store is not None else None)
        await zygote.start()
        self.zygote = zygote
        return zygote

    async def probe(self) -> Capabilities:
        """What works here, by making a sandbox and running a program in it."""
        if self.known is not None:
            return self.known
        zygote = await self.ready()
        try:
            async with await self.create(Spec()) as box:
                result = await box.exec(Command(argv=("/bin/true",)))
        except SandboxError as error:
            raise Unsupported(f"namespaces cannot be used here: {error}") from None
        if result.code != 0:
            reason = result.stderr.decode(errors="replace")
            raise Unsupported(f"namespaces cannot be used here: /bin/true ended with {result.code}: {reason}")
        held = {"memory": "memory_bytes", "pids": "processes", "cpu": "cpus"}
        notes = [*zygote.notes]
        missing = {field for controller, field in held.items() if controller not in zygote.controllers} - {"processes"}
        if "memory_bytes" in missing:
            notes.append("memory is limited per process, and in all by a watchdog inside that ends the largest program a moment later")
        if "freezer" not in zygote.controllers:
            notes.append("programs are frozen by SIGSTOP, which their parents notice")
        if zygote.rootless:
            notes.append("a sandbox has one user, root; the host's /usr is read-only inside")
        self.known = Capabilities(
            backend=self.name, isolation="standard", pause=frozenset({"freeze", "stop"}), snapshot_files=True, snapshot_memory=False,
            live_fork=False, network=True, rootless=zygote.rootless, unenforced=frozenset(missing), notes=tuple(notes),
        )  # fmt: skip
        return self.known

    async def create(self, spec: Spec) -> Machine:
        """A new sandbox; with an idempotency key that is known, the one it stands for."""
        if spec.idempotency_key is None:
            return await self._create(spec)
        task = self.keys.get(spec.idempotency_key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None or task.result().state == "gone")):
            task = self.keys[spec.idempotency_key] = asyncio.ensure_future(self._create(spec))
        return await asyncio.shield(task)

    async def _create(self, spec: Spec) -> Machine:
        zygote = await self.ready()
        try:
            return await self.make(spec, self.image(spec.image), zygote)
        except SandboxLost:
            if not zygote.channel.closed:
                raise
        return await self.make(spec, self.image(spec.image), await self.ready())  # it died before that was noticed

    async def make(self, spec: Spec, image: Image, zygote: Zygote) -> Machine:
        """A sandbox on an image."""
        checked(spec)
        below = self.chain(image)
        id = secrets.token_hex(8)
        root = Root(upper=id, below=below, host=image.host, image=image)
        machine = Machine(id=id, spec=spec, zygote=zygote, root=root, owner=self)
        await self.claim(machine)
        try:
            await self.hold(zygote, (f"@{id}", *below))
        except BaseException:
            if self.registry is not None:
                self.registry.release(id)
            raise
        try:
            await self.boot(machine)
            if spec.network != Network():
                await self.connect(machine, spec.network)
        except BaseException:
            machine.state = "gone"
            await asyncio.shield(self.end(machine))
            raise
        self.machines[id] = machine
        await machine.set_timeout(spec.ttl_seconds)
        return machine

    async def claim(self, machine: Machine) -> None:
        """Have it recorded before anything of it is made. Raises `SandboxError` if its idempotency key is another process's."""
        if self.registry is not None:
            record = await asyncio.to_thread(self.registry.claim, machine.id, self.name, machine.spec)
            if record.id != machine.id:
                raise SandboxError(f"sandbox {record.id} of process {record.owner.pid} has the idempotency key '{record.idempotency_key}'")

    def note(self, machine: Machine) -> None:
        """Have its state and first process recorded."""
        if self.registry is not None and machine.state != "gone":
            start = owners.start_ticks(machine.first) if machine.first else None
            traces = Traces(processes=((machine.first, start),)) if start is not None else Traces()
            self.registry.update(machine.id, state="running" if machine.state == "running" else "paused", traces=traces)

    async def boot(self, machine: Machine) -> None:
        """A first process on the machine's layers, and the conversation with it."""
        limits, root = machine.spec.limits, machine.root
        numbers = (limits.memory_bytes, limits.disk_bytes, max(1, round(limits.cpus * 100)), limits.processes, limits.inodes,
                   limits.open_files, int(root.host))  # fmt: skip
        names = (root.upper, machine.spec.hostname, self.workdir(machine), *root.below)
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise explained(error, "creating a sandbox") from None
        machine.channel = Channel(ours, messages=False, on_close=machine.lost)
        born = machine.channel.expect(0)
        born.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            machine.first = await machine.zygote.create(numbers, names, theirs)
        except BaseException:
            machine.channel.close("it was never born")
            raise
        finally:
            theirs.close()
        try:
            await asyncio.wait_for(born, BIRTH_SECONDS)
        except (Refused, TimeoutError, SandboxLost) as error:
            raise explained(error if str(error) else SandboxError("no sign of life"), "creating a sandbox") from None
        self.note(machine)

    def environment(self, machine: Machine) -> dict[str, str]:
        """What the image sets, and where the network is."""
        image = machine.root.image
        found = dict(image.env) if isinstance(image, Image) else {}
        return found | (door.VARIABLES if machine.network != Network() else {})

    def workdir(self, machine: Machine) -> str:
        """Where programs start."""
        return machine.spec.workdir

    def forget(self, machine: Machine) -> None:
        """It has ended by itself: give back what it held."""
        if self.machines.pop(machine.id, None) is not None:
            with contextlib.suppress(RuntimeError):
                machine.ending = asyncio.ensure_future(self._after(machine))

    async def _after(self, machine: Machine) -> None:
        with contextlib.suppress(SandboxError):
            await self.end(machine)

    async def end(self, machine: Machine) -> None:
        """Kill, and give back files, groups, layers, the door."""
        self.machines.pop(machine.id, None)
        if (way := self.doors.pop(machine.id, None)) is not None:
            await way.close()
        await self.ways.end(machine.id)
        if not machine.root.upper:
            return
        root, machine.root = machine.root, replace(machine.root, upper="", below=())
        try:
            await self.let_go(machine.zygote, root)
        finally:
            if hasattr(machine, "channel"):
                machine.channel.close(machine.reason or "it was killed")
            if self.registry is not None:
                await asyncio.to_thread(self.registry.release, machine.id)

    async def revive(self, machine: Machine) -> None:
        """A first process again; on a new writable layer if the old one has become part of a snapshot."""
        root = machine.root
        if machine.zygote.needs[f"@{root.upper}"] > 1:
            machine.root = replace(root, upper=secrets.token_hex(8), below=(f"@{root.upper}", *root.below))
            machine.zygote.need([f"@{machine.root.upper}"])
        try:
            await self.boot(machine)
        except BaseException:
            if machine.root is not root:
                del machine.zygote.needs[f"@{machine.root.upper}"]
                machine.root = root
            raise
        if machine.network != Network():
            await self.connect(machine, machine.network)

    async def multiply(self, machine: Machine, count: int) -> Sequence[Sandbox | Exception]:
        """Children on the machine's present files, each with an id of its own."""
        if count < 1:
            raise ConfigError(f"fork: count is {count}, and must be at least 1")
        zygote = machine.zygote
        below = await self.present(machine)
        image = machine.root.image if isinstance(machine.root.image, Image) else Image(name=machine.spec.image)
        spec = replace(machine.spec, idempotency_key=None, network=machine.network)
        await self.hold(zygote, below)
        try:
            return [child if not isinstance(child, BaseException) else self._plain(child) for child in await asyncio.gather(
                *(self._child(spec, image, zygote, below) for _ in range(count)), return_exceptions=True)]  # fmt: skip
        finally:
            await self.drop(zygote, below)

    async def _child(self, spec: Spec, image: Image, zygote: Zygote, below: tuple[str, ...]) -> Machine:
        return await self.make(spec, replace(image, layers=tuple(Path(layer) for layer in below)), zygote)

    @staticmethod
    def _plain(error: BaseException) -> Exception:
        if not isinstance(error, Exception):
            raise error
        return error

    async def keep(self, machine: Machine, name: str | None) -> Snapshot:
        """See `Keeping.remember`."""
        return await self.remember(machine, name, self.name)

    async def connect(self, machine: Machine, network: Network) -> None:
        """Open, move or shut the door. With rules it leads to a proxy that keeps them, and that cuts what new ones forbid."""
        way, target = self.doors.get(machine.id), await self.ways.lead(machine.id, network)
        if way is not None and way.proxy != target:
            way.cut(target)
        elif way is None and target is not None:
            way = self.doors[machine.id] = door.Door(await door.listener(machine.channel), target)
            await way.serve()

    async def close(self) -> None:
        """End everything."""
        machines = [*self.machines.values()]
        await asyncio.gather(*(machine.kill() for machine in machines), return_exceptions=True)
        self.lose_snapshots()
        if self.zygote is not None:
            zygote, self.zygote = self.zygote, None
            await zygote.close()


def checked(spec: Spec) -> None:
    """Refuse limits that no program could live in. Raises `ConfigError` naming the field."""
    limits = spec.limits
    for field, least in (("memory_bytes", MIN_MEMORY), ("disk_bytes", MIN_DISK), ("processes", MIN_PROCESSES), ("open_files", MIN_FILES),
                         ("inodes", MIN_INODES)):  # fmt: skip
        if getattr(limits, field) < least:
            raise ConfigError(f"Limits.{field} is {getattr(limits, field)}; the least is {least}")
    if not 0 < limits.cpus <= 4096:
        raise ConfigError(f"Limits.cpus is {limits.cpus}; it must be above 0")
    if not spec.workdir.startswith("/"):
        raise ConfigError(f"Spec.workdir is {spec.workdir!r}; it must be absolute")
    if len(spec.hostname.encode()) > 64 or not spec.hostname:
        raise ConfigError(f"Spec.hostname is {spec.hostname!r}; it must have 1 to 64 bytes")
    if limits.disk_bytes > limits.memory_bytes * 64:
        raise CapacityError("Limits.disk_bytes: files of a sandbox are kept in memory; this is more than any machine has")
