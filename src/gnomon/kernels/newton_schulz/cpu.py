"""Newton-Schulz in C++ (csrc/newton_schulz.cpp): symmetric products, and for wide or tall matrices steps on the small square alone.

Read next: `reference.py`.
"""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.kernels import native
from gnomon.kernels.newton_schulz.reference import COEFFICIENTS
from gnomon.kernels.operator import needs_grad


def refuse_newton_schulz(gradient: Tensor, steps: int = 5, compute_dtype: torch.dtype | None = None) -> str | None:
    """Needs the library and fp32 on the CPU, in products too; it has no backward pass."""
    if needs_grad(gradient):
        return "the C++ kernel has no backward pass"
    if compute_dtype not in (None, torch.float32):
        return f"products in {compute_dtype} were asked for; the C++ kernel computes in torch.float32"
    return native.refuse(gradient=gradient)


def newton_schulz(
    gradient: Float[Tensor, "*S A B"], steps: int = 5, compute_dtype: torch.dtype | None = None
) -> Float[Tensor, "*S A B"]:
    """As the reference, without gradients."""
    del compute_dtype
    gradient = gradient.detach().contiguous()
    out, (rows, columns) = torch.empty_like(gradient), gradient.shape[-2:]
    native.library().gnomon_newton_schulz(
        gradient.data_ptr(), gradient.shape[:-2].numel(), rows, columns, steps, (ctypes.c_float * 3)(*COEFFICIENTS), out.data_ptr(),
        native.threads(),
    )  # fmt: skip
    return out
