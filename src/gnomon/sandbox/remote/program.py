"""A program on another machine, over the E2B SDK. The SDK gives output as text: bytes that are none come as replacement characters."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import e2b

from gnomon.errors import SandboxError
from gnomon.sandbox.kept import Kept
from gnomon.sandbox.remote.errors import told
from gnomon.sandbox.sandbox import Chunk, Command, Result

QUEUE = 64
PIECE = 1 << 18
SIGNALS = {"hangup": 1, "interrupt": 2, "quit": 3, "aborted": 6, "killed": 9, "segmentation fault": 11, "broken pipe": 13, "terminated": 15}


class RemoteProgram:
    """See `gnomon.sandbox.sandbox.Process`."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.id = 0
        self.handle: Any = None
        self.chunks: asyncio.Queue[Chunk | None] = asyncio.Queue(QUEUE)
        self.kept = Kept(command.max_output_bytes)
        self.timed_out = False
        self.code: int | None = None
        self.lost: Exception | None = None
        self.began = time.monotonic()
        self.seconds = 0.0
        self.task: asyncio.Task[None] | None = None

    async def start(self, remote: Any, *, cwd: str, user: str, stdin: bool) -> None:
        """Run it; the SDK passes it to a login shell, so the words are quoted."""
        with told(f"running {self.command.argv[0]}"):
            self.handle = await remote.commands.run(
                "exec " + shlex.join(self.command.argv),
                background=True,
                envs=dict(self.command.env),
                user=user,
                cwd=cwd,
                stdin=stdin,
                timeout=self.command.timeout_seconds or 0,
                on_stdout=lambda text: self._take("stdout", text),
                on_stderr=lambda text: self._take("stderr", text),
                retain_output=False,
            )
        self.id = self.handle.pid
        self.task = asyncio.create_task(self._watch())

    async def _take(self, stream: Literal["stdout", "stderr"], text: str) -> None:
        await self.chunks.put(Chunk(stream=stream, data=text.encode("utf-8", "surrogateescape")))

    async def _watch(self) -> None:
        try:
            with told(f"following {self.command.argv[0]}"):
                self.code = int((await self.handle.wait()).exit_code)
        except e2b.CommandExitException as error:
            self.code = code_of(error)
        except SandboxError as error:
            if self.command.timeout_seconds is not None and isinstance(error.__cause__, e2b.TimeoutException):
                self.timed_out, self.code = True, -9
                with contextlib.suppress(SandboxError):
                    await self.kill()
            else:
                self.lost = error
        finally:
            self.seconds = time.monotonic() - self.began
            await self.chunks.put(None)

    async def output(self) -> AsyncIterator[Chunk]:
        """Output as it comes, until the program ends."""
        while (chunk := await self.chunks.get()) is not None:
            yield chunk
        self.chunks.put_nowait(None)
        if self.lost is not None:
            raise self.lost

    async def wait(self) -> Result:
        """Its end, with the output that nobody took."""
        await self.kept.take(self.output())
        assert self.code is not None
        return Result(
            code=self.code,
            stdout=self.kept.stdout,
            stderr=self.kept.stderr,
            timed_out=self.timed_out,
            truncated=self.kept.truncated,
            seconds=self.seconds,
        )

    async def write(self, data: bytes) -> None:
        """Bytes for its standard input; a program that has ended takes none."""
        with told("writing to a program"), contextlib.suppress(e2b.NotFoundException):
            for begin in range(0, len(data), PIECE):
                await self.handle.send_stdin(data[begin : begin + PIECE])

    async def close_stdin(self) -> None:
        """End of its standard input."""
        with told("closing a program's input"), contextlib.suppress(e2b.NotFoundException):
            await self.handle.close_stdin()

    async def feed_all(self, data: bytes) -> None:
        """All of its input; a program that ends first is no error."""
        with contextlib.suppress(SandboxError):
            await self.write(data)
            await self.close_stdin()

    async def kill(self, signal: int = 9) -> None:
        """End it. Raises `SandboxError` for other signals than 9, which the SDK cannot send."""
        if signal != 9:
            raise SandboxError(f"signal {signal}: the E2B SDK can only kill; run `kill -{signal} {self.id}` inside")
        with told("killing a program"):
            await self.handle.kill()


def code_of(error: Any) -> int:
    """How a program ended: negative for a signal, which the SDK gives as -1 and its name."""
    name = (error.error or "").removeprefix("signal: ")
    return -SIGNALS.get(name, 9) if error.exit_code == -1 else int(error.exit_code)
