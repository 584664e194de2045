"""Causal attention on NVIDIA GPUs through PyTorch's FlexAttention, whose mask is a function; a thin adapter.

It takes what the flash kernel's own causal mask cannot say: queries that do not start with the keys, and documents as they are packed,
without padding. Tiles of the mask that hide everything are skipped. Autograd is PyTorch's. Read next: `sdpa.py`, which is asked first.
"""

import functools
import importlib.util
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gnomon.kernels.mla.reference import check_attention

CAPABILITY = (8, 0)  # the first GPUs that its kernels are written for
LARGEST_WIDTH = 256  # of a head: what its tiles keep on the chip
SMALLEST_WIDTH = 16  # of a head: one step of a matrix unit


def refuse_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor | None = None, offset: int = 0
) -> str | None:
    """Needs CUDA tensors of one type, at most fp32, heads of 16 to 256 channels, Triton, and a GPU of at least Ampere's generation."""
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not x.is_cuda or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{name} is {x.dtype} on {x.device}; FlexAttention has kernels for at most fp32 on CUDA"
        if not SMALLEST_WIDTH <= x.shape[-1] <= LARGEST_WIDTH:
            return f"{name} has {x.shape[-1]} channels; FlexAttention takes {SMALLEST_WIDTH} to {LARGEST_WIDTH}"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[1] == 0:
        return "there are no queries"
    if importlib.util.find_spec("triton") is None:
        return "FlexAttention compiles its kernels with Triton, which is not installed"
    if torch.cuda.get_device_capability(q.device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(q.device)} is older than FlexAttention's kernels"
    return None


def attention(
    q: Float[Tensor, "B T H Q"],
    k: Float[Tensor, "B L H Q"],
    v: Float[Tensor, "B L H V"],
    scale: float,
    cu_seqlens: Int[Tensor, "S1"] | None = None,
    offset: int = 0,
) -> Float[Tensor, "B T H V"]:
    """As the reference."""
    check_attention(q, k, cu_seqlens, offset)
    mask = _mask(q.shape[1], k.shape[1], cu_seqlens, offset, q.device)
    out = _kernel(q.device.type)(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, scale=scale)
    return out.transpose(1, 2)


def _mask(tokens: int, keys: int, cu_seqlens: Tensor | None, offset: int, device: torch.device) -> BlockMask:
    """What each query sees. Numbers it depends on are tensors: a kernel is compiled once for all of them."""
    first = torch.tensor(offset, device=device)
    document = torch.zeros(keys, dtype=torch.int64, device=device)
    if cu_seqlens is not None:
        document = torch.bucketize(torch.arange(keys, device=device), cu_seqlens[1:].to(device), right=True)
    return create_block_mask(
        lambda batch, head, query, key: (key <= query + first) & (document[key] == document[query + first]),
        None, None, tokens, keys, device=str(device),
    )  # fmt: skip


@functools.cache
def _kernel(device: str) -> Any:
    """FlexAttention compiled where that gives its kernels; elsewhere as PyTorch writes it out, which serves tests."""
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention
