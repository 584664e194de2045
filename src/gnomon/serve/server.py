"""A server that listens: the socket, uvicorn on it, and an end that lets running answers finish. Read next: `api.py`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from gnomon.errors import ConfigError, GnomonError
from gnomon.serve.access import Access
from gnomon.serve.api import create_app
from gnomon.serve.logs import RequestLog
from gnomon.serve.service import Service

BACKLOG = 512


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address. Raises `ConfigError` where that is taken, not allowed or not there."""
    try:
        [family, kind, protocol, _, address] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"host = '{host}' is no address of this machine: {error.strerror}") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {_reason(error)}") from None
    return bound


def _reason(error: OSError) -> str:
    reasons = {
        errno.EADDRINUSE: "the port is in use; end what uses it, or choose another with port=N (port=0 takes a free one)",
        errno.EACCES: "ports below 1024 need more rights; choose a larger one with port=N",
        errno.EADDRNOTAVAIL: "this machine has no such address; use host=127.0.0.1, or host=0.0.0.0 for all of its addresses",
    }
    return reasons.get(error.errno or 0, error.strerror or str(error))


def address(bound: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def bounded(connections: int, head_seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol for at most so many connections, each with so long for the head of a request; a body has a limit of its own."""

    class Bounded(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            self._late = self.loop.call_later(head_seconds, transport.close)
            if len(self.connections) > connections:
                transport.write(FULL)
                transport.close()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            asked = self.cycle is not None and not self.cycle.response_complete
            if asked and self._late is not None:
                self._late.cancel()
                self._late = None
            elif not asked and self._late is None:
                self._late = self.loop.call_later(head_seconds, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._late is not None:
                self._late.cancel()
            super().connection_lost(exc)

    return Bounded


class Server(uvicorn.Server):
    """uvicorn with our end: on a signal nobody new is let in, who runs may finish, and the process goes on to clean up."""

    def __init__(self, app: FastAPI, service: Service, ready: Callable[[], None] = lambda: None) -> None:
        self._service = service
        self._ready = ready
        limits = service.settings.limits
        super().__init__(uvicorn.Config(
            app, http=bounded(limits.connections, limits.head_seconds), ws="none", log_config=None, access_log=False, server_header=False,
            lifespan="off", timeout_keep_alive=30, timeout_graceful_shutdown=max(1, round(service.settings.drain_seconds)),
        ))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say that it is ready: signals are taken from here on."""
        await super().startup(sockets=sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to end: drain; a second one: end now."""
        self.drain()
        super().handle_exit(sig, frame)

    def drain(self) -> None:
        """Let nobody in any more, and end when those inside are done."""
        for server in self.servers if hasattr(self, "servers") else []:
            server.get_loop().call_soon_threadsafe(self._service.admission.close)
            break
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM while serving, and do not raise them again afterwards: the end is orderly."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kept = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)


def serve(service: Service, keys: dict[str, str], bound: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Answer on a socket until a signal comes and those inside are done; `ready` is called before the first request."""
    log = RequestLog(service.settings.log)
    try:
        server = Server(create_app(service, Access(service.settings.access, keys), log), service, ready)
        server.run(sockets=[bound])
    finally:
        bound.close()
        service.close()
        log.close()


class Background:
    """A server on a thread of its own, for programs that also do something else: `with Background(service) as url`."""

    def __init__(self, service: Service, keys: dict[str, str] | None = None, port: int = 0) -> None:
        self._service = service
        self._log = RequestLog(service.settings.log)
        self._bound = listen("127.0.0.1", port)
        self.url = address(self._bound)
        self._server = Server(create_app(service, Access(service.settings.access, keys or {}), self._log), service)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._bound]}, name="server", daemon=True)

    def __enter__(self) -> str:
        """Start; the URL at which it answers."""
        self._thread.start()
        for _ in range(2000):
            if self._server.started:
                return self.url
            self._thread.join(0.005)
        raise GnomonError("the server did not start within 10 s")

    def __exit__(self, *_: object) -> None:
        """Let running answers finish, and stop."""
        self._server.drain()
        self._thread.join()
        self._bound.close()
        self._service.close()
        self._log.close()
