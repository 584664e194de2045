"""The short convolution in C++ (csrc/short_conv.cpp): documents side by side, backward by remaking the sums, inputs in fp32 or bf16.

Read next: `gnomon.kernels.native`.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.kda.layout import document_bounds
from gnomon.kernels.short_conv.reference import last_inputs

MOST_TAPS = 16  # of csrc/short_conv.cpp


def short_conv(
    u: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    history: Float[Tensor, "S W1 C"] | None = None,
    cu_seqlens: Int[Tensor, " S1"] | None = None,
    keep: bool = True,
) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "S W1 C"] | None]:
    """`reference.short_conv`; what the new history is made of is not copied for it."""
    bounds = document_bounds(u.shape[0], u.shape[1], cu_seqlens)
    documents, (channels, taps) = len(bounds) - 1, weight.shape
    if channels != u.shape[2] or (history is not None and history.shape != (documents, taps - 1, channels)):
        raise KernelError(f"{documents} documents of {u.shape[2]} channels do not fit taps {tuple(weight.shape)} and the given history")
    y = _Conv.apply(u, weight, history, torch.tensor(bounds))
    return y, last_inputs(u, history, bounds, taps) if keep else None


def refuse_short_conv(
    u: Tensor, weight: Tensor, history: Tensor | None = None, cu_seqlens: Tensor | None = None, keep: bool = True
) -> str | None:
    """Needs the library, fp32 or bf16 on the CPU, and not too many taps."""
    if weight.shape[-1] > MOST_TAPS:
        return f"{weight.shape[-1]} taps; the C++ kernel takes at most {MOST_TAPS}"
    return native.refuse_rows(u=u, weight=weight, history=history)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, weight: Tensor, history: Tensor | None, bounds: Tensor) -> Tensor:
        u, weight, history = u.contiguous(), weight.contiguous(), None if history is None else history.contiguous()
        ctx.save_for_backward(u, weight, history, bounds)
        y = torch.empty_like(u)
        inputs, half = [native.address(x) for x in (u, weight, history)], native.bf16_bits(u, weight, history)
        sizes = (len(bounds) - 1, *weight.shape)
        native.library().gnomon_short_conv_forward(*inputs, half, bounds.data_ptr(), *sizes, y.data_ptr(), native.threads())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        u, weight, history, bounds = ctx.saved_tensors
        documents, d_y = len(bounds) - 1, d_y.contiguous()
        d_history = torch.empty_like(history) if history is not None else u.new_empty(documents, weight.shape[1] - 1, u.shape[2],
                                                                                      dtype=torch.float32)
        grads = [torch.empty_like(u), torch.empty_like(weight), d_history]
        inputs, half = [native.address(x) for x in (u, weight, history, d_y)], native.bf16_bits(u, weight, history)
        sizes, outputs = (documents, *weight.shape), (x.data_ptr() for x in grads)
        native.library().gnomon_short_conv_backward(*inputs, half, bounds.data_ptr(), *sizes, *outputs, native.threads())
        return grads[0], grads[1], None if history is None else grads[2], None
