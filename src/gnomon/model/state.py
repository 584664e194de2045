"""What a layer keeps between calls: a recurrent matrix and a short history (KDA), or latents of past tokens (MLA).

These are the only mutable tensor objects of the model. A list with one state per layer makes a model incremental: prefill in any
split, then one token at a time, gives what one pass gives (report §5.4.1). Read next: `mixers/kda.py`, `mixers/mla.py`.
"""

from collections.abc import Callable
from typing import Protocol, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor


class LayerState(Protocol):
    """What every kind of state offers; `S` sequences are independent of each other."""

    def bytes(self) -> int:
        """Bytes in use for all sequences."""
        ...

    def copy(self) -> Self:
        """An independent copy: what forking a sequence needs."""
        ...

    def select(self, rows: Int[Tensor, "S2"]) -> Self:
        """A copy with these sequences only, in this order; a row may occur more than once."""
        ...


class KDAState:
    """Per sequence: projected q, k, v of the last few tokens, and the fp32 matrix of each head.

    Shapes: `conv` [S, W-1, 3·H·K] in the order q, k, v (values before the convolution); `matrix` [S, H, K, V] fp32.
    """

    def __init__(self, conv: Float[Tensor, "S W C"], matrix: Float[Tensor, "S H K V"]):
        self.conv, self.matrix = conv, matrix

    @classmethod
    def zeros(cls, sequences: int, history: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Self:
        """The state before the first token."""
        conv = torch.zeros(sequences, history, 3 * heads * width, dtype=dtype, device=device)
        return cls(conv, torch.zeros(sequences, heads, width, width, dtype=torch.float32, device=device))

    def bytes(self) -> int:
        """Bytes of history and matrices."""
        return self.conv.nbytes + self.matrix.nbytes

    def copy(self) -> Self:
        """An independent copy."""
        return type(self)(self.conv.clone(), self.matrix.clone())

    def select(self, rows: Int[Tensor, "S2"]) -> Self:
        """A copy with these sequences only."""
        return type(self)(self.conv[rows], self.matrix[rows])


class MLACache:
    """Per sequence: one row [latent | shared key] per past token, and how many rows are filled.

    Shapes: `rows` [S, capacity, C+R]; `lengths` [S]. The buffer grows by doubling.
    """

    def __init__(self, rows: Float[Tensor, "S L C"], lengths: Int[Tensor, "S"]):
        self.rows, self.lengths = rows, lengths

    @classmethod
    def empty(cls, sequences: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A cache with room for `capacity` tokens per sequence before it has to grow."""
        rows = torch.zeros(sequences, max(capacity, 1), width, dtype=dtype, device=device)
        return cls(rows, torch.zeros(sequences, dtype=torch.int64, device=device))

    def append(self, new: Float[Tensor, "S T C"]) -> None:
        """Add the same number of tokens to every sequence."""
        starts = self.lengths.tolist()
        self._reserve(max(starts) + new.shape[1])
        if len(set(starts)) == 1:
            self.rows[:, starts[0] : starts[0] + new.shape[1]] = new
        else:
            for sequence, start in enumerate(starts):
                self.rows[sequence, start : start + new.shape[1]] = new[sequence]
        self.lengths = self.lengths + new.shape[1]

    def append_to(self, sequence: int, new: Float[Tensor, "T C"]) -> None:
        """Add tokens to one sequence."""
        start = int(self.lengths[sequence])
        self._reserve(start + new.shape[0])
        self.rows[sequence, start : start + new.shape[0]] = new
        self.lengths[sequence] = start + new.shape[0]

    def filled(self) -> Float[Tensor, "S L C"]:
        """The rows up to the longest sequence."""
        return self.rows[:, : int(self.lengths.max())]

    def _reserve(self, length: int) -> None:
        if length > self.rows.shape[1]:
            grown = self.rows.new_zeros(self.rows.shape[0], max(length, 2 * self.rows.shape[1]), self.rows.shape[2])
            grown[:, : self.rows.shape[1]] = self.rows
            self.rows = grown

    def bytes(self) -> int:
        """Bytes of filled rows; spare capacity is not counted."""
        return int(self.lengths.sum()) * self.rows.shape[2] * self.rows.element_size()

    def copy(self) -> Self:
        """An independent copy."""
        return type(self)(self.rows.clone(), self.lengths.clone())

    def select(self, rows: Int[Tensor, "S2"]) -> Self:
        """A copy with these sequences only."""
        return type(self)(self.rows[rows], self.lengths[rows])


StateFactory = Callable[[int, int, torch.dtype, torch.device], LayerState]
"""`(sequences, capacity, dtype, device)` → a fresh state; every mixer has one as `new_state`."""
