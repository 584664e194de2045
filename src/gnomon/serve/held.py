"""A running sequence on the cache: a state of its own, pages that it may share, and what it adds to the index on its way.

Read next: `prefix.py`, which opens them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gnomon.errors import CapacityError, ConfigError
from gnomon.serve.checkpoints import Kind, unpack
from gnomon.serve.index import ID_BYTES, Node, packed, unpacked
from gnomon.serve.pages import Pages
from gnomon.serve.segments import Segment
from gnomon.serve.store import Store
from gnomon.units import format_bytes


class Held:
    """A running sequence: its state in `slot`, its latents in `pages`, `length` tokens in both.

    `cached_tokens` of the prompt were there at the start, and `note` says why not more; `error` bounds what packing lost of its state. The
    order of a step is `reserve`, `copies`, the forward, `advance`.
    """

    def __init__(self, store: Store, root: Node, tip: Node | None, slot: int, data: bytes | bytearray, pages: Pages):
        self.store, self.index, self.memory = store, store.index, store.memory
        self.slot, self.root = slot, root
        self.digests: list[bytes] = []
        self.turns: set[int] = set()
        self.note, self.cached_tokens, self.length = "", 0, 0 if tip is None else tip.depth * self.index.block
        self._tip, self._start, self.data = tip, tip, bytearray(data)
        self._owned = self.length % self.memory.page_tokens == 0  # whether the page of the next token is ours to write
        self._table, self._count = pages, len(pages)
        self._pending: dict[int, int] = {}
        self._made: set[bytes] = set()
        self._open = True
        self.error = 0.0
        self.uncounted: tuple[bool, int] | None = None  # (whether the cache was asked, tokens of the prompt) until the first step
        self.store.sequences += 1

    @property
    def pages(self) -> Tensor:
        """Page of each `page_tokens` tokens in order, int32 [pages]."""
        return torch.from_numpy(self._table[:self._count])

    @property
    def table(self) -> Pages:
        """The same as an array, for whoever lays out the rows of a step."""
        return self._table[:self._count]

    @property
    def bytes(self) -> int:
        """Bytes of slot and pages, shared ones included."""
        return self.memory.slot_bytes + self._count * self.memory.page_bytes

    def reserve(self, tokens: int) -> bool:
        """Have pages for so many more tokens, the last one safe to write; `False`, and nothing changed, where there is no room now."""
        memory = self.memory
        size = memory.page_tokens
        copying = tokens > 0 and not self._owned and memory.owners(int(self._table[self._count - 1])) > 1
        missing = max(0, -(-(self.length + tokens) // size) - self._count)
        if not missing and not copying:  # nearly every step of decoding
            self._owned = self._owned or tokens > 0
            return True
        if not self.store.room(pages=missing + copying):
            return False
        new = memory.take_pages(missing + copying)
        if new is None:
            return False
        if copying:
            old = self._table[self._count - 1:self._count].copy()
            memory.pool.copy_page(int(old[0]), int(new[0]))
            self._table = self._table.copy()
            self._table[self._count - 1] = new[0]
            memory.give_pages(old, live=True)
        if tokens > 0:
            self._owned = True
        self._append(new[int(copying):])
        return True

    def copies(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Checkpoints worth taking in a forward over positions `start` to `stop`: (new tokens seen, slot), ascending.

        Where memory is free every hash block's end gets one. Where it is not, ends of turns and the last block of the forward replace what
        is worth less.
        """
        self._drop_pending()
        if self._tip is None or start // self.index.block == stop // self.index.block:
            return []
        block, memory, store = self.index.block, self.memory, self.store
        depths = range(start // block + 1, stop // block + 1)
        self.index.chain(self.root, self.data, self.digests, stop // block)
        before = start
        node: Node | None = self._tip
        for depth in depths:
            node = node.children.get(self.digests[depth - 1]) if node is not None and depth <= len(self.digests) else None
            turn, last = depth in self.turns, depth == depths[-1]
            if node is not None and node.checkpoint is not None:
                before = depth * block
            elif memory.fits(slots=1) or (
                (turn or last) and store.room(slots=1, worth=store.worth.prospect(before, depth * block, turn))
            ):
                slot = memory.take_slot()
                assert slot is not None
                self._pending[depth], before = slot, depth * block
        return [(depth * block - start, slot) for depth, slot in self._pending.items()]

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens went through the model: full hash blocks are indexed, checkpoints published.

        Raises `ConfigError` for tokens that are not those of the prompt, or for which nothing was reserved.
        """
        new, at = packed(tokens), self.length * ID_BYTES
        known = self.data[at:at + len(new)]
        if known != new[:len(known)]:
            raise ConfigError(f"'tokens' after {self.length} are not those that the sequence was opened with")
        if self.length + len(tokens) > self._count * self.memory.page_tokens:
            raise ConfigError(f"{len(tokens)} tokens after {self.length} have no pages; reserve them before the forward")
        self.data += new[len(known):]
        self.length += len(tokens)
        if self._tip is not None and self.length // self.index.block > self._tip.depth:
            self._index()
        self._drop_pending()
        self._count_once()

    def fork(self) -> Held:
        """Another sequence with the same past: pages are shared, the state is copied. Raises `CapacityError` where there is no room."""
        slot = self.store.new_slot()
        if slot is None:
            raise CapacityError(f"no room to fork: running sequences take {format_bytes(self.memory.live_bytes)} of the cache's "
                                f"{format_bytes(self.memory.budget_bytes)}; wait for one to end or raise the memory budget")
        self.memory.pool.copy(self.slot, slot)
        pages = self._table[:-(-self.length // self.memory.page_tokens)].copy()
        self.memory.share(pages, live=True)
        if self._tip is not None:
            self._tip.pins += 1
        child = Held(self.store, self.root, self._tip, slot, self.data[:self.length * ID_BYTES], pages)
        child.digests, child.turns = self.digests[:self.length // self.index.block], set(self.turns)
        child.note, child.cached_tokens = f"forked after {self.length} tokens", self.length
        child.error = self.error
        child.length, child._owned = self.length, self.length % self.memory.page_tokens == 0
        return child

    def close(self, keep: bool = True) -> None:
        """The sequence ends; slot and pages are free. What it added to the cache stays, or with `keep` False goes unless others use it."""
        if not self._open:
            return
        self._open = False
        store, tip = self.store, self._tip
        self._drop_pending()
        if tip is not None:
            if keep:
                self._mark_end(tip)
                store.spill(tip)
            tip.pins -= 1
            while not keep and tip.parent is not None and tip.digest in self._made and not tip.children and not tip.pins:
                tip.parent.pins += 1
                (store.prune if tip.checkpoint is None else store.drop)(tip)
                tip = tip.parent
                tip.pins -= 1
            store.prune(tip)
        self.memory.give_pages(self._table[:self._count], live=True)
        self.memory.give_slot(self.slot)
        self.store.sequences -= 1

    def _mark_end(self, tip: Node) -> None:
        """Conversations go on from their end: the deepest checkpoint stays longer, the one that this sequence began from no longer."""
        node: Node | None = tip
        while node is not None and node.checkpoint is None:
            node = node.parent
        if node is None or node.checkpoint is None:
            return
        before = None if self._start is None else self._start.checkpoint
        if node is not self._start and before is not None and before.kind == "end":
            before.kind = "grid"
        if node.checkpoint.kind == "grid":
            node.checkpoint.kind = "end"
        self.store.worth.touch(node)

    def load(self, segment: Segment) -> bool:
        """Go on to the end of a piece from the disk without computing; `False`, and nothing changed, where it does not fit."""
        start, stop, size = self.length, segment.name.stop, self.memory.page_tokens
        ids = self.data[segment.name.start * ID_BYTES:stop * ID_BYTES]
        if not segment.name.start <= start < stop or ids != segment.tokens or not self.reserve(stop - start):
            return False
        pool, places = self.memory.pool, torch.arange(start, stop)
        latents = segment.latents[start - segment.name.start:].to(pool.latents.device)
        pool.latents[self.pages.long()[places // size], :, places % size] = latents
        unpack(segment.state, pool, self.slot)
        self.error = segment.error
        self.turns.add(stop // self.index.block)
        self.advance(unpacked(bytes(self.data[start * ID_BYTES:stop * ID_BYTES])))
        return True

    def leave(self) -> None:
        """Go on without the cache: nothing more is indexed."""
        tip, self._tip = self._tip, None
        if tip is not None:
            self.store.unpin(tip)

    def _count_once(self) -> None:
        """A prompt counts when its first step was done: one that found no room comes again."""
        if self.uncounted is None:
            return
        counters, (asked, tokens) = self.store.counters, self.uncounted
        counters.lookups += asked
        counters.hits += self.cached_tokens > 0
        counters.prompt_tokens += tokens
        counters.cached_tokens += self.cached_tokens
        self.uncounted = None

    def _index(self) -> None:
        """Index the blocks that are full by now, and publish the checkpoints that were taken of them."""
        tip = self._tip
        assert tip is not None
        block, width, size = self.index.block, self.index.width, self.memory.page_tokens
        full = self.length // block
        self.index.chain(self.root, self.data, self.digests, full)
        for depth in range(tip.depth + 1, full + 1):
            digest, tokens = self.digests[depth - 1], bytes(self.data[(depth - 1) * width:depth * width])
            node = tip.children.get(digest)
            if node is None:
                pages = self._table[(depth - 1) * block // size:-(-depth * block // size)]
                node = self.store.add(tip, digest, tokens, tuple(pages.tolist()))
                self._made.add(digest)
            else:
                self._adopt(node)
            node.pins += 1
            tip.pins -= 1
            self._tip = tip = node
            if node.checkpoint is None:
                self._publish(node, full)

    def _adopt(self, node: Node) -> None:
        """Somebody computed this block before or meanwhile: use the pages that it ends, and give back our own of the same tokens."""
        block, size = self.index.block, self.memory.page_tokens
        first = (node.depth - 1) * block // size
        for i, page in enumerate(node.pages, first):
            own = int(self._table[i])
            if (i + 1) * size <= node.depth * block and own != page:
                self.memory.share(np.array([page], np.int32), live=True)
                self._table[i] = page
                self.memory.give_pages(np.array([own], np.int32), live=True)

    def _publish(self, node: Node, full: int) -> None:
        """Make the copy that was taken after this block its checkpoint; at the sequence's own end, its state can still be copied."""
        kind = self._kind(node.depth)
        slot = self._pending.pop(node.depth, None)
        if slot is None and node.depth == full and self.length == full * self.index.block:
            start = self.length - self.index.block
            if self.store.room(slots=1, worth=self.store.worth.prospect(start, self.length, kind == "turn")):
                slot = self.memory.take_slot()
                assert slot is not None
                self.memory.pool.copy(self.slot, slot)
        if slot is not None:
            self.store.publish(node, slot, kind, self.error)

    def _kind(self, depth: int) -> Kind:
        return "turn" if depth in self.turns else "grid"

    def _append(self, pages: Pages) -> None:
        """Put pages at the end; the array grows by doubling."""
        needed = self._count + len(pages)
        if needed > len(self._table):
            grown = np.zeros(max(needed, 2 * len(self._table)), np.int32)
            grown[:self._count] = self._table[:self._count]
            self._table = grown
        self._table[self._count:needed] = pages
        self._count = needed

    def _drop_pending(self) -> None:
        for slot in self._pending.values():
            self.memory.give_slot(slot)
        self._pending.clear()
