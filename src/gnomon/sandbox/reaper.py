"""The end of sandboxes that nobody ends: their owner crashed, the machine restarted, their time is over, an answer was lost.

`sweep` is run by every backend when it starts, by `Sweeper` from time to time, and by `gnomon sandbox gc`. What it does to one sandbox it
can do again: processes are killed only under their own start time, everything else may already be gone, and the record goes last.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gnomon.errors import GnomonError
from gnomon.sandbox import owners, trees
from gnomon.sandbox.layers import Collected
from gnomon.sandbox.ns import cgroups
from gnomon.sandbox.registry import Record, Registry, Traces

_MNT_DETACH = 2
_PATIENCE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """Which sandboxes were ended, each with the reason; which could not be; and what the store gave back."""

    ended: tuple[tuple[str, str], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    collected: Collected | None = None


def sweep(registry: Registry, *, collect: bool = False) -> Swept:
    """End every sandbox that is dead, and with `collect` remove what the store does not need; never raises for a single sandbox."""
    ended, failed = [], []
    for record, why in registry.dead():
        try:
            if end(registry, record):
                ended.append((record.id, why))
        except (OSError, GnomonError) as error:
            failed.append((record.id, str(error)))
    return Swept(ended=tuple(ended), failed=tuple(failed), collected=registry.store.gc() if collect else None)


def end(registry: Registry, record: Record, *, by_force: bool = False) -> bool:
    """Take a dead sandbox over and remove all its traces; `False` if another process is doing it. `by_force`: a living one too.

    Space is given back before the record is touched, so that this works on a full disk.
    """
    if not by_force and not _mine(registry, record):
        return False
    erase(record.traces)
    registry.release(record.id)
    return True


def _mine(registry: Registry, record: Record) -> bool:
    if record.owner == owners.own(registry.store.root / "owners"):
        return True  # its time is over, in this very process
    try:
        return registry.take(record.id)
    except GnomonError:
        return registry.why_dead(record) is not None  # no room to write down who does it; doing it twice does no harm


def erase(traces: Traces) -> None:
    """Kill the processes, empty and remove the control groups, unmount, remove the files. Raises `OSError` for what stays."""
    for pid, start in traces.processes:
        kill(pid, start)
    for group in traces.cgroups:
        _remove_group(Path(group))
    libc = ctypes.CDLL(None, use_errno=True)
    for mount in reversed(traces.mounts):
        libc.umount2(os.fsencode(mount), _MNT_DETACH)  # in vain if its namespace is gone with its processes
    for name in traces.files:
        trees.remove(Path(name))


def kill(pid: int, start_ticks: int) -> bool:
    """Kill a process if it is still the one that started then, and wait a little until it is gone; `False` if it was gone."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if owners.start_ticks(pid) != start_ticks:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        _wait(lambda: owners.start_ticks(pid) != start_ticks)
        return True
    finally:
        os.close(handle)


def _remove_group(group: Path) -> None:
    """Kill what a control group holds, thaw it where it is frozen, and remove it and those below it."""
    if not group.is_dir():
        return
    for below in [path for path in group.iterdir() if path.is_dir()]:
        _remove_group(below)
    with contextlib.suppress(OSError):
        cgroups.write(str(group / "cgroup.kill"), "1")
    cgroups.thaw(str(group))

    def gone() -> bool:
        with contextlib.suppress(FileNotFoundError):
            for pid in (group / "cgroup.procs").read_text(encoding="ascii").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                group.rmdir()
        return not group.exists()

    if not _wait(gone):
        raise OSError(f"control group {group} cannot be removed: processes in it do not end")


def _wait(condition: Callable[[], bool]) -> bool:
    limit = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.002)
    return True


class Sweeper:
    """Sweeps from time to time in a thread of its own, from `start` to `stop`; `last` is what it found."""

    def __init__(self, registry: Registry, every_seconds: float = 15.0) -> None:
        self.last = Swept()
        self._registry, self._every = registry, every_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gnomon-sweeper", daemon=True)

    def start(self) -> None:
        """Begin; the first sweep is done when this returns."""
        self.last = sweep(self._registry)
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for a sweep that is under way."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._every):
            with contextlib.suppress(GnomonError, OSError):  # a full disk now; the next round tries again
                self.last = sweep(self._registry)
