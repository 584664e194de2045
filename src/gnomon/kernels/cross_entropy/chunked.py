"""Cross-entropy chunk by chunk: gradients are made in the forward pass, since the sum is linear.

Read next: `cpu.py`.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

LOGIT_ELEMENTS = 1 << 20  # logits alive at a time
LEAST_ROWS = 128  # with a large vocabulary, so that the products stay efficient


def refuse_cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> str | None:
    """Takes everything that the reference takes."""
    return None


def cross_entropy_sum(hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, "N"]) -> Float[Tensor, ""]:
    """As the reference; at most `LOGIT_ELEMENTS` logits exist at a time, or `LEAST_ROWS` rows of them."""
    rows = max(LEAST_ROWS, LOGIT_ELEMENTS // weight.shape[0])
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, rows)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(h Wᵀ)[target]; gradients are made chunk by chunk in the forward pass, since the sum is linear."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if wanted else None
        exact, product = torch.promote_types(weight.dtype, torch.float32), weight.to(hidden.dtype)
        grad_weight = torch.zeros_like(weight, dtype=exact) if wanted else None
        total = hidden.new_zeros((), dtype=torch.float64)
        for start in range(0, hidden.shape[0], rows):
            part, target = hidden[start : start + rows], targets[start : start + rows]
            log_p = functional.log_softmax(functional.linear(part, product).to(exact), dim=-1)  # [n, V]
            total -= log_p.gather(-1, target[:, None]).double().sum()
            if wanted:
                slope = log_p.exp_()
                slope[torch.arange(len(target), device=target.device), target] -= 1.0
                slope = slope.to(part.dtype)
                grad_hidden[start : start + rows] = slope @ product  # type: ignore[index]
                grad_weight += slope.mT @ part  # type: ignore[operator]
        if wanted:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))  # type: ignore[union-attr]
        return total.to(torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None  # a scalar keeps its precision and their types
