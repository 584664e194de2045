"""Control groups of either version, or both: one group per sandbox below the caller's own, never at the root of the machine.

The agent stays outside: a sandbox whose files fill its memory would otherwise take its agent along. Each program joins through descriptors
that were opened before privileges were given up; on version 1 through `tasks`, which needs no lock over the whole machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time

ROOT = "/sys/fs/cgroup"
FREEZE_SECONDS = 5.0
"""How long programs that fork without end may take to stand still."""

LOOKS = 50
FREEZER = ("freezer.state", "cgroup.freeze")
VALUES = (("THAWED", "FROZEN"), ("0", "1"))
"""By version: the file that freezes, and what goes into it."""

WANTED = ("memory", "pids", "cpu", "cpuacct", "freezer")
PREFIX = "gnomon-"


def write(path: str, text: str) -> None:
    """Write a control file at once, so that a refusal is seen."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def read(path: str) -> str:
    """What a control file says."""
    fd, text = os.open(path, os.O_RDONLY | os.O_CLOEXEC), b""
    try:
        while data := os.read(fd, 1 << 16):
            text += data
    finally:
        os.close(fd)
    return text.decode("ascii", "replace")


def own_groups() -> dict[str, str]:
    """The folder of this process in each hierarchy by controller; the unified one is `unified`."""
    paths = {}
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(",") if controllers else ["unified"]:
            paths[name] = path
    found = {}
    for line in read("/proc/self/mountinfo").splitlines():
        fields = line.split()
        root, point = fields[3], fields[4]
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        if kind not in ("cgroup", "cgroup2"):
            continue
        for name in ("unified",) if kind == "cgroup2" else options.split(","):
            path = paths.get(name, "")
            if path and (root in ("/", path) or path.startswith(root + "/")):
                found[name] = point + (path if root == "/" else path[len(root) :]).rstrip("/")
    return found


def start_time(pid: int) -> str:
    """When a process began, in the kernel's ticks: with its number, its identity. Empty if there is none."""
    try:
        return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def remove(folder: str, attempts: int = 500) -> bool:
    """Remove a group and those below it; a group that is still emptying gets a moment. False for one that stays, or is somebody else's."""
    for attempt in range(attempts):
        if attempt:
            time.sleep(0.002)
        try:
            try:
                os.rmdir(folder)  # most have none below them, and to look at every control file takes longer than all the rest
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                    raise
                with os.scandir(folder) as entries:
                    below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
                for path in below:
                    remove(path, 1)
                os.rmdir(folder)
            return True
        except FileNotFoundError:
            return True
        except PermissionError:
            return False
        except OSError:
            continue
    return False


def sweep(own: dict[str, str]) -> int:
    """Remove the groups of zygotes that were killed; how many there were. What still holds processes is left to the reaper, at once; what
    was frozen goes on, since nothing that is frozen can die."""
    count = 0
    for folder in set(own.values()):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            pid, _, began = name.removeprefix(PREFIX).partition("-")
            if name.startswith(PREFIX) and pid.isdigit() and start_time(int(pid)) != began:
                thaw(os.path.join(folder, name))
                count += remove(os.path.join(folder, name), 1)
    return count


def thaw(folder: str) -> None:
    """Let the groups below a folder go on, as far as this process may."""
    for inside, _, files in os.walk(folder):
        for name, values in zip(FREEZER, VALUES, strict=True):
            if name in files:
                with contextlib.suppress(OSError):
                    write(os.path.join(inside, name), values[False])


def stand_still(folder: str, unified: bool, frozen: bool) -> bool:
    """Stop or continue what is in a group; whether it stands, or runs, after a moment. Most do as soon as they are let run."""
    write(os.path.join(folder, FREEZER[unified]), VALUES[unified][frozen])
    for _ in range(LOOKS):
        if stands_still(folder, unified, frozen):
            return True
        os.sched_yield()
    return False


def stands_still(folder: str, unified: bool, frozen: bool) -> bool:
    """Whether all of a group stand still, or none has to."""
    state = read(os.path.join(folder, "cgroup.events" if unified else FREEZER[unified]))
    return f"frozen {int(frozen)}" in state if unified else state.strip() == VALUES[unified][frozen]


