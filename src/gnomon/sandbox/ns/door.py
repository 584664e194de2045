"""The only way out of a sandbox: a port on its own loopback that the host listens on, and carries to a proxy's Unix socket.

The sandbox's agent makes the listening socket inside its network namespace and hands it over; from then on the host accepts, so that no
program inside stands between. What the connection may reach is the proxy's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

from gnomon.errors import SandboxError
from gnomon.sandbox.ns import wire
from gnomon.sandbox.ns.channel import Channel, Refused

PORT = 3128
BUFFER = 1 << 16
MAX_CONNECTIONS = 128
VARIABLES = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), f"http://127.0.0.1:{PORT}") | dict.fromkeys(
    ("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1")  # fmt: skip


async def listener(channel: Channel) -> socket.socket:
    """A socket that listens on the sandbox's loopback."""
    received: list[int] = []
    try:
        await channel.request(wire.LISTEN, (PORT,), on_fds=received.extend)
    except Refused as error:
        raise SandboxError(f"opening the sandbox's network: {error}") from None
    if len(received) != 1:
        for descriptor in received:
            os.close(descriptor)
        raise SandboxError("opening the sandbox's network: it handed over no socket")
    connection = socket.socket(fileno=received[0])
    if connection.family != socket.AF_INET or not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        connection.close()
        raise SandboxError("opening the sandbox's network: what it handed over is no listening socket")
    return connection


class Door:
    """Carries connections of one sandbox to a proxy. `close` cuts those that are open."""

    def __init__(self, listening: socket.socket, proxy: Path) -> None:
        self.listening, self.proxy = listening, proxy
        self.server: asyncio.Server | None = None
        self.open: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Accept from now on."""
        self.server = await asyncio.start_server(self._carry, sock=self.listening, limit=BUFFER)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self.open) >= MAX_CONNECTIONS:
            writer.close()
            return
        self.open.add(task)
        try:
            out_reader, out_writer = await asyncio.open_unix_connection(str(self.proxy), limit=BUFFER)
        except OSError:
            self.open.discard(task)
            writer.close()
            return
        try:
            await asyncio.gather(pour(reader, out_writer), pour(out_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self.open.discard(task)
            for end in (writer, out_writer):
                end.close()

    def cut(self, proxy: Path | None) -> None:
        """End the open connections; new ones go to another proxy, or nowhere."""
        for task in self.open:
            task.cancel()
        self.proxy = proxy or Path("/nonexistent")

    async def close(self) -> None:
        """No more connections."""
        self.cut(None)
        if self.server is not None:
            self.server.close()
        with contextlib.suppress(OSError):
            self.listening.close()


async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes, until it ends; then the end."""
    while data := await reader.read(BUFFER):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
