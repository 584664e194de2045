"""The host's end of a socket to a zygote or an agent: requests and their answers by number, on asyncio, never blocking the loop.

What comes in is untrusted when it comes from an agent: frames are bounded, unknown ones are dropped, and whatever does not parse closes the
channel. When it closes, every call that waits fails with `SandboxLost`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence

from gnomon.errors import SandboxError, SandboxLost
from gnomon.sandbox.ns import wire

READ_BYTES = 1 << 16
"""Less than what the C library gets from the kernel anew for each read."""
MAX_QUEUED = 1 << 20


class Refused(SandboxError):
    """The other end could not do it: `number` is the system's error number, the message says what."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class Call:
    """One request: a future for the answer, and what to do with frames that come before it."""

    __slots__ = ("answer", "on_fds", "on_frame")

    def __init__(self, answer: asyncio.Future[wire.Frame], on_frame: Callable[[wire.Frame], None] | None,
                 on_fds: Callable[[list[int]], None] | None) -> None:  # fmt: skip
        self.answer, self.on_frame, self.on_fds = answer, on_frame, on_fds


class Channel:
    """A socket in use by one event loop. `messages` says that each message is one frame; else they are cut out of a stream."""

    def __init__(self, connection: socket.socket, *, messages: bool, on_close: Callable[[str], None]) -> None:
        connection.setblocking(False)
        self.socket, self.messages, self.on_close = connection, messages, on_close
        self.loop = asyncio.get_running_loop()
        self.splitter = wire.Splitter()
        self.calls: dict[int, Call] = {}
        self.on_news: Callable[[wire.Frame], None] | None = None
        self.next_call = 1
        self.queue: list[tuple[bytes, list[int]]] = []
        self.queued = 0
        self.space = asyncio.Event()
        self.space.set()
        self.closed = ""
        self.ending = "the sandbox has ended"  # what those who wait are told when the other side closes
        self.loop.add_reader(connection.fileno(), self._readable)

    def expect(self, call: int, on_frame: Callable[[wire.Frame], None] | None = None,
               on_fds: Callable[[list[int]], None] | None = None) -> asyncio.Future[wire.Frame]:  # fmt: skip
        """The future of the answer to a call with this number."""
        answer: asyncio.Future[wire.Frame] = self.loop.create_future()
        if self.closed:
            answer.set_exception(SandboxLost(self.closed))
        else:
            self.calls[call] = Call(answer, on_frame, on_fds)
        return answer

    def number(self) -> int:
        """A number for a new call."""
        self.next_call = self.next_call % 0xFFFFFFF0 + 1
        return self.next_call

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame; descriptors are copied and may be closed by the caller."""
        if self.closed:
            raise SandboxLost(self.closed)
        self.queue.append((frame, [os.dup(fd) for fd in fds]))
        self.queued += len(frame)
        if len(self.queue) == 1:
            self._writable()
        if self.queued > MAX_QUEUED:
            self.space.clear()

    async def request(self, kind: int, numbers: Sequence[int] = (), strings: Sequence[bytes] = (),
                      on_frame: Callable[[wire.Frame], None] | None = None,
                      on_fds: Callable[[list[int]], None] | None = None) -> wire.Frame:  # fmt: skip
        """Ask and wait for the answer; raises `Refused` with the reason, or `SandboxLost`. Descriptors come in for `on_fds` alone."""
        call = self.number()
        answer = self.expect(call, on_frame, on_fds)
        try:
            self.send(wire.pack(kind, call, numbers, strings))
            await self.space.wait()
            return await answer
        finally:
            self.calls.pop(call, None)

    def _readable(self) -> None:
        try:
            room = socket.CMSG_SPACE(4 * 4) if any(call.on_fds is not None for call in self.calls.values()) else 0
            data, ancillary, _, _ = self.socket.recvmsg(READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(f"the connection failed: {error.strerror}")
            return
        fds = [int.from_bytes(content[at : at + 4], "little") for level, kind, content in ancillary
               if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) for at in range(0, len(content) - 3, 4)]  # fmt: skip
        if not data:
            self._drop(fds)
            self.close(self.ending)
            return
        try:
            frames = [wire.unpack(data)] if self.messages else self.splitter.feed(data)
            if not frames:
                self._drop(fds)
            for frame in frames:
                self._frame(frame, fds if frame is frames[-1] else [])
        except ValueError as error:
            self._drop(fds)
            self.close(f"the sandbox does not keep to its protocol: {error}")

    def _frame(self, frame: wire.Frame, fds: list[int]) -> None:
        kind, number, numbers, strings = frame
        call = self.calls.get(number)
        if call is None:
            self._drop(fds)
            if number == 0 and self.on_news is not None:
                self.on_news(frame)
            return
        if kind in (wire.OK, wire.EXIT, wire.HELLO) or (kind == wire.READY and number == 0):
            del self.calls[number]
            if call.answer.done():
                self._drop(fds)
                return
            call.answer.set_result((kind, number, numbers, strings))
            if call.on_fds is not None:
                call.on_fds(fds)
            else:
                self._drop(fds)
        elif kind == wire.ERROR:
            del self.calls[number]
            self._drop(fds)
            if not call.answer.done():
                text = strings[0].decode("utf-8", "replace") if strings else "no reason given"
                call.answer.set_exception(Refused(numbers[0] if numbers else 0, text))
        else:
            self._drop(fds)
            if call.on_frame is not None:
                call.on_frame(frame)

    def _drop(self, fds: Sequence[int]) -> None:
        for fd in fds:
            os.close(fd)

    def _writable(self) -> None:
        while self.queue:
            data, fds = self.queue[0]
            try:
                sent = socket.send_fds(self.socket, [data], fds) if fds else self.socket.send(data)
            except (BlockingIOError, InterruptedError):
                self.loop.add_writer(self.socket.fileno(), self._writable)
                return
            except OSError as error:
                self.close(f"the connection failed: {error.strerror}")
                return
            self._drop(fds)
            self.queued -= sent
            if sent < len(data):
                self.queue[0] = (data[sent:], [])
            else:
                self.queue.pop(0)
        self.loop.remove_writer(self.socket.fileno())
        self.space.set()

    def close(self, reason: str) -> None:
        """End the conversation; whoever waits is told why. Twice is no error."""
        if self.closed:
            return
        self.closed = reason
        if not self.loop.is_closed():
            self.loop.remove_reader(self.socket.fileno())
            self.loop.remove_writer(self.socket.fileno())
        self.socket.close()
        for _, fds in self.queue:
            self._drop(fds)
        self.queue = []
        self.space.set()
        calls, self.calls = self.calls, {}
        for call in calls.values():
            if not call.answer.done():
                call.answer.set_exception(SandboxLost(reason))
        self.on_close(reason)
