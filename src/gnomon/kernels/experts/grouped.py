"""Routed experts in C++ (csrc/experts.cpp): all products of an expert while its tokens are in cache, forward and backward, in fp32.

Kept for the backward pass are the two pre-activations; the router's gradient is <W_downᵀ dy, a>, which needs no expert output (report
§5.2.2). Read next: `fused.py`, the same formulas in PyTorch.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.mxfp import fake_mxfp8
from gnomon.kernels.mxfp.reference import BLOCK
from gnomon.kernels.situ.cpu import UNCAPPED


def refuse_experts(
    z: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, weights: Tensor, beta1: float | None, beta2: float | None
) -> str | None:
    """Needs the library, fp32 on the CPU and ids of 64 bits."""
    if ids.dtype != torch.int64:
        return f"ids are {ids.dtype}; the C++ kernel takes torch.int64"
    return native.refuse(z=z, w_gate=w_gate, w_up=w_up, w_down=w_down, weights=weights)


def experts(
    z: Float[Tensor, "N L"],
    w_gate: Float[Tensor, "E I L"],
    w_up: Float[Tensor, "E I L"],
    w_down: Float[Tensor, "E L I"],
    ids: Int[Tensor, "N k"],
    weights: Float[Tensor, "N k"],
    beta1: float | None,
    beta2: float | None,
) -> Float[Tensor, "N L"]:
    """As the reference."""
    return _Grouped.apply(False, z, w_gate, w_up, w_down, ids, weights, beta1, beta2)


def refuse_experts_mxfp8(
    z: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, weights: Tensor, beta1: float | None, beta2: float | None
) -> str | None:
    """What `experts` needs, and widths of whole blocks."""
    if w_gate.shape[-1] % BLOCK or w_gate.shape[-2] % BLOCK:
        return f"experts are {tuple(w_gate.shape[1:])}; MXFP8 needs widths that are multiples of {BLOCK}"
    return refuse_experts(z, w_gate, w_up, w_down, ids, weights, beta1, beta2)


def experts_mxfp8(
    z: Float[Tensor, "N L"],
    w_gate: Float[Tensor, "E I L"],
    w_up: Float[Tensor, "E I L"],
    w_down: Float[Tensor, "E L I"],
    ids: Int[Tensor, "N k"],
    weights: Float[Tensor, "N k"],
    beta1: float | None,
    beta2: float | None,
) -> Float[Tensor, "N L"]:
    """As the reference: z is rounded once before it is gathered, the intermediate in cache."""
    return _Grouped.apply(True, fake_mxfp8(z), w_gate, w_up, w_down, ids, weights, beta1, beta2)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mxfp8: bool, z: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, weights: Tensor,
        beta1: float | None, beta2: float | None,
    ) -> Tensor:  # fmt: skip
        count, inner, latent = w_gate.shape
        stacks_fit = w_up.shape == w_gate.shape and w_down.shape == (count, latent, inner)
        if not stacks_fit or z.shape != (len(z), latent) or ids.shape != weights.shape or ids.shape[:-1] != z.shape[:1]:
            raise KernelError(f"experts: stacks {tuple(w_gate.shape)}, {tuple(w_up.shape)}, {tuple(w_down.shape)} with inputs "
                              f"{tuple(z.shape)}, ids {tuple(ids.shape)} and weights {tuple(weights.shape)} do not fit together")
        z, w_gate, w_up, w_down, weights = (t.contiguous() for t in (z, w_gate, w_up, w_down, weights))
        grouping = _group(ids.contiguous(), count)
        gate, up = (z.new_empty(ids.numel(), inner) for _ in range(2))
        y = torch.empty_like(z)
        ctx.mxfp8 = mxfp8
        ctx.sizes = (*ids.shape, count, latent, inner, beta1 or UNCAPPED, beta2 or UNCAPPED)
        inputs = [t.data_ptr() for t in (z, w_gate, w_up, w_down, weights, *grouping)]
        outputs = [t.data_ptr() for t in (gate, up, y)]
        native.library().gnomon_grouped_forward(*inputs, *ctx.sizes, *outputs, mxfp8, native.threads())
        ctx.save_for_backward(z, w_gate, w_up, w_down, weights, gate, up, *grouping)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, *rest = ctx.saved_tensors
        grad = grad.contiguous()
        w_gate, w_up, w_down, weights = rest[:4]
        made = [torch.empty_like(t) for t in (z, w_gate, w_up, w_down, weights)]
        inputs = [t.data_ptr() for t in (z, grad, *rest)]
        outputs = [t.data_ptr() for t in made]
        native.library().gnomon_grouped_backward(*inputs, *ctx.sizes, *outputs, ctx.mxfp8, native.threads())
        return None, *made[:4], None, made[4], None, None


def _group(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of each expert's pairs, the pair at each sorted place, and its inverse. Raises `KernelError` as the reference does."""
    starts, order, position, span = (ids.new_empty(n) for n in (num_experts + 1, ids.numel(), ids.numel(), 2))
    outputs = [t.data_ptr() for t in (span, starts, order, position)]
    native.library().gnomon_group(ids.data_ptr(), ids.numel(), num_experts, *outputs)
    least, most = span.tolist()
    if least < 0 or most >= num_experts:
        raise KernelError(f"experts: ids span {least}..{most}, the stacks hold experts 0..{num_experts - 1}")
    return starts, order, position
