"""Items to batches: rows filled to the last token, every document a segment of its own, a position that resumes exactly.

Each row of the batch is a lane with documents of its own, laid one after the other. What does not fit goes on in the same lane of the
next batch as a new segment, so a document longer than the context becomes consecutive pieces, and the rows of one batch come from
different documents; no token is dropped and none is trained on twice. The target of a position is the next token of the same
document, across a cut too; the last target is ``[EOS]``. The stream of global batches does not depend on the number of ranks:
rank r packs rows r, r + world, … of each.
Read next: `gnomon.train.loop`, which consumes the batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gnomon.data.images import ImageAt
from gnomon.data.mixture import Item, Mixture, State
from gnomon.data.shards import Shards
from gnomon.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Packed rows. `cu_seqlens` holds the segment bounds of the flattened B·T stream; each row starts a segment.

    `loss_mask` marks the targets that are learnt; `token_mask` marks real tokens (padding, if any, is False in both).
    `images` stand at positions of the flattened stream; their pixels stay in host memory.
    """

    tokens: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    token_mask: Bool[Tensor, "B T"]
    cu_seqlens: Int[Tensor, " bounds"]
    images: tuple[ImageAt, ...] = ()

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        return Batch(
            tokens=self.tokens.to(device),
            targets=self.targets.to(device),
            loss_mask=self.loss_mask.to(device),
            token_mask=self.token_mask.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            images=self.images,
        )

    def split(self, parts: int) -> list[Batch]:
        """Cut into `parts` micro-batches of consecutive rows. Raises ConfigError when the rows do not divide evenly."""
        rows, context = self.tokens.shape
        if parts < 1 or rows % parts:
            raise ConfigError(f"{rows} rows per rank cannot be cut into {parts} micro-batches; choose a divisor of {rows}")
        size = rows // parts
        return [self._rows(start, start + size, context) for start in range(0, rows, size)]

    def _rows(self, start: int, stop: int, context: int) -> Batch:
        first, last = start * context, stop * context
        inside = (self.cu_seqlens >= first) & (self.cu_seqlens <= last)
        return Batch(
            tokens=self.tokens[start:stop],
            targets=self.targets[start:stop],
            loss_mask=self.loss_mask[start:stop],
            token_mask=self.token_mask[start:stop],
            cu_seqlens=self.cu_seqlens[inside] - first,
            images=tuple(part for image in self.images if (part := image.within(first, last)) is not None),
        )

    def positions(self) -> Int[Tensor, "B T"]:
        """Place of each token inside its segment, from 0."""
        bounds = self.cu_seqlens.long()
        starts = torch.repeat_interleave(bounds[:-1], bounds.diff())
        flat = torch.arange(self.tokens.numel(), device=self.tokens.device) - starts
        return flat.view_as(self.tokens)


class _Sheet:
    """Rows under construction on one rank; a row of another rank is walked through without being written."""

    def __init__(self, rows: int, context: int, pad_id: int) -> None:
        self.tokens = np.full((rows, context), pad_id, dtype=np.int64)
        self.targets = np.full((rows, context), pad_id, dtype=np.int64)
        self.loss_mask = np.zeros((rows, context), dtype=np.bool_)
        self.token_mask = np.zeros((rows, context), dtype=np.bool_)
        self.lengths: list[int] = []
        self.images: list[ImageAt] = []

    def put(self, row: int, column: int, item: Item, offset: int, size: int) -> None:
        """Copy positions offset … offset+size-1 of `item` and their targets."""
        here, there = slice(column, column + size), slice(offset + 1, offset + 1 + size)
        self.tokens[row, here] = item.tokens[offset : offset + size]
        self.targets[row, here] = item.tokens[there]
        self.loss_mask[row, here] = True if item.loss_mask is None else item.loss_mask[there]
        self.token_mask[row, here] = True
        self.lengths.append(size)
        start = row * self.tokens.shape[1] + column
        self.images += [part.moved(start) for image in item.images if (part := image.within(offset, offset + size)) is not None]

    def batch(self) -> Batch:
        """The finished rows as tensors that share their memory."""
        bounds = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64))).astype(np.int32)
        return Batch(
            tokens=torch.from_numpy(self.tokens),
            targets=torch.from_numpy(self.targets),
            loss_mask=torch.from_numpy(self.loss_mask),
            token_mask=torch.from_numpy(self.token_mask),
            cu_seqlens=torch.from_numpy(bounds),
            images=tuple(self.images),
        )


@dataclass(slots=True, kw_only=True)
class _InHand:
    """An item, how much of it is used, and the mixture's state just before it was drawn."""

    item: Item
    offset: int = 0
    origin: State | None = None


