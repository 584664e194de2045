"""SiTU-GLU with a handwritten backward: keeps the two inputs, recomputes the rest, works in tiles that stay in cache.

`activate` and `differentiate` are the formulas on one tile; the grouped experts use them between their products.
Read next: `cpu.py`, which has the same two in C++; `gnomon/kernels/experts/fused.py`.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 1 << 16  # elements: the handful of fp32 temporaries of one tile stay in a second-level cache


def refuse_situ_glu(gate: Tensor, up: Tensor, beta1: float | None, beta2: float | None) -> str | None:
    """Refuse what the tiles cannot flatten."""
    return None if gate.shape == up.shape and gate.dtype == up.dtype else "gate and up differ in shape or dtype"


def situ_glu(
    gate: Float[Tensor, "*S I"], up: Float[Tensor, "*S I"], beta1: float | None, beta2: float | None
) -> Float[Tensor, "*S I"]:
    """As the reference."""
    return _SituGLU.apply(gate, up, beta1, beta2)


def activate(gate: Tensor, up: Tensor, beta1: float | None, beta2: float | None) -> Tensor:
    """The activation in fp32 (fp64 for fp64), before the cast."""
    dtype = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(dtype), up.to(dtype)
    out = g.sigmoid()
    out *= g if beta1 is None else torch.div(g, beta1).tanh_().mul_(beta1)
    out *= u if beta2 is None else torch.div(u, beta2).tanh_().mul_(beta2)
    return out


def differentiate(
    grad: Tensor, gate: Tensor, up: Tensor, weight: Tensor | None, beta1: float | None, beta2: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the backward pass needs of `weight * a` for the activation a, given the gradient of that product.

    With t = tanh(gate/beta1), s = sigmoid(gate), c = beta1 t and l = beta2 tanh(up/beta2): a = c s l,
    da/dgate = l s (1 - t^2 + c (1 - s)) and da/dup = c s (1 - (l/beta2)^2).
    Returns d gate and d up [N, I], weight * a [N, I] and d weight = <grad, a> [N]. `weight` is [N, 1], or `None` for ones.
    """
    dtype = torch.promote_types(gate.dtype, torch.float32)
    g, u, grad = gate.to(dtype), up.to(dtype), grad.to(dtype)
    s = g.sigmoid()
    if beta1 is None:
        capped, by_gate = g, torch.sub(1.0, s).mul_(g).add_(1.0)
    else:
        t = torch.div(g, beta1).tanh_()
        capped = t * beta1
        by_gate = torch.sub(1.0, s).mul_(capped).add_(1.0).addcmul_(t, t, value=-1.0)
    by_gate *= s
    by_up = s.mul_(capped)
    if beta2 is None:
        out = by_up * u
        by_gate *= u
    else:
        t = torch.div(u, beta2).tanh_()
        linear = t * beta2
        out = by_up * linear
        by_gate *= linear
        by_up.addcmul_(by_up, t.square_(), value=-1.0)
    d_weight = torch.linalg.vecdot(grad, out)
    scaled = grad if weight is None else grad * weight
    return by_gate.mul_(scaled), by_up.mul_(scaled), out if weight is None else out.mul_(weight), d_weight


class _SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta1: float | None, beta2: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta1, beta2
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        g, u, flat = gate.reshape(-1), up.reshape(-1), out.view(-1)
        for tile in _tiles(g.numel()):
            flat[tile] = activate(g[tile], u[tile], beta1, beta2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        g, u, incoming = gate.reshape(-1), up.reshape(-1), grad.reshape(-1)
        flat_gate, flat_up = d_gate.view(-1), d_up.view(-1)
        for tile in _tiles(g.numel()):
            flat_gate[tile], flat_up[tile], *_ = differentiate(incoming[tile], g[tile], u[tile], None, *ctx.betas)
        return d_gate, d_up, None, None


def _tiles(size: int) -> list[slice]:
    return [slice(start, start + TILE) for start in range(0, size, TILE)]
