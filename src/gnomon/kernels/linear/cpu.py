"""Linear maps in C++ (csrc/linear.cpp): maps that share an input run tile by tile, and the gradient of the input is summed in cache.

It takes many rows: packing a weight pays only when many tokens meet it. Read next: `csrc/product.h`.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.errors import KernelError
from gnomon.kernels import native

LEAST_ROWS = 64
"""Tokens from which on a weight is worth packing."""


def refuse_linears(x: Tensor, weights: Sequence[Tensor]) -> str | None:
    """Needs the library, fp32 on the CPU, and enough tokens to pay for packing the weights."""
    rows = x.shape[:-1].numel()
    if rows < LEAST_ROWS:
        return f"{rows} tokens; packing the weights pays from {LEAST_ROWS} on"
    return native.refuse(x=x, **{f"weights[{i}]": weight for i, weight in enumerate(weights)})


def linears(x: Float[Tensor, "*N D"], weights: Sequence[Float[Tensor, "_ D"]]) -> tuple[Float[Tensor, "*N _"], ...]:
    """As the reference."""
    return _Linears.apply(x, *weights)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        for weight in weights:
            if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
                raise KernelError(f"a weight of shape {tuple(weight.shape)} does not take inputs of width {x.shape[-1]}")
        x, weights = x.contiguous(), tuple(weight.contiguous() for weight in weights)
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        outputs = tuple(x.new_empty(*x.shape[:-1], len(weight)) for weight in weights)
        native.library().gnomon_linear_forward(
            x.data_ptr(), x.shape[:-1].numel(), x.shape[-1], *_maps(weights), _pointers(outputs), native.threads()
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted = [i for i, grad in enumerate(grads) if grad is not None]
        incoming = [grads[i].contiguous() for i in wanted]  # type: ignore[union-attr]
        rows, width = x.shape[:-1].numel(), x.shape[-1]
        d_x, d_weights = None, [None] * len(weights)
        if ctx.needs_input_grad[0] and wanted:
            d_x = torch.empty_like(x)
            maps = _maps([weights[i] for i in wanted])
            native.library().gnomon_linear_backward_input(_pointers(incoming), rows, width, *maps, d_x.data_ptr(), native.threads())
        learnt = [(i, grad) for i, grad in zip(wanted, incoming, strict=True) if ctx.needs_input_grad[1 + i]]
        if learnt:
            made = [torch.empty_like(weights[i]) for i, _ in learnt]
            sizes = (ctypes.c_int64 * len(learnt))(*(len(weights[i]) for i, _ in learnt))
            native.library().gnomon_linear_backward_weights(
                x.data_ptr(), _pointers([grad for _, grad in learnt]), rows, width, sizes, len(learnt), _pointers(made), native.threads()
            )
            for (i, _), gradient in zip(learnt, made, strict=True):
                d_weights[i] = gradient  # type: ignore[call-overload]
        return d_x, *d_weights


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def _maps(weights: Sequence[Tensor]) -> tuple[Any, Any, int]:
    """The weights' addresses, their heights and their number."""
    return _pointers(weights), (ctypes.c_int64 * len(weights))(*(len(weight) for weight in weights)), len(weights)
