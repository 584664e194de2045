"""Which layers a sandbox stands on, who needs them, and how its files become the start of others.

Files of a sandbox are in a memory file system of the zygote. Of a stopped sandbox they become a sealed layer as they lie; of one that runs
they are copied while it stands still. A snapshot without a name lives as long as its backend; one with a name is written to the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.errors import ConfigError, SandboxError
from gnomon.sandbox.images import Image
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.ns import wire
from gnomon.sandbox.ns.host import Zygote
from gnomon.sandbox.sandbox import Snapshot

if TYPE_CHECKING:
    from gnomon.sandbox.ns.machine import Machine, Root

SKELETON = "@"


class Keeping:
    """The part of the backend that knows layers: names as the zygote takes them, `@id` for those it keeps itself."""

    def __init__(self, store: LayerStore | None) -> None:
        self.store = store
        self.zygote: Zygote | None = None
        self.snapshots: dict[str, tuple[Snapshot, Image, tuple[str, ...]]] = {}
        self.chains: dict[str, tuple[str, ...]] = {}

    def opened(self) -> LayerStore:
        """The store, opened now if it was not given."""
        if self.store is None:
            self.store = LayerStore()
        return self.store

    def image(self, name: str) -> Image:
        """An image or snapshot by name; raises `ConfigError` for an unknown one."""
        if name in self.snapshots:
            _, image, chain = self.snapshots[name]
            return replace(image, name=name, layers=tuple(Path(layer) for layer in chain))
        return Image(name=name, host=True) if name == "host" else self.opened().resolve(name)

    def chain(self, image: Image) -> tuple[str, ...]:
        """An image's layers as the zygote takes them, top first."""
        found = tuple(str(layer) for layer in image.layers)
        if image.host and SKELETON not in found:
            found += (SKELETON,)
        if not found:
            raise ConfigError(f"image '{image.name}' has no files; nothing could run in it")
        return found

    async def hold(self, zygote: Zygote, layers: tuple[str, ...]) -> None:
        """Count one more use of layers, here and in the store."""
        stored = [Path(layer) for layer in layers if layer.startswith("/")]
        if stored:
            await asyncio.to_thread(self.opened().hold, stored)
        zygote.need(layers)

    async def drop(self, zygote: Zygote, layers: tuple[str, ...]) -> None:
        """Count one use less."""
        stored = [Path(layer) for layer in layers if layer.startswith("/")]
        if stored:
            await asyncio.to_thread(self.opened().release, stored)
        await zygote.leave(layers)

    async def let_go(self, zygote: Zygote, root: Root) -> None:
        """End the processes on a root and drop it; its files stay if they have become a layer that others need."""
        own = f"@{root.upper}"
        zygote.needs[own] -= 1
        kept = zygote.needs[own] > 0
        if not kept:
            del zygote.needs[own]
        try:
            if not zygote.channel.closed:
                await zygote.ask(wire.SEAL if kept else wire.KILL, (), root.upper, doing="ending a sandbox")
        finally:
            with contextlib.suppress(SandboxError):
                await self.drop(zygote, root.below)

    async def present(self, machine: Machine) -> tuple[str, ...]:
        """The machine's files as sealed layers, not yet held by anyone: its own layer as it lies if it is stopped, else a copy."""
        root, zygote = machine.root, machine.zygote
        if machine.state == "stopped":
            return (f"@{root.upper}", *root.below)
        layer = secrets.token_hex(8)
        limits = machine.spec.limits
        async with machine.still():
            await zygote.ask(wire.COPY, (limits.disk_bytes, limits.inodes), f"@{root.upper}", layer,
                             doing=f"copying the files of {machine.id}")  # fmt: skip
        return (f"@{layer}", *root.below)

    async def remember(self, machine: Machine, name: str | None, backend: str) -> Snapshot:
        """A snapshot: in memory without a name, in the store with one."""
        image = machine.root.image if isinstance(machine.root.image, Image) else Image(name=machine.spec.image)
        if name is not None:
            return await self._write_down(machine, name, backend, image)
        identity = secrets.token_hex(8)
        size = (await machine.zygote.ask(wire.COUNT, (), machine.root.upper, doing=f"measuring {machine.id}"))[3]
        below = await self.present(machine)
        snapshot = Snapshot(id=identity, name=f"snapshot-{identity}", backend=backend, memory=False, bytes=size,
                            created_seconds=time.time(), parent=machine.spec.image)  # fmt: skip
        await self.hold(machine.zygote, below)
        self.snapshots[snapshot.name] = (snapshot, image, below)
        return snapshot

    async def _write_down(self, machine: Machine, name: str, backend: str, image: Image) -> Snapshot:
        """Its layers as folders of the store: those that are in memory are copied, lowest first, its own last."""
        store, zygote, root = self.opened(), machine.zygote, machine.root
        written: list[Path] = []
        parents: tuple[Path, ...] = ()
        try:
            for layer in reversed([layer for layer in root.below if layer != SKELETON]):
                if layer.startswith("@"):
                    folder = await self._copied_out(zygote, layer, store)
                    written.append(await asyncio.to_thread(store.seal, folder, durable=True))
                    parents = (written[-1], *parents)
                else:
                    parents = (Path(layer), *parents)
            async with machine.still():
                folder = await self._copied_out(zygote, f"@{root.upper}", store)
            try:
                return await asyncio.to_thread(lambda: store.adopt(folder, name, parents, like=image, backend=backend))
            except BaseException:
                await asyncio.to_thread(store.discard, folder)
                raise
        finally:
            await asyncio.to_thread(store.release, written)

    @staticmethod
    async def _copied_out(zygote: Zygote, layer: str, store: LayerStore) -> Path:
        folder = await asyncio.to_thread(store.scratch)
        try:
            await zygote.ask(wire.COPY, (), layer, str(folder), doing=f"writing files to {folder}")
        except BaseException:
            await asyncio.to_thread(store.discard, folder)
            raise
        return folder

    async def remove_snapshot(self, name: str) -> None:
        """Forget a snapshot; its layers stay while sandboxes stand on them. Raises `ConfigError` for an unknown name."""
        found = self.snapshots.pop(name, None)
        if found is None:
            await asyncio.to_thread(self.opened().forget, name)
        elif self.zygote is not None and not self.zygote.channel.closed:
            await self.drop(self.zygote, found[2])

    def lose_snapshots(self) -> None:
        """The zygote is gone, and with it what was only in memory."""
        self.snapshots = {}
