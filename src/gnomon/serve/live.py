"""An engine on a thread of its own, for asyncio: each request is a stream of events, and closing the stream cancels the request.

Only that thread touches the engine; others leave commands for it. It sleeps while there is nothing to do. What a step says goes to each
event loop in one piece, so many streams cost one wake-up. A step that fails ends every request with an error that says why, and the engine
goes on with an empty cache. Read next: `engine.py`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor

from gnomon.errors import CapacityError, ConfigError, GnomonError
from gnomon.serve.constrain import Constraint
from gnomon.serve.engine import Engine, EngineStats
from gnomon.serve.request import Event, Finished, Grammar, Request, Sampled
from gnomon.serve.runner import Runner

FAILURES = (GnomonError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, MemoryError,
            OSError)
"""What a step may raise that says nothing about the next one. Anything else ends the thread, and all requests with it."""
COMPILE_SECONDS = 20.0
"""How long a request waits for its grammar to be compiled, those before it included."""
COMPILERS = 4
"""Grammars that are compiled at a time: what takes too long cannot be stopped, and holds up no other."""
PAUSE = 0.001
"""Seconds to wait after a step that had nothing to do although requests wait."""


class LiveEngine:
    """Runs an engine between `start` and `stop`; `stream` may be used from any number of event loops."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._listeners: dict[str, _Listener] = {}
        self._thread: threading.Thread | None = None
        self._open = False  # whether the thread will still look at commands
        self._grammars = ThreadPoolExecutor(max_workers=COMPILERS, thread_name_prefix="grammar")
        self._slow: dict[Grammar, Future[Constraint | None]] = {}  # grammars that took too long and are still being compiled
        self._until: float | None = None  # when to stop whatever still runs
        self.problem: str | None = None

    @property
    def max_tokens(self) -> int:
        """The longest sequence, prompt and output together."""
        return self._engine.max_tokens

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and the last step went well; `problem` says what is wrong."""
        return self._open and self._until is None and self.problem is None

    def stats(self) -> EngineStats:
        """Numbers for a page of metrics."""
        return self._engine.stats()

    def start(self) -> None:
        """Start the thread."""
        self._until, self._open = None, True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, let those that run go on for so long, cancel the rest, and wait for the thread to end.

        It blocks; inside an event loop use `await asyncio.to_thread(live.stop, seconds)`.
        """
        with self._wake:
            self._until = time.monotonic() + drain_seconds
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self._grammars.shutdown(wait=False, cancel_futures=True)

    async def stream(self, request: Request) -> AsyncGenerator[Event, None]:
        """The events of a request, `Finished` last; closing the stream cancels it.

        Raises `ConfigError` or `CapacityError` for a request that cannot be run, or when the engine is not running.
        """
        constraint = await self._compiled(request)
        listener = _Listener(request.id, asyncio.get_running_loop())
        try:
            await self._accepted(request, constraint, listener)
            while not listener.over:
                for event in await listener.take():
                    yield event
        finally:
            if not listener.over:
                self._do(lambda: self._leave(listener))

    def cancel(self, request_id: str) -> None:
        """End a request early; its stream still brings `Finished`."""
        self._do(lambda: _ignore(self._engine.cancel(request_id)))

    def exchange(self, runner: Runner) -> None:
        """Go on with other weights, as `Engine.exchange`; blocks until they are in place."""
        done: Future[None] = Future()

        def change() -> None:
            try:
                self._tell(self._engine.exchange(runner))
            except GnomonError as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._do(change)
        done.result()

    async def _compiled(self, request: Request) -> Constraint | None:
        """The grammar of a request, compiled beside everything else. Raises `ConfigError` where that takes too long, and at once for one
        that did and is not done yet."""
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        self._slow = {slow: work for slow, work in self._slow.items() if not work.done()}
        message = f"'grammar' took longer than {COMPILE_SECONDS:g} s to compile; make it smaller"
        if grammar in self._slow:
            raise ConfigError(message)
        work = self._grammars.submit(self._engine.prepare, request)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), COMPILE_SECONDS)
        except TimeoutError:
            if not work.cancel() and not work.done():
                self._slow[grammar] = work
            raise ConfigError(message) from None

    async def _accepted(self, request: Request, constraint: Constraint | None, listener: _Listener) -> None:
        done: Future[None] = Future()

        def submit() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                if self._until is not None:
                    raise CapacityError("the engine is stopping and takes no more requests")
                self._engine.submit(request, constraint)
            except GnomonError as error:
                done.set_exception(error)
            else:
                self._listeners[request.id] = listener
                done.set_result(None)

        self._do(submit)
        await asyncio.wrap_future(done)

    def _do(self, command: Callable[[], None]) -> None:
        """Have something done by the engine's thread. Raises `CapacityError` where there is none."""
        with self._wake:
            if not self._open:
                raise CapacityError(f"the engine is not running{': ' + self.problem if self.problem else ''}")
            self._commands.append(command)
            self._wake.notify()

    def _leave(self, listener: _Listener) -> None:
        """Nobody listens any more."""
        if self._listeners.get(listener.name) is listener:
            del self._listeners[listener.name]
            self._engine.cancel(listener.name)

    def _run(self) -> None:
        """The thread."""
        try:
            while self._turn():
                pass
        finally:
            self.problem = self.problem or ("the engine's thread ended" if self._until is None else None)
            self._tell(self._engine.fail(self.problem or "the engine was stopped"))
            with self._wake:
                commands, self._commands = self._commands, deque()
                self._until, self._open = self._until or 0.0, False
            for command in commands:
                command()

    def _turn(self) -> bool:
        """Wait for work, do what was asked, run a step; `False` when it is time to stop."""
        with self._wake:
            while not self._commands and self._engine.idle and self._until is None:
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        if self._until is not None and (self._engine.idle or time.monotonic() >= self._until):
            return False
        if not self._engine.idle and not self._step() and not self._commands:
            time.sleep(PAUSE)
        return True

    def _step(self) -> bool:
        """One step; whether anything happened."""
        try:
            events = self._engine.step()
        except FAILURES as error:
            self.problem = f"a step failed: {type(error).__name__}: {error}"
            self._tell(self._engine.fail(self.problem))
            return True
        if any(isinstance(event, Sampled) for _, event in events):
            self.problem = None
        self._tell(events)
        return bool(events) or self._engine.worked

    def _tell(self, events: list[tuple[str, Event]]) -> None:
        """Hand events to who listens, one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, Event]]] = {}
        for name, event in events:
            listener = self._listeners.get(name)
            if listener is None:
                continue
            if isinstance(event, Finished):
                del self._listeners[name]
            by_loop.setdefault(listener.loop, []).append((listener, event))
        for loop, said in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, said)
            except RuntimeError:  # the loop was closed without its streams
                for listener, _ in said:
                    self._leave(listener)


class _Listener:
    """Where the events of one request wait to be read; used by its event loop."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop):
        self.name, self.loop, self.over = name, loop, False
        self.events: list[Event] = []
        self.ready = asyncio.Event()

    async def take(self) -> list[Event]:
        """All events that came since; waits for at least one."""
        await self.ready.wait()
        self.ready.clear()
        events, self.events = self.events, []
        self.over = isinstance(events[-1], Finished)
        return events


def _deliver(said: list[tuple[_Listener, Event]]) -> None:
    for listener, event in said:
        listener.events.append(event)
        listener.ready.set()


def _ignore(result: object) -> None:
    del result
