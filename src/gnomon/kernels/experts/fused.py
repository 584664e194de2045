"""Routed experts with a handwritten backward that never needs an expert's output.

The router's gradient looks as if it needed y = W_down a, since dp = <du, y>. With g = W_down^T du it is dp = <g, a> and
da = p g (report §5.2.2, `MoE` paragraph), so only the two pre-activations are kept; rows are gathered again in the backward.
The activation runs inside the loop over experts, while an expert's rows are in cache.
Read next: `gnomon/kernels/situ/fused.py`.
"""

from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.kernels.experts.reference import group
from gnomon.kernels.situ import fused as situ


def refuse_experts(
    z: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, weights: Tensor, beta1: float | None, beta2: float | None
) -> str | None:
    """Refuse mixed dtypes, which products into preallocated rows cannot promote."""
    if {w_gate.dtype, w_up.dtype, w_down.dtype} != {z.dtype}:
        return f"the stacks are {w_gate.dtype}, {w_up.dtype}, {w_down.dtype} and z is {z.dtype}"
    return None


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
    return GroupedExperts.apply(situ, z, w_gate, w_up, w_down, ids, weights, beta1, beta2)


class GroupedExperts(torch.autograd.Function):
    """The operator for one implementation of the activation: a module with `activate` and `differentiate`."""

    @staticmethod
    def forward(
        ctx: Any, activation: ModuleType, z: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, weights: Tensor,
        beta1: float | None, beta2: float | None,
    ) -> Tensor:  # fmt: skip
        rows, order, position, counts = group(ids, w_gate.shape[0])
        gate, up = (z.new_empty(len(rows), w_gate.shape[1]) for _ in range(2))  # [N*k, I]
        outputs = z.new_empty(len(rows), z.shape[1])  # [N*k, L]
        for expert, part in _parts(counts):
            x = z.index_select(0, rows[part])
            torch.mm(x, w_gate[expert].T, out=gate[part])
            torch.mm(x, w_up[expert].T, out=up[part])
            hidden = activation.activate(gate[part], up[part], beta1, beta2).to(z.dtype)
            torch.mm(hidden, w_down[expert].T, out=outputs[part])
        ctx.save_for_backward(z, w_gate, w_up, w_down, weights, rows, order, position, gate, up)
        ctx.activation, ctx.counts, ctx.betas = activation, counts, (beta1, beta2)
        return _gather_sum(outputs, position.view(ids.shape), weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, w_gate, w_up, w_down, weights, rows, order, position, gate, up = ctx.saved_tensors
        d_gate_stack, d_up_stack, d_down_stack = (torch.zeros_like(w) for w in (w_gate, w_up, w_down))
        d_rows = z.new_empty(len(rows), z.shape[1])  # [N*k, L]
        d_weights = torch.empty(len(rows), dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
        sorted_weights = weights.reshape(-1)[order].to(d_weights.dtype).unsqueeze(-1)
        for expert, part in _parts(ctx.counts):
            x, dy = z.index_select(0, rows[part]), grad.index_select(0, rows[part])
            through = dy @ w_down[expert]  # g [n, I]
            d_gate, d_up, hidden, d_weights[part] = ctx.activation.differentiate(
                through, gate[part], up[part], sorted_weights[part], *ctx.betas
            )
            d_gate, d_up = d_gate.to(z.dtype), d_up.to(z.dtype)
            torch.mm(dy.T, hidden.to(z.dtype), out=d_down_stack[expert])
            torch.mm(d_gate.T, x, out=d_gate_stack[expert])
            torch.mm(d_up.T, x, out=d_up_stack[expert])
            torch.mm(d_gate, w_gate[expert], out=d_rows[part]).addmm_(d_up, w_up[expert])
        dz = _gather_sum(d_rows, position.view(weights.shape), None)
        dp = d_weights[position].view(weights.shape).to(weights.dtype)
        return None, dz, d_gate_stack, d_up_stack, d_down_stack, None, dp, None, None


def _parts(counts: list[int]) -> list[tuple[int, slice]]:
    """(expert, its sorted rows) for every expert that has any."""
    parts, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            parts.append((expert, slice(start, start + count)))
        start += count
    return parts


def _gather_sum(rows: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    """sum_k weights[n, k] * rows[position[n, k]] in one pass, in fp32 at least, in the dtype of `rows`."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    scale = None if weights is None else weights.to(dtype)
    return torch.nn.functional.embedding_bag(position, rows.to(dtype), mode="sum", per_sample_weights=scale).to(rows.dtype)
