"""The gateway over HTTP: a few routes, each in its dialect, and errors in the dialect's shape whatever happens.

An answer that is slow to come is streamed with comments in between, so that nobody hangs up. A client that leaves does not end the call: if
it tries again, it gets the same answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gnomon.agent import gateway_speech as speech
from gnomon.agent.fields import parsed
from gnomon.agent.gateway_speech import Turned
from gnomon.agent.gateway_visit import Bounds, Visit, Visits
from gnomon.agent.policy import Completion
from gnomon.data.dialects import anthropic
from gnomon.data.dialects.asked import Asked, Dialect, Sent
from gnomon.data.dialects.sent import as_bytes, encode_json
from gnomon.errors import DataError, GnomonError

Answering = Callable[[Request, Visit, Any, str], Awaitable[Response]]


class Server(uvicorn.Server):
    """uvicorn inside somebody else's loop: signals are not its business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


def server(visits: Visits, bounds: Bounds) -> Server:
    """What serves a gateway."""
    return Server(uvicorn.Config(
        application(visits, bounds), log_config=None, access_log=False, server_header=False, lifespan="off", ws="none",
        timeout_keep_alive=300, timeout_graceful_shutdown=1))


def application(visits: Visits, bounds: Bounds) -> Starlette:
    """The routes of a gateway, with and without `/v1`: programs differ in what they take for the address of an API."""
    routes = _Routes(visits, bounds)
    paths = [(path, routes.answering(dialect), "POST") for path, dialect in speech.PATHS.items()]
    paths += [(speech.COUNT, routes.knocking(routes.count), "POST"), ("/v1/models", routes.knocking(routes.models), "GET"),
              ("/v1/models/{name:path}", routes.knocking(routes.model), "GET")]
    found = [Route(place, endpoint, methods=[method]) for path, endpoint, method in paths for place in (path, path.removeprefix("/v1"))]
    nowhere = Route("/{path:path}", routes.nowhere, methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    return Starlette(routes=[Route("/", routes.alive, methods=["GET", "HEAD"]), *found, nowhere], exception_handlers={Exception: _broken})


class _Routes:
    """What each route does."""

    def __init__(self, visits: Visits, bounds: Bounds) -> None:
        self._visits, self._bounds = visits, bounds

    def answering(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        """The route of a dialect."""

        async def answer(request: Request, visit: Visit, body: Any, key: str) -> Response:
            asked = speech.read(dialect, body)
            call = asyncio.ensure_future(visit.answer(asked, key, _again(request)))
            call.add_done_callback(_noticed)
            size, request.state.held = request.state.held, 0  # the call holds what was sent until it ends, whoever waits for it
            call.add_done_callback(lambda _: _let_go(visit, size))
            done, _ = await asyncio.wait((call,), timeout=self._bounds.quiet_seconds if asked.stream else None)
            if not asked.stream:
                return Response(encode_json(speech.said(dialect, asked, await call)), media_type="application/json")
            if done:
                await call  # what is refused at once still has a status of its own
            events = self._events(dialect, asked, call)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

        return self.knocking(answer)

    def knocking(self, answer: Answering) -> Callable[[Request], Awaitable[Response]]:
        """A route for those who have a secret."""

        async def endpoint(request: Request) -> Response:
            dialect = speech.dialect_of(_place(request))
            visit: Visit | None = None
            request.state.held = 0
            try:
                visit = self._visits.find(request.headers)
                if visit is None:
                    raise Turned(401, "no key of an attempt; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'", "invalid_api_key")
                data = await self._body(request, visit) if request.method == "POST" else b""
                return await answer(request, visit, _parsed(data), _key(request, data))
            except GnomonError as error:
                status, body = speech.failed(dialect, error)
                return Response(encode_json(body), status, media_type="application/json")
            finally:
                if visit is not None:
                    _let_go(visit, request.state.held)

        return endpoint

    async def count(self, request: Request, visit: Visit, body: Any, key: str) -> Response:
        """The tokens of Anthropic's messages."""
        asked = anthropic.read_count(body)
        return JSONResponse(anthropic.counted(await asyncio.to_thread(visit.count, asked)))  # encoding a long one takes a while

    async def models(self, request: Request, visit: Visit, body: Any, key: str) -> Response:
        """The models: one, the attempt's policy."""
        return JSONResponse(speech.models([visit.recorder.policy.name]))

    async def model(self, request: Request, visit: Visit, body: Any, key: str) -> Response:
        """A model by name: whatever a program calls it, it is the attempt's policy."""
        return JSONResponse(speech.models([request.path_params["name"]])["data"][0])

    async def alive(self, request: Request) -> Response:
        """Some programs look whether anybody is there."""
        return JSONResponse({"status": "ok"})

    async def nowhere(self, request: Request) -> Response:
        """An unknown path."""
        place = _place(request)
        message = f"there is nothing at {request.method} {place[:200]}; a gateway has {', '.join(speech.PATHS)}, {speech.COUNT}, /v1/models"
        return JSONResponse(speech.dialect_of(place).error(404, message, None, "not_found"), 404)

    async def _body(self, request: Request, visit: Visit) -> bytes:
        bounds, chunks, size = self._bounds, [], 0
        try:
            async with asyncio.timeout(bounds.body_seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > bounds.body_bytes:
                        raise Turned(413, f"the body is larger than {bounds.body_bytes} bytes; send less", "request_too_large")
                    if visit.held + len(chunk) > bounds.attempt_bytes:
                        raise Turned(429, f"the requests under way hold {visit.held} bytes; wait for their answers", "too_many_requests")
                    visit.held += len(chunk)
                    request.state.held += len(chunk)
                    chunks.append(chunk)
        except TimeoutError:
            raise Turned(408, f"the body did not arrive within {bounds.body_seconds:g} s", "request_timeout") from None
        except ClientDisconnect:
            raise Turned(400, "the client left while it sent the body", "client_gone") from None
        return b"".join(chunks)

    async def _events(self, dialect: Dialect, asked: Asked, call: asyncio.Future[Completion]) -> AsyncIterator[bytes]:
        """The bytes of a stream; a failure becomes its last event."""
        try:
            while not (await asyncio.wait((call,), timeout=self._bounds.quiet_seconds))[0]:
                yield b": still here\n\n"
            yield as_bytes(speech.streamed(dialect, asked, call.result()))
        except GnomonError as error:
            _, body = speech.failed(dialect, error)
            yield as_bytes([Sent(body.get("type"), body)])


async def _broken(request: Request, error: Exception) -> Response:
    """What nobody foresaw; the server logs it."""
    status, body = speech.failed(speech.dialect_of(_place(request)), error)
    return JSONResponse(body, status)


def _let_go(visit: Visit, size: int) -> None:
    visit.held -= size


def _noticed(call: asyncio.Future[Completion]) -> None:
    """A client that left does not hear of a failure; somebody must."""
    if not call.cancelled():
        call.exception()


def _place(request: Request) -> str:
    """The path with `/v1`."""
    path = request.url.path
    return path if path.startswith("/v1/") else f"/v1{path}"


def _parsed(data: bytes) -> Any:
    try:
        return parsed(data, "the body") if data else {}
    except DataError as error:
        raise Turned(400, str(error), "invalid_json") from None


def _key(request: Request, data: bytes) -> str:
    """What names a request: the client's own key, else all that it says."""
    given = request.headers.get("idempotency-key")
    return f"key {given}" if given else f"body {request.url.path} {hashlib.sha256(data).hexdigest()}"


def _again(request: Request) -> bool:
    """Whether a client says that it tries again, or has a key by which it might."""
    retries = request.headers.get("x-stainless-retry-count", "0")
    return "idempotency-key" in request.headers or (retries.isascii() and retries.isdigit() and int(retries[:9]) > 0)
