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
    batch, _, channels = u.shape
    taps = weight.shape[1]
    if cu_seqlens is None:
        past = u.new_zeros(batch, taps - 1, channels) if history is None else history.to(u.dtype)
        stream = torch.cat([past, u], 1)  # [B, W-1+T, C]
        return _convolve(stream, weight, u.dtype), stream[:, stream.shape[1] - (taps - 1) :]
    if batch != 1:
        raise KernelError(f"cu_seqlens needs one packed row, but the batch is {batch}: flatten it to [1, batch·time, …]")
    bounds = cu_seqlens.tolist()
    documents = len(bounds) - 1
    past = u.new_zeros(documents, taps - 1, channels) if history is None else history.to(u.dtype)
    # One stream in which each document follows its own history: no tap reaches into the document before.
    parts = [part for s, (a, b) in enumerate(pairwise(bounds)) for part in (past[s], u[0, a:b])]
    stream = torch.cat([u[0, :0], *parts])
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(u.device, torch.int64)
    tokens = torch.arange(len(u[0]), device=u.device)
    tokens = tokens + (taps - 1) * torch.repeat_interleave(torch.arange(documents, device=u.device), lengths)
    out = _convolve(stream[None], weight, u.dtype)[:, tokens] if len(tokens) else u
    ends = cu_seqlens[1:].to(u.device, torch.int64) + (taps - 1) * torch.arange(1, documents + 1, device=u.device)
    last = ends[:, None] + torch.arange(-(taps - 1), 0, device=u.device)  # [S, W-1]
    return out, stream[last]


def _convolve(stream: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, W-1+T, C] to [B, T, C] in fp32 or fp64, cast once at the end."""
    compute = torch.float64 if stream.dtype == torch.float64 else torch.float32
    stream, weight = stream.to(compute), weight.to(compute)
    taps, time = weight.shape[1], stream.shape[1] - weight.shape[1] + 1
    total = stream[:, taps - 1 :] * weight[:, taps - 1]
    for j in range(taps - 1):
        total = total + stream[:, j : j + time] * weight[:, j]
    return F.silu(total).to(dtype)
