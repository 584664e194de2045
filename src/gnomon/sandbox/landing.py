"""Where files of a sandbox come down on the host: names are checked, no link is followed on the way, the whole is bounded.

A folder may hold what an earlier download left there, links of the sandbox's choosing among it. So every step goes through a descriptor of
the folder above and refuses links; a check of the name alone would be led away by a link that was there before.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self

from gnomon.errors import SandboxError

MAX_BYTES = 1 << 34
"""Most bytes of one download, holes included: a sandbox can name many files that are larger than all it may store."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def parts_below(top: str, path: str) -> tuple[str, ...]:
    """The names from a directory down to an entry that a sandbox named; raises `SandboxError` for one that is not below it."""
    parts = PurePosixPath(path).parts
    start = PurePosixPath(top).parts
    rest = parts[len(start) :]
    if parts[: len(start)] != start or not rest or any(part in ("..", ".", "") or "/" in part or "\0" in part for part in rest):
        raise SandboxError(f"the sandbox names {path!r:.200}, which is not below {top}")
    return rest


def open_below(top: int, parts: tuple[str, ...], make: bool) -> int:
    """A descriptor of a directory below another, no link followed on the way."""
    here = os.dup(top)
    for part in parts:
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=here)
            below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def create(top: int, parts: tuple[str, ...], mode: int) -> BinaryIO:
    """A new file below a directory, open for writing; one that is there is replaced, a link never followed."""
    folder = open_below(top, parts[:-1], True)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(parts[-1], dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(parts[-1], flags, mode & 0o777, dir_fd=folder), "wb")
    finally:
        os.close(folder)


class Landing:
    """One download into a folder of the host, which is made. Raises `OSError` where a link or a file is in the way of a folder."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.top = os.open(folder, _FOLDER)
        self.left = max_bytes

    def folder(self, parts: tuple[str, ...]) -> None:
        """A directory and those above it."""
        os.close(open_below(self.top, parts, True))

    def file(self, parts: tuple[str, ...], mode: int) -> BinaryIO:
        """See `create`."""
        return create(self.top, parts, mode)

    def link(self, parts: tuple[str, ...], target: str) -> None:
        """A symbolic link; what is there under its name stays."""
        folder = open_below(self.top, parts[:-1], True)
        try:
            with contextlib.suppress(FileExistsError):
                os.symlink(target, parts[-1], dir_fd=folder)
        finally:
            os.close(folder)

    def count(self, size: int) -> None:
        """Note bytes that are to be written. Raises `SandboxError` beyond the bound."""
        self.left -= size
        if self.left < 0:
            raise SandboxError("the sandbox's files are larger than one download may be; take them folder by folder")

    def __enter__(self) -> Self:
        """The landing itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the folder."""
        os.close(self.top)
