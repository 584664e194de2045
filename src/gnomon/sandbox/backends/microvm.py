"""Virtual machines: a kernel of its own for each sandbox, held by the processor (KVM); snapshots, forks and hibernation of whole machines.

Whether a guest boots is found out by booting one: a `/dev/kvm` that opens proves nothing. qemu's translation of instructions (TCG) runs the
same machine anywhere, slowly, and its authors promise no isolation: it is a mode for tests, taken only when `GNOMON_MICROVM_ACCEL=tcg`
asks for it, and it counts as `standard`. Facts and pitfalls: docs/sandbox.md. Read next: `gnomon.sandbox.microvm.machine`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path

from gnomon.errors import SandboxError, Unsupported
from gnomon.sandbox.guest import machine as machines
from gnomon.sandbox.guest.housing import Housing
from gnomon.sandbox.gvisor.bundle import foreign_python
from gnomon.sandbox.images import Image
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.microvm import kernel, qemu
from gnomon.sandbox.microvm.drives import Drives
from gnomon.sandbox.microvm.machine import Machine
from gnomon.sandbox.registry import Registry
from gnomon.sandbox.sandbox import MEGABYTE, Capabilities, Limits, Spec

PROBE_SECONDS = {"kvm": 100.0, "tcg": 900.0}
KERNEL_BYTES = 96 * MEGABYTE
"""Memory of a guest beyond its limit, for its kernel and the agent; and of the host beyond that, for qemu."""

TASKS = 64
DEVICE = "/dev/vport0p1"
LETTERS = "abcdefgh"
LIFTED = frozenset({"processes"})
"""What is set inside and root inside may lift, to the harm of nobody else."""


class Backend(Housing):
    """Sandboxes in virtual machines; see `gnomon.sandbox.sandbox.Backend`."""

    name = "microvm"

    def __init__(self, store: LayerStore | None = None, registry: Registry | None = None) -> None:
        super().__init__(store, registry)
        self.slots = asyncio.Semaphore(max(2, os.cpu_count() or 2))
        self._found: Capabilities | None = None
        self._ready: asyncio.Task[tuple[str, str, str, Path, Path]] | None = None
        self._drives: Drives | None = None
        self._making = asyncio.Lock()

    @property
    def program(self) -> str:
        """The qemu that runs machines. Raises `Unsupported` where there is none."""
        return qemu.find()

    async def ready(self) -> tuple[str, str, str, Path, Path]:
        """Accelerator, version of qemu, version of the kernel, the kernel and its archive; found out once. Raises `Unsupported`."""
        if self._ready is None or (self._ready.done() and self._ready.exception() is not None):
            self._ready = asyncio.create_task(self._find_tools())
        return await asyncio.shield(self._ready)

    async def _find_tools(self) -> tuple[str, str, str, Path, Path]:
        accelerator = await qemu.accelerator(self.program)
        return accelerator, qemu.version(self.program), *await asyncio.to_thread(self._start_files, accelerator)

    def _start_files(self, accelerator: str) -> tuple[str, Path, Path]:
        found = kernel.find()
        self._drives = Drives(self.store)
        place = self._drives.shared
        plain = place / f"kernel-{found.version}-{found.image.stat().st_mtime_ns}{'-bare' if accelerator == 'tcg' else ''}"
        if not plain.exists():
            content = kernel.bare(found) if accelerator == "tcg" else None
            kernel.kept(plain, content or found.image.read_bytes())
        return found.version, plain, kernel.archive(found, (*foreign_python(), DEVICE), place)

    async def probe(self) -> Capabilities:
        """Boot a machine with nothing in it, look into it, hibernate and resume it; the answer is kept."""
        if self._found is not None:
            return self._found
        accelerator, version, guest, *_ = await self.ready()
        notes = [f"qemu {version} with {accelerator.upper()}, guests run Linux {guest}"]
        if accelerator == "tcg":
            notes.append("TCG: a mode for tests, some twenty times slower, and no isolation that qemu's authors vouch for")
        limits = Limits(memory_bytes=64 * MEGABYTE, disk_bytes=16 * MEGABYTE)
        try:
            async with asyncio.timeout(PROBE_SECONDS[accelerator]):
                async with await self.create(Spec(image="scratch", limits=limits, workdir="/root", ttl_seconds=120.0)) as machine:
                    await machine.list("/")
                    await machine.pause("hibernate")
                    await machine.resume()
                    await machine.list("/")
        except (SandboxError, OSError, TimeoutError) as error:
            raise Unsupported(f"microvm: qemu {version} cannot run a sandbox here: {str(error) or 'it hangs'}") from error
        self._found = Capabilities(
            backend=self.name,
            isolation="strong" if accelerator == "kvm" else "standard",
            pause=frozenset({"freeze", "stop", "hibernate"}),
            snapshot_files=True,
            snapshot_memory=True,
            live_fork=True,
            network=True,
            rootless=os.geteuid() != 0,
            unenforced=LIFTED | (frozenset() if "cpu" in self.groups.folders else {"cpus"}),
            notes=tuple(notes),
        )
        return self._found

    def _room(self, spec: Spec) -> tuple[int, int]:
        return spec.limits.memory_bytes + 5 * KERNEL_BYTES, TASKS + 4 * math.ceil(spec.limits.cpus)

    def _machine(self, identifier: str, spec: Spec, folder: Path, key: bytes | None) -> Machine:
        return Machine(identifier, spec, folder, self, key)

    async def _furnish(self, machine: machines.Machine, image: Image, parent: machines.Machine | None) -> None:
        assert isinstance(machine, Machine)
        accelerator, version, _, plain, archive = await self.ready()
        if image.memory is not None:
            machine.shape = qemu.Shape(**json.loads((image.memory / "shape.json").read_text()))
            _same(machine, version, accelerator)
            files = {file.name: file for file in (image.memory / "files").iterdir()}
        elif isinstance(parent, Machine):
            machine.shape, files = parent.shape, {file.name: file for file in parent.files.iterdir()}
        else:
            assert self._drives is not None
            async with self._making:
                drives, host = await asyncio.to_thread(self._drives.of, image)
            machine.shape = _shape(machine.spec.limits, len(drives), host, version, accelerator)
            files = {"kernel": plain, "archive": archive, **{f"drive{number}": drive for number, drive in enumerate(drives)}}
        machine.files.mkdir()
        for name, file in files.items():
            os.link(file, machine.files / name)

    def _made_with(self) -> dict[str, str]:
        return {"qemu": qemu.version(self.program)}


def _shape(limits: Limits, drives: int, host: bool, version: str, accelerator: str) -> qemu.Shape:
    """The machine for these limits, and the words that its first program reads."""
    layers = LETTERS[1 : drives - host]
    words = {
        "disk": limits.disk_bytes, "inodes": limits.inodes, "open": limits.open_files, "tasks": limits.processes,
        "layers": f"'{' '.join(layers)}'" if len(layers) > 1 else layers, "usr": LETTERS[drives - 1] if host else "",
    }  # fmt: skip
    memory = math.ceil((limits.memory_bytes + KERNEL_BYTES) / MEGABYTE)
    said = " ".join(f"gnomon.{name}={value}" for name, value in words.items())
    return qemu.Shape(memory_mib=memory, cpus=math.ceil(limits.cpus), drives=drives, words=said, qemu=version, accelerator=accelerator)


def _same(machine: Machine, version: str, accelerator: str) -> None:
    """Raise for a checkpoint that was made otherwise, or is of a larger machine than is asked for."""
    shape, limits, name = machine.shape, machine.spec.limits, machine.spec.image
    if (shape.qemu, shape.accelerator) != (version, accelerator):
        raise SandboxError(f"snapshot {name} was made with qemu {shape.qemu} and {shape.accelerator}, and this is {version} with "
                           f"{accelerator}; make it anew, or use that qemu")
    if math.ceil((limits.memory_bytes + KERNEL_BYTES) / MEGABYTE) < shape.memory_mib or limits.cpus <= shape.cpus - 1:
        raise Unsupported(f"microvm: snapshot {name} is of a machine with {shape.memory_mib} MiB and {shape.cpus} processors, which it "
                          "keeps; ask for as much, or start from an image")
