"""Items to batches: rows filled to the last token, every document a segment of its own, a position that resumes exactly.

Documents are laid one after the other into rows of `context` tokens. What does not fit goes on at the start of the next row
as a new segment, so a document longer than the context becomes consecutive pieces; no token is dropped and none is trained
on twice. The target of a position is the next token of the same document, across a cut too; the last target is ``[EOS]``.
The stream of global batches does not depend on the number of ranks: rank r packs rows r, r + world, … of each.
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

from gnomon.data.mixture import Item, Mixture, State
from gnomon.data.shards import Shards
from gnomon.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Packed rows. `cu_seqlens` holds the segment bounds of the flattened B·T stream; each row starts a segment.

    `loss_mask` marks the targets that are learnt; `token_mask` marks real tokens (padding, if any, is False in both).
    """

    tokens: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    token_mask: Bool[Tensor, "B T"]
    cu_seqlens: Int[Tensor, " bounds"]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        return Batch(
            tokens=self.tokens.to(device),
            targets=self.targets.to(device),
            loss_mask=self.loss_mask.to(device),
            token_mask=self.token_mask.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
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

    def put(self, row: int, column: int, item: Item, offset: int, size: int) -> None:
        """Copy positions offset … offset+size-1 of `item` and their targets."""
        here, there = slice(column, column + size), slice(offset + 1, offset + 1 + size)
        self.tokens[row, here] = item.tokens[offset : offset + size]
        self.targets[row, here] = item.tokens[there]
        self.loss_mask[row, here] = True if item.loss_mask is None else item.loss_mask[there]
        self.token_mask[row, here] = True
        self.lengths.append(size)

    def batch(self) -> Batch:
        """The finished rows as tensors that share their memory."""
        bounds = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64))).astype(np.int32)
        return Batch(
            tokens=torch.from_numpy(self.tokens),
            targets=torch.from_numpy(self.targets),
            loss_mask=torch.from_numpy(self.loss_mask),
            token_mask=torch.from_numpy(self.token_mask),
            cu_seqlens=torch.from_numpy(bounds),
        )


class _Packer:
    """The item in hand, how much of it is used, and the rule that fills a row."""

    def __init__(self, pull: Callable[[], Item | None]) -> None:
        self.pull = pull
        self.item: Item | None = None
        self.offset = 0

    def fill(self, context: int, sheet: _Sheet | None, row: int) -> int:
        """Fill one row (write it only if `sheet` is given); returns its real tokens, fewer than `context` if it was padded."""
        column = 0
        while column < context:
            if self.item is None:
                self.item, self.offset = self.pull(), 0
                if self.item is None:
                    break
            left, room = self.item.tokens.size - 1 - self.offset, context - column
            if self.item.whole and self.offset == 0 and room < left <= context:
                break
            size = min(left, room)
            if size and sheet is not None:
                sheet.put(row, column, self.item, self.offset, size)
            column, self.offset = column + size, self.offset + size
            if size == left:
                self.item = None
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
        self._packer = _Packer(self._pull)
        # A position is the mixture's state before some item, the number of items taken since, and how much of the last is used.
        self._base: State = mixture.state()
        self._pulled, self._fresh = 0, True
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
        self._mixture.configure(weights=weights, long_exponent=long_exponent)

    def next(self) -> Batch:
        """The rows of this rank in the next global batch."""
        sheet = _Sheet(self.batch_size // self._world, self.context, self._pad_id)
        self._fresh = True
        for row in range(self.batch_size):
            mine = row % self._world == self._rank
            self.num_tokens += self._packer.fill(self.context, sheet if mine else None, row // self._world)
        self.num_batches += 1
        return sheet.batch()

    def __iter__(self) -> Iterator[Batch]:
        """Batches for ever."""
        while True:
            yield self.next()

    def _pull(self) -> Item:
        if self._fresh:  # one snapshot per batch: replaying at most one batch of items is cheap, a snapshot per item is not
            self._base, self._pulled, self._fresh = copy.deepcopy(self._mixture.state()), 0, False
        self._pulled += 1
        return self._mixture.next_item()

    def state(self) -> State:
        """The exact position between two batches, as small plain JSON values."""
        return {
            "base": copy.deepcopy(self._base),
            "pulled": self._pulled,
            "offset": self._packer.offset if self._packer.item is not None else -1,
            "now": copy.deepcopy(self._mixture.state()),
            "batches": self.num_batches,
            "tokens": self.num_tokens,
        }

    def restore(self, state: State) -> None:
        """Go to a position; the next batch is the one that followed it. Shape comes from the stage, not from the position.

        Raises CheckpointError when the position belongs to other data.
        """
        self._base, self._pulled, self._fresh = copy.deepcopy(state["base"]), state["pulled"], False
        self._mixture.restore(copy.deepcopy(self._base))
        item = None
        for _ in range(self._pulled):
            item = self._mixture.next_item()
        self._packer.item = item if state["offset"] >= 0 else None
        self._packer.offset = max(0, state["offset"])
        self._mixture.restore(copy.deepcopy(state["now"]))
        self.num_batches, self.num_tokens = state["batches"], state["tokens"]


def one_pass(shards: Shards, batch_size: int, context: int, *, pad_id: int = 0, whole: bool = False) -> Iterator[Batch]:
    """Each document of `shards` once, in order, for evaluation; the end of the last batch is padding.

    With `whole` a document that fits the context is not cut, so that each of its tokens sees all that precedes it.
    """
    items = (Item(tokens=shards[index], whole=whole) for index in range(len(shards)))
    packer = _Packer(lambda: next(items, None))
    while True:
        sheet = _Sheet(batch_size, context, pad_id)
        filled = [packer.fill(context, sheet, row) for row in range(batch_size)]
        if not any(filled):
            return
        yield sheet.batch()
