"""The way out of a sandbox: an HTTP proxy on a Unix socket that reaches what the rules allow and nothing else.

A sandbox has no network of its own; its backend carries connections to this socket. `CONNECT` opens a tunnel, a plain request is passed on.
A name is judged first, then looked up here, once, and every address of it judged; the connection goes to an address that was judged, so
that a name which changes its address between the two gains nothing. Rules can be replaced at any time; what they no longer allow is cut.

With an *upstream*, the Unix socket of another proxy such as a model gateway, permitted traffic goes there and it does the looking up. Where
it is to be the only door, a backend carries connections to it directly (`Network(proxy=…)` without `allow`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from gnomon.errors import SandboxError
from gnomon.sandbox.rules import Address, Rule, closed, literal, normal
from gnomon.sandbox.sandbox import Network

Lookup = Callable[[str, int], Awaitable[Sequence[Address]]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

RESOLVERS = ThreadPoolExecutor(16, "gnomon-lookup")
"""Threads of their own for looking up names: one that hangs holds up no file and no other work of this process."""

LOOKUPS = 4
"""How many names one sandbox may have looked up at a time, so that it cannot take all of them."""

_HEAD_BYTES = 16_384
_PIECE = 65_536
_HOP = frozenset(("connection", "proxy-connection", "keep-alive", "proxy-authorization", "te", "trailer", "upgrade", "host"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What one sandbox may use: connections at a time, bytes in all, seconds to say what it wants, to connect, to be silent."""

    connections: int = 64
    bytes: int = 4 << 30
    head_seconds: float = 15.0
    connect_seconds: float = 15.0
    idle_seconds: float = 600.0
    half_open_seconds: float = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One wish and what became of it; `reason` says why it was refused or ended."""

    date: float
    host: str
    port: int
    allowed: bool
    reason: str = ""


class Refused(Exception):
    """A wish that is not granted: an HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(slots=True)
class _Way:
    """One open connection."""

    host: str
    port: int
    writers: list[asyncio.StreamWriter] = field(default_factory=list)


