"""What the E2B server knows of its sandboxes: names, times, tokens, and the life cycle that the wire promises, over any backend.

A sandbox is running or paused, no more is shown. Its time ends in a kill or, if asked, in a pause; `connect` resumes it and only ever
extends. A creation with a key happens once, however often the request is sent. Read next: `server_control.py`.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnomon.errors import ConfigError, GnomonError, SandboxLost
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import Backend, Capabilities, Limits, Network, Sandbox, Snapshot, Spec
from gnomon.sandbox.server_connect import Refusal, refusal
from gnomon.sandbox.server_files import Files
from gnomon.sandbox.server_processes import Programs

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a server serves. Each key opens everything; `templates` gives further names to images, `base` being the SDKs' default.

    `default_seconds` is how long a sandbox lives unless its creation says otherwise; `patience_seconds` how long a client may take over
    the next piece of what it sends or reads; `max_sandboxes` the most that exist at a time, paused ones included.
    """

    keys: tuple[str, ...]
    templates: Mapping[str, str] = field(default_factory=lambda: {"base": "host"})
    limits: Limits = field(default_factory=Limits)
    user: str = "root"
    default_seconds: float = 300.0
    max_sandboxes: int = 1000
    max_upload_bytes: int = 1 << 30
    patience_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.keys or any(len(key) < 16 for key in self.keys):
            raise ConfigError("keys: a server needs at least one API key, and 16 characters in each; `secrets.token_urlsafe(24)` makes one")


