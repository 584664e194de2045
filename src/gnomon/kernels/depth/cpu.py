"""The depth read in C++, fp32: csrc/depth.cpp for training, csrc/depth_inference.cpp with the norm that follows and in two phases.

Each source passes once from memory, forward and backward. Kept for the backward pass is what `fused.py` keeps: two numbers per token and
source. Read next: `gnomon.kernels.native` (where the library comes from).
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
from gnomon.kernels.depth.reference import check_sources
from gnomon.kernels.operator import needs_grad


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


def refuse_read_norm(sources: Sequence[Tensor], query: Tensor, eps: float, weight: Tensor) -> str | None:
    """Needs the library, fp32 on the CPU and no gradients."""
    return _refuse_inference(*sources, query, weight)


def read_norm(
    sources: Sequence[Tensor], query: Float[Tensor, "D"], eps: float, weight: Float[Tensor, "D"]
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
    """`reference.read_norm` in one pass; in fp32 there is nothing to round between norm and weight."""
    check_sources(sources, query)
    if weight.shape != query.shape:
        raise KernelError(f"read_norm: weight has shape {tuple(weight.shape)}, the sources have width {len(query)}")
    values, query, weight = [source.contiguous() for source in sources], query.contiguous(), weight.contiguous()
    mixed, normed = torch.empty_like(values[0]), torch.empty_like(values[0])
    native.library().gnomon_depth_read_norm(
        _pointers(values), query.data_ptr(), weight.data_ptr(), len(values), mixed[..., 0].numel(), mixed.shape[-1], eps,
        mixed.data_ptr(), normed.data_ptr(), native.threads(),
    )  # fmt: skip
    return mixed, normed


def refuse_bank_partials(bank: Sequence[Tensor], queries: Tensor, eps: float) -> str | None:
    """Needs the library, fp32 on the CPU and no gradients."""
    return _refuse_inference(*bank, queries)


def bank_partials(
    bank: Sequence[Tensor], queries: Float[Tensor, "R D"], eps: float
) -> tuple[Float[Tensor, "R B T"], Float[Tensor, "R B T"], Float[Tensor, "R B T D"]]:
    """`reference.bank_partials`, the bank read once for all queries."""
    check_sources(bank, queries[0])
    values, queries = [source.contiguous() for source in bank], queries.contiguous()
    largest, denominator = (queries.new_empty(len(queries), *values[0].shape[:-1]) for _ in range(2))
    numerator = queries.new_empty(len(queries), *values[0].shape)
    native.library().gnomon_depth_bank(
        _pointers(values), queries.data_ptr(), len(queries), len(values), values[0][..., 0].numel(), queries.shape[1], eps,
        largest.data_ptr(), denominator.data_ptr(), numerator.data_ptr(), native.threads(),
    )  # fmt: skip
    return largest, denominator, numerator


def refuse_merge(partials: tuple[Tensor, Tensor, Tensor], live: Tensor, query: Tensor, eps: float) -> str | None:
    """Needs the library, fp32 on the CPU and no gradients."""
    return _refuse_inference(*partials, live, query)


def merge(
    partials: tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T D"]],
    live: Float[Tensor, "B T D"],
    query: Float[Tensor, "D"],
    eps: float,
) -> Float[Tensor, "B T D"]:
    """`reference.merge` in one pass."""
    check_sources([live, partials[2]], query)
    if not partials[0].shape == partials[1].shape == live.shape[:-1]:
        raise KernelError(f"merge: partials of shapes {[tuple(x.shape) for x in partials]} do not belong to a live sum {tuple(live.shape)}")
    inputs = [x.contiguous() for x in (*partials, live, query)]
    out = torch.empty_like(inputs[3])
    native.library().gnomon_depth_merge_norm(
        *(x.data_ptr() for x in inputs), None, out[..., 0].numel(), out.shape[-1], eps, None, out.data_ptr(), native.threads(),
    )  # fmt: skip
    return out


def _refuse_inference(*tensors: Tensor) -> str | None:
    if needs_grad(*tensors):
        return "gradients are needed, and the C++ kernel for inference has no backward"
    for x in tensors:
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return f"{x.dtype} on {x.device}: the C++ kernel takes torch.float32 on the CPU"
    return native.unavailable()


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
