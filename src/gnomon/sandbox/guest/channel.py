"""The host's end of the channel to the agent inside: framed, multiplexed, bounded, and never trusting what comes back.

A frame is two big-endian 32-bit lengths, a JSON header and raw bytes; those of the agent carry a seal behind the lengths, made with a
key that it was given before the first program ran. What is not sealed in its turn ends the machine, so nobody inside speaks in the agent's
name. Requests carry an `id` that their replies and events repeat. Output of a background program is sent only as far as the host has
granted credit, so that nothing piles up when nobody reads. Across a checkpoint the channel object stays and gets new file descriptors:
`hold` drains it, `connect` and `go` open it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import os
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

from gnomon.errors import SandboxError, SandboxLost, SandboxTimeout
from gnomon.sandbox.guest.agent_seal import SEAL_BYTES, Seal
from gnomon.sandbox.guest.door import Door
from gnomon.sandbox.guest.process import CREDIT, MAX_PAYLOAD, GuestProcess
from gnomon.sandbox.sandbox import Command, FileEvent, Result

FRAME = struct.Struct(">II")
MAX_HEADER = 1 << 18
MAX_REQUEST = 1 << 21
"""Most bytes of an answer's header, and of a request's: arguments and environment of a program are in it."""

LOOK_SECONDS, PATIENCE_SECONDS = 20.0, 60.0
"""How often an agent is asked for a sign of life while somebody waits for it, and how long it may take over that."""

KILLS = 3
"""The end of a killed program is waited for that part of the patience: twenty seconds, more in a machine that is translated."""


class Guest:
    """One agent: requests and their answers, programs, watches. Create it inside a running event loop."""

    def __init__(self, name: str, key: bytes | None = None) -> None:
        """`key` is that of the machine whose checkpoint this one starts from."""
        self.name = name
        self.seal, self.told = Seal(key or secrets.token_bytes(32)), key is not None
        self.door, self.port = Door(self), 0
        self.keys = itertools.count(1)
        self.replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.parts: dict[int, Callable[[bytes], None]] = {}
        self.processes: dict[int, GuestProcess] = {}
        self.watchers: dict[int, asyncio.Queue[FileEvent | None]] = {}
        self.lost: SandboxLost | None = None
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.WriteTransport | None = None
        self.task: asyncio.Task[None] | None = None
        self.looking: asyncio.Task[None] | None = None
        self.resting = False
        self.patience_seconds = PATIENCE_SECONDS
        self.open = asyncio.Event()
        self.drained = asyncio.Event()
        self.lock = asyncio.Lock()
        self.parting = False
        self.on_lost: Callable[[], None] = lambda: None

    async def connect(self, source: int, sink: int) -> None:
        """Speak through these file descriptors, which become the channel's own; one socket if they are the same. It opens with `go`."""
        loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(limit=2 * MAX_PAYLOAD)
        self.drained.set()
        reading: asyncio.BaseTransport
        if source == sink:
            both, line = _Both(self.reader, self.drained), socket.socket(fileno=source)
            line.setblocking(False)
            self.writer, _ = await loop.create_unix_connection(lambda: both, sock=line)
            reading = self.writer
        else:
            for handle in (source, sink):
                os.set_blocking(handle, False)
            protocol, flow = asyncio.StreamReaderProtocol(self.reader), _Flow(self.drained)
            reading, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(source, "rb", 0))
            self.writer, _ = await loop.connect_write_pipe(lambda: flow, os.fdopen(sink, "wb", 0))
        self.lost, self.parting = None, False
        self.task = asyncio.create_task(self._read(self.reader, reading))
        self.looking = asyncio.create_task(self._look())

    async def disconnect(self) -> None:
        """Let go of the file descriptors; programs and watches stay known."""
        self.open.clear()
        tasks = [task for task in (self.task, self.looking) if task is not None and task is not asyncio.current_task()]
        self.task = self.looking = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer, self.writer = self.writer, None
        if writer is not None and not writer.is_closing():
            writer.abort()

    def end(self, why: str) -> None:
        """The machine has gone: whoever waits is told."""
        if self.lost is not None:
            return
        self.lost = SandboxLost(f"sandbox {self.name}: {why}")
        for future in self.replies.values():
            if not future.done():
                future.set_exception(self.lost)
                future.exception()
        for process in self.processes.values():
            process.fail(self.lost)
        self._end_watches()
        self.door.cut()
        self.replies.clear()
        self.open.set()
        self.drained.set()
        self.on_lost()

    def abandon(self, why: str) -> None:
        """The machine goes on without the programs and watches that it had."""
        for process in self.processes.values():
            process.fail(SandboxError(f"sandbox {self.name}: {why}"))
        self._end_watches()
        self.processes.clear()
        self.watchers.clear()

    def _end_watches(self) -> None:
        for queue in self.watchers.values():
            if queue.full():  # its reader is slow; one change less, but it learns of the end
                queue.get_nowait()
            queue.put_nowait(None)

    async def _read(self, reader: asyncio.StreamReader, transport: asyncio.BaseTransport) -> None:
        why = "it ended"
        try:
            while True:
                lengths = await reader.readexactly(FRAME.size)
                head, body = FRAME.unpack(lengths)
                if head > MAX_HEADER or body > MAX_PAYLOAD:
                    raise ValueError("a frame beyond its bounds")
                seal = await reader.readexactly(SEAL_BYTES)
                text = await reader.readexactly(head)
                payload = await reader.readexactly(body)
                if not hmac.compare_digest(seal, self.seal.of(lengths, text, payload)):
                    raise ValueError("a frame that is not the agent's")
                header = json.loads(text)
                if not isinstance(header, dict):
                    raise ValueError("a header that is no object")
                self._take(header, payload)
        except asyncio.CancelledError:
            return
        except (asyncio.IncompleteReadError, OSError):
            pass
        except Exception as error:  # noqa: BLE001 - whatever a reply does to us ends the machine, and nobody is left waiting
            why = f"its agent sent what it must not: {type(error).__name__}: {error}"
        finally:
            transport.close()
        if not self.parting:
            self.end(why)

    async def _look(self) -> None:
        """While somebody waits for the agent, see that it lives: a program inside may have stopped it."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.open.is_set() and not self.resting and (self.processes or self.replies) and self.lost is None:
                try:
                    await self.call({"op": "ping"}, seconds=self.patience_seconds)
                except SandboxTimeout:
                    if self.open.is_set() and not self.resting:
                        self.end(f"its agent gave no sign of life for {self.patience_seconds:g} s")
                        return
                except SandboxError:
                    continue

    def _take(self, header: dict[str, Any], payload: bytes) -> None:
        key, kind = header.get("id"), header.get("ev")
        if not isinstance(key, int):
            return
        if kind in ("reply", "error"):
            self.parts.pop(key, None)
            future = self.replies.pop(key, None)
            if future is None or future.done():
                return
            if kind == "reply":
                future.set_result(header)
            else:
                future.set_exception(SandboxError(f"sandbox {self.name}: {str(header.get('error'))[:2000]}"))
        elif kind == "part" and key in self.parts:
            self.parts[key](payload)
        elif kind == "change" and key in self.watchers:
            if header.get("kind") in ("create", "write", "remove", "rename", "chmod"):
                event = FileEvent(path=str(header.get("path")), kind=header["kind"])
                with contextlib.suppress(asyncio.QueueFull):
                    self.watchers[key].put_nowait(event)
        elif kind in ("out", "exit", "took") and key in self.processes:
            self.processes[key].event(header, payload)
            if kind == "exit":
                del self.processes[key]
        elif kind == "way":
            self.door.event(key, header, payload)

    async def tell(self, header: dict[str, Any], payload: bytes = b"", *, gate: bool = True) -> None:
        """Send one frame, waiting until the channel is open and the agent takes it."""
        head = json.dumps(header).encode()
        if len(head) > MAX_REQUEST or len(payload) > MAX_PAYLOAD:
            raise SandboxError(f"sandbox {self.name}: a request of {len(head)} + {len(payload)} bytes is too large")
        while gate and not self.open.is_set():
            await self.open.wait()
        await self.drained.wait()
        if self.lost is not None or self.writer is None:
            raise self.lost or SandboxLost(f"sandbox {self.name}: not connected")
        self.writer.write(FRAME.pack(len(head), len(payload)) + head + payload)

    async def call(
        self,
        header: dict[str, Any],
        payload: bytes = b"",
        *,
        part: Callable[[bytes], None] | None = None,
        seconds: float | None = None,
        gate: bool = True,
    ) -> dict[str, Any]:
        """One request and its answer. Raises `SandboxError` with the agent's reason, `SandboxTimeout` when none comes in time."""
        seconds = self.patience_seconds if seconds is None else seconds
        key = header["id"] if "id" in header else next(self.keys)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.replies[key] = future
        if part is not None:
            self.parts[key] = part
        try:
            async with asyncio.timeout(seconds):
                await self.tell({**header, "id": key}, payload, gate=gate)
                return await future
        except TimeoutError:
            raise SandboxTimeout(f"sandbox {self.name}: no answer to {header['op']} within {seconds:g} s") from None
        finally:
            self.replies.pop(key, None)
            self.parts.pop(key, None)

    async def start(self, command: Command, defaults: tuple[str, str], *, stdin: bool, limit: int | None = None) -> GuestProcess:
        """Start a program; `defaults` are the folder and user where the command names none. `limit` bytes of each stream come unasked."""
        key = next(self.keys)
        process = GuestProcess(self, key, command, credit=limit is None)
        self.processes[key] = process
        header = {
            "op": "start",
            "id": key,
            "argv": list(command.argv),
            "env": dict(command.env),
            "cwd": command.cwd or defaults[0],
            "user": command.user or defaults[1],
            "stdin": stdin,
            "limit": limit,
            "credit": CREDIT if limit is None else None,
        }
        try:
            process.id = int((await self.call(header)).get("pid", 0))
        except BaseException:
            self.processes.pop(key, None)
            raise
        return process

    async def run(self, command: Command, defaults: tuple[str, str]) -> Result:
        """Run a program to its end, or to its timeout: then it and its session are killed."""
        process = await self.start(command, defaults, stdin=command.stdin is not None, limit=command.max_output_bytes)
        feeding = asyncio.create_task(process.feed_all(command.stdin)) if command.stdin is not None else None
        timed_out = False
        try:
            try:
                async with asyncio.timeout(command.timeout_seconds):
                    result = await process.wait()
            except TimeoutError:
                timed_out = True
                async with asyncio.timeout(self.patience_seconds / KILLS):
                    await process.kill()
                async with asyncio.timeout(self.patience_seconds / KILLS):
                    result = await process.wait()
        except TimeoutError:
            self.processes.pop(process.key, None)
            raise SandboxTimeout(f"sandbox {self.name}: {command.argv[0]} does not die") from None
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await process.kill()
            raise
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
        return Result(
            code=result.code,
            stdout=result.stdout,
            stderr=result.stderr,
            timed_out=timed_out,
            truncated=result.truncated,
            seconds=result.seconds,
        )

    async def hold(self, *, stop: bool = False) -> None:
        """Make the agent write nothing more: when this returns, nothing is on its way in either direction."""
        self.open.clear()
        self.door.cut()
        await self.call({"op": "hold", "stop": stop}, gate=False)

    async def go(self, **identity: object) -> dict[str, Any]:
        """Open the channel, with the machine's new identity where it has one, and begin a new row of seals."""
        word, key = secrets.token_hex(16), self.seal.key.hex()
        self.seal.turn(key, word)
        request = cast("dict[str, Any]", {"op": "go", "word": word, "key": "" if self.told else key, **identity})
        answer = await self.call(request, gate=False, seconds=self.patience_seconds)
        self.told = True
        self.open.set()
        if self.door.proxy is not None:
            await self.call({"op": "door", "port": self.port})
        return answer

    async def lead(self, port: int, proxy: Path | None) -> None:
        """Have a port of the machine's loopback lead to a proxy, or to nowhere."""
        opened, wanted = self.door.proxy is not None, proxy is not None
        self.door.lead(proxy)
        self.port = port
        if opened != wanted and self.open.is_set():  # else `go` does it
            await self.call({"op": "door", "port": port if wanted else 0})

    async def watch(self, path: str, *, recursive: bool) -> AsyncIterator[FileEvent]:
        """Changes below a directory; ends with the machine."""
        key = next(self.keys)
        queue: asyncio.Queue[FileEvent | None] = asyncio.Queue(maxsize=4096)
        self.watchers[key] = queue
        try:
            await self.call({"op": "watch", "id": key, "path": path, "recursive": recursive})
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self.watchers.pop(key, None)
            if self.lost is None and self.open.is_set():
                with contextlib.suppress(SandboxError):
                    await self.call({"op": "unwatch", "watch": key}, seconds=5.0)


class _Flow(asyncio.BaseProtocol):
    """Says whether the write pipe has room."""

    def __init__(self, drained: asyncio.Event) -> None:
        self.drained = drained

    def pause_writing(self) -> None:
        self.drained.clear()

    def resume_writing(self) -> None:
        self.drained.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.drained.set()


class _Both(asyncio.StreamReaderProtocol):
    """The same for a socket that is read from as well."""

    def __init__(self, reader: asyncio.StreamReader, drained: asyncio.Event) -> None:
        super().__init__(reader)
        self.drained = drained

    def pause_writing(self) -> None:
        super().pause_writing()
        self.drained.clear()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.drained.set()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.drained.set()
