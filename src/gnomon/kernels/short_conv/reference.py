"""The meaning of the short convolution: every channel mixes its last W inputs, then SiLU.

Legend: B rows, T time, C channels, W taps, S documents. The history of a document is its last W − 1 inputs *before* the convolution.
Read next: `gnomon.kernels.kda.reference`, which takes the result.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.kernels.kda.layout import document_bounds


def short_conv(
    u: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    history: Float[Tensor, "S W1 C"] | None = None,
    cu_seqlens: Int[Tensor, " S1"] | None = None,
    keep: bool = True,
) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "S W1 C"] | None]:
    """y_t = SiLU(Σ_j weight[:, j] · u_(t−W+1+j)): the last tap multiplies the current token. Returns y and the new
    histories, `None` unless `keep`.

    Before a document's first token stands its `history`, or zeros. Without `cu_seqlens` each row is a document (S = B); with it B = 1.
    Taps, inputs and sums are fp32 (fp64 for fp64 inputs); the result has the dtype of `u`.
    """
    bounds, taps = document_bounds(u.shape[0], u.shape[1], cu_seqlens), weight.shape[1]
    flat = u.flatten(0, 1)  # [N, C]
    past = u.new_zeros(len(bounds) - 1, taps - 1, u.shape[2]) if history is None else history.to(u.dtype)
    # One stream in which each document follows its own history: no tap reaches into the document before.
    parts = [part for s, (a, b) in enumerate(pairwise(bounds)) for part in (past[s], flat[a:b])]
    stream = torch.cat([flat[:0], *parts])
    lengths = torch.tensor(bounds).diff()
    before = (taps - 1) * torch.repeat_interleave(torch.arange(1, len(bounds)), lengths)
    total = _convolve(stream, weight)
    tokens = (torch.arange(len(flat)) + before - (taps - 1)).to(u.device)
    return F.silu(total[tokens]).to(u.dtype).view(u.shape), last_inputs(u, history, bounds, taps) if keep else None


def last_inputs(u: Tensor, history: Tensor | None, bounds: list[int], taps: int) -> Tensor:
    """The last W − 1 inputs of every document, its history included [S, W-1, C]."""
    kept, documents, device = taps - 1, len(bounds) - 1, u.device
    past = u.new_zeros(documents, kept, u.shape[2]) if history is None else history.to(u.dtype)
    if documents == u.shape[0]:  # each row is one
        recent = torch.cat([past, u[:, max(0, u.shape[1] - kept) :]], 1)
        return recent[:, recent.shape[1] - kept :]
    if u.shape[1] == 0 or kept == 0:
        return past
    place = torch.arange(kept, device=device)
    ends = torch.tensor(bounds[1:], device=device)[:, None]
    lengths = torch.tensor(bounds, device=device).diff()[:, None]
    own = u[0][(ends - kept + place).clamp(min=0)]
    older = past.take_along_dim((place + lengths).clamp(max=kept - 1)[:, :, None], 1)
    return torch.where((place >= kept - lengths)[:, :, None], own, older)


def _convolve(stream: Tensor, weight: Tensor) -> Tensor:
    """[N + S(W-1), C] to the sums that end at each position from the first full one on, in fp32 or fp64."""
    compute = torch.float64 if stream.dtype == torch.float64 else torch.float32
    stream, weight = stream.to(compute), weight.to(compute)
    taps = weight.shape[1]
    total = stream[taps - 1 :] * weight[:, taps - 1]
    for j in range(taps - 1):
        total = total + stream[j : j + len(total)] * weight[:, j]
    return total
