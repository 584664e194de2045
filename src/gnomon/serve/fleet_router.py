"""The router of a fleet: one address, requests to the replica that has their conversation, another one when that fails.

A request that failed before its first byte came is sent again to the secondary, which reads the conversation anew: nothing that a replica
does has an effect outside it. Answers that are not streamed are passed on when they are whole, so they can always be repeated. A stream
that breaks after its first byte ends with an error event in its dialect. Read next: `fleet_processes.py` for who starts replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gnomon.serve.admission import Busy
from gnomon.serve.api import refusal
from gnomon.serve.api_answer import dialect_of, error_event
from gnomon.serve.body import Room, read_bytes
from gnomon.serve.errors import CLIENT_GONE, ClientGone, Problem, Rejected, problem
from gnomon.serve.fleet import FleetSettings, Place, Ring, cost_of, key_of

OWN = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade", "host",
       "content-length"}
"""Headers of one connection, which are not passed on."""
REPLICA = "x-gnomon-replica"
RETRY_SECONDS = 1
CHECK_SECONDS = 5.0
"""How long a replica may take to say how it is."""


class Router:
    """Places by name behind one address. `transport` replaces the network in tests."""

    def __init__(self, addresses: Mapping[str, str], settings: FleetSettings, transport: httpx.AsyncBaseTransport | None = None):
        self.settings = settings
        self.ring = Ring(addresses, settings.points)
        self.places = {name: Place(name, url, settings.tokens) for name, url in addresses.items()}
        self.retried = 0
        self.room = Room(settings.inside_bytes)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.client = httpx.AsyncClient(transport=transport, timeout=httpx.Timeout(None, connect=5.0), limits=limits)

    def app(self) -> Starlette:
        """The application; health is looked at as long as it runs."""

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            watching = asyncio.create_task(self._watch())
            try:
                yield
            finally:
                watching.cancel()
                await self.client.aclose()

        every = ["GET", "POST", "OPTIONS", "DELETE"]
        return Starlette(lifespan=lifespan, routes=[
            Route("/health", self.health), Route("/metrics", self.metrics), Route("/{path:path}", self.pass_on, methods=every)])

    async def check(self) -> None:
        """Ask every replica how it is."""
        await asyncio.gather(*(self._check(place) for place in self.places.values()))

    async def _check(self, place: Place) -> None:
        try:
            answer = await self.client.get(f"{place.url}/health", timeout=CHECK_SECONDS)
            place.healthy = answer.status_code == 200
        except httpx.HTTPError:
            place.healthy = False

    async def _watch(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(self.settings.check_seconds)

    async def health(self, request: Request) -> Response:
        """200 as long as one replica answers, and each one's state."""
        del request
        healthy = sum(place.healthy for place in self.places.values())
        states = {name: {"healthy": place.healthy, "running": place.running, "tokens": place.used} for name, place in self.places.items()}
        return JSONResponse({"status": "ok" if healthy else "no replica answers", "replicas": states}, status_code=200 if healthy else 503)

    async def metrics(self, request: Request) -> Response:
        """Numbers for Prometheus; each replica has its own beside these."""
        del request
        lines = [f"gnomon_router_retries_total {self.retried}"]
        for name, place in self.places.items():
            values = {"healthy": int(place.healthy), "running": place.running, "tokens": place.used, "answered_total": place.answered,
                      "failed_total": place.failed}
            lines += [f'gnomon_router_replica_{what}{{replica="{name}"}} {value}' for what, value in values.items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def pass_on(self, request: Request) -> Response:
        """Send a request to where it belongs. Its body is held until an answer has begun, within bounds of size, time and all of them."""
        settings = self.settings
        try:
            return await self._placed(request, await read_bytes(request, settings.body_bytes, settings.body_seconds, self.room))
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        except (Rejected, Busy) as error:
            return refusal(request.url.path, problem(error))
        finally:
            self.room.give(request.scope.get("body_bytes", 0))

    async def _placed(self, request: Request, data: bytes) -> Response:
        path, body = request.url.path, _parsed(data)
        order, cost = [self.places[name] for name in self.ring.places(key_of(body))], cost_of(body, len(data))
        alive = [place for place in order if place.healthy]
        if not alive:
            return _later(path, 503, "no replica answers now; try again later")
        pair = [place for place in order[:2] if place.healthy] or alive[:1]
        roomy = [place for place in pair if place.fits(cost)]
        if not roomy:
            message = f"the replicas of this conversation have no room for about {cost} more tokens; try again later"
            return _later(path, 429, message, "rate_limit_exceeded")
        return await self._first_that_answers(request, data, cost, [*roomy, *(place for place in alive if place not in pair)])

    async def _first_that_answers(self, request: Request, data: bytes, cost: int, order: list[Place]) -> Response:
        for place in order:
            if not place.fits(cost):
                continue
            response = await self._try(request, data, cost, place)
            if response is not None:
                return response
            self.retried += 1
        return _later(request.url.path, 503, "no replica could answer; try again later")

    async def _try(self, request: Request, data: bytes, cost: int, place: Place) -> Response | None:
        """The answer of a replica, or `None` where nothing of it has come and another may try."""
        headers = [(name, value) for name, value in request.headers.items() if name not in OWN]
        url = f"{place.url}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        asked = self.client.build_request(request.method, url, headers=headers, content=data)
        place.enter(cost)
        kept = False
        try:
            answer = await self.client.send(asked, stream=True)
            try:
                if answer.status_code in (502, 503):  # it is ending, or what is before it is
                    place.healthy = False
                    return None
                sent = {name: value for name, value in answer.headers.items() if name not in OWN} | {REPLICA: place.name}
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                    content = b"".join([chunk async for chunk in answer.aiter_raw()])
                    place.answered += 1
                    return Response(content, status_code=answer.status_code, headers=sent)
                chunks = answer.aiter_raw()
                first = await anext(chunks, b"")
                kept = True
                flow = self._flow(request.url.path, place, cost, answer, (first, chunks))
                return StreamingResponse(flow, status_code=answer.status_code, headers=sent)
            finally:
                if not kept:
                    await answer.aclose()
        except httpx.TransportError:
            self._failed(place)
            return None
        finally:
            if not kept:
                place.leave(cost)

    async def _flow(self, path: str, place: Place, cost: int, answer: httpx.Response,
                    source: tuple[bytes, AsyncIterator[bytes]]) -> AsyncGenerator[bytes, None]:
        """The bytes of a stream that has begun; where it breaks, the error is its last event."""
        first, chunks = source
        try:
            yield first
            async for chunk in chunks:
                yield chunk
            place.answered += 1
        except httpx.TransportError:
            self._failed(place)
            message = "the replica that answered was lost in the middle; send the request again, another one will take it"
            yield b"\n\n" + error_event(dialect_of(path), Problem(status=502, message=message, code="server_error"))
        finally:
            place.leave(cost)
            await answer.aclose()

    def _failed(self, place: Place) -> None:
        place.failed += 1
        place.healthy = False


def _later(path: str, status: int, message: str, code: str = "server_error") -> Response:
    return refusal(path, Problem(status=status, message=message, code=code, headers={"retry-after": str(RETRY_SECONDS)}))


def _parsed(data: bytes) -> Any:
    """The JSON of a body, or nothing: what is wrong with it, the replica says."""
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError):
        return None
