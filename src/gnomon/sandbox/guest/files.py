"""File calls over a `Guest`: whole files in pieces, folders up and down. What the agent says about paths is checked, not believed."""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from gnomon.errors import SandboxError
from gnomon.sandbox.guest.channel import Guest
from gnomon.sandbox.landing import MAX_BYTES, Landing, parts_below
from gnomon.sandbox.sandbox import FileInfo

PIECE = 1 << 18
MAX_ENTRIES = 200_000
_UPLOADS = itertools.count(1)


async def read(guest: Guest, path: str, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes`."""
    kept = bytearray()

    def take(piece: bytes) -> None:
        if len(kept) + len(piece) > max_bytes:
            raise ValueError("a file beyond its bound")
        kept.extend(piece)

    await guest.call({"op": "read", "path": _absolute(path), "max": max_bytes}, part=take)
    return bytes(kept)


async def write(guest: Guest, path: str, data: bytes, mode: int | None) -> None:
    """Make or replace a file: it appears whole or not at all."""
    number = next(_UPLOADS)
    view = memoryview(data)
    while True:
        piece, view = view[:PIECE], view[PIECE:]
        header = {"op": "write", "file": number, "path": _absolute(path), "mode": mode, "last": not view}
        await guest.call(header, bytes(piece))
        if not view:
            return


async def listing(guest: Guest, path: str, depth: int) -> Sequence[FileInfo]:
    """What a directory holds, sorted by path."""
    found: list[FileInfo] = []

    def take(piece: bytes) -> None:
        if len(found) < MAX_ENTRIES:
            found.extend(_info(row) for row in json.loads(piece))

    await guest.call({"op": "list", "path": _absolute(path), "depth": depth}, part=take)
    return sorted(found, key=lambda info: info.path)


def _info(row: Any) -> FileInfo:
    path, kind, size, mode, modified, target = row
    if kind not in ("file", "directory", "symlink", "other"):
        raise ValueError("an entry of no known kind")
    known = cast("Literal['file', 'directory', 'symlink', 'other']", kind)
    link = None if target is None else str(target)
    return FileInfo(path=str(path), kind=known, size=int(size), mode=int(mode), modified_seconds=float(modified), target=link)


async def remove(guest: Guest, path: str) -> None:
    """Remove a file, or a directory and all below it."""
    await guest.call({"op": "remove", "path": _absolute(path)})


async def upload(guest: Guest, source: Path, path: str) -> None:
    """Copy a file or folder of the host in; links below it stay links."""
    if source.is_file():
        await _upload_file(guest, source, path)
        return
    if not source.is_dir():
        raise SandboxError(f"{source} is neither a file nor a folder: nothing to upload")
    for folder, folders, names in os.walk(source):
        below = Path(folder).relative_to(source).as_posix()
        await guest.call({"op": "mkdir", "path": _absolute(str(PurePosixPath(path) / below))})
        for name in sorted([*names, *folders]):
            local, place = Path(folder) / name, str(PurePosixPath(path) / below / name)
            if local.is_symlink():
                await guest.call({"op": "link", "path": _absolute(place), "target": os.readlink(local)})
            elif local.is_file():
                await _upload_file(guest, local, place)


async def _upload_file(guest: Guest, source: Path, path: str) -> None:
    number = next(_UPLOADS)
    with source.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        piece = file.read(PIECE)
        while True:
            following = file.read(PIECE)
            header = {"op": "write", "file": number, "path": _absolute(path), "mode": mode, "last": not following}
            await guest.call(header, piece)
            if not following:
                return
            piece = following


async def download(guest: Guest, path: str, target: Path, max_bytes: int = MAX_BYTES) -> None:
    """Copy a file or folder out, `max_bytes` in all. Links come last and none is followed, not even one that was there before."""
    try:
        entries = await listing(guest, path, 64)
    except SandboxError:
        with Landing(target.parent, max_bytes) as landing:
            await _download_file(guest, path, landing, (target.name,), 0o644)
        return
    placed = [(entry, parts_below(path, entry.path)) for entry in entries]
    try:
        with Landing(target, max_bytes) as landing:
            for entry, parts in placed:
                if entry.kind == "directory":
                    landing.folder(parts)
                elif entry.kind == "file":
                    await _download_file(guest, entry.path, landing, parts, entry.mode)
            for entry, parts in placed:
                if entry.kind == "symlink" and entry.target is not None:
                    landing.link(parts, entry.target)
    except OSError as error:
        raise SandboxError(f"downloading {path} to {target}: {error.strerror} ({error.filename})") from None


async def _download_file(guest: Guest, path: str, landing: Landing, parts: tuple[str, ...], mode: int) -> None:
    bound = landing.left
    with landing.file(parts, mode) as file:

        def take(piece: bytes) -> None:
            if file.tell() + len(piece) > bound:
                raise ValueError("a file beyond its bound")
            landing.count(len(piece))
            file.write(piece)

        await guest.call({"op": "read", "path": _absolute(path), "max": bound}, part=take, seconds=600.0)


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise SandboxError(f"{path!r} is not an absolute path inside the sandbox")
    return path
