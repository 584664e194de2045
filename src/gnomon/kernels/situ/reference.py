"""SiTU-GLU: SwiGLU with both branches smoothly capped, so one expert can never write more than beta1*beta2 (report §2.3.2).

Read next: `gnomon/kernels/experts`.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def situ_glu(
    gate: Float[Tensor, "*S I"], up: Float[Tensor, "*S I"], beta1: float | None, beta2: float | None
) -> Float[Tensor, "*S I"]:
    """beta1*tanh(gate/beta1) * sigmoid(gate) * beta2*tanh(up/beta2): the sigmoid reads the raw gate, not the capped one.

    `beta1=None` leaves the gate uncapped and `beta2=None` the up branch linear; both `None` is SwiGLU.
    Computes in fp32 (fp64 for fp64) and casts once to the dtype of `gate`.
    """
    dtype = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(dtype), up.to(dtype)
    capped = g if beta1 is None else beta1 * torch.tanh(g / beta1)
    linear = u if beta2 is None else beta2 * torch.tanh(u / beta2)
    return (capped * torch.sigmoid(g) * linear).to(gate.dtype)
