"""Programs of a sandbox as the host sees them: output taken as fast as it is read, never more than was asked for."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Literal

from gnomon.errors import SandboxError, SandboxTimeout
from gnomon.sandbox.kept import Kept
from gnomon.sandbox.ns import wire
from gnomon.sandbox.ns.channel import Channel, Refused
from gnomon.sandbox.sandbox import Chunk, Command, Result

WINDOW = 1 << 18
"""Bytes that may be under way to a reader before the program has to wait."""
SLACK = 1 << 17
NAMES: dict[int, Literal["stdout", "stderr"]] = {1: "stdout", 2: "stderr"}


def order(command: Command, env: dict[str, str], user: str, window: int, open_input: bool) -> tuple[list[int], list[bytes]]:
    """A command as the numbers and strings of an EXEC frame."""
    if not command.argv:
        raise SandboxError("Command.argv is empty; name a program")
    texts = [*command.argv, *env.keys(), *env.values(), command.cwd or "", user]
    if any("\0" in text for text in texts):
        raise SandboxError("Command: a NUL character cannot be passed to a program")
    timeout = -1 if command.timeout_seconds is None else max(0, int(command.timeout_seconds * 1000))
    argv = [text.encode("utf-8", "surrogateescape") for text in command.argv]
    pairs = [f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in env.items()]
    strings = [(command.cwd or "").encode(), user.encode(), command.stdin or b"", *argv, *pairs]
    return [timeout, command.max_output_bytes, window, int(open_input), len(argv)], strings


class Running:
    """One program in the background; see the contract `Process`. `lost` ends the sandbox for breaking the protocol."""

    def __init__(self, channel: Channel, command: Command) -> None:
        self.channel, self.command = channel, command
        self.id = channel.number()
        self.began = time.monotonic()
        self.chunks: deque[Chunk] = deque()
        self.held = 0
        self.more = asyncio.Event()
        self.ended = channel.expect(self.id, self._frame)
        self.ended.add_done_callback(self._done)
        self.result: Result | None = None

    def _frame(self, frame: wire.Frame) -> None:
        kind, _, numbers, strings = frame
        if kind != wire.OUTPUT or not numbers or not strings or numbers[0] not in NAMES:
            return
        self.chunks.append(Chunk(stream=NAMES[numbers[0]], data=strings[0]))
        self.held += len(strings[0])
        self.more.set()
        if self.held > WINDOW + SLACK:
            self.channel.close("the sandbox sends more than was asked for")

    def _done(self, answer: asyncio.Future[wire.Frame]) -> None:
        if not answer.cancelled():
            answer.exception()
        self.more.set()

    async def output(self) -> AsyncIterator[Chunk]:
        """Output as it comes, until the program ends."""
        while True:
            while self.chunks:
                chunk = self.chunks.popleft()
                self.held -= len(chunk.data)
                if not self.ended.done():
                    self.channel.send(wire.pack(wire.CREDIT, 0, (self.id, len(chunk.data))))
                yield chunk
            if self.ended.done():
                return
            self.more.clear()
            await self.more.wait()

    async def wait(self) -> Result:
        """The end, with the output that nobody took, up to `max_output_bytes` of each stream."""
        if self.result is not None:
            return self.result
        kept = Kept(self.command.max_output_bytes)
        await kept.take(self.output())
        try:
            _, _, numbers, _ = await self.ended
        except Refused as error:
            raise SandboxError(f"{self.command.argv[0]} could not be started: {error}") from None
        self.result = Result(code=numbers[0], stdout=kept.stdout, stderr=kept.stderr, timed_out=bool(numbers[1]),
                             truncated=kept.truncated or bool(numbers[2]), seconds=time.monotonic() - self.began)  # fmt: skip
        return self.result

    async def write(self, data: bytes) -> None:
        """Bytes for the standard input; waits until the program's pipe has taken them."""
        for at in range(0, len(data), wire.CHUNK):
            try:
                await self.channel.request(wire.STDIN, (self.id,), (data[at : at + wire.CHUNK],))
            except Refused as error:
                raise SandboxError(f"{self.command.argv[0]}: {error}") from None

    async def close_stdin(self) -> None:
        """End of the standard input."""
        if not self.ended.done():
            self.channel.send(wire.pack(wire.CLOSE_STDIN, 0, (self.id,)))

    async def kill(self, signal: int = 9) -> None:
        """A signal to every process of the program's session."""
        if not self.ended.done():
            await self.channel.request(wire.SIGNAL, (self.id, signal))


async def collect(channel: Channel, command: Command, frame: tuple[list[int], list[bytes]], grace: float) -> Result:
    """Run a program to its end, keeping at most `max_output_bytes` of each stream.

    The agent holds the deadline; if even that fails, `SandboxTimeout` comes `grace` seconds later.
    """
    kept = {1: bytearray(), 2: bytearray()}

    def on_frame(incoming: wire.Frame) -> None:
        kind, _, numbers, strings = incoming
        if kind == wire.OUTPUT and numbers and strings and numbers[0] in kept:
            kept[numbers[0]] += strings[0]
            if len(kept[numbers[0]]) > command.max_output_bytes:
                channel.close("the sandbox sends more than was asked for")

    call, began = channel.number(), time.monotonic()
    answer = channel.expect(call, on_frame)
    try:
        channel.send(wire.pack(wire.EXEC, call, *frame))
        limit = None if command.timeout_seconds is None else command.timeout_seconds + grace
        _, _, numbers, _ = await asyncio.wait_for(answer, limit)
    except TimeoutError:
        raise SandboxTimeout(f"{command.argv[0]} did not end {grace:g} s after its {command.timeout_seconds:g} s were over") from None
    except Refused as error:
        raise SandboxError(f"{command.argv[0]} could not be started: {error}") from None
    finally:
        if channel.calls.pop(call, None) is not None and not channel.closed:
            channel.send(wire.pack(wire.SIGNAL, 0, (call, 9)))
    return Result(code=numbers[0], stdout=bytes(kept[1]), stderr=bytes(kept[2]), timed_out=bool(numbers[1]), truncated=bool(numbers[2]),
                  seconds=time.monotonic() - began)  # fmt: skip


def start(channel: Channel, command: Command, frame: tuple[list[int], list[bytes]]) -> Running:
    """Run a program in the background."""
    running = Running(channel, command)
    channel.send(wire.pack(wire.EXEC, running.id, *frame))
    return running


