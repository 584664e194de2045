"""gVisor: another kernel between the program and the host, checkpoints of whole machines, N-way forks; as root or as an ordinary user.

`runsc` runs each sandbox with a kernel of its own in user space, so that a fault of the host's kernel is out of a program's reach. What it
costs is system calls. Facts and pitfalls: docs/sandbox.md. Read next: `gnomon.sandbox.gvisor.machine`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from gnomon.errors import SandboxError, Unsupported
from gnomon.sandbox.guest import machine as machines
from gnomon.sandbox.guest.housing import Housing
from gnomon.sandbox.gvisor import bundle, runsc
from gnomon.sandbox.gvisor.machine import Machine
from gnomon.sandbox.images import Image
from gnomon.sandbox.sandbox import MEGABYTE, Capabilities, Command, Spec

PROBE_SECONDS = 100.0
NEVER_HELD = frozenset({"disk_bytes", "inodes", "processes"})
KERNEL_BYTES = 96 * MEGABYTE
KERNEL_TASKS = 256
TASKS_PER_PROCESS = 16
HELD_BY = {"memory": "memory_bytes", "cpu": "cpus"}
"""Which controller holds which limit. Files are in memory, so that `memory_bytes` bounds them all, and `disk_bytes` each. One process
inside is several tasks of the host, more or fewer from one version to the next: their number is bounded, not that of `processes`."""


class Backend(Housing):
    """Sandboxes under `runsc`; see `gnomon.sandbox.sandbox.Backend`."""

    name = "gvisor"

    def __init__(self, store: LayerStore | None = None, registry: Registry | None = None) -> None:
        super().__init__(store, registry)
        self._runsc: runsc.Runsc | None = None
        self._found: Capabilities | None = None

    @property
    def runsc(self) -> runsc.Runsc:
        """The program. Raises `Unsupported` where there is none."""
        if self._runsc is None:
            found = runsc.Runsc(runsc.find(), self.store.root / "gvisor" / "bin")
            found.prepare()
            self._runsc = found
        return self._runsc

    def _room(self, spec: Spec) -> tuple[int, int]:
        return spec.limits.memory_bytes + KERNEL_BYTES, TASKS_PER_PROCESS * spec.limits.processes + KERNEL_TASKS

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

    def _machine(self, identifier: str, spec: Spec, folder: Path, key: bytes | None) -> Machine:
        return Machine(identifier, spec, folder, self, key)

    async def _furnish(self, machine: machines.Machine, image: Image, parent: machines.Machine | None) -> None:
        root, agent = await asyncio.to_thread(self._folders, image)
        bundle.write(machine.folder / "bundle", bundle.configuration(machine.spec, root, agent, host=image.host))

    def _made_with(self) -> dict[str, str]:
        return {"runsc": runsc.version(self.runsc.binary)}

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


async def _checkpoints(machine: machines.Machine, notes: list[str]) -> bool:
    """Whether hibernating and resuming works with this `runsc`."""
    try:
        await machine.pause("hibernate")
        await machine.resume()
    except SandboxError as error:
        notes.append(f"no checkpoints: {error}")
        return False
    return True
