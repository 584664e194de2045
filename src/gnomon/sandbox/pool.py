"""Sandboxes that are ready before they are wanted, and none when the machine has no room for more.

For each template (image, limits, network, user) some stand ready; taking one costs no creation. When no more than `low` are left, they are
filled up to `high` in the background. What was never handed out has an identity that nobody has seen, so only environment, metadata and
time to live are set when it is taken. Memory is watched: under pressure ready ones are given up first, then those whose model thinks go to
disk where the backend can do that, and new ones are refused. Read next: `cycles.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Self

from gnomon.errors import CapacityError, ConfigError, GnomonError, SandboxError
from gnomon.sandbox.cycles import thinking
from gnomon.sandbox.identity import named, renew
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.pressure import Guard
from gnomon.sandbox.registry import Registry
from gnomon.sandbox.sandbox import Backend, PauseLevel, Sandbox, Spec

Key = tuple[object, ...]
FILL_AT_ONCE = 4
LOOK_SECONDS = 1.0


@dataclass(slots=True)
class _Shelf:
    """The ready sandboxes of one template."""

    spec: Spec
    ready: deque[Sandbox] = field(default_factory=deque)
    filling: asyncio.Task[None] | None = None
    rest_until: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class _Thought:
    """A sandbox that is paused while its model thinks."""

    on_disk: bool
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Pool:
    """Ready sandboxes of a backend; an asynchronous context.

    `low` and `high` are per template. `store` lets a template notice that its image was replaced, `registry` is told the metadata of what
    is taken. The sandboxes that were taken belong to whoever took them.
    """

    def __init__(self, backend: Backend, *, low: int = 2, high: int = 8, guard: Guard | None = None,
                 store: LayerStore | None = None, registry: Registry | None = None) -> None:
        if not 0 <= low <= high:
            raise ConfigError(f"pool: low is {low} and high is {high}; 0 <= low <= high is needed")
        self.backend, self.low, self.high, self.guard = backend, low, high, guard or Guard()
        self.error: GnomonError | None = None
        self._store, self._registry = store, registry
        self._shelves: dict[Key, _Shelf] = {}
        self._thinking: dict[Sandbox, _Thought] = {}
        self._watch: asyncio.Task[None] | None = None
        self._can_hibernate = False
        self._closed = False

    async def __aenter__(self) -> Self:
        """Find out what the backend can do, and begin to watch the memory."""
        self._can_hibernate = "hibernate" in (await self.backend.probe()).pause
        self._watch = asyncio.ensure_future(self._look())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """`close`."""
        await self.close()

    async def warm(self, spec: Spec) -> None:
        """Have `high` sandboxes of this kind ready when this returns, or as many as there is room for. Raises if none can be made."""
        shelf = self._shelf(spec)
        if shelf.filling is not None:
            await asyncio.wait([shelf.filling])
        await self._fill(shelf)
        if not shelf.ready and self.error is not None:
            raise self.error

    async def take(self, spec: Spec, *, wait_seconds: float = 0.0) -> Sandbox:
        """A sandbox for this spec: one that is ready, else a new one.

        Under memory pressure it waits up to `wait_seconds` and then raises `CapacityError`. A spec with an idempotency key is always made
        anew, so that the key means what it says.
        """
        if self._closed:
            raise SandboxError("the pool is closed")
        if spec.idempotency_key is not None:
            await self._room(wait_seconds)
            return await self.backend.create(spec)
        shelf = self._shelf(spec)
        while shelf.ready:
            sandbox = shelf.ready.popleft()
            self._refill(shelf)
            try:
                return await self._hand_over(sandbox, spec)
            except SandboxError:  # it died while it waited; the next one
                with contextlib.suppress(SandboxError):
                    await sandbox.kill()
        await self._room(wait_seconds)
        self._refill(shelf)
        return await self._made(spec)

    def ready(self, spec: Spec) -> int:
        """How many of this kind stand ready."""
        return len(self._shelf(spec).ready)

    @contextlib.asynccontextmanager
    async def thinking(self, sandbox: Sandbox, level: PauseLevel = "freeze") -> AsyncIterator[None]:
        """`cycles.thinking`; and meanwhile the sandbox may be sent to disk if memory is short and the backend can do that."""
        async with thinking(sandbox, level):
            thought = self._thinking[sandbox] = _Thought(on_disk=level == "hibernate")
            try:
                yield
            finally:
                async with thought.lock:  # a pause that is under way ends before the resume begins
                    del self._thinking[sandbox]

    async def close(self) -> None:
        """End what stands ready. Twice is no error."""
        self._closed = True
        tasks = [task for task in (self._watch, *(shelf.filling for shelf in self._shelves.values())) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._give_up()

    def _shelf(self, spec: Spec) -> _Shelf:
        digest = self._store.resolve(spec.image).digest if self._store is not None else None
        key = (spec.image, digest, spec.limits, spec.network, spec.workdir, spec.user, spec.hostname)
        if key not in self._shelves:
            self._shelves[key] = _Shelf(spec=replace(spec, env={}, metadata={}, ttl_seconds=None, idempotency_key=None))
        return self._shelves[key]

    async def _hand_over(self, sandbox: Sandbox, spec: Spec) -> Sandbox:
        """Make a ready sandbox the one that was asked for. Raises `SandboxLost` if it is none any more."""
        await sandbox.set_timeout(spec.ttl_seconds)
        sandbox.spec = replace(spec, hostname=sandbox.spec.hostname, env={**sandbox.spec.env, **spec.env})
        if self._registry is not None:
            self._registry.update(sandbox.id, metadata=spec.metadata)
            self._registry.expire(sandbox.id, spec.ttl_seconds)
        return sandbox

    async def _room(self, wait_seconds: float) -> None:
        limit = time.monotonic() + wait_seconds
        while (why := self.guard.tight()) is not None:
            if time.monotonic() >= limit:
                raise CapacityError(f"no new sandbox: {why}; end or hibernate some, lower Limits.memory_bytes, or wait longer")
            await asyncio.sleep(min(0.1, max(0.001, limit - time.monotonic())))

    def _refill(self, shelf: _Shelf) -> None:
        idle = shelf.filling is None or shelf.filling.done()
        if len(shelf.ready) <= self.low and self.high and idle and not self._closed and time.monotonic() >= shelf.rest_until:
            shelf.filling = asyncio.ensure_future(self._fill(shelf))

    async def _fill(self, shelf: _Shelf) -> None:
        """Fill up, a few at a time; after a failure rest, longer each time."""
        try:
            while (missing := self.high - len(shelf.ready)) > 0 and not self._closed and self.guard.tight() is None:
                done = await asyncio.gather(*(self._put(shelf) for _ in range(min(missing, FILL_AT_ONCE))), return_exceptions=True)
                for error in filter(None, done):
                    raise error
            shelf.failures = 0
        except GnomonError as error:
            self.error = error
            shelf.failures += 1
            shelf.rest_until = time.monotonic() + min(60.0, 0.5 * 2**shelf.failures)
        if self._closed:
            await self._give_up()

    async def _put(self, shelf: _Shelf) -> None:
        shelf.ready.append(await self._made(shelf.spec))

    async def _made(self, spec: Spec) -> Sandbox:
        sandbox = await self.backend.create(named(spec))
        try:
            await renew(sandbox)
        except BaseException:
            await asyncio.shield(sandbox.kill())
            raise
        return sandbox

    async def _give_up(self) -> None:
        """End all that stand ready."""
        ready = [sandbox for shelf in self._shelves.values() for sandbox in shelf.ready]
        for shelf in self._shelves.values():
            shelf.ready.clear()
        await asyncio.gather(*(sandbox.kill() for sandbox in ready), return_exceptions=True)

    async def _look(self) -> None:
        """Under pressure give up what is only convenient, and send to disk what waits."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.guard.tight() is None:
                for shelf in self._shelves.values():
                    self._refill(shelf)
                continue
            await self._give_up()
            if self._can_hibernate:
                for sandbox, thought in [*self._thinking.items()]:
                    await self._to_disk(sandbox, thought)

    async def _to_disk(self, sandbox: Sandbox, thought: _Thought) -> None:
        async with thought.lock:
            if thought.on_disk or sandbox not in self._thinking:
                return
            try:
                await sandbox.pause("hibernate")
                thought.on_disk = True
            except GnomonError as error:
                self.error = error
