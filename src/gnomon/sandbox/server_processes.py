"""The process service of the E2B data plane: programs that any number of clients start, follow, feed and signal.

A program's output goes to all who follow it, and waits for the slowest of them; with nobody following it is dropped, so that a program
whose client has gone lives on. Terminals are `script` inside, where the image has it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import shlex
from collections.abc import AsyncIterator
from typing import Any

from gnomon.errors import GnomonError, SandboxError, SandboxLost
from gnomon.sandbox.sandbox import Command, Process, Sandbox
from gnomon.sandbox.server_connect import Call, Refusal, text_of

QUEUE = 32
SIGNALS = {"SIGNAL_SIGKILL": 9, "SIGNAL_SIGTERM": 15, 9: 9, 15: 15}
NAMES = {1: "hangup", 2: "interrupt", 6: "aborted", 9: "killed", 11: "segmentation fault", 13: "broken pipe", 15: "terminated"}


class Program:
    """One program and those who follow it."""

    def __init__(self, process: Process, config: dict[str, Any], tag: str | None, *, terminal: bool) -> None:
        self.process, self.config, self.tag, self.terminal = process, config, tag, terminal
        self.followers: set[asyncio.Queue[dict[str, Any] | GnomonError]] = set()
        self.task: asyncio.Task[None] | None = None

    async def pump(self) -> None:
        """Pass output on until the program ends, then say how it ended."""
        last: dict[str, Any] | GnomonError
        try:
            async for chunk in self.process.output():
                name = "pty" if self.terminal else chunk.stream
                await self._tell({"data": {name: base64.b64encode(chunk.data).decode()}})
            last = {"end": ended((await self.process.wait()).code)}
        except GnomonError as error:
            last = error
        await self._tell(last)

    async def _tell(self, event: dict[str, Any] | GnomonError) -> None:
        for follower in list(self.followers):
            while follower in self.followers:
                try:
                    async with asyncio.timeout(1.0):
                        await follower.put(event)
                    break
                except TimeoutError:
                    continue


def ended(code: int) -> dict[str, Any]:
    """The end of a program in the words of the wire: Go's `os/exec` as the official server gives them."""
    if code >= 0:
        return {"exitCode": code, "exited": True, "status": f"exit status {code}"}
    status = f"signal: {NAMES.get(-code, -code)}"
    return {"exitCode": -1, "exited": False, "status": status, "error": status}


