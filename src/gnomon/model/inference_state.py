"""What sequences keep between calls of an inference model, in pools: a slot of KDA states and pages of latents for each.

A slot is one sequence's state in all KDA layers, side by side, so that it can be copied, kept or written to disk as one piece; a page is
the latents of `page_tokens` tokens in all MLA layers. Who owns which slot and page is the caller's business: sequences may share pages
of a common past, and a slot may hold a state that nobody advances (a checkpoint). Read next: `inference.py`.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from gnomon.errors import ConfigError
from gnomon.kernels.packed.matrix import BF16, F32
from gnomon.model import inference_layout as layout
from gnomon.model.config import ModelConfig

STRETCH = 512
"""Longest stretch of one sequence that a pass takes (`CUT` in csrc/layer_model.cpp); held sequences bring at most as many tokens."""

_KINDS = (("tokens", torch.int64, 1), ("embeddings", torch.float32, 2), ("bounds", torch.int64, 1), ("past", torch.int64, 1),
          ("slots", torch.int64, 1), ("pages", torch.int32, 2), ("wanted", torch.int64, 1), ("copies", torch.int64, 2))


class StatePool:
    """Memory for states: `matrices` [slots, layers, H, K, K] and `conv` [slots, layers, W-1, 3·H·K] in fp32, and latents.

    `latents` [pages, layers, page_tokens, C+R] are fp32 or bf16. Nothing is cleared: a sequence without a past starts from zeros whatever
    its slot held.
    """

    def __init__(self, config: ModelConfig, slots: int, pages: int, page_tokens: int = 64, dtype: torch.dtype = torch.float32):
        if slots < 1 or pages < 0 or page_tokens < 1:
            raise ConfigError(f"a pool of {slots} slots and {pages} pages of {page_tokens} tokens cannot hold a sequence; ask for more")
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"'dtype' of latents is {dtype}; use torch.float32 or torch.bfloat16")
        kda, mla = config.mixers.get("kda"), config.mixers.get("mla")
        layers = config.layers.count("kda")
        heads, width, taps = (kda.num_heads, kda.head_dim, kda.short_conv_kernel_size) if kda is not None else (0, 0, 1)
        row = 0 if mla is None else mla.cached_values_per_token()
        self.matrices = torch.empty(slots, layers, heads, width, width)
        self.conv = torch.empty(slots, layers, taps - 1, 3 * heads * width)
        self.latents = torch.empty(pages, config.layers.count("mla"), page_tokens, row, dtype=dtype)
        self.config, self.slots, self.pages, self.page_tokens = config, slots, pages, page_tokens
        form = F32 if dtype == torch.float32 else BF16
        self.structure = layout.Pools(self.matrices.data_ptr(), self.conv.data_ptr(), self.latents.data_ptr(), form, page_tokens)
        self.address = ctypes.addressof(self.structure)

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` equal to slot `source`: what forking a sequence needs beside sharing its pages."""
        for slot in (source, target):
            if not 0 <= slot < self.slots:
                raise ConfigError(f"slot {slot} does not exist; the pool has {self.slots}")
        self.matrices[target] = self.matrices[source]
        self.conv[target] = self.conv[source]

    def copy_page(self, source: int, target: int) -> None:
        """Make page `target` equal to page `source`: before writing to a page that another sequence shares."""
        for page in (source, target):
            if not 0 <= page < self.pages:
                raise ConfigError(f"page {page} does not exist; the pool has {self.pages}")
        self.latents[target] = self.latents[source]

    def fork(self, sources: NDArray[np.int64], targets: NDArray[np.int64], pages: NDArray[np.int32], into: NDArray[np.int32]) -> None:
        """Make each slot of `targets` equal to that of `sources`, and each page of `into` equal to that of `pages`, all at once."""
        for places, most in ((sources, self.slots), (targets, self.slots), (pages, self.pages), (into, self.pages)):
            if len(places) and not 0 <= int(places.min()) <= int(places.max()) < most:
                raise ConfigError(f"slots or pages {places.tolist()[:5]} are not among the {most} of the pool")
        one, other = torch.from_numpy(sources), torch.from_numpy(targets)
        self.matrices[other], self.conv[other] = self.matrices[one], self.conv[one]
        self.latents[torch.from_numpy(into.astype(np.int64))] = self.latents[torch.from_numpy(pages.astype(np.int64))]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return (self.matrices.nbytes + self.conv.nbytes) // self.slots

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.latents.nbytes // max(self.pages, 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """The new tokens of any number of sequences, end to end, and where each sequence's past is.

    Sequence s brings rows `bounds[s]:bounds[s+1]` (one, thousands, or none) after `past[s]` earlier tokens; its state is in slot
    `slots[s]`, its position p in page `pages[s, p // page_tokens]`. `embeddings` replaces the look-up of `tokens`. `wanted` names the rows
    whose results are returned, ascending (default: the last row of each sequence that brings any). `copies` lists (sequence, new tokens
    seen, slot): the state after so many new tokens is copied into that slot on the way. The last `held` sequences are read but not
    advanced, for drafts whose acceptance is not known yet: `InferenceModel.advance` moves them on by any prefix later.
    """

    tokens: Tensor | None = None  # [N] int64
    embeddings: Tensor | None = None  # [N, D] fp32
    bounds: Tensor  # [S+1] int64
    past: Tensor  # [S] int64
    slots: Tensor  # [S] int64
    pages: Tensor  # [S, P] int32
    wanted: Tensor | None = None  # [W] int64
    copies: Tensor | None = None  # [C, 3] int64
    held: int = 0

    def last_rows(self) -> Int[Tensor, "W"]:
        """The last row of each sequence that brings any."""
        return self.bounds[1:][self.bounds[1:] > self.bounds[:-1]] - 1

    def check(self, config: ModelConfig, pool: StatePool) -> None:
        """Raise `ConfigError` for rows that do not fit together, the model or the pool, naming field and value."""
        if pool.config is not config and pool.config != config:
            raise ConfigError("the pool belongs to another model; take one of this model's 'new_pool'")
        self._check_types(config)
        bounds, past, slots = self.bounds.numpy(), self.past.numpy(), self.slots.numpy()
        count, lengths = self._count(), np.diff(bounds)
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != count or (lengths < 0).any():
            raise ConfigError(f"'bounds' must rise from 0 to the {count} rows, got {bounds.tolist()}")
        sequences = len(lengths)
        for name, rows in (("past", past), ("slots", slots), ("pages", self.pages)):
            if len(rows) != sequences:
                raise ConfigError(f"'{name}' has {len(rows)} entries for {sequences} sequences")
        if not 0 <= self.held <= sequences:
            raise ConfigError(f"'held' is {self.held}; there are {sequences} sequences")
        if (lengths[sequences - self.held :] > STRETCH).any():
            raise ConfigError(f"a held sequence brings more than {STRETCH} tokens; advance it in between")
        if (past < 0).any():
            raise ConfigError(f"'past' counts earlier tokens and cannot be negative, got {past.tolist()}")
        if ((slots < 0) | (slots >= pool.slots)).any():
            raise ConfigError(f"'slots' names {slots.tolist()}; the pool has {pool.slots}")
        self._check_copies(bounds.tolist() if self.copies is not None else [], pool)
        written = slots if self.copies is None else np.concatenate([slots, self.copies[:, 2].numpy()])
        if sequences and np.bincount(written).max() > 1:
            raise ConfigError(f"'slots' and 'copies' name a slot twice: {written.tolist()}; two states cannot be in one place")
        if pool.latents.shape[1]:
            self._check_pages(np.where(lengths > 0, past + lengths, 0), pool)

    def _count(self) -> int:
        rows = self.tokens if self.embeddings is None else self.embeddings
        assert rows is not None
        return len(rows)

    def _check_types(self, config: ModelConfig) -> None:
        if (self.tokens is None) == (self.embeddings is None):
            raise ConfigError("give either 'tokens' or 'embeddings'")
        for name, dtype, dimensions in _KINDS:
            x = getattr(self, name)
            if x is not None and (x.dtype != dtype or x.dim() != dimensions or x.device.type != "cpu" or not x.is_contiguous()):
                raise ConfigError(f"'{name}' must be a contiguous {dtype} tensor of {dimensions} axes on the CPU, "
                                  f"got {x.dtype} {list(x.shape)} on {x.device}")
        if self.embeddings is not None and self.embeddings.shape[1] != config.hidden_size:
            raise ConfigError(f"'embeddings' has shape {list(self.embeddings.shape)}; rows are {config.hidden_size} wide")
        if self.tokens is not None and len(self.tokens) and not 0 <= int(self.tokens.min()) <= int(self.tokens.max()) < config.vocab_size:
            raise ConfigError(f"'tokens' has an id outside the vocabulary of {config.vocab_size}")
        if self.wanted is not None and len(self.wanted):
            first, last = int(self.wanted[0]), int(self.wanted[-1])
            if first < 0 or last >= self._count() or bool((self.wanted.diff() < 1).any()):
                raise ConfigError(f"'wanted' must ascend within the {self._count()} rows")

    def _check_copies(self, bounds: list[int], pool: StatePool) -> None:
        if self.copies is not None and self.copies.shape[1] != 3:
            raise ConfigError(f"'copies' has shape {list(self.copies.shape)}; a row is (sequence, new tokens seen, slot)")
        before = (-1, 0)
        for sequence, seen, slot in [] if self.copies is None else self.copies.tolist():
            advancing = len(bounds) - 1 - self.held
            if not 0 <= sequence < advancing or not 1 <= seen <= bounds[sequence + 1] - bounds[sequence]:
                raise ConfigError(f"'copies' asks for sequence {sequence} after {seen} new tokens, which this call does not advance to")
            if not 0 <= slot < pool.slots:
                raise ConfigError(f"'copies' names slot {slot}; the pool has {pool.slots}")
            if (sequence, seen) < before:
                raise ConfigError("'copies' must be sorted by sequence and tokens seen")
            before = (sequence, seen)

    def _check_pages(self, reached: NDArray[np.int64], pool: StatePool) -> None:
        """`reached` are the tokens of each sequence after the call, 0 for one that brings none."""
        table, longest = self.pages.numpy(), int(reached.max(initial=0))
        if longest > table.shape[1] * pool.page_tokens:
            needed = -(-longest // pool.page_tokens)
            raise ConfigError(f"sequence {int(reached.argmax())} reaches {longest} tokens and needs {needed} pages of {pool.page_tokens}; "
                              f"'pages' has {table.shape[1]}")
        place = np.arange(table.shape[1]) * pool.page_tokens
        used = place < reached[:, None]
        outside = used & ((table < 0) | (table >= pool.pages))
        if outside.any():
            raise ConfigError(f"'pages' names pages outside the {pool.pages} of the pool: {table[outside][:5].tolist()}")
        written = used & (place + pool.page_tokens > self.past.numpy()[:, None])
        pages = table[written]
        if len(pages) and np.bincount(pages).max() > 1:
            owners, twice = written.nonzero()[0], next(page for page in pages.tolist() if (pages == page).sum() > 1)
            raise ConfigError(f"sequences {np.unique(owners[pages == twice]).tolist()} write page {twice} more than once; "
                              "copy a shared page first")
