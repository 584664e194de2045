"""Files, users and processes as the agent inside sees them; used by `agent` alone and, like it, runs inside under any Python from 3.9 on.

Everything happens inside the machine, where a symbolic link can lead nowhere else. A fifo or a device never makes the agent wait: files
are opened without blocking and must be regular. The list of processes is held open from the start, as root inside may mount over `/proc`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import stat
import struct
import time
from collections.abc import Iterator

import agent_kernel

PIECE = 1 << 18
HIDDEN = ".gnomon-part-"
PROC = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
BEGAN = time.time() - 1.0
EVENT = struct.Struct("iIII")
CREATE, MODIFY, ATTRIBUTES, GONE, MOVED_FROM, MOVED_TO = 0x100, 0x2, 0x4, 0x200, 0x40, 0x80
WATCHED = CREATE | MODIFY | ATTRIBUTES | GONE | MOVED_FROM | MOVED_TO
KINDS = ((CREATE, "create"), (MODIFY, "write"), (GONE, "remove"), (MOVED_FROM, "rename"), (MOVED_TO, "create"), (ATTRIBUTES, "chmod"))


def find_user(name: str) -> tuple[int, int, list[int], str, str]:
    """User id, group id, further groups, home and name, by name or number, from the machine's own files."""
    found = None
    for fields in _table("/etc/passwd", 7):
        if fields[0] == name or fields[2] == name:
            found = (int(fields[2]), int(fields[3]), fields[5] or "/", fields[0])
            break
    if found is None:
        if name == "root" or name.isdigit():
            number = 0 if name == "root" else int(name)
            return number, number, [], "/root" if number == 0 else "/", name
        raise OSError(2, f"no user {name} in the image")
    uid, gid, home, login = found
    groups = [int(fields[2]) for fields in _table("/etc/group", 4) if login in fields[3].split(",")]
    return uid, gid, groups, home, login


def _table(path: str, columns: int) -> Iterator[list[str]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.rstrip("\n").split(":")
                if len(fields) >= columns:
                    yield fields
    except OSError:
        return


def make_home(path: str, owner: str) -> None:
    """The working folder, owned by its user."""
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)
        uid, gid, *_ = find_user(owner)
        os.chown(path, uid, gid)


def read(path: str, limit: int) -> Iterator[bytes]:
    """A regular file in pieces; `OSError` if it is none or larger than `limit` bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(22, f"{path} is not a regular file")
        if os.fstat(handle).st_size > limit:
            raise OSError(27, f"{path} has {os.fstat(handle).st_size} bytes, so it is larger than {limit}")
        total = 0
        while piece := os.read(handle, PIECE):
            total += len(piece)
            if total > limit:
                raise OSError(27, f"{path} is larger than {limit} bytes")
            yield piece
    finally:
        os.close(handle)


class Upload:
    """A file that is being written beside its place and moved there when it is whole."""

    def __init__(self, path: str, mode: int | None) -> None:
        self.path, self.mode = path, mode
        target = os.path.realpath(path)
        if os.path.isdir(target):
            raise OSError(21, f"{path} is a directory")
        if os.path.exists(target) and not os.path.isfile(target):
            raise OSError(22, f"{path} is not a regular file")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        self.target = target
        self.fresh = not os.path.exists(target)
        self.scratch = os.path.join(os.path.dirname(target), f"{HIDDEN}{os.urandom(8).hex()}")
        self.handle = os.open(self.scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def add(self, data: bytes) -> None:
        """More of its bytes."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.handle, view) :]
        except OSError:
            self.drop()
            raise

    def finish(self) -> None:
        """It is whole: keep the mode and owner of what it replaces unless told otherwise."""
        try:
            if os.path.exists(self.target):
                old = os.stat(self.target)
                os.fchown(self.handle, old.st_uid, old.st_gid)
                os.fchmod(self.handle, stat.S_IMODE(old.st_mode))
            if self.mode is not None:
                os.fchmod(self.handle, self.mode)
            os.close(self.handle)
            os.rename(self.scratch, self.target)
        except OSError:
            self.drop()
            raise

    def drop(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(OSError):
            os.close(self.handle)
        with contextlib.suppress(OSError):
            os.unlink(self.scratch)


def entries(path: str, depth: int) -> Iterator[list[list[object]]]:
    """Rows (path, kind, size, mode, modified, link target) below a directory, some hundreds at a time, not following links below it."""
    if not os.path.isdir(path):
        raise OSError(20 if os.path.lexists(path) else 2, f"{path} is not a directory")
    rows: list[list[object]] = []
    stack = [(path.rstrip("/") or "/", depth)]
    while stack:
        folder, left = stack.pop()
        try:
            found = list(os.scandir(folder))
        except OSError:
            continue
        for entry in found:
            try:
                state = entry.stat(follow_symlinks=False)
                target = os.readlink(entry.path) if entry.is_symlink() else None
            except OSError:
                continue
            kind = kind_of(state.st_mode)
            rows.append([entry.path, kind, state.st_size, stat.S_IMODE(state.st_mode), state.st_mtime, target])
            if kind == "directory" and left > 1:
                stack.append((entry.path, left - 1))
            if len(rows) >= 256:
                yield rows
                rows = []
    yield rows


def written(limit: int = 20_000) -> int:
    """Bytes of the files of the root file system that changed since this process began; at most `limit` entries are looked at."""
    try:
        root = os.stat("/").st_dev
    except OSError:
        return 0
    total = seen = 0
    stack = ["/", "/tmp", "/run"]
    while stack and seen < limit:
        try:
            found = list(os.scandir(stack.pop()))
        except OSError:
            continue
        for entry in found:
            seen += 1
            try:
                state = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(state.st_mode):
                if state.st_dev == root and entry.path not in ("/tmp", "/run"):
                    stack.append(entry.path)
            elif state.st_ctime >= BEGAN:
                total += state.st_size
    return total


def kind_of(mode: int) -> str:
    """What a mode says that a file is."""
    for test, name in ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "symlink")):
        if test(mode):
            return name
    return "other"


