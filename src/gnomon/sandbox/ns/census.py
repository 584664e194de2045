"""What the processes of a sandbox use, counted from inside: for `usage` without control groups, and for the memory watchdog there."""

from __future__ import annotations

import os
import signal
import time

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
HELD_TURNS = 10
"""Looks until one that is held by its child counts as stopped: some milliseconds, so that what waits for a disk is through."""


def pids() -> list[int]:
    """All processes but the agent."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def first_line(path: str) -> bytes:
    """The start of a small file of `/proc`; empty if it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 4096)
    except OSError:
        return b""
    finally:
        os.close(fd)


def resident(pid: int) -> int:
    """Bytes in memory, those shared with others counted in full."""
    fields = first_line(f"/proc/{pid}/statm").split()
    return int(fields[1]) * PAGE if len(fields) > 1 else 0


def share(pid: int) -> int:
    """Bytes in memory, shared ones in proportion; in full where the kernel will not tell."""
    for line in first_line(f"/proc/{pid}/smaps_rollup").split(b"\n"):
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return resident(pid)


def memory() -> tuple[int, int, int]:
    """All memory of all programs in bytes, the largest program, the number of programs."""
    total, largest, most, found = 0, 0, -1, pids()
    for pid in found:
        size = share(pid)
        total += size
        if size > most:
            largest, most = pid, size
    return total, largest, len(found)


def over(limit: int) -> int:
    """The largest process if all together use more than `limit` bytes, else 0. The cheap upper bound is asked first."""
    if sum(resident(pid) for pid in pids()) <= limit:
        return 0
    total, largest, _ = memory()
    return largest if total > limit else 0


def processor_seconds() -> float:
    """Processor time of all programs, the ended ones included."""
    ticks = 0
    for pid in pids():
        fields = first_line(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        ticks += sum(int(field) for field in fields[11:15])
    ended = os.times()
    return ticks / TICKS + ended.children_user + ended.children_system


def stop_all(stopped: bool) -> bool:
    """Stop or continue every program by signal; True when all are stopped. A busy host takes its time to deliver: seconds are waited."""
    number = signal.SIGSTOP if stopped else signal.SIGCONT
    for turn in range(200):
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            return True
        if not stopped:
            return True
        moving, held = still_moving()
        if not moving or (turn >= HELD_TURNS and moving <= held):
            return True
        time.sleep(min(0.0002 * turn, 0.02))
    return False


def still_moving() -> tuple[set[int], set[int]]:
    """Programs that are not stopped, and those in the kernel, uninterruptibly, that have a stopped child. Who starts a program by vfork, as
    shells do, waits there until the child has become the program: stopped in between, neither comes further, and neither runs."""
    moving, asleep, parents = set(), set(), set()
    for pid in pids():
        fields = first_line(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        state, parent = fields[:2] if fields else (b"Z", b"0")  # gone meanwhile
        if state in (b"T", b"t"):
            parents.add(int(parent))
        elif state not in (b"Z", b"X"):
            moving.add(pid)
            if state == b"D":
                asleep.add(pid)
    return moving, asleep & parents