class Egress:
    """The proxy of one sandbox. `decisions` are the last thousand; `sent` and `received` count bytes.

    `lookup` replaces how names are found, for tests. Nothing is served before `start`.
    """

    def __init__(self, network: Network, bounds: Bounds | None = None, lookup: Lookup | None = None) -> None:
        self.decisions: deque[Decision] = deque(maxlen=1000)
        self.sent = self.received = 0
        self.bounds = bounds or Bounds()
        self._lookup = lookup or look_up
        self._rules: tuple[Rule, ...] = ()
        self._upstream: Path | None = None
        self._pins: dict[str, tuple[float, Address]] = {}
        self._ways: dict[int, _Way] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lookups = asyncio.Semaphore(LOOKUPS)
        self._server: asyncio.Server | None = None
        self._folder: str | None = None
        self.replace(network)

    async def start(self, folder: Path | None = None) -> Path:
        """Listen on a new Unix socket that only this user can reach, in `folder` or a temporary one; returns its path."""
        if folder is None:
            self._folder = tempfile.mkdtemp(prefix="gnomon-")
        path = Path(folder or str(self._folder)) / f"{secrets.token_hex(4)}.sock"
        try:
            self._server = await asyncio.start_unix_server(self._accept, path, limit=_HEAD_BYTES)
            os.chmod(path, 0o600)
        except OSError as error:
            raise SandboxError(f"the proxy cannot listen on {path} ({error.strerror or error}); give it a short path to a folder "
                               "of yours") from error
        self.path = path
        return path

    def replace(self, network: Network) -> None:
        """Other rules from now on. Connections that they do not allow are cut. Raises `ConfigError` for a rule that is none."""
        self._rules = tuple(map(Rule.parse, network.allow))
        upstream, self._upstream = self._upstream, network.proxy
        for way in [*self._ways.values()]:
            why = self._unruly(way.host, way.port) or ("the upstream proxy was replaced" if upstream != network.proxy else None)
            if why is not None:
                self._note(way.host, way.port, f"cut: {why}")
                for writer in way.writers:
                    writer.transport.abort()

    async def close(self) -> None:
        """Cut everything and stop listening. Twice is no error."""
        if self._server is not None:
            self._server.close()
            for task in [*self._tasks]:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None
            self.path.unlink(missing_ok=True)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._folder)
            self._folder = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError, TimeoutError):
            pass  # one end went away, or this proxy is closing
        finally:
            self._tasks.discard(task)
            self._ways.pop(id(task), None)
            await _shut(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._tasks) > 2 * self.bounds.connections:  # not even an answer
                return
            async with asyncio.timeout(self.bounds.head_seconds):
                head = await _head(reader)
            if len(self._tasks) > self.bounds.connections:
                raise Refused(429, f"more than {self.bounds.connections} connections at a time")
            method, target, headers = _parsed(head)
            tunnel = method == "CONNECT"
            host, port, path = _aim(target, tunnel)
            length = None if tunnel else _length(headers)
            way = self._ways[id(asyncio.current_task())] = _Way(host=host, port=port, writers=[writer])
            out_reader, out_writer = await self._open(host, port)
            way.writers.append(out_writer)
        except Refused as refusal:
            text = f"gnomon: {refusal}\n".encode()
            writer.write(b"HTTP/1.1 %d Refused\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
                         % (refusal.status, len(text), text))
            await writer.drain()
            return
        except TimeoutError:
            return
        try:
            if tunnel and self._upstream is None:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                named = f"[{host}]" if ":" in host else host
                aim = f"{named}:{port}" if tunnel else f"http://{named}:{port}{path}" if self._upstream else path
                lines = [f"{method} {aim} HTTP/1.1", f"Host: {named}" + (f":{port}" if port != 80 else "")]
                lines += [f"{name}: {value}" for name, value in headers if name.lower() not in _HOP]
                out_writer.write("\r\n".join([*lines, *([] if tunnel else ["Connection: close"]), "", ""]).encode("latin-1"))
            await self._carry((reader, writer), (out_reader, out_writer), tunnel, length)
        finally:
            await _shut(out_writer)

    async def _open(self, host: str, port: int) -> Streams:
        """A connection to where the rules allow one. Raises `Refused`."""
        try:
            if (why := self._unruly(host, port)) is not None:
                raise Refused(403, why)
            try:
                async with asyncio.timeout(self.bounds.connect_seconds):
                    if self._upstream is not None:
                        streams = await asyncio.open_unix_connection(str(self._upstream), limit=_PIECE)
                    else:
                        address = await self._judged(host, port)
                        streams = await asyncio.open_connection(str(address), port, limit=_PIECE)
            except (OSError, TimeoutError) as error:
                raise Refused(502, f"{host}:{port} cannot be reached ({error or 'no answer in time'})") from None
            if (why := self._unruly(host, port)) is not None:  # the rules may have changed meanwhile
                streams[1].transport.abort()
                raise Refused(403, why)
        except Refused as refusal:
            self._note(host, port, str(refusal))
            raise
        self.decisions.append(Decision(date=time.time(), host=host, port=port, allowed=True))
        return streams

    def _unruly(self, host: str, port: int) -> str | None:
        """Why the rules alone refuse a host and port."""
        address = literal(host)
        if address is not None and (why := closed(address)) is not None:
            return why
        if not any(rule.fits(host, port) for rule in self._rules):
            rules = ", ".join(f"{rule.host}:{rule.port or '*'}" for rule in self._rules)
            return f"{host}:{port} is not allowed; the rules are: {rules or 'none'}"
        return None

    async def _judged(self, host: str, port: int) -> Address:
        """An address of a name, all of whose addresses may be reached. Looked up once; kept for five minutes."""
        found = literal(host)
        pinned = self._pins.get(host)
        if found is None and pinned is not None and pinned[0] > time.monotonic():
            found = pinned[1]
        if found is None:
            async with self._lookups:
                addresses = await self._lookup(host, port)
            if not addresses:
                raise Refused(502, f"{host} has no address")
            for address in addresses:
                if (why := closed(address)) is not None:
                    raise Refused(403, f"{host} stands for an inner address: {why}")
            found = addresses[0]
            if len(self._pins) > 1000:
                self._pins.clear()
            self._pins[host] = time.monotonic() + 300.0, found
        return found

    async def _carry(self, inner: Streams, outer: Streams, tunnel: bool, length: int | None) -> None:
        """Both directions at once: a tunnel until both ends are done; a plain request, only its body going out, until its answer ends."""
        up = asyncio.ensure_future(self._pour(inner[0], outer[1], "sent", length))
        down = asyncio.ensure_future(self._pour(outer[0], inner[1], "received", None))
        try:
            if tunnel:
                await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait((up, down), timeout=self.bounds.half_open_seconds)
            else:
                await down
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _pour(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: str, length: int | None) -> None:
        left = length
        while left is None or left > 0:
            async with asyncio.timeout(self.bounds.idle_seconds):
                piece = await reader.read(_PIECE if left is None else min(_PIECE, left))
            if not piece:
                break
            setattr(self, count, getattr(self, count) + len(piece))
            if self.sent + self.received > self.bounds.bytes:
                self._note("", 0, f"cut: more than {self.bounds.bytes} bytes in all")
                writer.transport.abort()
                return
            left = None if left is None else left - len(piece)
            writer.write(piece)
            async with asyncio.timeout(self.bounds.idle_seconds):
                await writer.drain()
        if length is None and writer.can_write_eof():
            writer.write_eof()

    def _note(self, host: str, port: int, reason: str) -> None:
        self.decisions.append(Decision(date=time.time(), host=host, port=port, allowed=False, reason=reason))


