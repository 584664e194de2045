"""The owner's side of the zygote: started when first needed, asked over a socket, missed when it dies; and who still needs which layer."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import gnomon
from gnomon.errors import CapacityError, SandboxError, SandboxLost, Unsupported
from gnomon.sandbox.ns import cgroups, wire
from gnomon.sandbox.ns.channel import Channel, Refused

START_SECONDS = 120.0
NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE}
CODE = "import sys; sys.path.insert(0, {!r}); from gnomon.sandbox.ns.zygote import main; main()"
REMEDY = ("unprivileged user namespaces may be switched off: see `sysctl kernel.unprivileged_userns_clone`, "
          "`kernel.apparmor_restrict_unprivileged_userns` and `user.max_user_namespaces`; in a container its seccomp profile must allow "
          "unshare and mount")  # fmt: skip


def explained(error: Exception, doing: str) -> Exception:
    """What a caller is told when the machine refuses: full is `CapacityError`, the rest `SandboxError`."""
    number = error.number if isinstance(error, Refused) else getattr(error, "errno", 0)
    if isinstance(error, SandboxLost):
        return error
    if number in NO_ROOM:
        return CapacityError(f"{doing}: {error}; end other sandboxes, or raise the limit that this names (`ulimit -n` for files)")
    return SandboxError(f"{doing}: {error}")


class Zygote:
    """The zygote of one backend. Dead zygotes are not revived: the backend makes a new one."""

    def __init__(self, avoid: Path | None) -> None:
        self.avoid = str(avoid or "/nonexistent")
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: Channel
        self.rootless = os.geteuid() != 0
        self.controllers: frozenset[str] = frozenset()
        self.freezer, self.unified = "", False
        self.notes: tuple[str, ...] = ()
        self.needs: Counter[str] = Counter()

    @property
    def alive(self) -> bool:
        """Whether it can be asked, from this event loop."""
        return self.process is not None and not self.channel.closed and self.channel.loop is asyncio.get_running_loop()

    async def start(self) -> None:
        """Start it. Raises `Unsupported` with the reason and a remedy where this machine does not allow what it does."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source = str(Path(gnomon.__file__).resolve().parents[1])
        argv = [sys.executable, "-I", "-S", "-c", CODE.format(source), str(theirs.fileno()), str(os.getpid()), self.avoid]
        try:
            self.process = await asyncio.to_thread(
                subprocess.Popen, argv, env={}, cwd="/", pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours, messages=True, on_close=lambda reason: None)
        hello = self.channel.expect(0)
        try:
            _, _, numbers, strings = await asyncio.wait_for(hello, START_SECONDS)
        except (Refused, SandboxLost, TimeoutError) as error:
            await self.close()
            reason = str(error) or f"no answer in {START_SECONDS:g} s"
            raise Unsupported(f"namespaces cannot be used here: {reason}; {REMEDY}") from None
        self.rootless, self.unified = bool(numbers[0]), bool(numbers[1])
        self.controllers = frozenset(strings[0].decode().split(",")) - {""}
        self.freezer = strings[1].decode()
        self.notes = tuple(note.decode("utf-8", "replace") for note in strings[2:])

    async def ask(self, kind: int, numbers: Sequence[int] = (), *names: str, doing: str) -> tuple[int, ...]:
        """One request; raises `SandboxLost` when it is dead, `CapacityError` or `SandboxError` when it refuses."""
        try:
            return (await self.channel.request(kind, numbers, [name.encode() for name in names]))[2]
        except Refused as error:
            raise explained(error, doing) from None

    async def create(self, numbers: Sequence[int], names: Sequence[str], connection: socket.socket) -> int:
        """Have a sandbox forked that will answer on the other end of `connection`; the number of its first process, 0 where unknown."""
        channel = self.channel
        call = channel.number()
        answer = channel.expect(call)
        try:
            channel.send(wire.pack(wire.CREATE, call, numbers, [name.encode() for name in names]), [connection.fileno()])
            return (await answer)[2][0]
        except (Refused, OSError) as error:
            raise explained(error, "creating a sandbox") from None
        finally:
            channel.calls.pop(call, None)

    async def freeze(self, name: str, frozen: bool) -> None:
        """Stop or continue the programs of a sandbox: directly, and by the zygote, which has patience, where that is not done at once."""
        try:
            done = bool(self.freezer) and cgroups.stand_still(f"{self.freezer}/{name}", self.unified, frozen)
        except OSError:
            done = False
        if not done or self.channel.closed:
            await self.ask(wire.FREEZE if frozen else wire.THAW, (), name, doing=f"{'freezing' if frozen else 'thawing'} {name}")

    def need(self, layers: Iterable[str]) -> None:
        """Count one more use of layers that the zygote keeps, the writable one of a sandbox by its owner included."""
        self.needs.update(layer for layer in layers if len(layer) > 1 and layer.startswith("@"))

    async def leave(self, layers: Iterable[str]) -> None:
        """Count one use less; what nobody needs is dropped."""
        for layer in layers:
            if len(layer) > 1 and layer.startswith("@"):
                self.needs[layer] -= 1
                if self.needs[layer] <= 0:
                    del self.needs[layer]
                    if not self.channel.closed:
                        await self.ask(wire.KILL, (), layer[1:], doing="dropping a layer")

    async def close(self) -> None:
        """End it, and with it every sandbox; waits until all has been given back."""
        process, self.process = self.process, None
        if process is None:
            return
        self.channel.close("the backend was closed")
        try:
            await asyncio.wait_for(asyncio.to_thread(process.wait), START_SECONDS)
        except TimeoutError:
            process.kill()
            await asyncio.to_thread(process.wait)
