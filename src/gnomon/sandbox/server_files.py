"""The file service of the E2B data plane: directories and their changes by messages, content by plain HTTP at `/files`."""

from __future__ import annotations

import asyncio
import datetime
import posixpath
import secrets
import shutil
import stat
import tempfile
import zlib
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from gnomon.errors import GnomonError, SandboxError
from gnomon.sandbox import server_form
from gnomon.sandbox.sandbox import Command, FileInfo, Sandbox
from gnomon.sandbox.server_connect import Call, Json, Refusal, text_of

PIECE = 1 << 16
MAX_WATCHERS = 64
MAX_EVENTS = 4096
LAST_SECOND = 253_402_300_799.0  # of the year 9999, which dates end with
KINDS = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK", "other": "FILE_TYPE_UNSPECIFIED"}
MODES = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "symlink": stat.S_IFLNK, "other": 0}


def entry_of(info: FileInfo, owner: str) -> dict[str, Any]:
    """One entry in the words of the wire."""
    moment = datetime.datetime.fromtimestamp(min(max(info.modified_seconds, 0.0), LAST_SECOND), datetime.UTC)  # programs set any time
    entry = {
        "name": posixpath.basename(info.path) or "/",
        "type": KINDS[info.kind],
        "path": info.path,
        "size": str(info.size),
        "mode": info.mode & 0o7777,
        "permissions": stat.filemode(MODES[info.kind] | info.mode & 0o7777),
        "owner": owner,
        "group": owner,
        "modifiedTime": moment.isoformat().replace("+00:00", "Z"),
    }
    return entry if info.target is None else {**entry, "symlinkTarget": info.target}