async def _shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, asyncio.CancelledError):
        await writer.wait_closed()


async def look_up(host: str, port: int) -> Sequence[Address]:
    """The addresses of a name, by the machine's resolver. Raises `Refused` where it has none."""
    try:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(RESOLVERS, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        raise Refused(502, f"{host} cannot be looked up ({error})") from None
    return [address for item in found if (address := literal(str(item[4][0]))) is not None]


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise Refused(431, f"a request with more than {_HEAD_BYTES} bytes of headers") from None


def _parsed(head: bytes) -> tuple[str, str, list[tuple[str, str]]]:
    """Method, target and headers."""
    lines = head.decode("latin-1").split("\r\n")[:-2]
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[0].isalpha():
        raise Refused(400, "not an HTTP request to a proxy; this is an HTTP proxy, and only HTTP and CONNECT pass")
    headers = []
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name.strip() != name or any(c in line for c in "\r\n\0"):
            raise Refused(400, "a header that is none")
        headers.append((name, value.strip()))
    return words[0].upper(), words[1], headers


def _aim(target: str, tunnel: bool) -> tuple[str, int, str]:
    """Host in its normal form, port, and path of what a request wants."""
    try:
        parts = urlsplit(f"//{target}" if tunnel else target)
        port = parts.port
    except ValueError:
        raise Refused(400, "an address that cannot be read") from None
    host = normal(parts.hostname or "") if parts.hostname else None
    if host is None:
        raise Refused(400, "no host that can be reached; write a name, or an address in its usual form")
    if tunnel and (port is None or parts.path or parts.query):
        raise Refused(400, "CONNECT needs host:port")
    if not tunnel and (parts.scheme != "http" or parts.username is not None):
        raise Refused(400, "only http:// passes without CONNECT")
    return host, port or 80, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _length(headers: list[tuple[str, str]]) -> int | None:
    """Bytes of a request's body; `None` for chunks, which end by themselves."""
    lengths = [value for name, value in headers if name.lower() == "content-length"]
    chunked = any(name.lower() == "transfer-encoding" for name, _ in headers)
    if (chunked and lengths) or len(lengths) > 1 or not all(value.isascii() and value.isdigit() for value in lengths):
        raise Refused(400, "a body of two lengths")
    return None if chunked else int(lengths[0]) if lengths else 0
