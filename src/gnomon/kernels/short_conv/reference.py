"""The meaning of the short convolution: every channel mixes its last W inputs, then SiLU.

Legend: B rows, T time, C channels, W taps, S documents. The history of a document is its last W − 1 inputs *before* the convolution.
Read next: `gnomon.kernels.kda.reference`, which takes the result.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.errors import KernelError


def short_conv(
    u: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    history: Float[Tensor, "S W1 C"] | None = None,
    cu_seqlens: Int[Tensor, " S1"] | None = None,
) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "S W1 C"]]:
    """y_t = SiLU(Σ_j weight[:, j] · u_(t−W+1+j)): the last tap multiplies the current token. Returns y and the new histories.

    Before a document's first token stands its `history`, or zeros. Without `cu_seqlens` each row is a document (S = B); with it B = 1.
    Taps, inputs and sums are fp32 (fp64 for fp64 inputs); the result has the dtype of `u`.
    """
    bounds, taps = document_borders(u, cu_seqlens), weight.shape[1]
    flat = u.flatten(0, 1)  # [N, C]
    past = u.new_zeros(len(bounds) - 1, taps - 1, u.shape[2]) if history is None else history.to(u.dtype)
    # One stream in which each document follows its own history: no tap reaches into the document before.
    parts = [part for s, (a, b) in enumerate(pairwise(bounds)) for part in (past[s], flat[a:b])]
    stream = torch.cat([flat[:0], *parts])
    lengths = torch.tensor(bounds).diff()
    before = (taps - 1) * torch.repeat_interleave(torch.arange(1, len(bounds)), lengths)
    total = _convolve(stream, weight)
    tokens = (torch.arange(len(flat)) + before - (taps - 1)).to(u.device)
    return F.silu(total[tokens]).to(u.dtype).view(u.shape), last_inputs(u, history, bounds, taps)


def document_borders(u: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    """Where documents begin and end in the flattened stream of all rows; each row is one without `cu_seqlens`."""
    if cu_seqlens is None:
        return [row * u.shape[1] for row in range(u.shape[0] + 1)]
    if u.shape[0] != 1:
        raise KernelError(f"cu_seqlens needs one packed row, but the batch is {u.shape[0]}: flatten it to [1, batch·time, …]")
    bounds = [int(b) for b in cu_seqlens.tolist()]
    if not bounds or bounds[0] != 0 or bounds[-1] != u.shape[1] or any(b < a for a, b in pairwise(bounds)):
        raise KernelError(f"cu_seqlens must rise from 0 to the number of tokens, {u.shape[1]}; it is {bounds[:8]}…")
    return bounds


def last_inputs(u: Tensor, history: Tensor | None, bounds: list[int], taps: int) -> Tensor:
    """The last W − 1 inputs of every document, history included [S, W-1, C]."""
    flat, kept = u.flatten(0, 1), []
    for s, (a, b) in enumerate(pairwise(bounds)):
        own = flat[max(a, b - (taps - 1)) : b]
        past = u.new_zeros(taps - 1, u.shape[2]) if history is None else history[s].to(u.dtype)
        kept.append(torch.cat([past[len(own) :], own]))
    return torch.stack(kept) if kept else u.new_zeros(0, taps - 1, u.shape[2])


def _convolve(stream: Tensor, weight: Tensor) -> Tensor:
    """[N + S(W-1), C] to the sums that end at each position from the first full one on, in fp32 or fp64."""
    compute = torch.float64 if stream.dtype == torch.float64 else torch.float32
    stream, weight = stream.to(compute), weight.to(compute)
    taps = weight.shape[1]
    total = stream[taps - 1 :] * weight[:, taps - 1]
    for j in range(taps - 1):
        total = total + stream[j : j + len(total)] * weight[:, j]
    return total
