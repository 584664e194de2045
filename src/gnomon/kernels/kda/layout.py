"""How packed documents of any length are laid out in chunks, so that all of them advance together and no chunk is wasted.

Each document is padded to a multiple of the chunk. Chunks are stored by (chunk index, document), longest document first:
the documents that still have a chunk `j` are a contiguous slice, and the loop over `j` is the only sequential one.
Padding tokens are zero in q, k, v, g and β, which leaves the state as it is. Read next: `gnomon.kernels.kda.reference.chunk`.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gnomon.errors import KernelError

SAFE_EXPONENT = 45.0  # exp(±45) and products of a few such factors with unit vectors stay far inside fp32


def document_bounds(batch: int, time: int, cu_seqlens: Tensor | None) -> list[int]:
    """The boundaries of the documents in the flattened stream of batch × time tokens; refuses boundaries that do not cover it."""
    if cu_seqlens is None:
        return [row * time for row in range(batch + 1)]
    bounds = [int(b) for b in cu_seqlens.tolist()]
    if batch != 1:
        raise KernelError(f"cu_seqlens needs one packed row, but the batch is {batch}: flatten it to [1, batch·time, …]")
    if not bounds or bounds[0] != 0 or bounds[-1] != time or any(b < a for a, b in pairwise(bounds)):
        raise KernelError(f"cu_seqlens must rise from 0 to the number of tokens, {time}; it is {bounds[:8]}…")
    return bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkLayout:
    """Where each token of a packed stream sits among the chunks: `slots[token] = chunk · size + row`."""

    batch: int
    time: int
    heads: int
    size: int  # tokens in a chunk
    slots: Tensor  # [N] int64
    widths: list[int]  # how many documents have a chunk j; falls with j
    order: Tensor  # [S] documents, longest first
    num_documents: int

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor | None, size: int) -> "ChunkLayout":
        """The layout of the rows of x [B, T, H, …], or of the documents between `cu_seqlens`, in chunks of `size` tokens."""
        batch, time, heads = x.shape[:3]
        bounds = torch.tensor(document_bounds(batch, time, cu_seqlens))
        lengths = bounds[1:] - bounds[:-1]  # [S]
        chunks = (lengths + size - 1) // size
        order = torch.argsort(chunks, descending=True, stable=True)
        most = int(chunks.max()) if len(chunks) else 0
        widths = (chunks[:, None] > torch.arange(most)).sum(0)  # [most]
        starts = widths.cumsum(0) - widths
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # [N]
        index = torch.arange(batch * time) - bounds[:-1][document]  # position inside the document
        slots = (starts[index // size] + place[document]) * size + index % size
        return cls(
            batch=batch,
            time=time,
            heads=heads,
            size=size,
            slots=slots.to(x.device),
            widths=widths.tolist(),
            order=order.to(x.device),
            num_documents=len(lengths),
        )

    @property
    def num_chunks(self) -> int:
        """Chunks of all documents together."""
        return sum(self.widths)

    def to_chunks(self, x: Tensor) -> Tensor:
        """[B, T, H, X] to [chunks, H, size, X], zero where a chunk is padding."""
        heads, width = x.shape[2], x.shape[3]
        flat = x.new_zeros(self.num_chunks * self.size, heads * width)
        flat = flat.index_copy(0, self.slots, x.reshape(-1, heads * width))
        return flat.view(self.num_chunks, self.size, heads, width).transpose(1, 2)

    def to_tokens(self, x: Tensor) -> Tensor:
        """[chunks, H, size, X] back to [B, T, H, X]."""
        heads, width = x.shape[1], x.shape[3]
        flat = x.transpose(1, 2).reshape(self.num_chunks * self.size, heads * width)
        return flat.index_select(0, self.slots).view(self.batch, self.time, heads, width)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, H, X] to [chunks · H, size, X] in one piece of memory, in the precision of the computation; outside autograd."""
        width = x.shape[3]
        flat = x.new_zeros(self.num_chunks * self.heads * self.size, width, dtype=torch.promote_types(x.dtype, torch.float32))
        flat.index_copy_(0, self._rows(), x.reshape(-1, width).to(flat.dtype))
        return flat.view(self.num_chunks * self.heads, self.size, width)

    def unpack(self, x: Tensor) -> Tensor:
        """[chunks · H, size, X] back to [B, T, H, X]; outside autograd."""
        rows = x.reshape(-1, x.shape[2]).index_select(0, self._rows())
        return rows.view(self.batch, self.time, self.heads, x.shape[2])

    def to_states(self, x: Tensor) -> Tensor:
        """States [S, H, …] in the caller's order to [S · H, …], longest document first."""
        return x.index_select(0, self.order).flatten(0, 1)

    def from_states(self, x: Tensor) -> Tensor:
        """[S · H, …], longest document first, back to the caller's [S, H, …]."""
        x = x.view(self.num_documents, self.heads, *x.shape[1:])
        return torch.empty_like(x).index_copy(0, self.order, x)

    def _rows(self) -> Tensor:
        """The row of each (token, head) when heads stand outside a chunk's tokens."""
        chunk, row = self.slots // self.size, self.slots % self.size
        head = torch.arange(self.heads, device=self.slots.device)
        return ((chunk[:, None] * self.heads + head) * self.size + row[:, None]).flatten()


def leaf_size(min_log_decay: float, chunk: int) -> int:
    """The largest power of two, at most `chunk`, whose decay from first to last row stays within `SAFE_EXPONENT` e-foldings."""
    reach = chunk if min_log_decay == 0 else SAFE_EXPONENT / -min_log_decay + 1
    return min(chunk, 2 ** max(0, int(math.log2(max(1.0, reach)))))
