"""`gnomon sandbox serve`: the E2B HTTP API over any of our backends, so that the official SDKs run against a laptop unchanged.

Control plane (`X-API-Key`) and data plane (a token for each sandbox) are one address: set `E2B_API_URL` and `E2B_SANDBOX_URL` to it. It
binds to loopback unless told otherwise, compares keys in constant time, bounds bodies and drops clients that are too slow to send or read.
Read next: `server_desk.py`, `server_control.py`, `server_processes.py`, `server_files.py`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gnomon.errors import GnomonError, SandboxLost
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import Backend
from gnomon.sandbox.server_connect import Refusal, client_stream, stream, unary
from gnomon.sandbox.server_control import Control, failed
from gnomon.sandbox.server_desk import Box, Desk, Settings

ENVD_PORT = 49983
DATA_PLANE = ("/process.Process/", "/filesystem.Filesystem/", "/files")
MAX_CONTROL_BYTES = 1 << 20
MAX_CONNECTIONS = 2048
MAX_CALL_BYTES = 24 << 20
HOST = re.compile(r"(\d{1,5})-([a-z0-9]{8,64})\.")


class Gate:
    """In front of everything: keys and tokens, sizes, and patience with slow clients."""

    def __init__(self, app: ASGIApp, desk: Desk) -> None:
        self.app, self.desk = app, desk
        self.digests = [hashlib.sha256(key.encode()).digest() for key in desk.settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if ambiguous(scope["headers"]):
            await Response("a body of two lengths", 400, {"Connection": "close"})(scope, receive, send)
            return
        request = Request(scope)
        patience = self.desk.settings.patience_seconds

        async def patient_send(message: Message) -> None:
            async with asyncio.timeout(patience):
                await send(message)

        try:
            bound = await self._admit(request)
            await self.app(scope, _bounded(receive, bound, patience), patient_send)
        except GnomonError as error:
            await failed(error)(scope, receive, patient_send)
        except (TimeoutError, ClientDisconnect):
            raise ConnectionAbortedError("the client was too slow, or left") from None

    async def _admit(self, request: Request) -> int:
        """How large the body may be. Raises `Refusal` for who may not come in."""
        path = request.scope["path"]  # the one that routes go by; that of `request.url` depends on the Host header
        identifier = sandbox_of(request)
        if path.startswith(DATA_PLANE) or (path == "/health" and identifier is not None):
            if identifier is None:
                raise Refusal(400, "which sandbox? The header E2b-Sandbox-Id is missing")
            request.state.box = await self.desk.enter(identifier, self._token(request, identifier))
            return self.desk.settings.max_upload_bytes if path.startswith("/files") else MAX_CALL_BYTES
        if path != "/health" and not self.knows(request.headers.get("x-api-key", "")):
            raise Refusal(401, "the API key is missing or wrong (header X-API-Key, or E2B_API_KEY for an SDK)")
        return MAX_CONTROL_BYTES

    def knows(self, key: str) -> bool:
        """Whether a key is one of ours: every one is compared, in constant time."""
        digest = hashlib.sha256(key.encode()).digest()
        return sum(hmac.compare_digest(digest, known) for known in self.digests) > 0

    def _token(self, request: Request, identifier: str) -> str | None:
        """The token of a request, or the sandbox's own where a signed address stands for it."""
        query = request.query_params
        box = self.desk.boxes.get(identifier)
        if request.scope["path"] == "/files" and "signature" in query and box is not None:
            return box.token if signed(request, box.token) else None
        return request.headers.get("x-access-token")


