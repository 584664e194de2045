"""Cross-entropy in C++ (csrc/cross_entropy.cpp): logits, softmax and both gradients of a chunk of rows while it is in cache, in fp32.

Read next: `chunked.py`, the same in PyTorch.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.errors import KernelError
from gnomon.kernels import native


def refuse_cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> str | None:
    """Needs the library, fp32 on the CPU and targets of 64 bits."""
    if targets.dtype != torch.int64:
        return f"targets are {targets.dtype}; the C++ kernel takes torch.int64"
    return native.refuse(hidden=hidden, weight=weight)


def cross_entropy_sum(hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, "N"]) -> Float[Tensor, ""]:
    """As the reference. Raises `KernelError` for a target that is no row of the weight."""
    return _CrossEntropy.apply(hidden, weight, targets)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
        (rows, width), words = hidden.shape, len(weight)
        if not words or weight.shape != (words, width) or targets.shape != (rows,):
            raise KernelError(f"cross_entropy: hidden states {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets "
                              f"{tuple(targets.shape)} do not fit together")
        if rows and (int(targets.min()) < 0 or int(targets.max()) >= words):
            raise KernelError(f"cross_entropy: targets span {int(targets.min())}..{int(targets.max())}, the weight has rows 0..{words - 1}")
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grads = (torch.empty_like(hidden), torch.empty_like(weight)) if wanted else (None, None)
        losses = torch.empty(rows, dtype=torch.float64)
        inputs = [t.data_ptr() for t in (hidden, weight, targets)]
        outputs = [native.address(t) for t in (losses, *grads)]
        native.library().gnomon_cross_entropy(*inputs, rows, width, words, *outputs, native.threads())
        if wanted:
            ctx.save_for_backward(*grads)
        return losses.sum().to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grad, d_weight * grad, None