class Box:
    """One sandbox on the wire."""

    def __init__(self, sandbox: Sandbox, template: str, scratch: Path, wishes: Mapping[str, Any]) -> None:
        self.sandbox, self.template, self.scratch, self.wishes = sandbox, template, scratch, wishes
        self.id = sandbox.id
        self.token = secrets.token_urlsafe(24)
        self.started = datetime.datetime.now(datetime.UTC)
        self.ends = time.time()
        self.state = "running"
        self.lock = asyncio.Lock()
        self.timer: asyncio.TimerHandle | None = None
        self.programs = Programs(sandbox)
        self.files = Files(sandbox, scratch)

    def opens(self, token: str) -> bool:
        """Whether a token is this sandbox's, compared in constant time."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    @property
    def auto_pause(self) -> bool:
        """Whether the end of its time pauses it."""
        return bool(self.wishes.get("autoPause"))

    @property
    def auto_resume(self) -> bool:
        """Whether a call to the paused sandbox resumes it."""
        wish = self.wishes.get("autoResume")
        return bool(wish.get("enabled")) if isinstance(wish, dict) else False

    async def close(self) -> None:
        """Stop following programs and directories."""
        if self.timer is not None:
            self.timer.cancel()
        await self.programs.close()
        await self.files.close()


class Desk:
    """All sandboxes of a server."""

    def __init__(self, backend: Backend, settings: Settings, store: LayerStore | None = None) -> None:
        self.backend, self.settings, self.store = backend, settings, store
        self.boxes: dict[str, Box] = {}
        self.creations: dict[str, asyncio.Task[Box]] = {}
        self.snapshots: dict[str, tuple[Snapshot, str]] = {}
        self.making = 0
        self.scratch = tempfile.TemporaryDirectory(prefix="gnomon-serve-")
        self.tasks: set[asyncio.Task[None]] = set()
        self._capabilities: Capabilities | None = None

    async def capabilities(self) -> Capabilities:
        """What the backend can do."""
        self._capabilities = self._capabilities or await self.backend.probe()
        return self._capabilities

    def box(self, identifier: str) -> Box:
        """A sandbox. Raises `Refusal` 404."""
        found = self.boxes.get(identifier)
        if found is None:
            raise Refusal(404, f"sandbox {identifier} not found")
        return found

    async def create(self, wishes: Mapping[str, Any], key: str | None) -> Box:
        """A new sandbox, or the one that was made with the same key."""
        if key is None:
            return await self._create(wishes)
        task = self.creations.get(key)
        if task is None:
            task = self.creations[key] = asyncio.create_task(self._create(wishes))
        try:
            return await asyncio.shield(task)
        except GnomonError:
            self.creations.pop(key, None)
            raise

    async def _create(self, wishes: Mapping[str, Any]) -> Box:
        seconds = self.seconds(wishes)
        spec = self._spec(wishes)
        if len(self.boxes) + self.making >= self.settings.max_sandboxes:
            raise Refusal(503, f"all {self.settings.max_sandboxes} sandboxes of this server are taken; kill some", "resource_exhausted")
        self.making += 1
        try:
            try:
                sandbox = await self.backend.create(spec)
            except ConfigError as error:
                raise Refusal(404, f"template '{wishes.get('templateID')}' not found: {error}") from error
        finally:
            self.making -= 1
        return self.adopt(sandbox, str(wishes["templateID"]), wishes, seconds)

    def adopt(self, sandbox: Sandbox, template: str, wishes: Mapping[str, Any], seconds: float) -> Box:
        """Give a sandbox its place on the wire."""
        box = Box(sandbox, template, Path(self.scratch.name), wishes)
        self.boxes[box.id] = box
        self.expire(box, seconds)
        return box

    def _spec(self, wishes: Mapping[str, Any]) -> Spec:
        template = wishes.get("templateID")
        if not isinstance(template, str) or not template:
            raise Refusal(400, "templateID is missing")
        env, metadata = (_texts(wishes, name) for name in ("envVars", "metadata"))
        image = template.removesuffix(":latest")
        image = self.settings.templates.get(image, image)
        if image.startswith((".", "/")):
            raise Refusal(404, f"template '{template}' not found")
        return Spec(
            image=image,
            limits=self.settings.limits,
            network=network_of(wishes),
            env=env,
            metadata=metadata,
            ttl_seconds=None,
            user=self.settings.user,
        )

    def seconds(self, wishes: Mapping[str, Any]) -> float:
        """The time that a request gives a sandbox."""
        value = wishes.get("timeout", self.settings.default_seconds)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 30 * DAY_SECONDS:
            raise Refusal(400, f"timeout {value!r}: seconds from 0 to {30 * DAY_SECONDS:.0f}")
        return float(value)

    def expire(self, box: Box, seconds: float) -> None:
        """End the sandbox's time this long from now."""
        if box.timer is not None:
            box.timer.cancel()
        box.ends = time.time() + seconds
        box.timer = asyncio.get_running_loop().call_later(seconds, self._expired, box)

    def _expired(self, box: Box) -> None:
        task = asyncio.create_task(self._end(box))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _end(self, box: Box) -> None:
        try:
            if box.auto_pause and box.state == "running":
                await self.pause(box, memory=box.wishes.get("autoPauseMemory"))
            elif not box.auto_pause:
                await self.kill(box)
        except GnomonError:
            await self.kill(box)

    async def kill(self, box: Box) -> None:
        """End a sandbox."""
        self.forget(box)
        await box.close()
        await box.sandbox.kill()

    def forget(self, box: Box) -> None:
        """Take a sandbox that is gone, or going, off the wire."""
        self.boxes.pop(box.id, None)
        for key, task in list(self.creations.items()):
            if task.done() and not task.cancelled() and task.exception() is None and task.result() is box:
                del self.creations[key]

    async def pause(self, box: Box, memory: object = None) -> bool:
        """Pause; `False` if it was paused. With memory, programs are kept, on disk where the backend can do that."""
        capabilities = await self.capabilities()
        async with box.lock:
            if box.state == "paused":
                return False
            keeps = "hibernate" in capabilities.pause and (capabilities.snapshot_memory or memory is False)
            await box.sandbox.pause("hibernate" if keeps else "freeze")
            box.state = "paused"
            if box.timer is not None:
                box.timer.cancel()
            return True

    async def resume(self, box: Box, seconds: float | None) -> bool:
        """Resume; `False` if it ran. The time is only ever extended."""
        async with box.lock:
            resumed = box.state == "paused"
            if resumed:
                await box.sandbox.resume()
                box.state = "running"
            wanted = self.settings.default_seconds if seconds is None else seconds
            if resumed or time.time() + wanted > box.ends:
                self.expire(box, wanted)
            return resumed

    async def enter(self, identifier: str, token: str | None) -> Box:
        """The sandbox for a call of the data plane. Raises `Refusal`: 401 for a wrong token, 502 for one that does not run."""
        box = self.boxes.get(identifier)
        if box is None:
            raise Refusal(502, f"The sandbox was not found: {identifier}", "unavailable")
        if token is None or not box.opens(token):
            raise Refusal(401, "the access token is missing or not this sandbox's", "unauthenticated")
        if box.state == "paused":
            if not box.auto_resume:
                raise Refusal(502, f"The sandbox was not found: {identifier} is paused; connect to it first", "unavailable")
            await self.resume(box, None)
        return box

    async def fork(self, box: Box, count: int, seconds: float) -> Sequence[Box | Refusal]:
        """Copies of a sandbox as it is now, with its memory where the backend can, each a sandbox or a reason."""
        capabilities = await self.capabilities()
        if len(self.boxes) + self.making + count > self.settings.max_sandboxes:
            raise Refusal(503, f"{count} more than the {self.settings.max_sandboxes} sandboxes this server allows", "resource_exhausted")
        async with box.lock:
            if box.state != "running":
                raise Refusal(409, f"sandbox {box.id} is paused: connect to it first")
            children = await box.sandbox.fork(count, memory=capabilities.snapshot_memory)
        return [
            refusal(child if isinstance(child, GnomonError) else SandboxLost(str(child)))
            if isinstance(child, Exception)
            else self.adopt(child, box.template, box.wishes, seconds)
            for child in children
        ]

    async def snapshot(self, box: Box, name: str | None, memory: object) -> Snapshot:
        """Keep a sandbox's state as a template."""
        capabilities = await self.capabilities()
        async with box.lock:
            if box.state != "running":
                raise Refusal(409, f"sandbox {box.id} is paused: connect to it first")
            wanted = capabilities.snapshot_memory if memory is None else bool(memory)
            made = await box.sandbox.snapshot(name, memory=wanted)
        self.snapshots[made.name] = (made, box.id)
        return made

    async def close(self) -> None:
        """End everything."""
        for task in list(self.creations.values()):
            if not task.done():
                await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(*(self.kill(box) for box in list(self.boxes.values())), return_exceptions=True)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.to_thread(self.scratch.cleanup)


def _texts(wishes: Mapping[str, Any], name: str) -> dict[str, str]:
    value = wishes.get(name) or {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Refusal(400, f"{name} must map names to text")
    return dict(value)


def network_of(wishes: Mapping[str, Any]) -> Network:
    """The network that a request asks for: nothing, or hosts by name. Raises `Refusal` for the open internet, which nobody gets here."""
    rules = wishes.get("network") or {}
    allowed = rules.get("allowOut") or [] if isinstance(rules, dict) else []
    if wishes.get("allow_internet_access") is True and not allowed:
        raise Refusal(400, "allow_internet_access: sandboxes here have no open network; name hosts in network.allow_out")
    if not all(isinstance(host, str) and host for host in allowed):
        raise Refusal(400, "allowOut must be a list of hosts")
    if any("/" in host or host.partition(":")[0] in ("*", "0.0.0.0") for host in allowed):
        raise Refusal(400, "allowOut: hosts by name only, no address ranges")
    return Network(allow=tuple(host if ":" in host else f"{host}:*" for host in allowed))