def ambiguous(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a body has two lengths, or a coding that is not `chunked`: another server in front may have read another one."""
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    return len(lengths) + len(codings) > 1 or codings not in ([], [b"chunked"])


def signed(request: Request, token: str) -> bool:
    """Whether the signature of an address is right and its time not over (E2B's v1: a hash of path, operation, user, token, expiry)."""
    query = request.query_params
    operation = "read" if request.method in ("GET", "HEAD") else "write"
    words = [query.get("path", ""), operation, query.get("username", ""), token]
    expiry = query.get("signature_expiration")
    if expiry is not None:
        if not (expiry.isascii() and expiry.isdigit() and int(expiry) >= time.time()):
            return False
        words.append(expiry)
    digest = hashlib.sha256(":".join(words).encode()).digest()
    expected = "v1_" + base64.b64encode(digest).decode().rstrip("=")
    return hmac.compare_digest(expected.encode(), query["signature"].encode())


def sandbox_of(request: Request) -> str | None:
    """The sandbox that a request is for: by header, or by the host's name."""
    named = request.headers.get("e2b-sandbox-id")
    if named is not None:
        return named
    found = HOST.match(request.headers.get("host", ""))
    return found.group(2) if found is not None and int(found.group(1)) == ENVD_PORT else None


def _bounded(receive: Receive, bound: int, patience: float) -> Receive:
    """What comes in, up to a size; each piece in time while the body is not complete."""
    total, complete = 0, False

    async def bounded() -> Message:
        nonlocal total, complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout(patience):
                message = await receive()
        except TimeoutError:
            raise Refusal(408, f"nothing came for {patience:g} s") from None
        if message["type"] == "http.request":
            total += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if total > bound:
                raise Refusal(413, f"more than {bound} bytes")
        return message

    return bounded


class DataPlane:
    """The routes that reach into a sandbox; `Gate` has found it and checked the token."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def routes(self) -> list[Route]:
        """Every path with what answers it."""
        single: dict[str, Callable[[Box], Any]] = {
            "/process.Process/List": lambda box: box.programs.list,
            "/process.Process/SendInput": lambda box: box.programs.send_input,
            "/process.Process/SendSignal": lambda box: box.programs.send_signal,
            "/process.Process/CloseStdin": lambda box: box.programs.close_stdin,
            "/process.Process/Update": lambda box: box.programs.update,
            "/filesystem.Filesystem/Stat": lambda box: box.files.stat,
            "/filesystem.Filesystem/ListDir": lambda box: box.files.list_dir,
            "/filesystem.Filesystem/MakeDir": lambda box: box.files.make_dir,
            "/filesystem.Filesystem/Move": lambda box: box.files.move,
            "/filesystem.Filesystem/Remove": lambda box: box.files.remove,
            "/filesystem.Filesystem/CreateWatcher": lambda box: box.files.create_watcher,
            "/filesystem.Filesystem/GetWatcherEvents": lambda box: box.files.get_watcher_events,
            "/filesystem.Filesystem/RemoveWatcher": lambda box: box.files.remove_watcher,
        }
        streams: dict[str, Callable[[Box], Any]] = {
            "/process.Process/Start": lambda box: box.programs.start,
            "/process.Process/Connect": lambda box: box.programs.connect,
            "/filesystem.Filesystem/WatchDir": lambda box: box.files.watch_dir,
        }
        routes = [Route(path, self._call(unary, work), methods=["POST"]) for path, work in single.items()]
        routes += [Route(path, self._call(stream, work), methods=["POST"]) for path, work in streams.items()]
        feed = self._call(client_stream, lambda box: box.programs.stream_input)
        routes.append(Route("/process.Process/StreamInput", feed, methods=["POST"]))
        for methods, files in ((["GET"], self.download), (["POST", "PUT"], self.upload)):
            routes.append(Route("/files", files, methods=methods))
        routes.append(Route("/health", self.health))
        return routes

    def _call(self, protocol: Callable[..., Awaitable[Response]], work: Callable[[Box], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await protocol(request, work(request.state.box))

        return answer

    async def health(self, request: Request) -> Response:
        """204: the server, or the sandbox that the request names, is there; and what its isolation is worth."""
        return Response(status_code=204, headers={"X-Gnomon-Isolation": (await self.desk.capabilities()).isolation})

    async def download(self, request: Request) -> Response:
        """The content of a file."""
        box: Box = request.state.box
        return await self._files(box, box.files.download(request))

    async def upload(self, request: Request) -> Response:
        """Content for files."""
        box: Box = request.state.box
        return await self._files(box, box.files.upload(request, self.desk.settings.max_upload_bytes))

    async def _files(self, box: Box, answer: Awaitable[Response]) -> Response:
        try:
            return await answer
        except SandboxLost as error:
            self.desk.forget(box)
            return failed(error)
        except GnomonError as error:
            return failed(error)


def build(backend: Backend, settings: Settings, store: LayerStore | None = None) -> ASGIApp:
    """The application: give it to any ASGI server, or to `serve`. Its sandboxes end with it."""
    desk = Desk(backend, settings, store)

    @contextlib.asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        await desk.capabilities()
        try:
            yield
        finally:
            await desk.close()

    routes = [*DataPlane(desk).routes(), *Control(desk).routes()]
    return Gate(Starlette(routes=routes, lifespan=life), desk)


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that gives up on a connection whose first request does not come in time."""

    patience_seconds = 10.0
    most = 1
    present: ClassVar[set[PatientProtocol]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self.present.add(self)
        if len(self.present) > self.most:
            transport.abort()
        self.waiting = asyncio.get_running_loop().call_later(self.patience_seconds, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """Some bytes of it."""
        super().data_received(data)
        if self.cycle is not None:
            self.waiting.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self.waiting.cancel()
        self.present.discard(self)
        super().connection_lost(exc)

    def _too_slow(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


def server(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 0, *, patience_seconds: float = 10.0, connections: int = MAX_CONNECTIONS
) -> uvicorn.Server:
    """A server for an application of `build`, to be awaited with `.serve()`; a connection has `patience_seconds` for its first request.

    Of more than `connections` at a time the further ones are closed at once.
    """
    fields = {"patience_seconds": patience_seconds, "most": connections, "present": set()}
    protocol = type("Protocol", (PatientProtocol,), fields)
    config = uvicorn.Config(
        app, host=host, port=port, http=protocol, ws="none", log_level="warning", timeout_keep_alive=75,
        timeout_graceful_shutdown=5, server_header=False, date_header=False, access_log=False,
    )  # fmt: skip
    return uvicorn.Server(config)


def keys_of(text: str | None) -> tuple[str, ...]:
    """API keys from a comma-separated text."""
    return tuple(key.strip() for key in (text or "").split(",") if key.strip())


def address_of(running: uvicorn.Server) -> str:
    """Where a started server is: what `E2B_API_URL` and `E2B_SANDBOX_URL` must be."""
    host, port = running.servers[0].sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
