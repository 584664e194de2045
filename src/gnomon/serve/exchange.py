"""Newer weights into a server that runs: `POST /admin/reload`, for whoever trains what is served (report §4.1: rollouts between updates).

The route exists where `access.reload_folders` names folders, and answers keys that `access.admins` names. The new weights must be of the
same shape and vocabulary; both are in memory for the moment of the exchange. Read next: `engine.py`, where it happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gnomon.data.dialects.asked import Refused
from gnomon.data.dialects.fields import Fields
from gnomon.errors import ConfigError
from gnomon.serve.body import read_json
from gnomon.serve.live import LiveEngine
from gnomon.serve.load import Loaded, load
from gnomon.serve.service import Revision, Service

PATH = "/admin/reload"
MOST_VERSIONS = 2**53


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A folder to take weights from, and the version that what they sample is noted with."""

    folder: Path
    version: int | None


def read(body: object) -> Wanted:
    """What a body asks. Raises `Refused` naming the field."""
    fields = Fields(body)
    folder, version = fields.text("path"), fields.integer("version", 0, MOST_VERSIONS)
    fields.refuse_rest()
    if not folder:
        raise Refused("'path' is required: a run folder or a released checkpoint", "path", "missing_required_parameter")
    return Wanted(folder=Path(folder), version=version)


def add_route(app: FastAPI, service: Service) -> None:
    """Add the route, where the service can exchange its weights."""
    exchange = service.exchange
    if exchange is None:
        return
    lock = asyncio.Lock()

    async def reload(request: Request) -> Response:
        wanted = await read_json(request, service.settings.limits, service.room, read)
        async with lock:
            version = service.revision.version + 1 if wanted.version is None else wanted.version
            service.revision = await asyncio.to_thread(exchange, allowed(wanted.folder, service.settings.access.reload_folders), version)
        return JSONResponse({"model": service.name, "fingerprint": service.revision.fingerprint, "version": service.revision.version})

    app.add_api_route(PATH, reload, methods=["POST"], include_in_schema=False)


def allowed(folder: Path, roots: tuple[Path, ...]) -> Path:
    """A folder with its links followed. Raises `Refused` for one that lies in none of the roots."""
    found = folder.resolve()
    if not any(found.is_relative_to(root.resolve()) for root in roots):
        raise Refused(f"'path' is {str(folder)[:200]}, which lies in none of access.reload_folders; name one of those", "path")
    return found


def exchanging(model: Loaded, live: LiveEngine, precision: str) -> Callable[[Path, int], Revision]:
    """What `Service.exchange` is for a model that is loaded in this precision: it loads, compares and exchanges, and blocks meanwhile."""

    def exchange(folder: Path, version: int) -> Revision:
        fresh = load(folder, precision)  # type: ignore[arg-type]  # a precision that the server began with
        if fresh.tokenizer.fingerprint != model.tokenizer.fingerprint:
            raise ConfigError(f"{folder} has another tokenizer than the model that is served; start another server for it")
        live.exchange(fresh.runner)
        return Revision(fingerprint=fresh.fingerprint, version=version)

    return exchange
