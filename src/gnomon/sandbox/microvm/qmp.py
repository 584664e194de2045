"""Orders for a running qemu: its machine protocol (QMP, qemu/docs/interop/qmp-spec), over a socket that nobody else has."""

from __future__ import annotations

import array
import asyncio
import json
import socket
from typing import Any

from gnomon.errors import SandboxError, SandboxLost, SandboxTimeout

MAX_LINE = 1 << 20
PATIENCE_SECONDS = 300.0


class Monitor:
    """One connection. Orders are given one after the other; what qemu tells unasked is passed over."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.connection, self.name = connection, name
        self.connection.setblocking(False)
        self.rest = b""
        self.lock = asyncio.Lock()

    async def begin(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for the greeting and agree on nothing special."""
        try:
            async with asyncio.timeout(seconds):
                await self._line()
        except TimeoutError:
            raise SandboxTimeout(f"sandbox {self.name}: qemu said nothing within {seconds:g} s") from None
        except OSError as error:
            raise SandboxLost(f"sandbox {self.name}: qemu has ended ({error.strerror})") from None
        await self.call("qmp_capabilities", seconds=seconds)

    async def call(self, order: str, *, seconds: float = PATIENCE_SECONDS, handle: int | None = None, **arguments: Any) -> Any:
        """Give one order, with a file descriptor if it takes one; its answer. Words are joined by `_` here and by `-` there.

        Raises `SandboxError` with qemu's reason, `SandboxTimeout`, or `SandboxLost` if it has ended.
        """
        text = json.dumps({"execute": order, "arguments": {name.replace("_", "-"): value for name, value in arguments.items()}}).encode()
        try:
            async with self.lock, asyncio.timeout(seconds):
                if handle is None:
                    await asyncio.get_running_loop().sock_sendall(self.connection, text + b"\n")
                else:
                    self.connection.sendmsg([text + b"\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [handle]))])
                while True:
                    answer = json.loads(await self._line())
                    if "error" in answer:
                        raise SandboxError(f"sandbox {self.name}: qemu refuses {order}: {answer['error'].get('desc')}")
                    if "return" in answer:
                        return answer["return"]
        except TimeoutError:
            raise SandboxTimeout(f"sandbox {self.name}: qemu did not answer to {order} within {seconds:g} s") from None
        except OSError as error:
            raise SandboxLost(f"sandbox {self.name}: qemu has ended ({error.strerror})") from None

    async def _line(self) -> bytes:
        while b"\n" not in self.rest:
            data = await asyncio.get_running_loop().sock_recv(self.connection, 1 << 16)
            if not data or len(self.rest) > MAX_LINE:
                raise SandboxLost(f"sandbox {self.name}: qemu has ended")
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    def close(self) -> None:
        """No more orders."""
        self.connection.close()
