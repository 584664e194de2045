"""Who owns what: a process is named by boot, pid and start time, and is alive while it holds the lock on its file.

A lock of the kernel ends with its process, however that dies, and no other process, namespace or clock can be mistaken for its holder.
Times here are of the clock that counts from boot: it is the same for all processes and never jumps. Read next: `registry.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gnomon.errors import SandboxError

_held: dict[tuple[str, int], tuple[Owner, int]] = {}
_guard = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """One process, for all time: pids are used again, but not with the same start time in the same boot."""

    boot: str
    pid: int
    start_ticks: int

    @property
    def id(self) -> str:
        """Boot, pid and start time in one word that can be a file name."""
        return f"{self.boot}-{self.pid}-{self.start_ticks}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The owner that `id` describes. Raises `ValueError` for other text."""
        boot, pid, start = text.split("-")
        return cls(boot=boot, pid=int(pid), start_ticks=int(start))


def now() -> float:
    """Seconds since the machine started, sleep included; unaffected by anyone setting the clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot() -> str:
    """Twelve hexadecimal digits that name this start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:12]
    except OSError:
        return "unknown"


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (field 22 of its `stat`); `None` if it is gone or only waits to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name may hold spaces and brackets
    return None if fields[0] in ("Z", "X") else int(fields[19])


def own(folder: Path) -> Owner:
    """The present process as an owner, with its lock taken in `folder`; again after a fork, since locks are not inherited."""
    with _guard:
        key = (str(folder), os.getpid())
        if key not in _held:
            for stale in [k for k in _held if k[1] != key[1]]:
                os.close(_held.pop(stale)[1])
            owner = Owner(boot=boot(), pid=os.getpid(), start_ticks=start_ticks(os.getpid()) or 0)
            _held[key] = owner, _lock(folder / owner.id)
        return _held[key][0]


def alive(folder: Path, owner: str) -> bool:
    """Whether the process that `owner` names still runs; the file of one that does not is removed."""
    path = folder / owner
    with _guard:
        if any(key == (str(folder), os.getpid()) and held.id == owner for key, (held, _) in _held.items()):
            return True  # opening one's own file and closing it again would give up the lock
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        with contextlib.suppress(OSError):
            path.unlink()
        return False
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int:
    """Make and lock a file; whoever finds it unlocked may remove it, so look again once it is locked."""
    for _ in range(100):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        os.close(descriptor)
        time.sleep(0.005)
    raise SandboxError(f"cannot lock {path}: does the file system have locks? Set GNOMON_SANDBOX_HOME to a folder on a local disk")
