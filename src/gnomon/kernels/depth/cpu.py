"""The depth read in C++ (csrc/depth.cpp): each source passes once from memory, forward and backward, fp32.

Keeps what `fused.py` keeps: two numbers per token and source. Read next: `gnomon.kernels.native` (where the library comes from).
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.kernels import native
from gnomon.kernels.depth.reference import check_sources


def refuse_depth_read(sources: Sequence[Tensor], query: Tensor, eps: float) -> str | None:
    """Needs the library and fp32 on the CPU."""
    for x in (*sources, query):
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return f"{x.dtype} on {x.device}: the C++ kernel takes torch.float32 on the CPU"
    return native.unavailable()


def depth_read(sources: Sequence[Tensor], query: Float[Tensor, "D"], eps: float) -> Float[Tensor, "B T D"]:
    """As the reference."""
    check_sources(sources, query)
    return _DepthRead.apply(eps, query, *sources)


class _DepthRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, query: Tensor, *sources: Tensor) -> Tensor:
        values = [source.contiguous() for source in sources]
        u, out = query.contiguous(), torch.empty_like(values[0])
        tokens, width = out[..., 0].numel(), out.shape[-1]
        inverse_rms, scores = (out.new_empty(len(values), tokens) for _ in range(2))
        native.library().gnomon_depth_forward(
            _pointers(values), u.data_ptr(), len(values), tokens, width, eps,
            inverse_rms.data_ptr(), scores.data_ptr(), out.data_ptr(), native.threads(),
        )  # fmt: skip
        ctx.save_for_backward(u, inverse_rms, scores, *values)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        u, inverse_rms, scores, *values = ctx.saved_tensors
        dh, du = grad.contiguous(), torch.empty_like(u)
        d_values = [torch.empty_like(v) if wanted else None for v, wanted in zip(values, ctx.needs_input_grad[2:], strict=True)]
        native.library().gnomon_depth_backward(
            _pointers(values), u.data_ptr(), inverse_rms.data_ptr(), scores.data_ptr(), dh.data_ptr(),
            len(values), scores.shape[1], dh.shape[-1], _pointers(d_values), du.data_ptr(), native.threads(),
        )  # fmt: skip
        return None, du, *d_values


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*[native.address(x) for x in tensors])