class _Lane:
    """The item in hand and the rule that fills a row."""

    def __init__(self, pull: Callable[[], _InHand | None]) -> None:
        self.pull = pull
        self.hand: _InHand | None = None

    def fill(self, context: int, sheet: _Sheet | None, row: int) -> int:
        """Fill one row (write it only if `sheet` is given); returns its real tokens, fewer than `context` if it was padded."""
        column = 0
        while column < context:
            if self.hand is None:
                self.hand = self.pull()
            if self.hand is None:
                break
            item, offset = self.hand.item, self.hand.offset
            left, room = item.tokens.size - 1 - offset, context - column
            if item.whole and offset == 0 and room < left <= context:
                break
            size = min(left, room)
            if size and sheet is not None:
                sheet.put(row, column, item, offset, size)
            column, self.hand.offset = column + size, offset + size
            if size == left:
                self.hand = None
        if column < context and sheet is not None:
            sheet.lengths.append(context - column)
        return column


class PackedBatches:
    """The endless stream of batches of one rank, with an exact position.

    `batch_size` counts the rows of the global batch; each rank gets every `world`-th of them. `state()` is the same on all
    ranks and does not depend on `world`, so a run may resume with another number of ranks.
    """

    def __init__(self, mixture: Mixture, batch_size: int, context: int, rank: int = 0, world: int = 1, *, pad_id: int = 0) -> None:
        self._mixture, self._rank, self._world, self._pad_id = mixture, rank, world, pad_id
        # A position is what each lane has in hand, as the mixture's state before that item and how much of it is used.
        self._lanes: list[_Lane] = []
        self.num_batches, self.num_tokens = 0, 0
        self.batch_size, self.context = 0, 0
        self.set_stage(batch_size=batch_size, context=context)

    def set_stage(
        self,
        *,
        batch_size: int | None = None,
        context: int | None = None,
        long_exponent: float | None = None,
        weights: tuple[float, ...] | None = None,
    ) -> None:
        """Change shape or mixture from the next batch on; the data position goes on where it is, in the middle of a document too."""
        batch_size, context = batch_size or self.batch_size, context or self.context
        if batch_size < 1 or batch_size % self._world:
            raise ConfigError(f"batch_size = {batch_size} rows cannot be shared by {self._world} ranks; choose a multiple of {self._world}")
        if context < 2:
            raise ConfigError(f"context = {context}: a row needs at least 2 tokens")
        self.batch_size, self.context = batch_size, context
        self._lanes += [_Lane(self._pull) for _ in range(batch_size - len(self._lanes))]
        self._mixture.configure(weights=weights, long_exponent=long_exponent, context=context)

    def next(self) -> Batch:
        """The rows of this rank in the next global batch."""
        sheet = _Sheet(self.batch_size // self._world, self.context, self._pad_id)
        for row in range(self.batch_size):
            mine = row % self._world == self._rank
            self.num_tokens += self._lanes[row].fill(self.context, sheet if mine else None, row // self._world)
        self.num_batches += 1
        return sheet.batch()

    def __iter__(self) -> Iterator[Batch]:
        """Batches for ever."""
        while True:
            yield self.next()

    def _pull(self) -> _InHand:
        """What an earlier, wider batch left unfinished in lanes that are now idle, else the mixture's next item."""
        for lane in self._lanes[self.batch_size :]:
            if lane.hand is not None:
                taken, lane.hand = lane.hand, None
                return taken
        origin = self._mixture.state()
        return _InHand(item=self._mixture.next_item(), origin=origin)

    def state(self) -> State:
        """The exact position between two batches, as small plain JSON values."""
        hands = [lane.hand for lane in self._lanes]
        lanes = [None if hand is None else {"origin": copy.deepcopy(hand.origin), "offset": hand.offset} for hand in hands]
        return {"lanes": lanes, "now": copy.deepcopy(self._mixture.state()), "batches": self.num_batches, "tokens": self.num_tokens}

    def restore(self, state: State) -> None:
        """Go to a position; the next batch is the one that followed it. Shape comes from the stage, not from the position.

        Raises CheckpointError when the position belongs to other data.
        """
        lanes = [_Lane(self._pull) for _ in range(max(self.batch_size, len(state["lanes"])))]
        for lane, saved in zip(lanes, state["lanes"], strict=False):
            if saved is not None:
                self._mixture.restore(copy.deepcopy(saved["origin"]))
                lane.hand = _InHand(item=self._mixture.next_item(), offset=saved["offset"], origin=copy.deepcopy(saved["origin"]))
        self._lanes = lanes
        self._mixture.restore(copy.deepcopy(state["now"]))
        self.num_batches, self.num_tokens = state["batches"], state["tokens"]


def one_pass(shards: Shards, batch_size: int, context: int, *, pad_id: int = 0, whole: bool = False) -> Iterator[Batch]:
    """Each document of `shards` once, in order, for evaluation; the end of the last batch is padding.

    With `whole` a document that fits the context is not cut, so that each of its tokens sees all that precedes it.
    """
    items = (Item(tokens=shards[index], whole=whole) for index in range(len(shards)))
    lane = _Lane(lambda: next((_InHand(item=item) for item in items), None))
    while True:
        sheet = _Sheet(batch_size, context, pad_id)
        filled = [lane.fill(context, sheet, row) for row in range(batch_size)]
        if not any(filled):
            return
        yield sheet.batch()
