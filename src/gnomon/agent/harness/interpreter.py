"""A Python interpreter inside the machine that keeps its variables between calls, and through which code may ask the policy.

The program below runs inside; both sides speak lines of JSON. What it sends is hostile: bounded, and read as data. Code that breaks the
interpreter breaks its own and no other. Read next: `tools/python.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gnomon.agent.harness.desk import LEFT_TO_THE_MACHINE, Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.terminals import WRITE_SECONDS
from gnomon.errors import SandboxError
from gnomon.sandbox.sandbox import Chunk, Command, Process

LONGEST_LINE = 8 << 20

PROGRAM = r"""
import ast, contextlib, io, json, os, sys, traceback
inbox, outbox = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
nothing = os.open(os.devnull, os.O_RDWR)
os.dup2(nothing, 0); os.dup2(nothing, 1)
def send(**record):
    outbox.write(json.dumps(record) + "\n"); outbox.flush()
def llm_query(prompt):
    return llm_query_batched([prompt])[0]
def llm_query_batched(prompts):
    send(kind="ask", prompts=[str(prompt) for prompt in prompts])
    answer = json.loads(inbox.readline())
    if answer.get("error"):
        raise RuntimeError(answer["error"])
    return answer["answers"]
space = {"__name__": "__main__", "llm_query": llm_query, "llm_query_batched": llm_query_batched}
for line in inbox:
    wish = json.loads(line)
    space.update(wish.get("variables", {}))
    said = io.StringIO()
    ok = True
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            tree = ast.parse(wish["code"])
            last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<code>", "exec"), space)
            value = eval(compile(last, "<code>", "eval"), space) if last else None
            if value is not None:
                print(repr(value))
        except BaseException:
            ok = False
            traceback.print_exc(limit=-8)
    send(kind="done", ok=ok, text=said.getvalue()[-2000000:])
"""

Asked = Callable[[list[str]], Awaitable[list[str]]]


@dataclass(kw_only=True, slots=True)
class Interpreter:
    """One interpreter. `run` may be called again and again; after a failure another is started by whoever uses it."""

    process: Process
    output: AsyncIterator[Chunk]
    rest: bytes = b""

    @classmethod
    async def start(cls, desk: Desk) -> Interpreter:
        """A fresh one. Raises `Fault` where the machine has no Python."""
        try:
            process = await desk.machine.start(Command(argv=("python3", "-u", "-c", PROGRAM), timeout_seconds=None, cwd=desk.workdir,
                                                       user=desk.task.user), stdin=True)
        except LEFT_TO_THE_MACHINE:
            raise
        except SandboxError as error:
            raise Fault(f"no interpreter can be started: {error}") from None
        return cls(process=process, output=process.output())

    async def run(self, code: str, variables: dict[str, str], seconds: float, ask: Asked) -> tuple[str, bool]:
        """What code prints, and whether it went well. The time that the policy takes for answers does not count.

        Raises `Fault` where the interpreter ends, takes too long, or says what it must not: then it is of no use any more.
        """
        await self._send({"code": code, "variables": variables})
        left = seconds
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                async with asyncio.timeout(left):
                    record = await self._line()
            except TimeoutError:
                raise Fault(f"the code did not end within {seconds:g} seconds; the interpreter was started anew") from None
            left = max(0.0, left - (clock() - began))
            if record.get("kind") == "done" and isinstance(record.get("text"), str):
                return record["text"], record.get("ok") is True
            prompts = record.get("prompts")
            if record.get("kind") != "ask" or not isinstance(prompts, list) or not all(isinstance(each, str) for each in prompts):
                raise Fault("the interpreter was broken by the code; it was started anew")
            try:
                await self._send({"answers": await ask(prompts)})
            except Fault as fault:
                await self._send({"error": str(fault)})

    async def _send(self, record: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self.process.write(json.dumps(record).encode() + b"\n")
        except TimeoutError:
            raise Fault("the interpreter does not read; it was started anew") from None
        except LEFT_TO_THE_MACHINE:
            raise
        except SandboxError as error:
            raise Fault(f"the interpreter has ended ({error}); it was started anew") from None

    async def _line(self) -> dict[str, Any]:
        while b"\n" not in self.rest:
            if len(self.rest) > LONGEST_LINE:
                raise Fault("the code printed more than can be kept; the interpreter was started anew")
            chunk = await anext(self.output, None)
            if chunk is None:
                raise Fault("the interpreter has ended; it was started anew")
            self.rest += chunk.data if chunk.stream == "stdout" else b""
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise Fault("the interpreter was broken by the code; it was started anew")
        return record

    async def close(self) -> None:
        """End it."""
        with contextlib.suppress(SandboxError):
            await self.process.kill()
