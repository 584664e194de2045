"""Files between the host and a sandbox. What comes out is untrusted: names are checked, links are made last and never followed."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from gnomon.errors import SandboxError
from gnomon.sandbox.landing import Landing, parts_below
from gnomon.sandbox.ns import wire
from gnomon.sandbox.ns.channel import Channel, Refused
from gnomon.sandbox.sandbox import FileInfo

KINDS: tuple[Literal["file", "directory", "symlink", "other"], ...] = ("file", "directory", "symlink", "other")
MAX_ENTRIES = 200_000
AT_ONCE = 32
MAX_DOWNLOAD = 1 << 32


class Readable(Protocol):
    """The two calls that a download needs."""

    async def read(self, path: str, max_bytes: int = ...) -> bytes:
        """A file."""
        ...

    async def list(self, path: str, depth: int = 1) -> Sequence[FileInfo]:
        """A directory."""
        ...


def checked(path: str) -> bytes:
    """An absolute path as bytes; raises `SandboxError` for any other."""
    if not path.startswith("/") or "\0" in path or len(path) > 4096:
        raise SandboxError(f"{path!r:.200} is not an absolute path of a sandbox")
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise SandboxError(f"{path!r:.200} is no path: it holds half a character") from None


class Listing:
    """Gathers the entries that an agent sends."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.entries: list[FileInfo] = []

    def on_frame(self, frame: wire.Frame) -> None:
        """One entry; what is malformed is left out."""
        kind, _, numbers, strings = frame
        if kind != wire.ENTRY or len(numbers) != 4 or len(strings) != 2 or not 0 <= numbers[0] < len(KINDS):
            return
        if len(self.entries) > MAX_ENTRIES:
            self.channel.close("the sandbox sends more than was asked for")
            return
        path, target = (text.decode("utf-8", "surrogateescape") for text in strings)
        self.entries.append(FileInfo(path=path, kind=KINDS[numbers[0]], size=numbers[1], mode=numbers[2] & 0o7777,
                                     modified_seconds=numbers[3] / 1e9, target=target or None))  # fmt: skip


async def write(channel: Channel, path: str, data: bytes, mode: int) -> None:
    """A whole file in pieces; answered once."""
    name, call = checked(path), channel.number()
    answer = channel.expect(call)
    try:
        for at in range(0, max(1, len(data)), wire.CHUNK):
            piece = data[at : at + wire.CHUNK]
            channel.send(wire.pack(wire.WRITE, call, (int(at == 0), int(at + wire.CHUNK >= len(data)), mode), (name, piece)))
            await channel.space.wait()
            if answer.done():
                break
        await answer
    except Refused as error:
        raise SandboxError(f"writing {path}: {error}") from None
    finally:
        channel.calls.pop(call, None)


async def upload(channel: Channel, source: Path, path: str) -> None:
    """A file or folder of the host; links are copied as links, and what is neither is left out."""
    if not os.path.lexists(source):
        raise SandboxError(f"{source}: there is no such file to upload")
    room = asyncio.Semaphore(AT_ONCE)

    async def one(local: Path, inside: str) -> None:
        async with room:
            data = await asyncio.to_thread(local.read_bytes)
            await write(channel, inside, data, stat.S_IMODE(local.stat().st_mode))

    async def link(target: bytes, inside: str) -> None:
        try:
            await channel.request(wire.LINK, (), (checked(inside), target))
        except Refused as error:
            raise SandboxError(f"writing {inside}: {error}") from None

    if source.is_file():
        await one(source, path)
        return
    files = []
    for folder, names, leaves in os.walk(source):
        inside = str(PurePosixPath(path) / Path(folder).relative_to(source))
        await link(b"", inside)
        for name in [*names, *leaves]:
            local = Path(folder) / name
            if local.is_symlink():
                await link(os.fsencode(os.readlink(local)), f"{inside}/{name}")
            elif local.is_file():
                files.append((local, f"{inside}/{name}"))
    tasks = [asyncio.ensure_future(one(*pair)) for pair in files]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def download(sandbox: Readable, path: str, target: Path) -> None:
    """A file, or a folder with everything below it, to the host. Set-user bits are not kept, devices and pipes are left out."""
    found = await sandbox.list(path, 0)
    if not found:
        raise SandboxError(f"{path}: there is no such file to download")
    info = found[0]
    if info.kind != "directory":
        with Landing(target.parent) as landing:
            await _file(sandbox, path, landing, (target.name,), info.mode)
        return
    try:
        with Landing(target) as landing:
            await _folder(sandbox, path, landing)
    except OSError as error:
        raise SandboxError(f"downloading {path} to {target}: {error.strerror} ({error.filename})") from None


async def _file(sandbox: Readable, path: str, landing: Landing, parts: tuple[str, ...], mode: int) -> None:
    data = await sandbox.read(path, min(MAX_DOWNLOAD, landing.left))
    landing.count(len(data))

    def save() -> None:
        with landing.file(parts, mode) as file:
            file.write(data)

    await asyncio.to_thread(save)


async def _folder(sandbox: Readable, path: str, landing: Landing) -> None:
    entries = [(entry, parts_below(path, entry.path)) for entry in await sandbox.list(path, 256)]
    for entry, parts in entries:
        if entry.kind == "directory":
            landing.folder(parts)
        elif entry.kind == "file":
            await _file(sandbox, entry.path, landing, parts, entry.mode)
    for entry, parts in entries:
        if entry.kind == "symlink":
            landing.link(parts, entry.target or "")