class Programs:
    """The programs of one sandbox that were started over the wire."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.running: dict[int, Program] = {}

    async def list(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """What runs."""
        rows = []
        for pid, program in self.running.items():
            row: dict[str, Any] = {"config": program.config, "pid": pid}
            rows.append(row if program.tag is None else {**row, "tag": program.tag})
        return {"processes": rows}

    async def start(self, message: dict[str, Any], call: Call) -> AsyncIterator[dict[str, Any]]:
        """Start a program and follow it; the call's timeout ends the program too."""
        config = message.get("process")
        if not isinstance(config, dict):
            raise Refusal(400, "process is missing")
        terminal = message.get("pty") is not None
        command = command_of(config, call, terminal=terminal)
        process = await self.sandbox.start(command, stdin=terminal or bool(message.get("stdin", False)))
        tag = message.get("tag")
        program = Program(process, config, tag if isinstance(tag, str) else None, terminal=terminal)
        self.running[process.id] = program
        follower: asyncio.Queue[dict[str, Any] | GnomonError] = asyncio.Queue(QUEUE)
        program.followers.add(follower)
        program.task = asyncio.create_task(self._run(program))
        guard = asyncio.create_task(self._end_late(program, call.timeout_seconds)) if call.timeout_seconds else None
        if guard is not None:
            program.task.add_done_callback(lambda _: guard.cancel())
        async for event in self._follow(program, follower, call):
            yield event

    async def connect(self, message: dict[str, Any], call: Call) -> AsyncIterator[dict[str, Any]]:
        """Follow a program that runs."""
        program = self._selected(message)
        follower: asyncio.Queue[dict[str, Any] | GnomonError] = asyncio.Queue(QUEUE)
        program.followers.add(follower)
        async for event in self._follow(program, follower, call):
            yield event

    async def _run(self, program: Program) -> None:
        try:
            await program.pump()
        finally:
            self.running.pop(program.process.id, None)

    async def _end_late(self, program: Program, seconds: float) -> None:
        await asyncio.sleep(seconds)
        try:
            await program.process.kill()
        except SandboxError:
            return

    async def _follow(
        self, program: Program, follower: asyncio.Queue[dict[str, Any] | GnomonError], call: Call
    ) -> AsyncIterator[dict[str, Any]]:
        try:
            yield {"event": {"start": {"pid": program.process.id}}}
            while True:
                try:
                    async with asyncio.timeout(call.keepalive_seconds):
                        event = await follower.get()
                except TimeoutError:
                    yield {"event": {"keepalive": {}}}
                    continue
                if isinstance(event, GnomonError):
                    raise event
                yield {"event": event}
                if "end" in event:
                    return
        finally:
            program.followers.discard(follower)

    def _selected(self, message: dict[str, Any]) -> Program:
        selector = message.get("process")
        if not isinstance(selector, dict):
            raise Refusal(400, "process is missing")
        for pid, program in self.running.items():
            if selector.get("pid") == pid or ("tag" in selector and selector["tag"] == program.tag):
                return program
        raise Refusal(404, f"process {selector} is not running")

    async def send_input(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """Bytes for a program's input."""
        await self._selected(message).process.write(_input(message.get("input")))
        return {}

    async def close_stdin(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """End of a program's input."""
        await self._selected(message).process.close_stdin()
        return {}

    async def send_signal(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """End a program, politely or not."""
        number = SIGNALS.get(message.get("signal", 0))
        if number is None:
            raise Refusal(400, f"signal {message.get('signal')}; it is one of SIGNAL_SIGKILL, SIGNAL_SIGTERM")
        await self._selected(message).process.kill(number)
        return {}

    async def stream_input(self, messages: AsyncIterator[dict[str, Any]], call: Call) -> dict[str, Any]:
        """Bytes for a program's input, in order, while the stream lasts."""
        program: Program | None = None
        async for message in messages:
            if isinstance(message.get("start"), dict):
                program = self._selected(message["start"])
            elif isinstance(message.get("data"), dict):
                if program is None:
                    raise Refusal(400, "input before its start")
                await program.process.write(_input(message["data"].get("input")))
        return {}

    async def update(self, message: dict[str, Any], call: Call) -> dict[str, Any]:
        """The size of a terminal cannot be changed here."""
        self._selected(message)
        raise Refusal(501, "this server's terminals cannot be resized", "unimplemented")

    async def close(self) -> None:
        """The sandbox goes: whoever follows a program is told."""
        for program in list(self.running.values()):
            for follower in program.followers:
                if follower.full():
                    follower.get_nowait()
                follower.put_nowait(SandboxLost(f"{self.sandbox.id} was killed"))
            if program.task is not None:
                program.task.cancel()
                await asyncio.gather(program.task, return_exceptions=True)


def command_of(config: dict[str, Any], call: Call, *, terminal: bool) -> Command:
    """The command that a process configuration describes."""
    arguments, env = config.get("args") or [], config.get("envs") or {}
    if not isinstance(arguments, list) or not all(isinstance(word, str) for word in arguments):
        raise Refusal(400, "args must be a list of text")
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise Refusal(400, "envs must map names to text")
    words = (text_of(config, "cmd"), *arguments)
    cwd = config.get("cwd") or None
    if terminal:
        words, env = ("script", "-qefc", shlex.join(words), "/dev/null"), {"TERM": "xterm-256color", **env}
    return Command(argv=words, env=env, cwd=cwd, user=call.user, timeout_seconds=None, max_output_bytes=1)


def _input(message: Any) -> bytes:
    value = message.get("stdin", message.get("pty", "")) if isinstance(message, dict) else None
    if not isinstance(value, str):
        raise Refusal(400, "input must hold stdin or pty")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        raise Refusal(400, "input is not base64") from None
