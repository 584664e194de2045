"""AgentENV, hosted E2B, or a server of our own as a backend: the machine is elsewhere, the words are the same.

It needs the official SDK (`pip install 'gnomon[e2b]'`), `E2B_API_KEY`, and for a server of one's own `E2B_API_URL` and `E2B_SANDBOX_URL`.
Limits are those of the template. What the server can do is found out by doing it. Read next: `gnomon.sandbox.remote.machine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import urllib.request
from typing import TYPE_CHECKING, Any

from gnomon.errors import SandboxError, Unsupported
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.registry import Registry
from gnomon.sandbox.sandbox import Capabilities, Command, Isolation, Spec

if TYPE_CHECKING:
    from gnomon.sandbox.remote.machine import RemoteMachine

PROBE_SECONDS = 60.0
LIMITS = frozenset({"memory_bytes", "disk_bytes", "cpus", "processes", "inodes", "open_files"})


class Backend:
    """Sandboxes on a server; `options` are those of the SDK (`api_key`, `api_url`, `sandbox_url`, …), by default from the environment."""

    name = "e2b"

    def __init__(self, store: LayerStore | None = None, registry: Registry | None = None, options: dict[str, Any] | None = None) -> None:
        self.options = dict(options or {})
        self.machines: dict[str, RemoteMachine] = {}
        self._found: Capabilities | None = None

    def _sdk(self) -> Any:
        if not (self.options.get("api_key") or os.environ.get("E2B_API_KEY")):
            raise Unsupported("e2b: there is no API key; set E2B_API_KEY, and E2B_API_URL with E2B_SANDBOX_URL for a server of your own")
        try:
            import e2b
        except ImportError as error:
            raise Unsupported("e2b: the official SDK is not installed; `pip install 'gnomon[e2b]'`") from error
        return e2b

    async def probe(self) -> Capabilities:
        """Make a sandbox there, run a program, pause it, fork it; the answer is kept."""
        if self._found is not None:
            return self._found
        self._sdk()
        notes = ["limits are the template's", "output comes as text: bytes that are none are replaced"]
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                machine = await self.create(Spec(image="base", ttl_seconds=120.0))
                async with machine:
                    result = await machine.exec(Command(argv=("echo", "here"), timeout_seconds=20.0))
                    if result.stdout != b"here\n":
                        raise Unsupported(f"e2b: `echo here` said {result.stdout!r}")
                    await machine.start(Command(argv=("sleep", "417"), timeout_seconds=None))
                    files = await _works(self._kept(machine), notes, "snapshots of files")
                    forks = await _works(self._forked(machine), notes, "forks with memory")
                    await machine.pause("hibernate")
                    await machine.resume()
        except (SandboxError, OSError, TimeoutError) as error:
            raise Unsupported(f"e2b: the server does not serve: {str(error) or 'no answer in time'}") from error
        self._found = Capabilities(
            backend=self.name,
            isolation=await asyncio.to_thread(self._isolation),
            pause=frozenset({"hibernate"}),
            snapshot_files=files,
            snapshot_memory=forks,
            live_fork=forks,
            network=True,
            rootless=True,
            unenforced=LIMITS,
            notes=tuple(notes),
        )
        return self._found

    def _isolation(self) -> Isolation:
        """Hosted E2B and AgentENV run virtual machines; a server of ours says in its health what its backend is worth."""
        address = self.options.get("api_url") or os.environ.get("E2B_API_URL")
        if address:
            with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=5) as reply:
                return "standard" if reply.headers.get("X-Gnomon-Isolation") == "standard" else "strong"
        return "strong"

    async def _kept(self, machine: RemoteMachine) -> None:
        made = await machine.snapshot(memory=False)
        await self._sdk().AsyncSandbox.delete_snapshot(made.name, **self.options)

    async def _forked(self, machine: RemoteMachine) -> None:
        from gnomon.sandbox.remote.errors import told
        from gnomon.sandbox.remote.machine import RemoteMachine

        with told("forking"):
            [remote] = await machine.remote.fork(count=1, timeout=60)
        child = remote if isinstance(remote, Exception) else RemoteMachine(remote, machine.spec, self.options, self)
        if isinstance(child, Exception):
            raise SandboxError(str(child))
        async with child:
            result = await child.exec(Command(argv=("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"), timeout_seconds=20.0))
            if b"sleep 417" not in result.stdout:
                raise SandboxError("a fork had none of the programs")

    async def create(self, spec: Spec) -> RemoteMachine:
        """A sandbox from the template or snapshot that `spec.image` names; `host` is the server's `base`."""
        e2b = self._sdk()
        from gnomon.sandbox.remote.errors import told
        from gnomon.sandbox.remote.machine import RemoteMachine, hosts_of, seconds_of

        network = {"network": {"allow_out": hosts_of(spec.network), "deny_out": ["0.0.0.0/0"]}} if spec.network.allow else {}
        with told(f"creating a sandbox from template {spec.image}"):
            remote = await e2b.AsyncSandbox.create(
                "base" if spec.image == "host" else spec.image,
                timeout=seconds_of(spec.ttl_seconds),
                envs=dict(spec.env),
                metadata=dict(spec.metadata),
                allow_internet_access=bool(spec.network.allow),
                idempotency_key=spec.idempotency_key,
                lifecycle={"on_timeout": "kill"},
                **network,
                **self.options,
            )
        known = self.machines.get(remote.sandbox_id)
        if known is not None:
            return known
        machine = RemoteMachine(remote, spec, self.options, self)
        self.machines[machine.id] = machine
        return machine

    async def close(self) -> None:
        """End all sandboxes that this object made."""
        await asyncio.gather(*(machine.kill() for machine in list(self.machines.values())), return_exceptions=True)


async def _works(trial: Any, notes: list[str], what: str) -> bool:
    """Whether something can be done; if not, a note says why."""
    try:
        await trial
    except SandboxError as error:
        notes.append(f"no {what}: {error}")
        return False
    return True