class Watcher:
    """Changes of one directory, kept until somebody asks for them."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.arrived = asyncio.Event()
        self.error: GnomonError | None = None
        self.task: asyncio.Task[None] | None = None

    async def run(self, sandbox: Sandbox, *, recursive: bool) -> None:
        """Take changes as they come."""
        try:
            async for event in sandbox.watch(self.root, recursive=recursive):
                name = posixpath.relpath(event.path, self.root)
                self.events.append({"name": name, "type": f"EVENT_TYPE_{event.kind.upper()}"})
                self.arrived.set()
        except GnomonError as error:
            self.error = error
            self.arrived.set()


class Files:
    """The files of one sandbox as the wire shows them."""

    def __init__(self, sandbox: Sandbox, scratch: Path) -> None:
        self.sandbox, self.scratch = sandbox, scratch
        self.watchers: dict[str, Watcher] = {}

    def path(self, path: str, user: str | None) -> str:
        """An absolute path: what is relative begins at the user's home."""
        if "\0" in path:
            raise Refusal(400, "a path with a zero byte")
        home = self.sandbox.spec.workdir if user is None else "/root" if user == "root" else f"/home/{user}"
        if path == "~" or path.startswith("~/"):
            path = path[2:]
        return posixpath.normpath(posixpath.join(home, path)).replace("//", "/")

    async def info(self, path: str) -> FileInfo | None:
        """What is at a path, or nothing."""
        if path == "/":
            return FileInfo(path="/", kind="directory", size=0, mode=0o755, modified_seconds=0.0)
        try:
            entries = await self.sandbox.list(posixpath.dirname(path))
        except SandboxError as error:
            if "paused" in str(error) or type(error) is not SandboxError:
                raise
            return None
        return next((entry for entry in entries if posixpath.basename(entry.path) == posixpath.basename(path)), None)

    async def known(self, path: str) -> FileInfo:
        """What is at a path. Raises `Refusal` 404 where there is nothing."""
        found = await self.info(path)
        if found is None:
            raise Refusal(404, f"path not found: {path}: no such file or directory")
        return found

    def entry(self, info: FileInfo, call: Call) -> dict[str, Any]:
        """An entry as a reply."""
        return entry_of(info, call.user or self.sandbox.spec.user)

    async def stat(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """What is at a path."""
        return {"entry": self.entry(await self.known(self.path(text_of(message, "path"), call.user)), call)}

    async def list_dir(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """The entries of a directory, `depth` levels deep."""
        path = self.path(text_of(message, "path", ""), call.user)
        depth = message.get("depth") or 1
        if not isinstance(depth, int) or not 1 <= depth <= 64:
            raise Refusal(400, "depth must be from 1 to 64")
        info = await self.known(path)
        if info.kind not in ("directory", "symlink"):
            raise Refusal(400, f"path is not a directory: {path}")
        return {"entries": [self.entry(found, call) for found in await self.sandbox.list(path, depth)]}

    async def make_dir(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """A directory and those above it."""
        path = self.path(text_of(message, "path"), call.user)
        if await self.info(path) is not None:
            raise Refusal(409, f"directory already exists: {path}")
        await self.run("mkdir", "-p", "--", path, user=call.user)
        return {"entry": self.entry(await self.known(path), call)}

    async def move(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """Another name for what is at a path."""
        source, target = (self.path(text_of(message, name), call.user) for name in ("source", "destination"))
        await self.known(source)
        await self.run("mkdir", "-p", "--", posixpath.dirname(target), user=call.user)
        await self.run("mv", "-fT", "--", source, target, user=call.user)
        return {"entry": self.entry(await self.known(target), call)}

    async def remove(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """What is at a path goes, with all below it; nothing there is no error."""
        path = self.path(text_of(message, "path"), call.user)
        if path == "/":
            raise Refusal(400, "the root directory stays")
        if await self.info(path) is not None:
            await self.sandbox.remove(path)
        return {}

    async def run(self, *argv: str, user: str | None) -> None:
        """Run a small program as a user. Raises `Refusal` with what it said."""
        result = await self.sandbox.exec(Command(argv=argv, user=user, timeout_seconds=60.0, max_output_bytes=4096))
        if result.code != 0:
            said = result.stderr.decode("utf-8", "replace").strip()
            denied = "denied" in said or "not permitted" in said
            raise Refusal(403 if denied else 400, said or f"{argv[0]} ended with status {result.code}")

    async def _watch(self, message: dict[str, Any], call: Call) -> Watcher:
        path = self.path(text_of(message, "path"), call.user)
        if (await self.known(path)).kind not in ("directory", "symlink"):
            raise Refusal(400, f"path is not a directory: {path}")
        watcher = Watcher(path)
        watcher.task = asyncio.create_task(watcher.run(self.sandbox, recursive=bool(message.get("recursive"))))
        await asyncio.sleep(0)
        await self.sandbox.list(path)  # answered after the watch stands: the agent inside takes one request after the other
        return watcher

    async def watch_dir(self, message: dict[str, Any], call: Call) -> AsyncIterator[dict[str, Any]]:
        """Changes of a directory as they happen."""
        watcher = await self._watch(message, call)
        try:
            yield {"start": {}}
            while True:
                while watcher.events:
                    yield {"filesystem": watcher.events.popleft()}
                if watcher.error is not None:
                    raise watcher.error
                watcher.arrived.clear()
                try:
                    async with asyncio.timeout(call.keepalive_seconds):
                        await watcher.arrived.wait()
                except TimeoutError:
                    yield {"keepalive": {}}
        finally:
            await _stop(watcher)

    async def create_watcher(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """Keep the changes of a directory until they are asked for."""
        if len(self.watchers) >= MAX_WATCHERS:
            raise Refusal(429, f"{MAX_WATCHERS} watchers are the most; remove one")
        name = secrets.token_hex(8)
        self.watchers[name] = await self._watch(message, call)
        return {"watcherId": name}

    async def get_watcher_events(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """The changes since the last time."""
        watcher = self.watchers.get(text_of(message, "watcherId"))
        if watcher is None:
            raise Refusal(404, "no such watcher")
        if watcher.error is not None:
            raise watcher.error
        await self.sandbox.list(watcher.root)
        events = [*watcher.events]
        watcher.events.clear()
        return {"events": events}

    async def remove_watcher(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """Keep them no more."""
        watcher = self.watchers.pop(text_of(message, "watcherId"), None)
        if watcher is None:
            raise Refusal(404, "no such watcher")
        await _stop(watcher)
        return {}

    async def close(self) -> None:
        """Stop all watchers."""
        for watcher in self.watchers.values():
            await _stop(watcher)
        self.watchers.clear()

    async def download(self, request: Request) -> Response:
        """`GET /files`: a file's content."""
        user = request.query_params.get("username") or None
        path = self.path(request.query_params.get("path", ""), user)
        info = await self.known(path)
        if info.kind == "directory":
            raise Refusal(400, f"path is a directory: {path}")
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        clean = BackgroundTask(_remove, folder)
        try:
            await self.sandbox.download(path, folder / "content")
            if not (folder / "content").is_file():
                raise Refusal(400, f"path is a directory: {path}")
        except BaseException:
            await clean()
            raise
        return FileResponse(folder / "content", media_type="application/octet-stream", background=clean)

    async def upload(self, request: Request, max_bytes: int) -> Response:
        """`POST /files`: content for one path, or for each part of a form."""
        user = request.query_params.get("username") or None
        named = request.query_params.get("path")
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        written: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            if kind == "multipart/form-data":
                parts = await server_form.files(request.headers["content-type"], request.stream(), Path(folder))
                if named is not None and len(parts) > 1:
                    raise Refusal(400, "one path and several files")
                for name, local in parts:
                    written.append(await self._put(local, self.path(named or name, user), user))
            else:
                if named is None:
                    raise Refusal(400, "path is missing")
                local = Path(folder) / "content"
                await _receive(request, local, max_bytes)
                written.append(await self._put(local, self.path(named, user), user))
        return Json(written)

    async def _put(self, local: Path, path: str, user: str | None) -> dict[str, Any]:
        found = await self.info(path)
        if found is not None and found.kind == "directory":
            raise Refusal(400, f"path is a directory: {path}")
        if user not in (None, "root"):
            await self.run("mkdir", "-p", "--", posixpath.dirname(path), user=user)
        local.chmod(0o644 if found is None else found.mode & 0o777)
        await self.sandbox.upload(local, path)
        if user not in (None, "root"):
            await self.run("chown", f"{user}:", "--", path, user="root")
        return {"name": posixpath.basename(path), "type": "file", "path": path}


async def _receive(request: Request, local: Path, max_bytes: int) -> None:
    """A body into a file, unpacked if it is gzip, and never more than the bound once unpacked."""
    packed = request.headers.get("content-encoding", "").strip().lower()
    if packed not in ("", "identity", "gzip"):
        raise Refusal(415, f"content encoding {packed}: gzip or none")
    unpacker = zlib.decompressobj(31) if packed == "gzip" else None
    total = 0
    with local.open("wb") as file:
        async for piece in request.stream():
            while piece:
                if unpacker is None:
                    data, piece = piece, b""
                else:
                    try:
                        data = unpacker.decompress(piece, PIECE)
                    except zlib.error as error:
                        raise Refusal(400, f"the body is no gzip: {error}") from None
                    piece = unpacker.unconsumed_tail
                total += len(data)
                if total > max_bytes:
                    raise Refusal(413, f"more than {max_bytes} bytes")
                file.write(data)
    if unpacker is not None and not unpacker.eof:
        raise Refusal(400, "the gzip ends too early")


async def _stop(watcher: Watcher) -> None:
    if watcher.task is not None:
        watcher.task.cancel()
        await asyncio.gather(watcher.task, return_exceptions=True)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
