"""A program inside that runs in the background, as the host sees it: its output, its input, its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

from gnomon.errors import SandboxError
from gnomon.sandbox.kept import Kept
from gnomon.sandbox.sandbox import Chunk, Command, Result

MAX_PAYLOAD = 1 << 20
CREDIT = 1 << 18


class Line(Protocol):
    """What a program needs of the channel to its agent."""

    async def tell(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send one frame."""
        ...

    async def call(self, header: dict[str, Any], payload: bytes = b"") -> dict[str, Any]:
        """Send one frame and wait for its answer."""
        ...


class GuestProcess:
    """A program inside that was started in the background; see `gnomon.sandbox.sandbox.Process`."""

    def __init__(self, guest: Line, key: int, command: Command, *, credit: bool) -> None:
        self.guest, self.key, self.command = guest, key, command
        self.id = 0
        self.credit = credit
        self.chunks: deque[Chunk] = deque()
        self.waiting_bytes = 0
        self.kept = Kept(command.max_output_bytes)
        self.changed = asyncio.Event()
        self.taken = asyncio.Event()
        self.code: int | None = None
        self.lost: Exception | None = None
        self.truncated = False
        self.began = time.monotonic()
        self.ended = 0.0

    def event(self, header: dict[str, Any], payload: bytes) -> None:
        """What the agent says about it."""
        kind = header.get("ev")
        if kind == "out":
            stream: Literal["stdout", "stderr"] = "stderr" if header.get("stream") == "stderr" else "stdout"
            self.waiting_bytes += len(payload)
            if self.waiting_bytes > max(CREDIT, 2 * self.command.max_output_bytes) + MAX_PAYLOAD:
                raise ValueError("output that nobody asked for")
            if self.chunks and self.chunks[-1].stream == stream and len(self.chunks[-1].data) < 4096:
                payload = self.chunks.pop().data + payload
            self.chunks.append(Chunk(stream=stream, data=payload))
        elif kind == "exit":
            code = header.get("code")
            self.code = code if isinstance(code, int) and -128 <= code <= 255 else 255
            self.truncated = self.truncated or bool(header.get("truncated"))
            self.ended = time.monotonic()
        elif kind == "took":
            self.taken.set()
        self.changed.set()

    def fail(self, error: Exception) -> None:
        """The machine is gone."""
        self.lost = error
        self.changed.set()
        self.taken.set()

    async def output(self) -> AsyncIterator[Chunk]:
        """Output as it comes, until the program ends."""
        while True:
            while self.chunks:
                chunk = self.chunks.popleft()
                self.waiting_bytes -= len(chunk.data)
                if self.credit and self.code is None and self.lost is None:
                    await self.guest.tell({"op": "more", "id": self.key, "bytes": len(chunk.data)})
                yield chunk
            if self.code is not None:
                return
            if self.lost is not None:
                raise self.lost
            self.changed.clear()
            await self.changed.wait()

    async def wait(self) -> Result:
        """Its end, with the output that nobody took, up to the command's limit."""
        await self.kept.take(self.output())
        assert self.code is not None
        return Result(
            code=self.code,
            stdout=self.kept.stdout,
            stderr=self.kept.stderr,
            truncated=self.truncated or self.kept.truncated,
            seconds=self.ended - self.began,
        )

    async def write(self, data: bytes) -> None:
        """Bytes for its standard input; returns when the program's pipe has them."""
        view = memoryview(data)
        while view and self.code is None:
            await self._feed(bytes(view[:CREDIT]), eof=False)
            view = view[CREDIT:]

    async def close_stdin(self) -> None:
        """End of its standard input."""
        if self.code is None:
            await self._feed(b"", eof=True)

    async def feed_all(self, data: bytes) -> None:
        """All of its standard input, and the end of it; a program that ends first is no error."""
        with contextlib.suppress(SandboxError):
            await self.write(data)
            await self.close_stdin()

    async def _feed(self, data: bytes, *, eof: bool) -> None:
        self.taken.clear()
        await self.guest.call({"op": "stdin", "child": self.key, "eof": eof}, data)
        ended = asyncio.ensure_future(self._ended())
        taken = asyncio.ensure_future(self.taken.wait())
        try:
            await asyncio.wait({ended, taken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in (ended, taken):
                waiter.cancel()
        if self.lost is not None:
            raise self.lost

    async def _ended(self) -> None:
        while self.code is None and self.lost is None:
            await asyncio.sleep(0.05)

    async def kill(self, signal: int = 9) -> None:
        """Send a signal to the program and all that it started in its session."""
        if self.code is None:
            await self.guest.call({"op": "signal", "child": self.key, "signal": int(signal)})
