"""The prefix cache: what a prompt shares with an earlier one is not computed again (report section 5.4.1).

A hybrid model makes this harder than attention alone: to continue after token n it needs the latents of all n tokens *and* the recurrent
state after exactly n, which nobody can cut back to fewer. So the cache keeps immutable checkpoints of the state at the ends of hash
blocks, as many as memory allows, and a hit is the deepest block that has both. A sequence that runs, `Held`, has a slot of its own, into
which the checkpoint is copied, and shares full pages; a page is copied before a second sequence writes to it. Nothing that happens to one
sequence takes anything from another, and leaving a branch erases nothing.

What a step writes is known to others when `advance` was called after it, so nobody can hit what is still being written.
Read next: `store.py` for what is kept and what goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from gnomon.errors import CapacityError, CheckpointError, ConfigError
from gnomon.serve.cache_settings import CacheSettings
from gnomon.serve.disk import DiskCounters, DiskTier
from gnomon.serve.held import Held
from gnomon.serve.index import ID_BYTES, Index, Node, packed, unpacked
from gnomon.serve.pages import MakesPools, Memory
from gnomon.serve.store import Store
from gnomon.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheStats:
    """The cache in numbers: what it holds now, and what happened since the start."""

    budget_bytes: int
    used_bytes: int
    live_bytes: int
    sequences: int
    blocks: int
    checkpoints: int
    lookups: int
    hits: int
    prompt_tokens: int
    cached_tokens: int
    evicted_checkpoints: int
    evicted_blocks: int
    packed_checkpoints: int
    worst_error: float
    disk: DiskCounters | None


class PrefixCache:
    """All prefixes of one model. One thread at a time; `fingerprint` names model, weights and types, so that no other's states are used."""

    def __init__(self, memory: Memory, settings: CacheSettings | None = None, fingerprint: str = "", disk: Path | None = None):
        self.memory, self.settings = memory, settings or CacheSettings()
        self.index = Index(fingerprint, self.settings.hash_block)
        self.disk = None if disk is None else DiskTier(
            disk, _belongs(memory, fingerprint, self.settings.hash_block), self.settings.disk_bytes, self.settings.disk_queue_bytes)
        self.store = Store(self.index, memory, self.settings.resting, self.disk)

    @classmethod
    def build(cls, runner: MakesPools, settings: CacheSettings, fingerprint: str) -> Self:
        """Memory and cache as the settings say. Raises `CapacityError` for too small a budget, `ConfigError` for another model's folder."""
        types = {"fp32": torch.float32, "bf16": torch.bfloat16}
        memory = Memory(runner, settings.budget_bytes, settings.page_tokens, types[settings.latents])
        return cls(memory, settings, fingerprint, settings.folder)

    def open(self, tokens: Sequence[int], *, salt: str = "", boundaries: Sequence[int] = (), reuse: bool = True) -> Held:
        """A sequence that begins with a prompt: what is known of it is there already, at least its last token is not.

        `boundaries` are lengths where others may come back to (ends of turns). Without `reuse` the cache is neither read nor written.
        Raises `CapacityError` where there is no room for another sequence now.
        """
        if not len(tokens):
            raise ConfigError("'tokens' is empty; a sequence begins with at least one token")
        data, block, limit = packed(tokens), self.settings.hash_block, (len(tokens) - 1) // self.settings.hash_block
        root, digests = self.index.root(salt), list[bytes]()
        path = self.index.match(root, data, digests, limit) if reuse else []
        hit, slot, error = self._enter(root, path)
        if slot is None:
            raise CapacityError(f"no room for another sequence: running ones take {format_bytes(self.memory.live_bytes)} of the cache's "
                                f"{format_bytes(self.memory.budget_bytes)}; wait for one to end or raise the memory budget")
        tip = path[hit - 1] if hit else root
        pages = self.store.pages_to(path[:hit])
        self.memory.share(pages, live=True)
        held = Held(self.store, root, tip, slot, data, pages)
        held.error = error
        if reuse and self.disk is not None and hit < limit:
            self._load(held, self.disk, digests, limit)
            path = self.index.match(root, data, digests, limit)
            hit = held.length // block
        held.digests, held.cached_tokens = digests, hit * block
        held.turns = {n // block for n in (*boundaries, len(tokens) - 1, len(tokens))} | ({len(path)} if len(path) > hit else set())
        self._promote(path, held.turns)
        held.note = self._note(root, path, hit, digests, data) if reuse else "cache off"
        if held.error:
            held.note += f"; the state was packed, which changed it by up to {held.error:.0e}"
        if not reuse:
            held.leave()
        held.uncounted = reuse, len(tokens)
        return held

    def known(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many tokens of a prompt memory has now, without opening it: what decides who goes first. Nothing changes."""
        root = self.index.root(salt)
        root.pins += 1
        path = self.index.match(root, packed(tokens), [], (len(tokens) - 1) // self.settings.hash_block)
        self.store.unpin(root)
        return next((node.depth * self.settings.hash_block for node in reversed(path) if node.checkpoint is not None), 0)

    def _load(self, held: Held, disk: DiskTier, digests: list[bytes], limit: int) -> None:
        """Go on from the disk, piece by piece, as far as it has what follows."""
        self.index.chain(held.root, held.data, digests, limit)
        held.digests = digests
        for name in disk.chain(held.root.digest, digests[:limit], held.length // self.settings.hash_block):
            if name.stop > held.length:
                segment = disk.read(name)
                if segment is None or not held.load(segment):
                    break

    def _promote(self, path: list[Node], turns: set[int]) -> None:
        """Blocks that end a turn, or where requests part, are worth more than they were."""
        for depth in turns:
            if 0 < depth <= len(path) and (checkpoint := path[depth - 1].checkpoint) is not None:
                checkpoint.kind = "turn"

    def _enter(self, root: Node, path: list[Node]) -> tuple[int, int | None, float]:
        """The depth of the deepest block with a checkpoint, pinned; a slot with that state, or none where there is no room; its error."""
        for hit in range(len(path), 0, -1):
            node = path[hit - 1]
            if node.checkpoint is None:
                continue
            node.pins += 1
            error = node.checkpoint.error
            try:
                slot = self.store.restore(node)
            except CheckpointError:
                self.store.unpin(node)
                continue
            if slot is None:
                self.store.unpin(node)
            return hit, slot, error
        root.pins += 1
        slot = self.store.new_slot()
        if slot is None:
            self.store.unpin(root)
        return 0, slot, 0.0

    def stats(self) -> CacheStats:
        """What is held and what happened."""
        counters = self.store.counters
        return CacheStats(
            budget_bytes=self.memory.budget_bytes, used_bytes=self.memory.used_bytes, live_bytes=self.memory.live_bytes,
            sequences=self.store.sequences, blocks=self.index.count, checkpoints=self.store.checkpoints, lookups=counters.lookups,
            hits=counters.hits, prompt_tokens=counters.prompt_tokens, cached_tokens=counters.cached_tokens,
            evicted_checkpoints=counters.evicted_checkpoints, evicted_blocks=counters.evicted_blocks, packed_checkpoints=counters.packed,
            worst_error=counters.worst_error, disk=None if self.disk is None else self.disk.counters,
        )

    def clear(self) -> None:
        """Forget everything that no running sequence stands on."""
        for node in self.index.nodes():
            if node.checkpoint is not None:
                self.store.drop(node)

    def close(self) -> None:
        """The server ends: what waits to be written to the disk is written."""
        if self.disk is not None:
            self.disk.close()

    def _note(self, root: Node, path: list[Node], hit: int, digests: list[bytes], data: bytes) -> str:
        """How many tokens are cached, and why not more."""
        block, width, total = self.settings.hash_block, self.index.width, len(data) // ID_BYTES
        known, limit = len(path), (total - 1) // block
        said = f"{hit * block} of {total} tokens cached"
        if hit == limit:
            return f"{said}: all that a hash block of {block} tokens allows" if limit else f"{said}: shorter than a hash block"
        if known > hit:
            gone = any(self.index.was_here(node.digest) for node in path[hit:])
            return f"{said}: " + ("later checkpoints were evicted" if gone else f"no checkpoint after token {hit * block}")
        if digests[hit:] and self.index.was_here(digests[hit]):
            return f"{said}: what followed was evicted"
        tip = path[-1] if path else root
        best = max((_agreement(child.tokens, data[hit * width:(hit + 1) * width]), -i, child)
                   for i, child in enumerate(list(tip.children.values())[-COMPARED:])) if tip.children else None
        if best is None:
            return f"{said}: nothing known" + (f" after token {hit * block}" if hit else "")
        agreed, _, child = best
        ours, theirs = unpacked(data[hit * width:(hit + 1) * width])[agreed], unpacked(child.tokens)[agreed]
        return f"{said}: prefix differs at token {hit * block + agreed}: the cache has {theirs}, the request {ours}"


COMPARED = 16
"""Most continuations that are looked at to say where a prompt differs."""


def _belongs(memory: Memory, fingerprint: str, block: int) -> dict[str, Any]:
    """What the files of a cache depend on."""
    pool = memory.pool
    return {"fingerprint": fingerprint, "hash_block": block, "matrices": list(pool.matrices.shape[1:]), "conv": list(pool.conv.shape[1:]),
            "latents": [pool.latents.shape[1], pool.latents.shape[3]], "latent_type": str(pool.latents.dtype)}


def _agreement(a: bytes, b: bytes) -> int:
    """How many ids two blocks have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(unpacked(a), unpacked(b), strict=True)) if x != y), 0)
