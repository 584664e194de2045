"""SiTU-GLU in C++ (csrc/situ.cpp): one pass forward, one pass backward, arithmetic in fp32 whatever the inputs are.

`activate` and `differentiate` mean what they mean in `fused.py`, so the grouped experts can use either.
Read next: `gnomon/kernels/experts/cpu.py`.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.kernels import native

UNCAPPED = 0.0  # how csrc/gnomon.h says that a branch has no cap


def refuse_situ_glu(gate: Tensor, up: Tensor, beta1: float | None, beta2: float | None) -> str | None:
    """Needs the library and equal shapes of fp32, bf16 or fp16 on the CPU."""
    if gate.shape != up.shape:
        return f"gate is {tuple(gate.shape)} and up is {tuple(up.shape)}"
    return refuse_tensors(gate, up)


def situ_glu(
    gate: Float[Tensor, "*S I"], up: Float[Tensor, "*S I"], beta1: float | None, beta2: float | None
) -> Float[Tensor, "*S I"]:
    """As the reference."""
    return _SituGLU.apply(gate, up, beta1, beta2)


def refuse_tensors(*tensors: Tensor) -> str | None:
    """Why these tensors cannot go to the library, or `None`."""
    for x in tensors:
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{x.dtype} on {x.device}: the C++ kernel computes in fp32 on the CPU"
    return native.unavailable()


def activate(gate: Tensor, up: Tensor, beta1: float | None, beta2: float | None) -> Tensor:
    """The activation in fp32, before the cast."""
    g, u = _plain(gate), _plain(up)
    out = torch.empty_like(g)
    rows, width = _sizes(g)
    native.library().gnomon_situ_forward(
        g.data_ptr(), u.data_ptr(), rows, width, beta1 or UNCAPPED, beta2 or UNCAPPED, out.data_ptr(), native.threads()
    )
    return out


def differentiate(
    grad: Tensor, gate: Tensor, up: Tensor, weight: Tensor | None, beta1: float | None, beta2: float | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """d gate, d up, weight * a and d weight in fp32; the last two only when there is a weight."""
    d, g, u = _plain(grad), _plain(gate), _plain(up)
    scale = None if weight is None else _plain(weight)
    rows, width = _sizes(g)
    d_gate, d_up = torch.empty_like(g), torch.empty_like(g)
    weighted, d_weight = (None, None) if scale is None else (torch.empty_like(g), g.new_empty(rows))
    inputs = [native.address(x) for x in (d, g, u, scale)]
    outputs = [native.address(x) for x in (d_gate, d_up, weighted, d_weight)]
    betas = beta1 or UNCAPPED, beta2 or UNCAPPED
    native.library().gnomon_situ_backward(*inputs, rows, width, *betas, *outputs, native.threads())
    return d_gate, d_up, weighted, d_weight


class _SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta1: float | None, beta2: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta1, beta2
        return activate(gate, up, beta1, beta2).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        d_gate, d_up, *_ = differentiate(grad, gate, up, None, *ctx.betas)
        return d_gate.to(gate.dtype), d_up.to(up.dtype), None, None


def _plain(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32).contiguous()


def _sizes(x: Tensor) -> tuple[int, int]:
    width = x.shape[-1] if x.ndim else 1
    return (x.numel() // width if width else 0), width
