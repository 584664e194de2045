"""The control plane of the E2B API over a `Desk`: sandboxes made, listed, paused, resumed, forked, kept and ended, as plain JSON."""

from __future__ import annotations

import datetime
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gnomon.errors import ConfigError, GnomonError, SandboxLost
from gnomon.sandbox.sandbox import MEGABYTE
from gnomon.sandbox.server_connect import Json, Refusal, parsed, refusal
from gnomon.sandbox.server_desk import Box, Desk, network_of

ENVD_VERSION = "0.5.7"
"""The version of E2B's agent whose data plane this server speaks: the SDKs switch their features by it."""

MAX_FORKS = 100
MAX_PAGE = 100


def failed(error: GnomonError) -> Response:
    """An error in the words of the control plane."""
    told = refusal(error)
    headers = {"Should-Retry": "false"} if told.status == 503 else None
    return Json({"code": told.status, "message": str(told)}, status_code=told.status, headers=headers)


class Control:
    """The routes of the control plane."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def routes(self) -> list[Route]:
        """Every path with what answers it."""
        rows: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("POST", "/sandboxes", self.create),
            ("POST", "/v2/sandboxes", self.create),
            ("GET", "/sandboxes", self.listing),
            ("GET", "/v2/sandboxes", self.listing),
            ("GET", "/sandboxes/{id}", self.detail),
            ("DELETE", "/sandboxes/{id}", self.kill),
            ("POST", "/sandboxes/{id}/pause", self.pause),
            ("POST", "/sandboxes/{id}/resume", self.connect),
            ("POST", "/sandboxes/{id}/connect", self.connect),
            ("POST", "/v2/sandboxes/{id}/connect", self.connect),
            ("POST", "/sandboxes/{id}/timeout", self.timeout),
            ("POST", "/sandboxes/{id}/refreshes", self.refresh),
            ("POST", "/sandboxes/{id}/fork", self.fork),
            ("POST", "/sandboxes/{id}/snapshots", self.snapshot),
            ("PUT", "/sandboxes/{id}/network", self.network),
            ("GET", "/sandboxes/{id}/metrics", self.metrics),
            ("GET", "/snapshots", self.snapshots),
            ("GET", "/templates", self.templates),
            ("GET", "/v2/templates", self.templates),
            ("GET", "/templates/aliases/{name}", self.alias),
            ("DELETE", "/templates/{name:path}", self.remove_template),
        ]
        return [Route(path, self._guarded(work), methods=[method]) for method, path, work in rows]

    def _guarded(self, work: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await work(request)
            except SandboxLost as error:
                box = self.desk.boxes.get(request.path_params.get("id", ""))
                if box is not None:
                    await self.desk.kill(box)
                return failed(Refusal(404, str(error)))
            except GnomonError as error:
                return failed(error)

        return answer

    def _box(self, request: Request) -> Box:
        return self.desk.box(request.path_params["id"])

    def _made(self, box: Box) -> dict[str, Any]:
        """What a client needs to reach a sandbox."""
        return {
            "templateID": box.template,
            "sandboxID": box.id,
            "clientID": "gnomon",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": box.token,
        }

    def _told(self, box: Box) -> dict[str, Any]:
        """What a list says of a sandbox."""
        limits = box.sandbox.spec.limits
        return {
            "templateID": box.template,
            "sandboxID": box.id,
            "clientID": "gnomon",
            "envdVersion": ENVD_VERSION,
            "state": box.state,
            "startedAt": _date(box.started.timestamp()),
            "endAt": _date(box.ends),
            "cpuCount": max(1, round(limits.cpus)),
            "memoryMB": limits.memory_bytes // MEGABYTE,
            "diskSizeMB": limits.disk_bytes // MEGABYTE,
            "metadata": dict(box.sandbox.spec.metadata),
        }

    async def create(self, request: Request) -> Response:
        """A new sandbox."""
        wishes = parsed(await request.body())
        return Json(self._made(await self.desk.create(wishes, request.headers.get("idempotency-key"))), status_code=201)

    async def listing(self, request: Request) -> Response:
        """Sandboxes that fit a query, a page at a time."""
        query = request.query_params
        states = query.get("state", "running" if request.scope["path"] == "/sandboxes" else "running,paused").split(",")
        wanted = {unquote(name): unquote(value) for name, value in parse_qsl(query.get("metadata", ""))}
        after = _moment(query.get("startedAfter"))
        template = query.get("template")
        rows = [
            box
            for box in self.desk.boxes.values()
            if box.state in states
            and wanted.items() <= box.sandbox.spec.metadata.items()
            and (after is None or box.started >= after)
            and template in (None, box.template)
        ]
        rows.sort(key=lambda box: (box.started, box.id), reverse=query.get("order", "desc") != "asc")
        page, headers = _page(rows, query)
        return Json([self._told(box) for box in page], headers=headers)

    async def detail(self, request: Request) -> Response:
        """All about one sandbox."""
        box = self._box(request)
        life = {"onTimeout": "pause" if box.auto_pause else "kill", "autoResume": box.auto_resume}
        return Json({**self._told(box), "envdAccessToken": box.token, "lifecycle": life, "allowInternetAccess": False})

    async def kill(self, request: Request) -> Response:
        """End a sandbox."""
        await self.desk.kill(self._box(request))
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        """Pause a sandbox; 409 if it is."""
        wishes = parsed(await request.body())
        if not await self.desk.pause(self._box(request), wishes.get("memory")):
            raise Refusal(409, "the sandbox is already paused")
        return Response(status_code=204)

    async def connect(self, request: Request) -> Response:
        """Reach a sandbox, resuming it if it is paused."""
        box = self._box(request)
        wishes = parsed(await request.body())
        if wishes.get("memory") is False:
            raise Refusal(400, "memory: a paused sandbox cannot be rebooted here; kill it and start from a snapshot")
        resumed = await self.desk.resume(box, self.desk.seconds(wishes) if "timeout" in wishes else None)
        return Json(self._made(box), status_code=201 if resumed else 200)

    async def timeout(self, request: Request) -> Response:
        """End a sandbox's time this long from now."""
        box = self._box(request)
        self.desk.expire(box, self.desk.seconds(parsed(await request.body())))
        return Response(status_code=204)

    async def refresh(self, request: Request) -> Response:
        """Extend a sandbox's time, by an hour at most."""
        box = self._box(request)
        duration = parsed(await request.body()).get("duration", 15)
        if isinstance(duration, bool) or not isinstance(duration, (int, float)) or not 0 <= duration <= 3600:
            raise Refusal(400, f"duration {duration!r}: seconds from 0 to 3600")
        if time.time() + duration > box.ends:
            self.desk.expire(box, float(duration))
        return Response(status_code=204)

    async def fork(self, request: Request) -> Response:
        """Copies of a sandbox, each a sandbox or an error."""
        box = self._box(request)
        wishes = parsed(await request.body())
        count = wishes.get("count", 1)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_FORKS:
            raise Refusal(400, f"count {count!r}: from 1 to {MAX_FORKS}")
        results = await self.desk.fork(box, count, self.desk.seconds(wishes))
        rows: list[dict[str, Any]] = [
            {"sandbox": self._made(child)} if isinstance(child, Box) else {"error": {"code": child.status, "message": str(child)}}
            for child in results
        ]
        return Json(rows, status_code=201)

    async def snapshot(self, request: Request) -> Response:
        """Keep a sandbox's state under a name."""
        box = self._box(request)
        wishes = parsed(await request.body())
        name = wishes.get("name")
        if name is not None and not isinstance(name, str):
            raise Refusal(400, "name must be text")
        made = await self.desk.snapshot(box, name, wishes.get("memory"))
        return Json({"snapshotID": made.name, "names": [made.name]}, status_code=201)

    async def network(self, request: Request) -> Response:
        """Replace a sandbox's rules."""
        box = self._box(request)
        wishes = parsed(await request.body())
        await box.sandbox.set_network(network_of({"network": wishes, "allow_internet_access": wishes.get("allow_internet_access")}))
        return Response(status_code=204)

    async def metrics(self, request: Request) -> Response:
        """What a sandbox uses now, as a row of one."""
        box = self._box(request)
        limits, usage, now = box.sandbox.spec.limits, await box.sandbox.usage(), time.time()
        row = {
            "cpuCount": max(1, round(limits.cpus)),
            "cpuUsedPct": round(100 * usage.cpu_seconds / max(1.0, now - box.started.timestamp()), 2),
            "diskTotal": limits.disk_bytes,
            "diskUsed": usage.disk_bytes,
            "memTotal": limits.memory_bytes,
            "memUsed": usage.memory_bytes,
            "memCache": 0,
            "timestamp": _date(now),
            "timestampUnix": int(now),
        }
        return Json([row])

    async def snapshots(self, request: Request) -> Response:
        """The snapshots of this server, newest first."""
        query = request.query_params
        origin, name = query.get("sandboxID"), query.get("name")
        rows = [
            made
            for made, source in reversed(self.desk.snapshots.values())
            if origin in (None, source) and name in (None, made.name, made.id)
        ]
        page, headers = _page(rows, query)
        return Json([{"snapshotID": made.name, "names": [made.name]} for made in page], headers=headers)

    async def templates(self, request: Request) -> Response:
        """The names that a sandbox can be made from."""
        names = [*self.desk.settings.templates]
        if self.desk.store is not None:
            names += [image.name for image in self.desk.store.images() if image.name not in names]
        moment = _date(0.0)
        limits = self.desk.settings.limits
        rows = [
            {
                "templateID": name,
                "buildID": name,
                "aliases": [name],
                "names": [name],
                "public": False,
                "cpuCount": max(1, round(limits.cpus)),
                "memoryMB": limits.memory_bytes // MEGABYTE,
                "diskSizeMB": limits.disk_bytes // MEGABYTE,
                "createdAt": moment,
                "updatedAt": moment,
                "createdBy": None,
                "lastSpawnedAt": None,
                "spawnCount": 0,
                "buildCount": 1,
                "envdVersion": ENVD_VERSION,
                "buildStatus": "ready",
            }
            for name in names
        ]
        return Json(rows)

    async def alias(self, request: Request) -> Response:
        """Whether a template of this name exists."""
        name = request.path_params["name"]
        if not self._exists(name):
            raise Refusal(404, f"template '{name}' not found")
        return Json({"templateID": name, "public": False})

    def _exists(self, name: str) -> bool:
        if name in self.desk.settings.templates or name in self.desk.snapshots:
            return True
        try:
            return self.desk.store is not None and bool(self.desk.store.resolve(name)) and not name.startswith((".", "/"))
        except GnomonError:
            return False

    async def remove_template(self, request: Request) -> Response:
        """Forget a snapshot."""
        name = request.path_params["name"].removesuffix(":latest")
        known = self.desk.snapshots.pop(name, None) is not None
        if self.desk.store is not None:
            try:
                self.desk.store.forget(name)
                known = True
            except ConfigError:
                known = False
        if not known:
            raise Refusal(404, f"template '{name}' not found")
        return Response(status_code=204)


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _moment(text: str | None) -> datetime.datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(text.replace(" ", "+"))
    except ValueError:
        raise Refusal(400, f"startedAfter {text!r} is no time") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)


def _page(rows: list[Any], query: Mapping[str, str]) -> tuple[list[Any], dict[str, str]]:
    """A page of rows, and the header that names the next one."""
    limit, begin = query.get("limit", str(MAX_PAGE)), query.get("nextToken", "0")
    if not all(text.isascii() and text.isdigit() and len(text) < 10 for text in (limit, begin)) or not 1 <= int(limit) <= MAX_PAGE:
        raise Refusal(400, f"limit from 1 to {MAX_PAGE}, nextToken as it was given")
    end = int(begin) + int(limit)
    return rows[int(begin) : end], {"x-next-token": str(end)} if end < len(rows) else {}
