"""Which item comes next: shuffled documents, any resumable generator, and mixtures of them by weight.

A source hands out items forever and can say in a few numbers where it is. A mixture gives the next turn to the source that
is furthest behind its share of tokens, so shares are exact at any moment and no random state has to be kept. Long documents
can be seen more often, as K3 does when it extends the context (report section 3). Read next: `packing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from gnomon.data.images import ImageAt
from gnomon.data.shards import Pieces, Shards
from gnomon.errors import CheckpointError, ConfigError, DataError

MAX_REPEATS = 8  # visits per epoch of one document, however long it is

State = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One document or sample: `tokens` (1-D integers, at least two), which of them are learnt, and whether it may be cut.

    `loss_mask[i]` says that token `i` counts when it is predicted (None: all do). `whole` keeps an item that fits the context
    in one piece, at the price of some padding before it; an item longer than the context is cut all the same.
    `images` stand at pads among the tokens.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray | None = None
    whole: bool = False
    images: tuple[ImageAt, ...] = ()


@runtime_checkable
class ItemSource(Protocol):
    """An endless, resumable stream of items; `state` is small and JSON-able, `restore(state())` changes nothing."""

    def next_item(self) -> Item:
        """The next item."""

    def state(self) -> State:
        """Where the stream is, as plain JSON values."""

    def restore(self, state: State) -> None:
        """Go to where `state` was taken; raises CheckpointError when it belongs to other data."""


@runtime_checkable
class FitsContext(Protocol):
    """A source whose items are made to fill a row."""

    def set_context(self, context: int) -> None:
        """Rows have this many tokens from here on."""


class ShuffledDocuments:
    """The documents of `shards` in a new random order each epoch; the order depends on nothing but seed and epoch.

    With `long_exponent` α a document of n tokens is visited clip((n / median)^α, 1, 8) times per epoch, the fraction decided by
    chance: no document is lost, long ones come more often. α may change in the middle of an epoch; first visits stay in place.
    """

    def __init__(self, shards: Shards | Pieces, seed: int = 0, long_exponent: float = 0.0) -> None:
        if len(shards) == 0:
            raise DataError(f"the {shards.split} split of {shards.folder} is empty")
        if seed < 0:
            raise ConfigError(f"seed = {seed}: expected a non-negative integer")
        self._shards, self._seed = shards, seed
        self._epoch, self._cursor = 0, 0
        self._exponent = _checked_exponent(long_exponent)
        self._order, self._keys = self._ordered()

    def next_item(self) -> Item:
        """The next document of this epoch, or the first of the next one."""
        if self._cursor == len(self._order):
            self._epoch, self._cursor = self._epoch + 1, 0
            self._order, self._keys = self._ordered()
        index = self._order[self._cursor]
        self._cursor += 1
        return Item(tokens=self._shards[index])

    def set_long_exponent(self, exponent: float) -> None:
        """Change α from here on; the position in the epoch stays."""
        if exponent == self._exponent:
            return
        place = self._keys[self._cursor] if self._cursor < len(self._keys) else None
        self._exponent = _checked_exponent(exponent)
        self._order, self._keys = self._ordered()
        self._cursor = len(self._keys) if place is None else int(np.searchsorted(self._keys, place))

    def state(self) -> State:
        """Epoch, place in its order, exponent, and what they belong to."""
        return {
            "fingerprint": self._shards.fingerprint,
            "seed": self._seed,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "long_exponent": self._exponent,
        }

    def restore(self, state: State) -> None:
        """Go to a place taken with the same shards and seed."""
        for name, mine in (("fingerprint", self._shards.fingerprint), ("seed", self._seed)):
            if state.get(name) != mine:
                raise CheckpointError(
                    f"the data position belongs to other data: {name} {state.get(name)!r}, here {mine!r}; resume with the corpus, "
                    "tokenizer and seed of the run, or start a new run"
                )
        self._epoch, self._cursor, self._exponent = state["epoch"], state["cursor"], state["long_exponent"]
        self._order, self._keys = self._ordered()

    def _ordered(self) -> tuple[np.ndarray, np.ndarray]:
        """The documents of this epoch in the order of random keys, one key per visit, and those keys."""
        count = len(self._shards)
        visits = np.ones(count, dtype=np.int64)
        if self._exponent:
            ratio = self._shards.lengths / np.median(self._shards.lengths)
            expected = np.clip(ratio**self._exponent, 1.0, MAX_REPEATS)
            chance = self._random(MAX_REPEATS) / 2.0**64
            visits = np.floor(expected).astype(np.int64) + (chance < expected % 1.0)
        chosen = [np.flatnonzero(visits > visit) for visit in range(int(visits.max()))]
        keys = np.concatenate([self._random(visit)[index] for visit, index in enumerate(chosen)])
        order = np.argsort(keys, kind="stable")
        return np.concatenate(chosen)[order], keys[order]

    def _random(self, stream: int) -> np.ndarray:
        """One 64-bit number per document; raw Philox output, which no numpy version may change."""
        counter = [0, 0, stream, self._epoch]
        return np.random.Philox(key=self._seed, counter=counter).random_raw(len(self._shards))


class Mixture:
    """Several sources as one: over time source `i` gives the fraction `weight_i / Σ weights` of the tokens.

    Shards are shuffled with `seed`; any other source is taken as it is. A mixture is itself a source.
    """

    def __init__(self, sources: Sequence[tuple[ItemSource | Shards | Pieces, float]], seed: int = 0) -> None:
        if not sources:
            raise ConfigError("a mixture needs at least one source")
        self._sources: list[ItemSource] = [
            ShuffledDocuments(source, seed + index) if isinstance(source, Shards | Pieces) else source
            for index, (source, _) in enumerate(sources)
        ]
        self._weights = _checked_weights([weight for _, weight in sources], len(sources))
        self._served = [0] * len(sources)

    def next_item(self) -> Item:
        """The next item of the source that is furthest behind its share."""
        active = [index for index, weight in enumerate(self._weights) if weight > 0]
        index = min(active, key=lambda i: self._served[i] / self._weights[i])
        try:
            item = _checked_item(self._sources[index].next_item(), index)
        except StopIteration:
            raise DataError(
                f"source {index} of the mixture has come to its end; a source must go on for ever, so let it start over"
            ) from None
        self._served[index] += item.tokens.size
        return item

    def configure(self, weights: Sequence[float] | None = None, long_exponent: float | None = None, context: int | None = None) -> None:
        """Change weights, the exponent of shuffled documents or the context from here on; the position in each source stays."""
        if weights is not None and list(weights) != self._weights:
            self._weights = _checked_weights(list(weights), len(self._sources))
            self._served = [0] * len(self._sources)  # the new shares hold from now on, they do not repair the past
        if long_exponent is not None:
            for source in self._sources:
                if isinstance(source, ShuffledDocuments):
                    source.set_long_exponent(long_exponent)
        if context is not None:
            for source in self._sources:
                if isinstance(source, FitsContext):
                    source.set_context(context)

    def state(self) -> State:
        """Weights, tokens served by each source, and the state of each."""
        return {
            "weights": list(self._weights),
            "served": list(self._served),
            "sources": [source.state() for source in self._sources],
        }

    def restore(self, state: State) -> None:
        """Go to a place taken with the same number and kinds of sources."""
        if len(state["sources"]) != len(self._sources):
            raise CheckpointError(
                f"the data position belongs to a mixture of {len(state['sources'])} sources, this one has {len(self._sources)}; "
                "resume with the sources of the run"
            )
        self._weights, self._served = list(state["weights"]), list(state["served"])
        for source, inner in zip(self._sources, state["sources"], strict=True):
            source.restore(inner)


def _checked_exponent(exponent: float) -> float:
    if not 0.0 <= exponent <= 4.0:
        raise ConfigError(f"long_exponent = {exponent}: expected a number from 0 (each document once) to 4")
    return float(exponent)


def _checked_weights(weights: list[float], count: int) -> list[float]:
    valid = len(weights) == count and all(math.isfinite(weight) and weight >= 0 for weight in weights) and sum(weights) > 0
    if not valid:
        raise ConfigError(f"weights = {weights}: expected {count} non-negative numbers, one per source, not all zero")
    return [float(weight) for weight in weights]


def _checked_item(item: Item, index: int) -> Item:
    tokens, mask = item.tokens, item.loss_mask
    where = f"source {index} of the mixture"
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size < 2:
        raise DataError(f"{where} gave tokens of shape {tokens.shape} and type {tokens.dtype}; expected 1-D integers, at least two")
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != np.bool_):
        raise DataError(f"{where} gave a loss mask {mask.dtype}{mask.shape} for {tokens.size} tokens; expected as many booleans")
    if any(image.start < 0 or image.start + image.count > tokens.size for image in item.images):
        raise DataError(f"{where} gave an image that stands outside its {tokens.size} tokens")
    return item
