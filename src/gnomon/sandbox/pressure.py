"""How close this machine is to the end of its memory, and what that means for another sandbox.

The kernel's own words are used: what is available, of the machine and of the control group that this process may grow in, and the share of
time in which something waited for memory. A guard that says no is better than a kernel that picks somebody to kill. Read next: `pool.py`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gnomon.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """Bytes in all, bytes that can still be had, by the narrower of machine and control group; per cent of the last ten seconds stalled."""

    total_bytes: int
    available_bytes: int
    stalled_percent: float


def pressure(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Pressure:
    """The present state. A kernel without pressure information counts as not stalled."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(proc / "meminfo"), re.MULTILINE))
    total, available = (int(fields.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, used in _groups(proc, groups):
        total, available = min(total, limit), min(available, max(0, limit - used))
    stalled = re.search(r"^some avg10=([\d.]+)", _read(proc / "pressure" / "memory"), re.MULTILINE)
    return Pressure(total_bytes=total, available_bytes=available, stalled_percent=float(stalled[1]) if stalled else 0.0)


def _groups(proc: Path, groups: Path) -> list[tuple[int, int]]:
    """Limit and use of each control group above this process that has a limit; what the kernel could drop does not count as used."""
    found = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            folder, limit, used, cache = groups, "memory.max", "memory.current", "inactive_file"
            if not (groups / path.strip("/") / limit).exists() and (groups / "unified").is_dir():
                folder = groups / "unified"
        elif "memory" in controllers.split(","):
            folder, limit, used, cache = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        place = folder / path.strip("/")
        while place.is_relative_to(folder):
            text = _read(place / limit).strip()
            if text.isdigit() and int(text) < 1 << 60:
                droppable = re.search(rf"^{cache} (\d+)", _read(place / "memory.stat"), re.MULTILINE)
                found.append((int(text), int(_read(place / used).strip() or 0) - (int(droppable[1]) if droppable else 0)))
            place = place.parent
    return found


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace")
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Says when there must be no more: less than `least_share` of the memory left, or `most_stalled_percent` of the time spent waiting."""

    least_share: float = 0.08
    most_stalled_percent: float = 25.0
    read: Callable[[], Pressure] = pressure

    def tight(self, need_bytes: int = 0) -> str | None:
        """Why `need_bytes` more would be too much, or `None`."""
        now = self.read()
        least = round(now.total_bytes * self.least_share)
        if now.available_bytes - need_bytes < least:
            wants = f" and {format_bytes(need_bytes)} are wanted" if need_bytes else ""
            return (f"{format_bytes(now.available_bytes)} of {format_bytes(now.total_bytes)} memory are available{wants}; "
                    f"{format_bytes(least)} are kept free")
        if now.stalled_percent > self.most_stalled_percent:
            return f"programs waited for memory in {now.stalled_percent:.0f} % of the last ten seconds"
        return None
