"""Changes of files, seen from inside through inotify: one descriptor per watched directory, those below it included when asked."""

from __future__ import annotations

import contextlib
import errno
import os
import struct

from gnomon.sandbox.ns import calls, wire

MODIFY, ATTRIB, CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE, OVERFLOW, IS_FOLDER = (
    0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200, 0x4000, 0x40000000,
)  # fmt: skip
MASK = MODIFY | ATTRIB | MOVED_FROM | MOVED_TO | CREATE | DELETE
MEANINGS = ((CREATE, 0), (MODIFY, 1), (DELETE, 2), (MOVED_FROM, 3), (MOVED_TO, 0), (ATTRIB, 4))
MAX_FOLDERS = 4096


class Watch:
    """A directory that is watched for the host."""

    __slots__ = ("call", "fd", "folders", "recursive", "root")

    def __init__(self, call: int, path: bytes, recursive: bool) -> None:
        self.call, self.recursive = call, recursive
        self.folders: dict[int, bytes] = {}
        self.fd = calls.inotify()
        self.root = path
        try:
            if not os.path.isdir(path):
                raise OSError(errno.ENOTDIR, "not a directory", os.fsdecode(path))
            self.add(path)
        except OSError:
            os.close(self.fd)
            raise

    def add(self, path: bytes) -> None:
        """Watch a directory, and with `recursive` those below it."""
        waiting = [path]
        while waiting:
            folder = waiting.pop()
            if len(self.folders) >= MAX_FOLDERS:
                raise OSError(errno.ENOSPC, f"more than {MAX_FOLDERS} directories to watch", os.fsdecode(path))
            self.folders[calls.inotify_watch(self.fd, folder, MASK)] = folder
            if self.recursive:
                with os.scandir(folder) as found:
                    waiting.extend(entry.path for entry in found if entry.is_dir(follow_symlinks=False))

    def read(self) -> list[bytes]:
        """The frames for what has changed; `OSError` when changes were missed."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return []
        frames, at = [], 0
        while at + 16 <= len(data):
            number, mask, _, length = struct.unpack_from("<iIII", data, at)
            name = data[at + 16 : at + 16 + length].rstrip(b"\0")
            at += 16 + length
            if mask & OVERFLOW:
                raise OSError(errno.EOVERFLOW, "more changes than could be kept", os.fsdecode(self.root))
            folder = self.folders.get(number)
            if folder is None:
                continue
            path = os.path.join(folder, name) if name else folder
            for bit, meaning in MEANINGS:
                if mask & bit and (name or bit not in (ATTRIB,)):
                    frames.append(wire.pack(wire.EVENT, self.call, (meaning,), (path,)))
            if self.recursive and mask & IS_FOLDER and mask & (CREATE | MOVED_TO):
                with contextlib.suppress(OSError):
                    self.add(path)
        return frames

    def close(self) -> None:
        """Stop watching."""
        os.close(self.fd)
