"""A sandbox of AgentENV or hosted E2B, in the words of our contract, over the official SDK."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, Self, cast

import e2b

from gnomon.errors import SandboxError, SandboxLost, Unsupported
from gnomon.sandbox.landing import Landing, parts_below
from gnomon.sandbox.remote.errors import told
from gnomon.sandbox.remote.program import RemoteProgram
from gnomon.sandbox.sandbox import MEGABYTE, Capabilities, Command, FileEvent, FileInfo, Network, PauseLevel, Result, Snapshot, Spec, Usage

FOREVER_SECONDS = 86_400
"""What `None` becomes: the most that hosted E2B gives."""

KINDS = {"file": "file", "dir": "directory", "symlink": "symlink"}


def seconds_of(ttl: float | None) -> int:
    """Whole seconds, as the wire wants them."""
    return FOREVER_SECONDS if ttl is None else max(1, math.ceil(ttl))


class Home(Protocol):
    """What a machine asks of the backend that made it."""

    machines: dict[str, RemoteMachine]

    async def probe(self) -> Capabilities:
        """What the server can do."""
        ...


class RemoteMachine:
    """See `gnomon.sandbox.sandbox.Sandbox`; `options` are those of every call of the SDK."""

    def __init__(self, remote: Any, spec: Spec, options: dict[str, Any], home: Home) -> None:
        self.remote, self.spec, self.options, self.home = remote, spec, options, home
        self.id: str = remote.sandbox_id
        self.state = "running"

    def _ready(self) -> None:
        if self.state == "ended":
            raise SandboxLost(f"sandbox {self.id}: it has ended")
        if self.state == "paused":
            raise SandboxError(f"sandbox {self.id} is paused: call resume() first")

    async def exec(self, command: Command) -> Result:
        """Run a program to its end."""
        self._ready()
        program = await self._begin(command, stdin=command.stdin is not None)
        feeding = asyncio.create_task(program.feed_all(command.stdin)) if command.stdin is not None else None
        try:
            return await program.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await program.kill()
            raise
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)

    async def start(self, command: Command, *, stdin: bool = False) -> RemoteProgram:
        """Run a program in the background."""
        self._ready()
        return await self._begin(command, stdin=stdin)

    async def _begin(self, command: Command, *, stdin: bool) -> RemoteProgram:
        program = RemoteProgram(command)
        await program.start(self.remote, cwd=command.cwd or self.spec.workdir, user=command.user or self.spec.user, stdin=stdin)
        return program

    async def read(self, path: str, max_bytes: int = 16 * MEGABYTE) -> bytes:
        """The content of a regular file."""
        self._ready()
        with told(f"reading {path}"):
            info = await self.remote.files.get_info(_absolute(path), user=self.spec.user)
            if info.size > max_bytes:
                raise SandboxError(f"sandbox {self.id}: {path} has {info.size} bytes, so it is larger than {max_bytes}")
            return bytes(await self.remote.files.read(path, format="bytes", user=self.spec.user))

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Make or replace a file, and the directories above it."""
        self._ready()
        with told(f"writing {path}"):
            await self.remote.files.write(_absolute(path), data, user=self.spec.user)
        if mode is not None:
            await self._small("chmod", f"{mode:o}", "--", path)

    async def _small(self, *argv: str) -> None:
        result = await self.exec(Command(argv=argv, cwd="/"))
        if result.code != 0:
            raise SandboxError(f"sandbox {self.id}: {argv[0]}: {result.stderr.decode('utf-8', 'replace').strip()}")

    async def list(self, path: str, depth: int = 1) -> Sequence[FileInfo]:
        """What a directory holds."""
        self._ready()
        with told(f"listing {path}"):
            rows = await self.remote.files.list(_absolute(path), depth=depth, user=self.spec.user)
        return sorted((_info(row) for row in rows), key=lambda info: info.path)

    async def remove(self, path: str) -> None:
        """Remove a file, or a directory and all below it."""
        self._ready()
        with told(f"removing {path}"):
            if not await self.remote.files.exists(_absolute(path), user=self.spec.user):
                raise SandboxError(f"sandbox {self.id}: {path}: no such file or directory")
            await self.remote.files.remove(path, user=self.spec.user)

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or folder of the host in; links below it stay links."""
        if source.is_file():
            await self._put(source, path)
            return
        for folder, folders, names in os.walk(source):
            below = str(PurePosixPath(path) / Path(folder).relative_to(source).as_posix())
            await self._small("mkdir", "-p", "--", below)
            for name in sorted([*folders, *names]):
                local = Path(folder) / name
                if local.is_symlink():
                    await self._small("ln", "-sfn", "--", os.readlink(local), f"{below}/{name}")
                elif local.is_file():
                    await self._put(local, f"{below}/{name}")

    async def _put(self, source: Path, path: str) -> None:
        self._ready()
        with told(f"writing {path}"), source.open("rb") as file:
            await self.remote.files.write(_absolute(path), file, user=self.spec.user)
        if source.stat().st_mode & 0o111:
            await self._small("chmod", f"{source.stat().st_mode & 0o777:o}", "--", path)

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or folder out; links come last, so that none is ever written through."""
        self._ready()
        with told(f"reading {path}"):
            info = await self.remote.files.get_info(_absolute(path), user=self.spec.user)
        if _kind(info) != "directory":
            with Landing(target.parent) as landing:
                await self._get(path, landing, (target.name,), info.mode)
            return
        placed = [(entry, parts_below(path, entry.path)) for entry in await self.list(path, 64)]
        with Landing(target) as landing:
            for entry, parts in placed:
                if entry.kind == "directory":
                    landing.folder(parts)
                elif entry.kind == "file":
                    await self._get(entry.path, landing, parts, entry.mode)
            for entry, parts in placed:
                if entry.kind == "symlink" and entry.target is not None:
                    landing.link(parts, entry.target)

    async def _get(self, path: str, landing: Landing, parts: tuple[str, ...], mode: int) -> None:
        with landing.file(parts, mode) as file, told(f"reading {path}"):
            async with await self.remote.files.read(path, format="stream", user=self.spec.user) as pieces:
                async for piece in pieces:
                    landing.count(len(piece))
                    file.write(piece)

    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileEvent]:
        """Changes below a directory, as they happen."""
        self._ready()
        queue: asyncio.Queue[FileEvent | None] = asyncio.Queue(4096)

        def seen(event: Any) -> None:
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(FileEvent(path=f"{path.rstrip('/')}/{event.name}", kind=event.type.value))

        def over(_: Exception | None) -> None:
            queue.put_nowait(None)

        with told(f"watching {path}"):
            handle = await self.remote.files.watch_dir(_absolute(path), seen, over, user=self.spec.user, timeout=0, recursive=recursive)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            await handle.stop()

    async def pause(self, level: PauseLevel = "freeze") -> None:
        """Pause on the server, which keeps everything."""
        self._ready()
        if level != "hibernate":
            raise Unsupported(f"e2b: pause('{level}'); a server only hibernates")
        with told("pausing"):
            await self.remote.pause()
        self.state = "paused"

    async def resume(self) -> None:
        """Go on after `pause`."""
        if self.state == "paused":
            with told("resuming"):
                self.remote = await e2b.AsyncSandbox.connect(self.id, timeout=seconds_of(self.spec.ttl_seconds), **self.options)
            self.state = "running"
        else:
            self._ready()

    async def snapshot(self, name: str | None = None, *, memory: bool = False) -> Snapshot:
        """Keep the present state on the server. Raises `Unsupported` where it keeps no such kind."""
        self._ready()
        with told("keeping a snapshot"):
            made = await self.remote.create_snapshot(name, mode="full" if memory else "filesystem")
        return Snapshot(
            id=made.snapshot_id,
            name=made.snapshot_id,
            backend="e2b",
            memory=memory,
            bytes=0,
            created_seconds=time.time(),
            parent=self.spec.image,
        )

    async def fork(self, count: int = 1, *, memory: bool = False) -> Sequence[RemoteMachine | Exception]:
        """Copies of what runs; without `memory`, sandboxes from a snapshot of the files, which is then forgotten."""
        self._ready()
        spec = replace(self.spec, idempotency_key=None)
        if memory and not (await self.home.probe()).live_fork:
            raise Unsupported("e2b: this server's forks have none of the programs; fork without memory")
        if memory:
            with told("forking"):
                made = await self.remote.fork(count=count, timeout=seconds_of(spec.ttl_seconds))
        else:
            kept = await self.snapshot(memory=False)
            births = (
                e2b.AsyncSandbox.create(
                    kept.name,
                    timeout=seconds_of(spec.ttl_seconds),
                    envs=dict(spec.env),
                    metadata=dict(spec.metadata),
                    **self.options,
                )
                for _ in range(count)
            )
            made = await asyncio.gather(*births, return_exceptions=True)
            with told("forgetting a snapshot"):
                await e2b.AsyncSandbox.delete_snapshot(kept.name, **self.options)
        return [child if isinstance(child, Exception) else self._sibling(child, spec) for child in made]

    def _sibling(self, remote: Any, spec: Spec) -> RemoteMachine:
        return RemoteMachine(remote, spec, self.options, self.home)

    async def set_timeout(self, seconds: float | None) -> None:
        """End the sandbox this long from now unless told otherwise."""
        with told("setting the time"):
            await self.remote.set_timeout(seconds_of(seconds))

    async def set_network(self, network: Network) -> None:
        """Replace the rules."""
        self._ready()
        with told("setting network rules"):
            await self.remote.update_network(cast("Any", {"allow_out": hosts_of(network), "deny_out": ["0.0.0.0/0"]}))

    async def usage(self) -> Usage:
        """Memory and disk as the server counts them, processes and their processor time as `/proc` inside does."""
        self._ready()
        with told("asking for metrics"):
            rows = await self.remote.get_metrics()
        ticks, processes = 0, 0
        for line in (await self.exec(Command(argv=("sh", "-c", "cat /proc/[0-9]*/stat"), cwd="/"))).text.splitlines():
            fields = line.rpartition(")")[2].split()
            if len(fields) > 14 and all(word.isdigit() for word in fields[11:15]):
                ticks, processes = ticks + sum(map(int, fields[11:15])), processes + 1
        memory, disk = (rows[-1].mem_used, rows[-1].disk_used) if rows else (0, 0)
        return Usage(memory_bytes=memory, disk_bytes=disk, processes=processes, cpu_seconds=ticks / 100)

    async def kill(self) -> None:
        """End it."""
        if self.state == "ended":
            return
        self.state = "ended"
        self.home.machines.pop(self.id, None)
        with told("killing"), contextlib.suppress(e2b.SandboxNotFoundException):
            await self.remote.kill()

    async def __aenter__(self) -> Self:
        """The sandbox itself."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """`kill`."""
        await self.kill()


def hosts_of(network: Network) -> list[str]:
    """The hosts of a network. Raises `Unsupported` for ports and proxies, which the wire does not know."""
    if network.proxy is not None:
        raise Unsupported("e2b: no proxy of this machine is in reach of another one")
    wrong = [entry for entry in network.allow if not entry.endswith(":*")]
    if wrong:
        raise Unsupported(f"e2b: {', '.join(wrong)}: the wire has rules for hosts, not for ports; write host:*")
    return [entry.removesuffix(":*") for entry in network.allow]


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise SandboxError(f"{path!r} is not an absolute path inside the sandbox")
    return path


def _kind(row: Any) -> str:
    return KINDS.get(row.type.value if row.type is not None else "", "other")


def _info(row: Any) -> FileInfo:
    kind = cast("Any", _kind(row))
    return FileInfo(
        path=row.path, kind=kind, size=row.size, mode=row.mode, modified_seconds=row.modified_time.timestamp(), target=row.symlink_target
    )
