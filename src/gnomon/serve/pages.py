"""Memory of a server: one budget in bytes for pages of latents, slots of KDA states and whatever else the cache keeps.

A pool has two kinds of things and nobody knows beforehand how many of each will be wanted: one long conversation needs pages, a hundred
short ones need slots. So both are laid out as large as the whole budget in address space, which costs nothing until it is written, and
bytes are counted: what was written and is free again goes back to the system as soon as something else needs its bytes. Who owns what is
counted here, who may be evicted is decided in `prefix.py`. Read next: `index.py`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.errors import CapacityError, ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.inference_state import StatePool
from gnomon.units import format_bytes

MOST = 1 << 20
"""Most pages or slots that are laid out: more of them than this are never in use at once."""
EAGER_SLOTS = 0.5
"""Share of the budget that goes to slots where memory is committed at once, as on a GPU."""

Pages = NDArray[np.int32]


class MakesPools(Protocol):
    """What makes pools: `InferenceModel` or another runner."""

    config: ModelConfig

    def new_pool(self, slots: int, tokens: int, page_tokens: int = 64, dtype: torch.dtype = torch.float32) -> StatePool:
        """A pool with this many slots and pages for `tokens` tokens in all."""


class Memory:
    """Pages with reference counts, slots, and loose bytes, never more than `budget_bytes` together.

    A *live* reference is a running sequence's; the others are the cache's, which could give them up. Raises `CapacityError` for a budget
    that holds not even one sequence of one page.
    """

    def __init__(self, runner: MakesPools, budget_bytes: int, page_tokens: int = 64, dtype: torch.dtype = torch.float32):
        probe = runner.new_pool(1, page_tokens, page_tokens, dtype)
        self.slot_bytes, self.page_bytes, self.page_tokens = probe.slot_bytes, probe.page_bytes, page_tokens
        self.budget_bytes, self.config = budget_bytes, runner.config
        if budget_bytes < self.slot_bytes + self.page_bytes:
            raise CapacityError(f"a memory budget of {format_bytes(budget_bytes)} holds no sequence: a state takes "
                                f"{format_bytes(self.slot_bytes)}, a page {format_bytes(self.page_bytes)}; raise it")
        lazy = probe.latents.device.type == "cpu"
        slots = _count(budget_bytes if lazy else int(budget_bytes * EAGER_SLOTS), self.slot_bytes)
        pages = _count(budget_bytes if lazy else budget_bytes - slots * self.slot_bytes, self.page_bytes)
        self.pool = runner.new_pool(slots, pages * page_tokens, page_tokens, dtype)
        giving = lazy and sys.platform == "linux"
        self._slots = Shelf([self.pool.matrices, self.pool.conv] if giving else [], slots, self.slot_bytes)
        self._pages = Shelf([self.pool.latents] if giving else [], pages, self.page_bytes)
        self._references = np.zeros(pages, np.int32)
        self._live_references = np.zeros(pages, np.int32)
        self._live_slots: set[int] = set()
        self._live_pages = 0
        self.loose_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that somebody owns."""
        return self._slots.used_bytes + self._pages.used_bytes + self.loose_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody owns."""
        return self.budget_bytes - self.used_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes that running sequences own; no eviction can free them."""
        return self._live_pages * self.page_bytes + len(self._live_slots) * self.slot_bytes

    @property
    def committed_bytes(self) -> int:
        """Bytes that were written and not given back to the system: what the process really occupies, up to rounding."""
        return self._slots.committed_bytes + self._pages.committed_bytes + self.loose_bytes

    @property
    def pages_used(self) -> int:
        """Pages that somebody owns."""
        return self._pages.used

    @property
    def slots_used(self) -> int:
        """Slots that somebody owns, running states and checkpoints together."""
        return self._slots.used

    def bytes_for(self, tokens: int) -> int:
        """Bytes of one running sequence of so many tokens, sharing nothing: what can never fit is more than `budget_bytes`."""
        return self.slot_bytes + -(-tokens // self.page_tokens) * self.page_bytes

    def fits(self, *, slots: int = 0, pages: int = 0) -> bool:
        """Whether so many can be taken now."""
        enough = slots <= self._slots.left and pages <= self._pages.left
        return enough and slots * self.slot_bytes + pages * self.page_bytes <= self.free_bytes

    def could_fit(self, *, slots: int = 0, pages: int = 0) -> bool:
        """Whether so many could be taken if all that is not live were given back."""
        enough = slots <= self._slots.count - len(self._live_slots) and pages <= self._pages.count - self._live_pages
        return enough and slots * self.slot_bytes + pages * self.page_bytes + self.live_bytes <= self.budget_bytes

    def take_slot(self) -> int | None:
        """A slot with undefined contents, live, or `None` where there is no room now."""
        if not self.fits(slots=1):
            return None
        self._reclaim(self._slots, 1)
        slot = self._slots.take()
        self._live_slots.add(slot)
        return slot

    def settle_slot(self, slot: int, *, live: bool = False) -> None:
        """From now on the slot is the cache's, or a running sequence's again."""
        (self._live_slots.add if live else self._live_slots.discard)(slot)

    def give_slot(self, slot: int) -> None:
        """Give a slot back."""
        self._live_slots.discard(slot)
        self._slots.give(slot)

    def take_pages(self, count: int) -> Pages | None:
        """Pages with undefined contents and one live reference each, or `None` where there is no room for all of them now."""
        if not self.fits(pages=count):
            return None
        self._reclaim(self._pages, count)
        pages = np.fromiter((self._pages.take() for _ in range(count)), np.int32, count)
        self._references[pages] = 1
        self._live_references[pages] = 1
        self._live_pages += count
        return pages

    def share(self, pages: Pages, *, live: bool) -> None:
        """One more reference to each of these pages, no page twice in one call."""
        if live:
            self._live_pages += int((self._live_references[pages] == 0).sum())
            self._live_references[pages] += 1
        self._references[pages] += 1

    def give_pages(self, pages: Pages, *, live: bool) -> int:
        """One reference to each less; pages without any are free. Returns how many that are."""
        if live:
            self._live_references[pages] -= 1
            self._live_pages -= int((self._live_references[pages] == 0).sum())
        self._references[pages] -= 1
        gone = pages[self._references[pages] == 0]
        assert not len(pages) or self._references[pages].min() >= 0, "a page was given back twice"
        for page in gone.tolist():
            self._pages.give(page)
        return len(gone)

    def owners(self, page: int) -> int:
        """References to a page."""
        return int(self._references[page])

    def take_bytes(self, count: int) -> bool:
        """Count bytes that live outside the pool, or say that there is no room."""
        if count > self.free_bytes:
            return False
        self.loose_bytes += count
        self._settle([self._pages, self._slots])
        return True

    def give_bytes(self, count: int) -> None:
        """Such bytes are gone."""
        self.loose_bytes -= count

    def _reclaim(self, shelf: Shelf, count: int) -> None:
        """Make sure that `count` more things of a shelf can be written within the budget."""
        self._settle([self._slots if shelf is self._pages else self._pages], max(0, count - shelf.warm) * shelf.size)

    def _settle(self, shelves: list[Shelf], more: int = 0) -> None:
        """Give free memory of these shelves back to the system until what is committed and `more` fit the budget."""
        over = self.committed_bytes + more - self.budget_bytes
        for shelf in shelves:
            over -= shelf.cool(over)


class Shelf:
    """Numbered things of one size; those that were used and are free again are *warm* until their memory is given back."""

    def __init__(self, tensors: list[torch.Tensor], count: int, size: int):
        self.size, self.used = size, 0
        self._spans = [(x.data_ptr(), x.nbytes // count) for x in tensors]
        self._warm: list[int] = []
        self._cold: list[int] = []
        self._fresh, self.count = 0, count

    @property
    def warm(self) -> int:
        """Free things whose memory is still committed."""
        return len(self._warm)

    @property
    def left(self) -> int:
        """Free things."""
        return self.count - self.used

    @property
    def used_bytes(self) -> int:
        """Bytes of what is in use."""
        return self.used * self.size

    @property
    def committed_bytes(self) -> int:
        """Bytes of what is in use or warm."""
        return (self.used + len(self._warm)) * self.size

    def take(self) -> int:
        """The number of a free thing, a warm one first; ask `left` before."""
        self.used += 1
        if self._warm:
            return self._warm.pop()
        if self._cold:
            return self._cold.pop()
        self._fresh += 1
        return self._fresh - 1

    def give(self, number: int) -> None:
        """It is free again."""
        self.used -= 1
        self._warm.append(number)

    def cool(self, wanted: int) -> int:
        """Give memory of warm things back to the system until `wanted` bytes are; returns how many were."""
        done = 0
        while done < wanted and self._warm and self.size:
            number = self._warm.pop()
            for start, length in self._spans:
                _discard(start + number * length, length)
            self._cold.append(number)
            done += self.size
        return done


def _count(budget: int, size: int) -> int:
    """How many things of a size a budget can hold at most."""
    return max(1, min(MOST, budget // size if size else MOST))


def _discard(start: int, length: int) -> None:
    """Tell the system that these bytes are not needed; only whole pages of the system's can go."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first and _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        raise ConfigError(f"the system refused to take {last - first} bytes back; memory of the pool is not what was asked for")


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