class Cgroups:
    """What this process may make: `folders` by controller (empty where nothing is allowed), `notes` on what was refused."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.folders: dict[str, str] = {}
        self.unified = ""
        try:
            self.own = own_groups()
        except OSError as error:
            self.own = {}
            self.notes.append(f"control groups cannot be read: {error.strerror}")
            return
        sweep(self.own)
        self.name = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}"
        for controller in WANTED:
            if controller in self.own:
                self._found(controller, self.own[controller])
        if "unified" in self.own:
            self._unified(self.own["unified"])

    def _found(self, controller: str, folder: str) -> None:
        path = os.path.join(folder, self.name)
        try:
            os.makedirs(path, exist_ok=True)
            self.folders[controller] = path
        except OSError as error:
            self.notes.append(f"no {controller} group under {folder}: {error.strerror}")

    def _unified(self, folder: str) -> None:
        path = os.path.join(folder, self.name)
        wanted = [name for name in ("memory", "pids", "cpu") if name not in self.folders]
        try:
            offered = [name for name in wanted if name in read(os.path.join(folder, "cgroup.controllers")).split()]
            if not offered and "freezer" in self.folders:
                return
            os.makedirs(path, exist_ok=True)
            self.unified = path
            for name in offered:
                if name not in read(os.path.join(folder, "cgroup.subtree_control")).split():
                    write(os.path.join(folder, "cgroup.subtree_control"), f"+{name}")
                write(os.path.join(path, "cgroup.subtree_control"), f"+{name}")
                self.folders[name] = path
            if "cpu" in self.folders:
                self.folders.setdefault("cpuacct", path)
        except OSError as error:
            self.notes.append(f"the unified hierarchy under {folder} gives no controllers ({error.strerror}); start with "
                              "`systemd-run --user --scope -p Delegate=yes` to have them")  # fmt: skip
        if self.unified and "freezer" not in self.folders:
            self.folders["freezer"] = path

    def make(self, name: str, memory: int, cpus_percent: int, processes: int) -> Group:
        """A group with limits in every hierarchy that there is."""
        group = Group(self, name)
        try:
            for folder in group.folders:
                os.mkdir(folder)
            group.limit("memory", "memory.limit_in_bytes", "memory.max", str(memory))
            group.limit("memory", "memory.memsw.limit_in_bytes", "memory.swap.max", str(memory), "0", optional=True)
            if group.is_unified("memory"):
                group.limit("memory", "", "memory.oom.group", "0", optional=True)
            group.limit("cpu", "cpu.cfs_quota_us", "cpu.max", str(cpus_percent * 1000), f"{cpus_percent * 1000} 100000")
            group.limit("pids", "pids.max", "pids.max", str(processes))
            group.open()
        except OSError:
            group.remove()
            raise
        return group

    @property
    def freezer(self) -> tuple[str, bool]:
        """Where the groups that can be frozen are, empty if nowhere, and whether that is on the unified hierarchy."""
        folder = self.folders.get("freezer", "")
        return folder, bool(self.unified) and folder == self.unified

    def close(self) -> None:
        """Remove the groups above those of the sandboxes."""
        for folder in {*self.folders.values(), self.unified} - {""}:
            remove(folder)


class Group:
    """The group of one sandbox: its folders, and the descriptors through which programs join."""

    def __init__(self, parent: Cgroups, name: str) -> None:
        self.parents = parent.folders
        self.unified, self.name = parent.unified, name
        self.folders = sorted({os.path.join(folder, name) for folder in parent.folders.values()})
        self.joins: list[int] = []

    def path(self, controller: str) -> str:
        """The folder for a controller; empty if there is none."""
        return os.path.join(self.parents[controller], self.name) if controller in self.parents else ""

    def is_unified(self, controller: str) -> bool:
        """Whether a controller is on the unified hierarchy."""
        return bool(self.unified) and self.parents.get(controller) == self.unified

    def limit(self, controller: str, old: str, new: str, *values: str, optional: bool = False) -> None:
        """Write a limit in the words of either version."""
        if folder := self.path(controller):
            unified = self.is_unified(controller)
            try:
                write(os.path.join(folder, new if unified else old), values[-1] if unified else values[0])
            except OSError:
                if not optional:
                    raise

    def open(self) -> None:
        """Open what programs will write themselves into."""
        for folder in self.folders:
            unified = bool(self.unified) and folder.startswith(self.unified + "/")
            self.joins.append(os.open(os.path.join(folder, "cgroup.procs" if unified else "tasks"), os.O_WRONLY | os.O_CLOEXEC))

    def freeze(self, frozen: bool) -> bool:
        """Stop or continue every program of the group; False where there is no freezer. A group that does not stand still goes on."""
        folder, unified = self.path("freezer"), self.is_unified("freezer")
        if not folder:
            return False
        limit = time.monotonic() + FREEZE_SECONDS
        if stand_still(folder, unified, frozen):
            return True
        while time.monotonic() < limit:
            time.sleep(0.0005)
            if stands_still(folder, unified, frozen):
                return True
        self.thaw()
        raise OSError(f"{self.name} does not {'freeze' if frozen else 'thaw'}")

    def thaw(self) -> None:
        """Let the programs go on, without waiting until they do."""
        folder, unified = self.path("freezer"), self.is_unified("freezer")
        if folder:
            with contextlib.suppress(OSError):
                write(os.path.join(folder, FREEZER[unified]), VALUES[unified][False])

    def count(self) -> tuple[int, int, int]:
        """Memory in bytes, number of processes, processor time in microseconds; -1 for what is not counted."""
        found = []
        for controller, old, new in (("memory", "memory.usage_in_bytes", "memory.current"), ("pids", "pids.current", "pids.current"),
                                     ("cpuacct", "cpuacct.usage", "cpu.stat")):  # fmt: skip
            try:
                unified = self.is_unified(controller)
                text = read(os.path.join(self.path(controller) or "/nowhere", new if unified else old))
                value = int(text.split()[1 if controller == "cpuacct" and unified else 0])
                found.append(value // 1000 if controller == "cpuacct" and not unified else value)
            except (OSError, ValueError, IndexError):
                found.append(-1)
        return found[0], found[1], found[2]

    def close_joins(self) -> None:
        """Close the descriptors; the sandbox has copies."""
        for fd in self.joins:
            os.close(fd)
        self.joins = []

    def remove(self) -> None:
        """Remove the group; its programs must be gone."""
        self.close_joins()
        for folder in self.folders:
            remove(folder)
