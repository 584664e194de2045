"""The host's end of a machine's only way out: its agent's connections are carried to a proxy's Unix socket, which judges them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, Protocol

from gnomon.sandbox.guest.agent_door import MOST, PIECE, WINDOW


class Line(Protocol):
    """What a door needs of the channel to the agent."""

    async def tell(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send one frame."""
        ...


class _Way:
    """One connection: what has come for the proxy, and how much more the program may be sent."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[bytes] = asyncio.Queue()
        self.waiting = 0
        self.room = WINDOW
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Door:
    """All connections of one machine. What the agent says is bounded: `ValueError` for more than was asked for."""

    def __init__(self, guest: Line) -> None:
        self.guest = guest
        self.proxy: Path | None = None
        self.ways: dict[int, _Way] = {}

    def lead(self, proxy: Path | None) -> None:
        """Where connections go from now on; those that are open are cut if that changes."""
        if proxy != self.proxy:
            self.proxy = proxy
            self.cut()

    def cut(self) -> None:
        """End every connection."""
        for way in self.ways.values():
            if way.task is not None:
                way.task.cancel()

    def event(self, number: int, header: dict[str, Any], payload: bytes) -> None:
        """What the agent says about a connection."""
        what, way = header.get("do"), self.ways.get(number)
        if what == "open" and way is None and len(self.ways) < 2 * MOST:
            way = self.ways[number] = _Way()
            way.task = asyncio.create_task(self._carry(number, way))
        elif way is None:
            return
        elif what in ("data", "end"):
            way.waiting += len(payload)
            if way.waiting > WINDOW:
                raise ValueError("more of a connection than was asked for")
            way.incoming.put_nowait(payload if what == "data" else b"")
        elif what == "room" and isinstance(size := header.get("bytes"), int) and 0 < size <= WINDOW:
            way.room = min(WINDOW, way.room + size)
            way.changed.set()
        elif what == "gone" and way.task is not None:
            way.task.cancel()

    async def _carry(self, number: int, way: _Way) -> None:
        """Both directions of one connection, until it ends."""
        writer: asyncio.StreamWriter | None = None
        try:
            if self.proxy is None or len(self.ways) > MOST:
                return
            reader, writer = await asyncio.open_unix_connection(str(self.proxy), limit=PIECE)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._out(number, way, writer))
                both.create_task(self._in(number, way, reader))
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass  # one end went away
        finally:
            self.ways.pop(number, None)
            if writer is not None:
                writer.close()
            with contextlib.suppress(Exception):  # the machine may be gone
                await asyncio.wait_for(self.guest.tell({"op": "pass", "way": number, "do": "gone"}), 5.0)

    async def _out(self, number: int, way: _Way, writer: asyncio.StreamWriter) -> None:
        while data := await way.incoming.get():
            writer.write(data)
            await writer.drain()
            way.waiting -= len(data)
            await self.guest.tell({"op": "pass", "way": number, "do": "room", "bytes": len(data)})
        writer.write_eof()

    async def _in(self, number: int, way: _Way, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(PIECE):
            while way.room < len(data):
                way.changed.clear()
                await way.changed.wait()
            way.room -= len(data)
            await self.guest.tell({"op": "pass", "way": number, "do": "data"}, data)
        await self.guest.tell({"op": "pass", "way": number, "do": "end"})
