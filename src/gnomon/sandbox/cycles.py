"""What reinforcement learning does with a sandbox: pause it while the model thinks, grade a copy, keep its states (report §5.3.2).

Each is a context, so that no way out of it leaves a sandbox paused, a copy alive or a task running. Read next: `pool.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from gnomon.errors import ConfigError, GnomonError, SandboxError
from gnomon.sandbox.identity import renew
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import PauseLevel, Sandbox, Snapshot


@contextlib.asynccontextmanager
async def thinking(sandbox: Sandbox, level: PauseLevel = "freeze", *, after_seconds: float = 0.0) -> AsyncIterator[None]:
    """Paused for as long as the block takes, if it takes longer than `after_seconds`: below what pausing costs there is nothing to gain.

    Raises what `pause` raises, `Unsupported` for instance, before the block or, with `after_seconds`, after it.
    """
    if after_seconds <= 0:
        await sandbox.pause(level)
        try:
            yield
        finally:
            await sandbox.resume()
        return
    over = asyncio.Event()
    paused = asyncio.ensure_future(_pause(sandbox, level, after_seconds, over))
    try:
        yield
    finally:
        over.set()
        if await asyncio.shield(paused):
            await sandbox.resume()


async def _pause(sandbox: Sandbox, level: PauseLevel, seconds: float, over: asyncio.Event) -> bool:
    """Pause after a while, unless it is over before; whether it was paused."""
    try:
        await asyncio.wait_for(over.wait(), seconds)
    except TimeoutError:
        await sandbox.pause(level)
        return True
    return False


@contextlib.asynccontextmanager
async def graded(sandbox: Sandbox, *, memory: bool = False) -> AsyncIterator[Sandbox]:
    """A copy to judge in, gone after the block; what is done to it does not touch the original.

    A copy isolates side effects; it does not undo tampering. Bring the verifier in after the copy was made, and run it as another user.
    Raises the copy's own error if it cannot be made.
    """
    [child] = await sandbox.fork(1, memory=memory)
    if isinstance(child, Exception):
        raise child
    try:
        await renew(child, restored=memory)
        yield child
    finally:
        await asyncio.shield(child.kill())


class Keeping:
    """Snapshots of a sandbox from time to time, the last few kept under `NAME-1`, `NAME-2` …; `latest` is the one to go on from.

    ::

        async with Keeping(sandbox, store, "task-7", every_seconds=60) as kept:
            ...

    A snapshot that fails leaves the sandbox running and the earlier ones in place; `failures` counts, `error` is the last one. All go with
    the block unless `leave` is set.
    """

    def __init__(self, sandbox: Sandbox, store: LayerStore, name: str, *, every_seconds: float, last: int = 2, leave: bool = False) -> None:
        if every_seconds <= 0 or last < 1:
            raise ConfigError(f"snapshots every {every_seconds} s, the last {last} kept; both must be more than 0")
        self._sandbox, self._store, self._name = sandbox, store, name
        self._every, self._last, self._leave = every_seconds, last, leave
        self._kept: list[Snapshot] = []
        self._number = 0
        self._task: asyncio.Task[None] | None = None
        self.failures = 0
        self.error: GnomonError | None = None

    @property
    def latest(self) -> Snapshot | None:
        """The last snapshot that was acknowledged."""
        return self._kept[-1] if self._kept else None

    async def now(self) -> Snapshot:
        """One at once. Raises what `snapshot` raises."""
        self._number += 1
        snapshot = await self._sandbox.snapshot(f"{self._name}-{self._number}")
        self._kept.append(snapshot)
        while len(self._kept) > self._last:
            self._drop(self._kept.pop(0))
        return snapshot

    async def __aenter__(self) -> Self:
        """Begin."""
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End; a snapshot that is under way is finished first."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if not self._leave:
            while self._kept:
                self._drop(self._kept.pop())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            try:
                await asyncio.shield(self.now())
            except GnomonError as error:
                self.failures, self.error = self.failures + 1, error
                if isinstance(error, SandboxError) and type(error) is not SandboxError:  # lost, or cannot be kept at all
                    return

    def _drop(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(ConfigError):  # somebody else has forgotten it
            self._store.forget(snapshot.name)
