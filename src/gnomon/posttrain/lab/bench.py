"""Where the lab's programs run: one interpreter in one sandbox, and all programs that wait, together.

Who asks gets a future at once, so that those who wait hold no thread; a program that stands twice in a call is run once. Read next:
`coding.py`, which asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from gnomon.agent.trajectory import Score
from gnomon.errors import GnomonError, VerifierError
from gnomon.sandbox.open import open_backend
from gnomon.sandbox.sandbox import Backend, Command, Process, Sandbox, Spec

Program = tuple[tuple[str, int], ...]
"""Statements of a program, each an operator and a number that it puts to the value."""

Asked = tuple[tuple[Program, ...], "Future[list[list[int]]]"]

RUNNER = """\
import json, sys
STATEMENTS = {"+": "value = (value + {}) % 10", "-": "value = (value - {}) % 10", "*": "value = (value * {}) % 10"}
for line in sys.stdin:
    results = []
    for program in json.loads(line):
        text = ["def program(value):", *("    " + STATEMENTS[operator].format(number) for operator, number in program), "    return value"]
        scope = {}
        exec("\\n".join(text), scope)
        results.append([scope["program"](value) for value in range(10)])
    print(json.dumps(results), flush=True)
"""
"""Runs in the sandbox: reads a line of programs, writes a line of what each gives for every digit, until there are no more."""

SECONDS = 60.0
MOST = 256
"""How many who ask are answered by one call."""


class Bench:
    """Runs programs in a sandbox that is made when the first one comes. Use as a context, or `close` it."""

    def __init__(self, backend: str = "auto") -> None:
        self.backend = backend
        self._waiting: queue.Queue[Asked | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def ask(self, *programs: Program) -> Future[list[list[int]]]:
        """What each program will have given for 0 to 9; `VerifierError` where the sandbox fails, which says nothing about the programs."""
        result: Future[list[list[int]]] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), name="gnomon-bench", daemon=True)
                self._thread.start()
            self._waiting.put((programs, result))
        return result

    def run(self, *programs: Program) -> list[list[int]]:
        """`ask`, and wait."""
        try:
            return self.ask(*programs).result(timeout=3 * SECONDS)
        except TimeoutError:
            raise VerifierError(f"programs of the lab had no result after {3 * SECONDS:.0f} s") from None

    def judge(self, program: Program, right: Program, score: Callable[[list[int], list[int]], Score]) -> Future[Score]:
        """The score that is made of what a program and the right one give, once they have run."""
        judged: Future[Score] = Future()

        def told(ran: Future[list[list[int]]]) -> None:
            try:
                judged.set_result(score(*ran.result()))
            except (GnomonError, ArithmeticError, LookupError, TypeError, ValueError) as error:  # whoever waits hears of it
                judged.set_exception(error)

        self.ask(program, right).add_done_callback(told)
        return judged

    def close(self) -> None:
        """End the sandbox; twice is no error."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """`close`."""
        self.close()

    async def _work(self) -> None:
        backend: Backend | None = None
        box: Sandbox | None = None
        runner: _Runner | None = None
        try:
            while (batch := await asyncio.to_thread(self._batch)):
                try:
                    if backend is None:
                        backend = await open_backend(self.backend)
                    if box is None or runner is None:
                        box = await backend.create(Spec(ttl_seconds=None, metadata={"purpose": "bench of the lab"}))
                        command = Command(argv=("python3", "-c", RUNNER), timeout_seconds=None)
                        runner = _Runner(await box.start(command, stdin=True))
                    different = list(dict.fromkeys(program for programs, _ in batch for program in programs))
                    values = dict(zip(different, await runner.run(different), strict=True))
                    for programs, future in batch:
                        future.set_result([values[program] for program in programs])
                except (GnomonError, OSError, ValueError) as error:  # those who wait hear it; the next batch gets a new sandbox
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(VerifierError(f"the programs of the lab did not run: {type(error).__name__}: {error}"))
                    if box is not None:
                        with contextlib.suppress(GnomonError, OSError):
                            await box.kill()
                    box = runner = None
        finally:
            if backend is not None:
                await backend.close()
            self._thread = None  # whatever ended this one, the next who asks begins another

    def _batch(self) -> list[Asked]:
        """All that wait, at least one; nothing when it is over."""
        first = self._waiting.get()
        batch = [] if first is None else [first]
        while batch and len(batch) < MOST:
            try:
                more = self._waiting.get_nowait()
            except queue.Empty:
                break
            if more is None:
                self._waiting.put(None)
                break
            batch.append(more)
        return batch


class _Runner:
    """The program in the sandbox, which stays there: starting an interpreter costs more than many programs."""

    def __init__(self, process: Process) -> None:
        self._process, self._output, self._read = process, process.output(), b""

    async def run(self, programs: Sequence[Program]) -> list[list[int]]:
        """What the sandbox says of programs. What is no list of ten numbers for each is a failure, not an answer."""
        await self._process.write(json.dumps([list(map(list, program)) for program in programs]).encode() + b"\n")
        line = await asyncio.wait_for(self._line(), SECONDS)
        found: Any = json.loads(line)
        lists = isinstance(found, list) and all(isinstance(each, list) and len(each) == 10 for each in found)
        if not lists or len(found) != len(programs):
            raise VerifierError(f"the sandbox said {line[:100]!r}")
        return found

    async def _line(self) -> bytes:
        said = b""
        while b"\n" not in self._read:
            chunk = await anext(self._output, None)
            if chunk is None:
                raise VerifierError(f"the program in it ended: {said[-300:].decode(errors='replace')}")
            if chunk.stream == "stdout":
                self._read += chunk.data
            else:
                said += chunk.data
        line, _, self._read = self._read.partition(b"\n")
        return line
