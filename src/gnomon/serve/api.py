"""The HTTP API of a model: FastAPI over the service, one route for each dialect, and a gate that every request passes.

The gate gives each request its id, asks for keys, and turns whatever was not foreseen into an error of the right shape: it owns the
boundary, so nothing a client sends ends the server. Read next: `api_answer.py` for what a route does, `service.py` for what is behind it.
"""

from __future__ import annotations

import json
import re
import time
import traceback
import uuid
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gnomon import __version__
from gnomon.errors import GnomonError
from gnomon.serve import api_answer, api_more, exchange, openapi
from gnomon.serve.access import Access
from gnomon.serve.errors import CLIENT_GONE, Problem, problem
from gnomon.serve.logs import RequestLog
from gnomon.serve.service import Service

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
DESCRIPTION = "A model behind the APIs of OpenAI and Anthropic. What goes beyond them is described field by field in docs/serving.md."


@dataclass(slots=True)
class Note:
    """What is known about a request while it runs, for its line in the log."""

    id: str
    began: float = field(default_factory=time.perf_counter)
    status: int = 0
    streams: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


def create_app(service: Service, access: Access, log: RequestLog) -> FastAPI:
    """The application of a service."""
    app = FastAPI(title="gnomon", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None)
    app.state.service = service
    for path, dialect in api_answer.DIALECTS.items():
        app.add_api_route(path, api_answer.endpoint(service, dialect), methods=["POST"], **openapi.answering(path))
    api_more.add_routes(app, service)
    exchange.add_route(app, service)
    app.add_exception_handler(GnomonError, _said)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(Gate, access=access, log=log, service=service)
    origins = service.settings.access.origins
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"])
    return app


async def _said(request: Request, error: Exception) -> Response:
    return refusal(request.url.path, problem(error))


async def _http(request: Request, error: Exception) -> Response:
    """What the router itself refuses: an unknown path, or another method than the path has."""
    assert isinstance(error, HTTPException)
    words = {404: f"there is nothing at {request.url.path[:200]}; /openapi.json lists what there is",
             405: f"{request.method[:20]} is not for {request.url.path[:200]}"}
    message = words.get(error.status_code, str(error.detail))
    return refusal(request.url.path, Problem(status=error.status_code, message=message, code="not_found", headers=error.headers or {}))


def refusal(path: str, found: Problem) -> Response:
    """An error in the shape of the path's dialect."""
    dialect = api_answer.dialect_of(path)
    body = dialect.error(found.status, found.message, found.place, found.code)
    return Response(json.dumps(body), status_code=found.status, headers=dict(found.headers), media_type="application/json")


class Gate:
    """What every request passes, on its way in and out."""

    def __init__(self, app: ASGIApp, *, access: Access, log: RequestLog, service: Service) -> None:
        self._app = app
        self._access = access
        self._log = log
        self._metrics = service.metrics
        self._room = service.room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        note = Note(id=given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
        scope["note"] = note
        try:
            note.fields["key"] = self._access.check(scope["path"], headers)
            await self._app(scope, receive, self._sender(note, send))
        except GnomonError as error:
            await self._close(scope, note, problem(error), receive, send)
        except Exception as error:  # noqa: BLE001  the boundary: whatever it was, the server goes on
            note.fields["error"] = "".join(traceback.format_exception(error))[-4000:]
            await self._close(scope, note, problem(error), receive, send)
        finally:
            self._room.give(scope.get("body_bytes", 0))
            self._done(scope, note)

    def _sender(self, note: Note, send: Send) -> Send:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._mark(note, message)
            await send(message)

        return sent

    def _mark(self, note: Note, message: MutableMapping[str, Any]) -> None:
        note.status = message["status"]
        headers = MutableHeaders(raw=message.setdefault("headers", []))
        headers["x-request-id"] = note.id
        headers["x-content-type-options"] = "nosniff"
        note.streams = headers.get("content-type", "").startswith("text/event-stream")

    async def _close(self, scope: Scope, note: Note, found: Problem, receive: Receive, send: Send) -> None:
        """Answer with an error, or end a stream that has begun with one."""
        begun, note.status = note.status != 0, found.status
        note.fields.setdefault("problem", found.message)
        if found.status == CLIENT_GONE:
            return
        if not begun:
            await refusal(scope["path"], found)(scope, receive, self._sender(note, send))
        elif note.streams:
            body = api_answer.error_event(api_answer.dialect_of(scope["path"]), found)
            await send({"type": "http.response.body", "body": body, "more_body": False})

    def _done(self, scope: Scope, note: Note) -> None:
        seconds = time.perf_counter() - note.began
        route: Mapping[str, Any] | Any = scope.get("route")
        path = getattr(route, "path", "other")
        self._metrics.requests.labels(path, str(note.status)).inc()
        self._metrics.seconds.observe(seconds)
        self._log.record(level="error" if note.status >= 500 else "info", request=note.id, method=scope["method"], path=scope["path"][:200],
                         status=note.status, seconds=seconds, **note.fields)