def remove(path: str) -> None:
    """A file, a link, or a directory and all below it."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def others() -> list[int]:
    """Every process but this one and the kernel's own; none where it is not process 1, so that no signal can leave the machine."""
    if os.getpid() != 1:
        return []
    found = [int(name) for name in os.listdir(PROC) if name.isdigit() and int(name) != os.getpid()]
    return [pid for pid in found if agent_kernel.is_program(_status(pid))] if _status(2)[1:2] == ["0"] else found


def _status(pid: int) -> list[str]:
    """State, parent, group and session of a process, or nothing if it has gone."""
    try:
        handle = os.open(f"{pid}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=PROC)
        try:
            return os.read(handle, 4096).decode("utf-8", "replace").rpartition(")")[2].split()
        finally:
            os.close(handle)
    except OSError:
        return []


def signal_all(number: int, these: set[int] | None = None) -> None:
    """A signal for every process but this one, or for these."""
    if these is None and number == signal.SIGKILL and os.getpid() == 1:
        with contextlib.suppress(OSError):
            os.kill(-1, number)
    for pid in others() if these is None else these:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def stop_all() -> set[int]:
    """Stop every other process, new ones too, and name those that were running: they alone are to go on later."""
    stopped: set[int] = set()
    seen: set[int] = set()
    for _ in range(20):
        fresh = [pid for pid in others() if pid not in seen]
        if not fresh:
            break
        for pid in fresh:
            seen.add(pid)
            if _status(pid)[:1] not in (["T"], ["Z"], []):
                stopped.add(pid)
                signal_all(signal.SIGSTOP, {pid})
    return stopped


def signal_session(leader: int, number: int) -> None:
    """A signal for a program, its group and all that it started in its session."""
    members = {pid for pid in others() if _status(pid)[3:4] == [str(leader)]}
    with contextlib.suppress(OSError):
        os.killpg(leader, number)
    signal_all(number, members - {leader})


class Watches:
    """Changes of directories by inotify, one queue for each watch."""

    def __init__(self) -> None:
        self.queues: dict[int, tuple[int, bool, dict[int, str]]] = {}
        self.fresh: set[str] = set()
        self.library: ctypes.CDLL | None = None

    def open(self, key: int, path: str, recursive: bool) -> int:
        """Watch a directory, and all below it if asked; the handle to wait on."""
        if not os.path.isdir(path):
            raise OSError(20 if os.path.lexists(path) else 2, f"{path} is not a directory")
        self.library = self.library or ctypes.CDLL(None, use_errno=True)
        handle = self.library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if handle < 0:
            raise OSError(ctypes.get_errno(), "inotify is not available here")
        self.queues[handle] = (key, recursive, {})
        for folder in [path, *(found for found, *_ in os.walk(path))] if recursive else [path]:
            self._add(handle, folder)
        return handle

    def _add(self, handle: int, folder: str) -> None:
        assert self.library is not None
        number = self.library.inotify_add_watch(handle, os.fsencode(folder), WATCHED)
        if number >= 0:
            self.queues[handle][2][number] = folder

    def read(self, handle: int) -> tuple[int, list[tuple[str, str]]]:
        """The watch's key and what happened: paths and kinds. An `Upload` looks like the plain writing of a file."""
        key, recursive, folders = self.queues[handle]
        events: list[tuple[str, str]] = []
        uploads: set[int] = set()
        data = os.read(handle, 1 << 16)
        while data:
            number, mask, cookie, length = EVENT.unpack_from(data)
            name = os.fsdecode(data[EVENT.size : EVENT.size + length].rstrip(b"\0"))
            data = data[EVENT.size + length :]
            if number not in folders or not name:
                continue
            path = os.path.join(folders[number], name)
            if name.startswith(HIDDEN):
                uploads.add(cookie if mask & MOVED_FROM else 0)
            elif mask & MOVED_TO and cookie in uploads:
                events += [(path, "create")] if path in self.fresh else []
                events.append((path, "write"))
                self.fresh.discard(path)
            else:
                events += [(path, kind) for bit, kind in KINDS if mask & bit]
            if recursive and mask & (CREATE | MOVED_TO) and os.path.isdir(path):
                self._add(handle, path)
        return key, events

    def close(self, key: int | None = None) -> list[int]:
        """End one watch, or all; the handles that were closed."""
        ended = [handle for handle, (owner, *_) in self.queues.items() if key is None or owner == key]
        for handle in ended:
            del self.queues[handle]
            os.close(handle)
        return ended
