"""What a machine with a kernel of its own costs the host: memory and processor time of its processes, by control groups or by `/proc`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def use(processes: Iterable[int], groups: Iterable[Path]) -> tuple[int, float]:
    """Bytes of memory and seconds of processor time: from the control groups, else from the processes and those they started."""
    memory: int | None = None
    seconds: float | None = None
    for group in groups:
        counted = dict(line.split() for line in _text(group / "memory.stat").splitlines())
        for words in (("total_rss", "total_shmem"), ("anon", "shmem")):  # version 1, 2; not the cache of files, which can be dropped
            if all(word in counted for word in words):
                memory = sum(int(counted[word]) for word in words)
        nanoseconds = _number(group / "cpuacct.usage", None)
        seconds = seconds if nanoseconds is None else nanoseconds / 1e9
        for line in _text(group / "cpu.stat").splitlines():
            if line.startswith("usage_usec"):
                seconds = int(line.split()[1]) / 1e6
    family = _family(processes) if memory is None or seconds is None else ()
    if memory is None:
        memory = sum(_shared_part(process) for process in family)
    if seconds is None:
        seconds = sum(_seconds(process) for process in family)
    return memory, seconds


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def _number(path: Path, otherwise: int | None) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else otherwise


def _family(processes: Iterable[int]) -> list[int]:
    found = list(processes)
    for process in found:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            found += [int(child) for child in _text(task).split() if int(child) not in found]
    return found


def _shared_part(process: int) -> int:
    for line in _text(Path(f"/proc/{process}/smaps_rollup")).splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _seconds(process: int) -> float:
    fields = _text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0


def disk(folder: Path) -> int:
    """Bytes that the files below a folder occupy."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total
