"""Products with packed weights in C++ (csrc/matrix.cpp): few rows at the speed of memory, many at the speed of arithmetic.

A row's result is the same to the last bit whatever the other rows are and however many threads there are.
Read next: csrc/matrix.h.
"""

import ctypes

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.operator import needs_grad
from gnomon.kernels.packed.matrix import PackedExperts, PackedMatrix


def refuse_multiply(x: Tensor, w: PackedMatrix) -> str | None:
    """Needs the library, fp32 on the CPU and no gradient."""
    return _refuse(x=x)


def multiply(x: Float[Tensor, "*S I"], w: PackedMatrix) -> Float[Tensor, "*S O"]:
    """As the reference. Raises `KernelError` for rows of another length than the weights'."""
    if x.shape[-1] != w.inner:
        raise KernelError(f"packed multiply: rows of {x.shape[-1]} values meet {w}")
    rows = x.reshape(-1, w.inner)
    if rows.stride(-1) != 1 and w.inner > 1:
        rows = rows.contiguous()
    y = torch.empty(len(rows), w.out)
    stride = rows.stride(0) if len(rows) > 1 else w.inner
    native.library().gnomon_matrix_multiply(
        ctypes.addressof(w.view), rows.data_ptr(), len(rows), stride, y.data_ptr(), w.out, 0, native.threads()
    )
    return y.view(*x.shape[:-1], w.out)


def refuse_experts(
    z: Tensor, stack: PackedExperts, ids: Tensor, weights: Tensor, beta1: float | None, beta2: float | None
) -> str | None:
    """Needs the library, fp32 on the CPU and no gradient."""
    return _refuse(z=z, weights=weights)


def experts(
    z: Float[Tensor, "N L"],
    stack: PackedExperts,
    ids: Int[Tensor, "N k"],
    weights: Float[Tensor, "N k"],
    beta1: float | None,
    beta2: float | None,
) -> Float[Tensor, "N L"]:
    """As the reference; each token's experts are summed in the order of `ids`."""
    if z.shape[-1] != stack.latent:
        raise KernelError(f"packed experts: rows of {z.shape[-1]} values meet experts of latent width {stack.latent}")
    if z.ndim != 2 or ids.shape != weights.shape or ids.shape[:-1] != z.shape[:1]:
        raise KernelError(f"packed experts: rows {tuple(z.shape)}, ids {tuple(ids.shape)} and weights {tuple(weights.shape)} "
                          "do not fit together")
    chosen = ids.long().clamp(-1, len(stack)).int().contiguous()  # an id beyond 32 bits must not become one that exists
    z, weights = z.contiguous(), weights.contiguous()
    y, view, refused = torch.empty_like(z), stack.view(beta1, beta2), ctypes.c_int64()
    native.library().gnomon_experts_forward(
        ctypes.addressof(view), z.data_ptr(), chosen.data_ptr(), weights.data_ptr(), len(z), ids.shape[1], stack.mxfp8_activations,
        y.data_ptr(), ctypes.addressof(refused), native.threads(),
    )  # fmt: skip
    if refused.value >= 0:
        wrong = int(ids.reshape(-1)[refused.value])
        raise KernelError(f"experts: an id is {wrong}, the stacks hold experts 0..{len(stack) - 1}")
    return y


def _refuse(**tensors: Tensor) -> str | None:
    if needs_grad(*tensors.values()):
        return "packed weights are for inference: an input asks for a gradient"
    return native.refuse(**tensors)
