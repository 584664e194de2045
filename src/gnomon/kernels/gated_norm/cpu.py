"""The norms in C++ (csrc/rows.cpp): one pass forward, one pass backward, inputs in fp32 or bf16.

The backward pass keeps the inputs alone and remakes the rest. Read next: `gnomon.kernels.native`.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.errors import KernelError
from gnomon.kernels import native


def rms_norm(x: Float[Tensor, "*B D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*B D"]:
    """`reference.rms_norm`; a bf16 norm is rounded before the weight multiplies."""
    return _Norm.apply(x, weight, None, eps)


def refuse_rms_norm(x: Tensor, weight: Tensor, eps: float) -> str | None:
    """Needs the library and fp32 or bf16 on the CPU."""
    return native.refuse_rows(x=x, weight=weight)


def gated_norm(
    o: Float[Tensor, "*B H V"], weight: Float[Tensor, " V"], gate: Float[Tensor, "*B H V"], eps: float
) -> Float[Tensor, "*B H V"]:
    """`reference.gated_norm` in one pass."""
    return _Norm.apply(o, weight, gate, eps)


def refuse_gated_norm(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> str | None:
    """Needs the library and fp32 or bf16 on the CPU."""
    return native.refuse_rows(o=o, weight=weight, gate=gate)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
        if weight.shape != x.shape[-1:] or (gate is not None and gate.shape != x.shape):
            raise KernelError(f"a norm of {tuple(x.shape)} needs a weight of its last size and a gate of its shape")
        x, weight, gate = x.contiguous(), weight.contiguous(), None if gate is None else gate.contiguous()
        ctx.eps = eps
        ctx.save_for_backward(x, weight, gate)
        sizes, kind = (x.shape[:-1].numel(), x.shape[-1]), torch.promote_types(x.dtype, weight.dtype) if gate is None else gate.dtype
        y = torch.empty_like(x, dtype=kind)
        inputs = [native.address(t) for t in (x, weight, gate)]
        ctx.half = native.bf16_bits(x, weight, gate, y)
        native.library().gnomon_rms_forward(*inputs, ctx.half, *sizes, eps, y.data_ptr(), native.threads())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        d_y, sizes = d_y.contiguous(), (x.shape[:-1].numel(), x.shape[-1])
        d_x, d_gate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
        d_weight = torch.empty_like(weight, dtype=torch.float32)
        inputs = [native.address(t) for t in (x, weight, gate, d_y)]
        outputs = [native.address(t) for t in (d_x, d_weight, d_gate)]
        native.library().gnomon_rms_backward(*inputs, ctx.half, *sizes, ctx.eps, *outputs, native.threads())
        return d_x, d_weight.to(weight.dtype), d_gate, None
