"""What the prefix cache keeps: blocks and checkpoints in one memory, and what goes when memory is needed.

A checkpoint and the pages that only it makes useful go together: pages above the last checkpoint of a path can never be hit, so they are
given back at once unless a running sequence stands there, and pages below a checkpoint stay as long as it does. Read next: `prefix.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnomon.errors import CheckpointError
from gnomon.serve.cache_settings import Form
from gnomon.serve.checkpoints import Checkpoint, Kind, pack, unpack
from gnomon.serve.disk import DiskTier
from gnomon.serve.index import Index, Node
from gnomon.serve.pages import Memory, Pages
from gnomon.serve.segments import Segment, SegmentName
from gnomon.serve.worth import Worth


@dataclass(kw_only=True, slots=True)
class Counters:
    """What happened since the start."""

    lookups: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evicted_checkpoints: int = 0
    evicted_blocks: int = 0
    mistaken: int = 0
    packed: int = 0
    worst_error: float = 0.0


class Store:
    """Index, memory and the order of eviction, kept true together."""

    def __init__(self, index: Index, memory: Memory, resting: Form = "fp32", disk: DiskTier | None = None):
        self.index, self.memory, self.resting, self.disk = index, memory, resting, disk
        self.worth = Worth(index, memory)
        self.counters = Counters()
        self._stamps: dict[int, tuple[int, bytes]] = {}
        self.checkpoints = self.sequences = 0

    def room(self, *, slots: int = 0, pages: int = 0, worth: float = float("inf")) -> bool:
        """Make room by packing, then by evicting what is worth no more than `worth`; nothing goes where all would not be enough."""
        if not self.memory.could_fit(slots=slots, pages=pages):
            return False
        while not self.memory.fits(slots=slots, pages=pages):
            if self.resting != "fp32" and self.memory.slot_bytes and (exact := self.worth.least_exact()) is not None:
                self._rest(exact)
                continue
            node = self.worth.least(worth)
            if node is None:
                return False
            self.drop(node)
        return True

    def new_slot(self) -> int | None:
        """A slot for a running sequence, or `None` where there is no room."""
        return self.memory.take_slot() if self.room(slots=1) else None

    def add(self, parent: Node, digest: bytes, tokens: bytes, pages: tuple[int, ...]) -> Node:
        """Index a block after `parent` whose latents lie in these pages."""
        node = self.index.add(parent, digest, tokens, pages)
        self.memory.share(np.array(pages, np.int32), live=False)
        self.worth.changed(parent)
        return node

    def publish(self, node: Node, slot: int, kind: Kind, error: float = 0.0) -> None:
        """The slot, a running sequence's so far, becomes the checkpoint of a block that has none."""
        assert node.checkpoint is None, "a checkpoint is never replaced"
        self.memory.settle_slot(slot)
        length = node.depth * self.index.block
        node.checkpoint = Checkpoint(length=length, digest=node.digest, slot=slot, bytes=self.memory.slot_bytes, kind=kind, error=error)
        self._stamps[slot] = (length, node.digest)
        self.checkpoints += 1
        self.worth.touch(node)

    def restore(self, node: Node) -> int | None:
        """A live slot with the state of the node's checkpoint, or `None` where there is no room for one.

        The checkpoint is copied; only where nothing else can go does it make room itself. Raises `CheckpointError`, and the checkpoint is
        gone, where it is not what the node says.
        """
        checkpoint = node.checkpoint
        assert checkpoint is not None
        expected = (node.depth * self.index.block, node.digest)
        stamp = expected if checkpoint.slot is None else self._stamps.get(checkpoint.slot)
        if (checkpoint.length, checkpoint.digest) != expected or stamp != expected:
            self.counters.mistaken += 1
            self.drop(node)
            raise CheckpointError(f"the state kept after token {expected[0]} is not of this prefix")
        node.checkpoint = None  # out of reach of eviction
        slot = self.new_slot()
        node.checkpoint = checkpoint
        if slot is None:
            return self._hand_over(node, checkpoint)
        if checkpoint.slot is not None:
            self.memory.pool.copy(checkpoint.slot, slot)
        elif checkpoint.packed is not None:
            unpack(checkpoint.packed, self.memory.pool, slot)
        checkpoint.hits += 1
        self.worth.touch(node)
        return slot

    def _hand_over(self, node: Node, checkpoint: Checkpoint) -> int | None:
        """The memory of the checkpoint itself becomes the live slot, where that is enough."""
        if not self.memory.could_fit(slots=1):
            self.worth.changed(node)
            return None
        packed = checkpoint.packed
        slot = self._forget(node)
        if slot is not None:
            self.memory.settle_slot(slot, live=True)
            return slot
        slot = self.new_slot()
        if slot is not None and packed is not None:
            unpack(packed, self.memory.pool, slot)
        return slot

    def _rest(self, node: Node) -> None:
        """Pack a checkpoint, so that nothing has to go yet."""
        checkpoint = node.checkpoint
        assert checkpoint is not None and checkpoint.slot is not None
        packed = pack(self.memory.pool, checkpoint.slot, self.resting)
        self.memory.give_slot(checkpoint.slot)
        del self._stamps[checkpoint.slot]
        counted = self.memory.take_bytes(packed.bytes)
        assert counted, "a packed state is larger than its slot"
        checkpoint.slot, checkpoint.packed, checkpoint.bytes = None, packed, packed.bytes
        checkpoint.error += packed.error
        self.counters.packed += 1
        self.counters.worst_error = max(self.counters.worst_error, packed.error)
        self.worth.changed(node)

    def drop(self, node: Node) -> None:
        """Forget a node's checkpoint, and the blocks that are of no use without it."""
        slot = self._forget(node)
        if slot is not None:
            self.memory.give_slot(slot)
        self.prune(node)

    def _forget(self, node: Node) -> int | None:
        """Take the checkpoint off its node; its slot, if it has one, is the caller's now."""
        checkpoint = node.checkpoint
        assert checkpoint is not None
        node.checkpoint = None
        if checkpoint.slot is not None:
            del self._stamps[checkpoint.slot]
        else:
            self.memory.give_bytes(checkpoint.bytes)
        self.checkpoints -= 1
        self.counters.evicted_checkpoints += 1
        self.index.mourn(node.digest)
        return checkpoint.slot

    def prune(self, node: Node | None) -> None:
        """Forget blocks from here towards the root as long as nothing needs them."""
        while node is not None and not node.children and not node.pins and node.checkpoint is None:
            parent = node.parent
            self.index.remove(node)
            if parent is not None:
                self.memory.give_pages(np.array(node.pages, np.int32), live=False)
                self.counters.evicted_blocks += 1
            node = parent
        if node is not None:
            self.worth.changed(node)

    def unpin(self, node: Node) -> None:
        """One running sequence less stands here."""
        node.pins -= 1
        self.prune(node)

    def spill(self, tip: Node) -> None:
        """Have the turns and ends on the way to a block written to the disk, each with the blocks since the one before it."""
        disk = self.disk
        if disk is None:
            return
        path: list[Node] = []
        node = tip
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        there, begin, parent = disk.ends([node.digest for node in path]), 0, node.digest
        for i, node in enumerate(path):
            checkpoint = node.checkpoint
            if node.digest not in there:
                if checkpoint is None or checkpoint.kind == "grid":
                    continue
                pages = (i + 1 - begin) * self.index.block * self.memory.page_bytes // self.memory.page_tokens
                if not disk.room(checkpoint.bytes + pages):
                    continue
                disk.offer(self._segment(parent, path[begin:i + 1], checkpoint))
            begin, parent = i + 1, node.digest

    def _segment(self, parent: bytes, nodes: list[Node], checkpoint: Checkpoint) -> Segment:
        """A copy of these blocks' latents and of the state after them."""
        start, state = (nodes[0].depth - 1) * self.index.block, checkpoint.packed
        if checkpoint.slot is not None:
            state = pack(self.memory.pool, checkpoint.slot, self.resting)
        assert state is not None
        return Segment(
            name=SegmentName(parent=parent, digest=checkpoint.digest, start=start, stop=checkpoint.length),
            tokens=b"".join(node.tokens for node in nodes), latents=self._latents(nodes), state=state,
            error=checkpoint.error + (state.error if checkpoint.packed is None else 0.0),
        )

    def _latents(self, nodes: list[Node]) -> Tensor:
        """A copy of the latents of blocks in a row, [tokens, layers, C+R] or [pages, tokens of a page, layers, C+R]."""
        block, size, latents = self.index.block, self.memory.page_tokens, self.memory.pool.latents
        if block % size == 0:  # whole pages: the copy is one sweep, and putting it in order can wait for the writer
            return latents[torch.tensor([page for node in nodes for page in node.pages])].transpose(1, 2)
        start = (nodes[0].depth - 1) * block
        places = np.arange(start, start + len(nodes) * block)
        pages = np.empty(len(places), np.int64)
        for node in nodes:
            first = (node.depth - 1) * block
            own = slice(first - start, first - start + block)
            pages[own] = np.array(node.pages)[places[own] // size - first // size]
        return latents[torch.from_numpy(pages), :, torch.from_numpy(places % size)]

    def pages_to(self, path: list[Node]) -> Pages:
        """Pages of a path from the root, one for each `page_tokens` tokens: of those that know a page, the deepest block has all of it."""
        if not path:
            return np.zeros(0, np.int32)
        block, size = self.index.block, self.memory.page_tokens
        pages = np.zeros(-(-len(path) * block // size), np.int32)
        for i, node in enumerate(path):
            first = i * block // size
            pages[first:first + len(node.pages)] = node.pages
        return pages
