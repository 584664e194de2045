"""Routed experts with the activation in C++ (csrc/situ.cpp) between PyTorch's matrix products.

The backward pass gets the router's gradient, the weighted activation and both pre-activation gradients from one pass over the rows.
Read next: `fused.py` (the same function around another activation), `gnomon/kernels/situ/cpu.py`.
"""

from jaxtyping import Float, Int
from torch import Tensor

from gnomon.kernels.experts import fused
from gnomon.kernels.situ import cpu as situ


def refuse_experts(
    z: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, weights: Tensor, beta1: float | None, beta2: float | None
) -> str | None:
    """What `fused` refuses, and what the library does."""
    return fused.refuse_experts(z, w_gate, w_up, w_down, ids, weights, beta1, beta2) or situ.refuse_tensors(z)


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
    return fused.GroupedExperts.apply(situ, z, w_gate, w_up, w_down, ids, weights, beta1, beta2)
