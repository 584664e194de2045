"""A backend that isolates nothing: programs of the tests run in a folder of the host. It keeps the contract's book-keeping and no more.

What is tested with it is what lies around a backend: builds, pools, the command line. Never give it a program that is not the test's own.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon.errors import GnomonError, SandboxError, SandboxLost, Unsupported
from gnomon.sandbox import trees
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.registry import Registry, Traces
from gnomon.sandbox.sandbox import Capabilities, Command, FileInfo, Network, Result, Snapshot, Spec, Usage


class Backend:
    """Folders that act as sandboxes."""

    name = "pretend"

    def __init__(self, store: LayerStore | None = None, registry: Registry | None = None) -> None:
        self.store = store or LayerStore()
        self.registry = registry or Registry(self.store)
        self.living: dict[str, PretendSandbox] = {}
        self.created = 0
        self.fail: Exception | None = None

    async def probe(self) -> Capabilities:
        return Capabilities(backend=self.name, isolation="standard", pause=frozenset({"freeze"}), snapshot_files=True,
                            snapshot_memory=False, live_fork=True, network=False, rootless=True, unenforced=frozenset({"memory_bytes"}))

    async def create(self, spec: Spec) -> "PretendSandbox":
        await asyncio.sleep(0)
        if self.fail is not None:
            raise self.fail
        image = self.store.resolve(spec.image)
        id = secrets.token_hex(6)
        record = self.registry.claim(id, self.name, spec)
        if record.id != id:
            return self.living[record.id]
        root = self.store.scratch()
        self.registry.update(id, state="running", traces=Traces(files=(str(root),)))
        place = root / "root"
        trees.merge([*reversed(image.layers)], place, whiteouts=False, link=False)
        self.created += 1
        self.living[id] = PretendSandbox(self, id, spec, place)
        return self.living[id]

    async def close(self) -> None:
        for sandbox in [*self.living.values()]:
            await sandbox.kill()


class PretendSandbox:
    """One folder."""

    def __init__(self, backend: Backend, id: str, spec: Spec, root: Path) -> None:
        self.id, self.spec, self.root = id, spec, root
        self.backend, self.paused, self.killed = backend, False, False
        self.calls: list[str] = []
        self.network = spec.network

    def _place(self, path: str) -> Path:
        if self.killed:
            raise SandboxLost(f"sandbox {self.id} is gone")
        if self.paused:
            raise SandboxError(f"sandbox {self.id} is paused; resume it first")
        return self.root / path.lstrip("/")

    async def exec(self, command: Command) -> Result:
        cwd = self._place(command.cwd or "/")
        self.calls.append("exec")
        cwd.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        done = await asyncio.to_thread(lambda: subprocess.run(
            command.argv, cwd=cwd, env={"PATH": os.environ["PATH"], "ROOT": str(self.root), **command.env}, input=command.stdin or b"",
            capture_output=True, check=False, timeout=command.timeout_seconds))
        return Result(code=done.returncode, stdout=done.stdout, stderr=done.stderr, seconds=time.monotonic() - began)

    async def start(self, command: Command, *, stdin: bool = False) -> Any:
        raise Unsupported("pretend sandboxes have no background programs")

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        try:
            return self._place(path).read_bytes()
        except FileNotFoundError:
            raise SandboxError(f"{path}: no such file") from None

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)

    async def list(self, path: str, depth: int = 1) -> Sequence[FileInfo]:
        place = self._place(path)
        if not place.is_dir():
            raise SandboxError(f"{path}: no such folder")
        return [FileInfo(path=f"{path.rstrip('/')}/{p.name}", kind="directory" if p.is_dir() else "file", size=p.stat().st_size,
                         mode=p.stat().st_mode, modified_seconds=p.stat().st_mtime) for p in sorted(place.iterdir())]

    async def remove(self, path: str) -> None:
        trees.remove(self._place(path))

    async def upload(self, source: Path, path: str) -> None:
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, dirs_exist_ok=True)
        else:
            shutil.copy(source, place)

    async def download(self, path: str, target: Path) -> None:
        shutil.copy(self._place(path), target)

    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[Any]:
        raise Unsupported("pretend sandboxes are not watched")
        yield

    async def pause(self, level: str = "freeze") -> None:
        if level != "freeze":
            raise Unsupported("pretend sandboxes cannot hibernate")
        self._place("/")
        self.calls.append("pause")
        self.paused = True
        self.backend.registry.update(self.id, state="paused")

    async def resume(self) -> None:
        if self.killed:
            raise SandboxLost(f"sandbox {self.id} is gone")
        self.calls.append("resume")
        self.paused = False
        self.backend.registry.update(self.id, state="running")

    async def snapshot(self, name: str | None = None, *, memory: bool = False) -> Snapshot:
        if memory:
            raise Unsupported("pretend sandboxes have no memory to keep")
        store = self.backend.store
        copy = store.scratch() / "copy"
        trees.copy(self.root, copy)
        snapshot = store.adopt(copy, name, like=store.resolve(self.spec.image), backend="pretend")
        store.discard(copy.parent)
        store.release(store.resolve(snapshot.name).layers[:1])
        return snapshot

    async def fork(self, count: int = 1, *, memory: bool = False) -> Sequence["PretendSandbox | Exception"]:
        snapshot = await self.snapshot()
        children: list[PretendSandbox | Exception] = []
        for _ in range(count):
            try:
                children.append(await self.backend.create(replace(self.spec, image=snapshot.name, idempotency_key=None)))
            except GnomonError as error:
                children.append(error)
        self.backend.store.forget(snapshot.name)
        return children

    async def set_timeout(self, seconds: float | None) -> None:
        self.backend.registry.expire(self.id, seconds)

    async def set_network(self, network: Network) -> None:
        self.network = network

    async def usage(self) -> Usage:
        return Usage(memory_bytes=0, disk_bytes=trees.measure(self.root), processes=0, cpu_seconds=0.0)

    async def kill(self) -> None:
        if not self.killed:
            self.killed = True
            self.backend.living.pop(self.id, None)
            with contextlib.suppress(OSError):
                trees.remove(self.root.parent)
            self.backend.registry.release(self.id)

    async def __aenter__(self) -> "PretendSandbox":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.kill()
