"""The meaning of the norms, with the rounding points of the released model. Legend: H heads, V value channels, D width.

Read next: `gnomon.kernels.kda.reference`, whose output `gated_norm` takes.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def rms_norm(x: Float[Tensor, "*B D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*B D"]:
    """x / sqrt(mean x² + eps) in fp32, cast to the dtype of x, then times the weight: in bf16 it rounds twice, as released."""
    return _normalised(x, eps).to(x.dtype) * weight


def gated_norm(
    o: Float[Tensor, "*B H V"], weight: Float[Tensor, " V"], gate: Float[Tensor, "*B H V"], eps: float
) -> Float[Tensor, "*B H V"]:
    """RMSNorm(o) · weight · sigmoid(gate) per head: norm before gate, all in fp32, one cast to the dtype of the gate."""
    normalised = _normalised(o, eps)
    return (normalised * weight.to(normalised.dtype) * torch.sigmoid(gate.to(normalised.dtype))).to(gate.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    """fp64 stays fp64, everything else is computed in fp32."""
    x = x if x.dtype == torch.float64 else x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
