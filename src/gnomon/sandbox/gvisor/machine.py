"""One gVisor sandbox: an agent as process 1 under `runsc`, paused, kept on disk, and copied by checkpoint and restore.

A checkpoint takes everything (processes, memory, files, which live in an overlay in memory) and ends the instance; going on is a restore
like any other. What does not depend on `runsc` is in `gnomon.sandbox.guest.machine`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gnomon.sandbox.guest import machine
from gnomon.sandbox.gvisor.runsc import Runsc
from gnomon.sandbox.sandbox import Spec


class Home(machine.Home, Protocol):
    """What a gVisor machine asks of the backend that made it."""

    @property
    def runsc(self) -> Runsc:
        """The program that runs it."""
        ...


class Machine(machine.Machine):
    """A sandbox under gVisor; see `gnomon.sandbox.sandbox.Sandbox`."""

    home: Home

    def __init__(self, identifier: str, spec: Spec, folder: Path, home: Home, key: bytes | None = None) -> None:
        super().__init__(identifier, spec, folder, home, key)

    async def _launch(self, image: Path | None) -> tuple[int, int]:
        shutil.rmtree(self.folder / "state", ignore_errors=True)
        from_guest, guest_out = os.pipe()
        guest_in, to_guest = os.pipe()
        try:
            self.group = self.home.group(self)
            process = await self.home.runsc.launch(self.folder, self.name, image, (guest_in, guest_out), self.groups)
            self.handle = os.pidfd_open(process)
        except BaseException:
            for end in (from_guest, to_guest):
                os.close(end)
            raise
        finally:
            for end in (guest_in, guest_out):
                os.close(end)
        self.processes = (process, *self._gofers())
        return from_guest, to_guest

    def _gofers(self) -> Sequence[int]:
        found = []
        for path in (self.folder / "state").glob("*.state"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                found.append(int(json.loads(path.read_text())["goferPid"]))
        return found

    async def _halt(self) -> None:
        await self.home.runsc.verb(self.folder, "pause", self.name)

    async def _continue(self) -> None:
        await self.home.runsc.verb(self.folder, "resume", self.name)

    async def _save(self, image: Path) -> None:
        await self.home.runsc.verb(self.folder, "checkpoint", f"--image-path={image}", self.name, seconds=300.0)

    async def _end_processes(self) -> None:
        """Also what serves the instance files."""
        for process in self.processes[1:]:
            if _is_gofer(process, self.name):
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        await super()._end_processes()


def _is_gofer(process: int, name: str) -> bool:
    """Whether a process still is the file server of this instance, and not a later process with the same number."""
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
    return any(word == name or word.endswith(f"={name}") for word in words) or "gofer" in words
