"""What the prefix cache keeps: blocks and checkpoints in one memory, and what goes when memory is needed.

A checkpoint and the pages that only it makes useful go together: pages above the last checkpoint of a path can never be hit, so they are
given back at once unless a running sequence stands there, and pages below a checkpoint stay as long as it does. Read next: `prefix.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gnomon.errors import CheckpointError
from gnomon.serve.checkpoints import Checkpoint, Kind
from gnomon.serve.index import Index, Node
from gnomon.serve.pages import Memory, Pages
from gnomon.serve.worth import Worth


@dataclass(kw_only=True, slots=True)
class Counters:
    """What happened since the start."""

    evicted_checkpoints: int = 0
    evicted_blocks: int = 0
    mistaken: int = 0


class Store:
    """Index, memory and the order of eviction, kept true together."""

    def __init__(self, index: Index, memory: Memory):
        self.index, self.memory = index, memory
        self.worth = Worth(index, memory)
        self.counters = Counters()
        self._stamps: dict[int, tuple[int, bytes]] = {}
        self.checkpoints = self.sequences = 0

    def room(self, *, slots: int = 0, pages: int = 0, worth: float = float("inf")) -> bool:
        """Make room by evicting what is worth no more than `worth`; nothing is evicted where even everything would not be enough."""
        if not self.memory.could_fit(slots=slots, pages=pages):
            return False
        while not self.memory.fits(slots=slots, pages=pages):
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

    def publish(self, node: Node, slot: int, kind: Kind) -> None:
        """The slot, a running sequence's so far, becomes the checkpoint of a block that has none."""
        assert node.checkpoint is None, "a checkpoint is never replaced"
        self.memory.settle_slot(slot)
        length = node.depth * self.index.block
        node.checkpoint = Checkpoint(length=length, digest=node.digest, slot=slot, kind=kind)
        self._stamps[slot] = (length, node.digest)
        self.checkpoints += 1
        self.worth.touch(node)

    def restore(self, node: Node) -> int | None:
        """A live slot with the state of the node's checkpoint, or `None` where there is no room for one.

        The checkpoint is copied; only where nothing else can go is its own slot handed over. Raises `CheckpointError`, and the checkpoint
        is gone, where it is not what the node says.
        """
        checkpoint = node.checkpoint
        assert checkpoint is not None
        expected = (node.depth * self.index.block, node.digest)
        if (checkpoint.length, checkpoint.digest) != expected or self._stamps.get(checkpoint.slot) != expected:
            self.counters.mistaken += 1
            self.drop(node)
            raise CheckpointError(f"the state kept after token {expected[0]} is not of this prefix")
        node.checkpoint = None  # out of reach of eviction
        fits = self.room(slots=1)
        node.checkpoint = checkpoint
        if fits:
            slot = self.memory.take_slot()
            assert slot is not None
            self.memory.pool.copy(checkpoint.slot, slot)
            checkpoint.hits += 1
            self.worth.touch(node)
            return slot
        slot = checkpoint.slot
        self.memory.settle_slot(slot, live=True)
        if self.memory.live_bytes > self.memory.budget_bytes:
            self.memory.settle_slot(slot)
            self.worth.changed(node)
            return None
        self._forget(node)
        return slot

    def drop(self, node: Node) -> None:
        """Forget a node's checkpoint, and the blocks that are of no use without it."""
        self.memory.give_slot(self._forget(node))
        self.prune(node)

    def _forget(self, node: Node) -> int:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        node.checkpoint = None
        del self._stamps[checkpoint.slot]
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
