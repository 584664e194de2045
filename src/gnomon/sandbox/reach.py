"""From one process of a user to the sandboxes of another: a Unix socket of their owner, with one JSON object a line.

`gnomon sandbox exec` and `kill` use it. Whoever may connect may do anything with the owner's sandboxes, so the socket lies in a folder that
only this user can enter, and the kernel is asked who called. Read next: `keeper.py`, an owner that does nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from gnomon.errors import GnomonError, SandboxError
from gnomon.sandbox import owners
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import Command, Sandbox

LINE_BYTES = 8 << 20


class Reach:
    """Lets this process's sandboxes be reached; `find` gives the sandbox of an id. An asynchronous context."""

    def __init__(self, store: LayerStore, find: Callable[[str], Sandbox | None]) -> None:
        self._store, self._find = store, find
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Reach:
        """Listen under this owner's name."""
        self._path = _folder(self._store) / owners.own(self._store.root / "owners").id
        with _short(self._path.parent) as folder:
            self._path.unlink(missing_ok=True)
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(f"{folder}/{self._path.name}")
        self._server = await asyncio.start_unix_server(self._accept, sock=listening, limit=LINE_BYTES)
        return self

    async def __aexit__(self, *exception: object) -> None:
        """No more calls; those under way end."""
        self._path.unlink(missing_ok=True)
        if self._server is not None:
            self._server.close()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("3i", peer)[1] not in (0, os.geteuid()):
                return
            try:
                await self._serve(json.loads(await reader.readline()), writer)
            except (GnomonError, ValueError, KeyError, TypeError) as error:
                _say(writer, error=str(error))
            await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass  # the caller went away, or this owner ends
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, wish: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        sandbox = self._find(str(wish["id"]))
        if sandbox is None:
            raise SandboxError(f"sandbox '{wish['id']}' is gone")
        if wish["do"] == "kill":
            await sandbox.kill()
            _say(writer, code=0)
            return
        stdin = base64.b64decode(wish["stdin"]) if wish.get("stdin") is not None else None
        command = Command(argv=tuple(map(str, wish["argv"])), timeout_seconds=wish.get("timeout_seconds"), env=dict(wish.get("env") or {}),
                          cwd=wish.get("cwd"), user=wish.get("user"), stdin=stdin)
        process = await sandbox.start(command)
        try:
            async for chunk in process.output():
                _say(writer, **{chunk.stream: base64.b64encode(chunk.data).decode()})
                await writer.drain()
            result = await process.wait()
        except BaseException:
            with contextlib.suppress(GnomonError):
                await asyncio.shield(process.kill())
            raise
        _say(writer, code=result.code, timed_out=result.timed_out)


async def call(store: LayerStore, owner: str, wish: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """What an owner answers to a wish, line by line. Raises `SandboxError` with its error, or where it does not listen."""
    try:
        with _short(_folder(store)) as folder:
            reader, writer = await asyncio.open_unix_connection(f"{folder}/{owner}", limit=LINE_BYTES)
    except OSError:
        raise SandboxError(f"its owner, process {owners.Owner.parse(owner).pid}, takes no calls from others: sandboxes of "
                           "`gnomon sandbox run --detach` and `gnomon sandbox serve` can be reached") from None
    try:
        writer.write(json.dumps(dict(wish)).encode() + b"\n")
        while line := await reader.readline():
            answer = json.loads(line)
            if "error" in answer:
                raise SandboxError(answer["error"])
            yield answer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _folder(store: LayerStore) -> Path:
    folder = store.root / "reach"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextlib.contextmanager
def _short(folder: Any) -> Any:
    """A short name of a folder: a socket's path has 108 bytes at most."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _say(writer: asyncio.StreamWriter, **fields: object) -> None:
    writer.write(json.dumps(fields).encode() + b"\n")
