"""The contract of a sandbox: what every backend offers in the same words, and how it says what it cannot do (report §5.3.2).

A backend is one file in `backends/` with a class `Backend`. It makes sandboxes; a sandbox runs programs, keeps files, and can be paused,
snapshotted and forked. Whatever a backend cannot do raises `Unsupported` with the reason and is never imitated. Replies from inside are
untrusted: bounded in length, parsed as data. Read next: `backends/namespaces.py`, the default.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, Self, runtime_checkable

MEGABYTE = 1 << 20

Isolation = Literal["standard", "strong"]
"""`standard` shares the host's kernel; `strong` puts another kernel, or a virtual machine, between the program and the host."""

PauseLevel = Literal["freeze", "stop", "hibernate"]
"""`freeze` stops the processes and keeps them in memory; `stop` ends them and keeps the files, so that `snapshot` and `fork` copy
nothing, and `resume` starts with no program running; `hibernate` keeps everything on disk and leaves neither CPU nor memory in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a sandbox may use in all. Each is enforced, or listed in `Capabilities.unenforced`."""

    memory_bytes: int = 512 * MEGABYTE
    disk_bytes: int = 256 * MEGABYTE
    cpus: float = 1.0
    processes: int = 128
    inodes: int = 65_536
    open_files: int = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What a sandbox may reach: nothing, unless `allow` names it.

    An entry of `allow` is `host:port`, `*.domain:port` or `host:*`; `proxy` is the path of a Unix socket on the host that all permitted
    traffic passes through (a model gateway, for instance) and that appears inside as an HTTP proxy. Link-local, private and host addresses
    are denied whatever `allow` says, except for `proxy` itself.
    """

    allow: tuple[str, ...] = ()
    proxy: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """All that is decided when a sandbox is made.

    `image` names a template or image known to the store (`host` is the host's `/usr`, read-only). `ttl_seconds` is the time until the
    reaper ends the sandbox unless `set_timeout` moves it; `None` is for ever. `idempotency_key`: creating twice with one key gives one
    sandbox, so that a lost response leaks nothing.
    """

    image: str = "host"
    limits: Limits = field(default_factory=Limits)
    network: Network = field(default_factory=Network)
    env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    ttl_seconds: float | None = 3600.0
    workdir: str = "/home/user"
    user: str = "root"
    hostname: str = "sandbox"
    idempotency_key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One program to run. `argv` is not passed through a shell; write `("sh", "-c", text)` for that."""

    argv: tuple[str, ...]
    timeout_seconds: float | None = 60.0
    max_output_bytes: int = MEGABYTE
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    stdin: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a program ended. `code` is negative for the signal that ended it; `truncated` says that output beyond the limit was dropped."""

    code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Standard output as text, with replacement characters for bytes that are none."""
        return self.stdout.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Output of a running program, as it comes."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """One entry of a directory inside a sandbox."""

    path: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int
    modified_seconds: float
    target: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEvent:
    """A change seen by `Sandbox.watch`."""

    path: str
    kind: Literal["create", "write", "remove", "rename", "chmod"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A state that new sandboxes can start from: give its `name` as `Spec.image`. `memory` says whether processes are part of it."""

    id: str
    name: str
    backend: str
    memory: bool
    bytes: int
    created_seconds: float
    parent: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a sandbox uses now."""

    memory_bytes: int
    disk_bytes: int
    processes: int
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend can do here, found by doing it; `notes` says what was measured or refused and why.

    `unenforced` names the fields of `Limits` that cannot be held on this machine.
    """

    backend: str
    isolation: Isolation
    pause: frozenset[PauseLevel]
    snapshot_files: bool
    snapshot_memory: bool
    live_fork: bool
    network: bool
    rootless: bool
    unenforced: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


class Process(Protocol):
    """A program that runs in the background."""

    id: int

    async def wait(self) -> Result:
        """Its end, with whatever output nobody took from `output`."""
        ...

    def output(self) -> AsyncIterator[Chunk]:
        """Output as it comes, until the program ends. Nothing piles up on the host when nobody reads: the program waits."""
        ...

    async def write(self, data: bytes) -> None:
        """Bytes for its standard input."""
        ...

    async def close_stdin(self) -> None:
        """End of its standard input."""
        ...

    async def kill(self, signal: int = 9) -> None:
        """Send a signal to the program and all that it started in its session."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """One isolated machine. Every call raises `SandboxLost` once the machine is gone, and `SandboxTimeout` where a deadline passes.

    Paths are absolute inside the sandbox; symbolic links are followed inside and never lead out.
    """

    id: str
    spec: Spec

    async def exec(self, command: Command) -> Result:
        """Run a program to its end. One that ignores signals, becomes a daemon, floods its output or holds its pipe ends in bounded time;
        what it left running stays until the sandbox ends."""
        ...

    async def start(self, command: Command, *, stdin: bool = False) -> Process:
        """Run a program in the background; with `stdin` its input stays open."""
        ...

    async def read(self, path: str, max_bytes: int = 16 * MEGABYTE) -> bytes:
        """The content of a regular file. Raises `SandboxError` naming the path if there is none, or if it is larger."""
        ...

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Make or replace a file, and the directories above it."""
        ...

    async def list(self, path: str, depth: int = 1) -> Sequence[FileInfo]:
        """What a directory holds, sorted by path."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file, or a directory and all below it."""
        ...

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or folder of the host into the sandbox."""
        ...

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or folder out; links inside never make it write outside `target`."""
        ...

    def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileEvent]:
        """Changes below a directory, as they happen."""
        ...

    async def pause(self, level: PauseLevel = "freeze") -> None:
        """Stop; `resume` goes on. While paused, other calls raise `SandboxError` and say so."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def snapshot(self, name: str | None = None, *, memory: bool = False) -> Snapshot:
        """Keep the present state under a name. The sandbox goes on."""
        ...

    async def fork(self, count: int = 1, *, memory: bool = False) -> Sequence[Sandbox | Exception]:
        """`count` sandboxes that start from the present state, each with an identity of its own; each is a sandbox or an error."""
        ...

    async def set_timeout(self, seconds: float | None) -> None:
        """End the sandbox this long from now unless told otherwise."""
        ...

    async def set_network(self, network: Network) -> None:
        """Replace the rules; connections that they no longer allow are cut."""
        ...

    async def usage(self) -> Usage:
        """What it uses now."""
        ...

    async def kill(self) -> None:
        """End it and all that runs in it, and give back everything it used. Twice is no error."""
        ...

    async def __aenter__(self) -> Self:
        """The sandbox itself."""
        ...

    async def __aexit__(self, *exception: object) -> None:
        """`kill`."""
        ...


class Backend(Protocol):
    """A way of isolating programs. `Backend()` costs nothing; `probe` finds out by doing."""

    name: str

    async def probe(self) -> Capabilities:
        """What works here, found by making a sandbox and running a program in it, within seconds; the answer is kept.

        Raises `Unsupported` with the reason and the remedy where nothing works.
        """
        ...

    async def create(self, spec: Spec) -> Sandbox:
        """A new sandbox. Raises `Unsupported` for what this backend cannot hold, `CapacityError` where the machine is full."""
        ...

    async def close(self) -> None:
        """End all sandboxes that this object made, and what serves them."""
        ...
