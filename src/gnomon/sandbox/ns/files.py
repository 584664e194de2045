"""File calls, done inside the sandbox by its own agent: a symbolic link leads nowhere but to the sandbox's own files.

Long calls are generators of frames that the agent's loop steps between other events, so that no call keeps another waiting; `None` means
that there is nothing to send yet. Only regular files are read or written; nothing is opened that could block.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from gnomon.sandbox.ns import calls, wire

STEP = 200
MAX_ENTRIES = 200_000
KINDS = {stat.S_IFREG: 0, stat.S_IFDIR: 1, stat.S_IFLNK: 2}
ATTEMPTS = 5
LAST_MOMENT = (1 << 63) - 1


def open_regular(path: bytes, flags: int, mode: int = 0) -> int:
    """A descriptor of a regular file."""
    fd = calls.open_inside(path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", os.fsdecode(path))
    return fd


def read(call: int, path: bytes, limit: int) -> Iterator[bytes | None]:
    """The content of a file in DATA frames; refuses one that is longer than `limit`."""
    fd = open_regular(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size} bytes are more than {limit}", os.fsdecode(path))
        sent = 0
        while data := os.read(fd, min(wire.CHUNK, limit + 1 - sent)):
            sent += len(data)
            if sent > limit:
                raise OSError(errno.EFBIG, f"more than {limit} bytes", os.fsdecode(path))
            yield wire.pack(wire.DATA, call, (), (data,))
        yield wire.pack(wire.OK, call, (sent, stat.S_IMODE(os.fstat(fd).st_mode)))
    finally:
        os.close(fd)


def open_for_writing(path: bytes, mode: int) -> int:
    """A descriptor of an empty regular file at `path`, made with the directories above it; `mode` -1 keeps or takes the usual one."""
    parent = os.path.dirname(path)
    if parent:
        os.makedirs(parent, exist_ok=True)
    fd = open_regular(path, os.O_WRONLY | os.O_CREAT, 0o644 if mode < 0 else mode)
    try:
        if os.fstat(fd).st_dev == os.stat("/proc").st_dev:
            raise OSError(errno.EPERM, "files of /proc are not written for you", os.fsdecode(path))
        os.ftruncate(fd, 0)
        if mode >= 0:
            os.fchmod(fd, mode & 0o7777)
    except OSError:
        os.close(fd)
        raise
    return fd


def write_all(fd: int, data: bytes) -> None:
    """Write all of it."""
    at = 0
    while at < len(data):
        at += os.write(fd, data[at:])


def entry_frame(call: int, path: bytes, status: os.stat_result) -> bytes:
    """One entry of a directory."""
    kind = KINDS.get(stat.S_IFMT(status.st_mode), 3)
    target = os.readlink(path) if kind == 2 else b""
    moment = min(max(status.st_mtime_ns, -LAST_MOMENT), LAST_MOMENT)  # a program may set any time, also one that no frame can hold
    return wire.pack(wire.ENTRY, call, (kind, status.st_size, stat.S_IMODE(status.st_mode), moment), (path, target))


def entries(call: int, path: bytes, depth: int) -> Iterator[bytes | None]:
    """What a directory holds down to a depth; links are not followed below it. A depth of 0 is the entry itself."""
    if depth == 0:
        yield entry_frame(call, path, os.lstat(path))
        yield wire.pack(wire.OK, call)
        return
    waiting, count = [(path.rstrip(b"/") or b"/", depth)], 0
    while waiting:
        folder, left = waiting.pop()
        try:
            found = os.scandir(folder)
        except OSError:
            if folder.rstrip(b"/") == path.rstrip(b"/"):
                raise
            continue  # removed meanwhile
        with found:
            for entry in found:
                try:
                    frame = entry_frame(call, entry.path, entry.stat(follow_symlinks=False))
                except OSError:
                    continue
                count += 1
                if count > MAX_ENTRIES:
                    raise OSError(errno.EFBIG, f"more than {MAX_ENTRIES} entries", os.fsdecode(path))
                yield frame
                if left > 1 and entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, left - 1))
    yield wire.pack(wire.OK, call)


def remove(call: int, path: bytes) -> Iterator[bytes | None]:
    """Remove a file, or a directory and all below it, by steps and without following links."""
    if path.strip(b"/") == b"":
        raise OSError(errno.EBUSY, "the root cannot be removed", "/")
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        yield wire.pack(wire.OK, call)
        return
    parents = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)]
    names: list[bytes] = []
    steps = attempts = 0
    try:
        while parents:
            below = None
            for name in os.listdir(parents[-1]):
                steps += 1
                if steps % STEP == 0:
                    yield None
                below = remove_entry(parents[-1], name) or below
                if below is not None:
                    break
            if below is not None:
                parents.append(os.open(below, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parents[-1]))
                names.append(os.fsencode(below))
                if len(parents) > 500:
                    raise OSError(errno.ELOOP, "directories are nested too deeply; remove them with a program", os.fsdecode(path))
                continue
            os.close(parents.pop())
            if parents:
                attempts += not remove_folder(parents[-1], names.pop())
                if attempts > ATTEMPTS:
                    raise OSError(errno.ENOTEMPTY, "programs keep filling it", os.fsdecode(path))
        os.rmdir(path)
    finally:
        for fd in parents:
            os.close(fd)
    yield wire.pack(wire.OK, call)


def remove_entry(parent: int, name: str) -> str | None:
    """Remove one entry; its name if it is a directory, which must be emptied first."""
    try:
        os.unlink(name, dir_fd=parent)
    except IsADirectoryError:
        return name
    except FileNotFoundError:
        pass
    return None


def remove_folder(parent: int, name: bytes) -> bool:
    """Remove an emptied directory; False if it has been filled again."""
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            return False
        raise
    return True
