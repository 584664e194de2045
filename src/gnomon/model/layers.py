"""The plain parts: a linear map without bias, RMSNorm, the gated feed-forward, and how weights start.

The rounding points are those of the released code (`docs/numerics.md`): RMSNorm rounds to the activation's type before its weight
multiplies. Read next: `transformer.py`.
"""

import hashlib
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from gnomon.kernels import gated_norm, linear, situ

LATENT_EPS = 1e-6
"""Epsilon of the two MLA latent norms: the released class's own default, not `rms_norm_eps`."""


class Linear(nn.Module):
    """`y = x Wᵀ` with the weight in `[out, in]`; there is no bias anywhere in the model."""

    def __init__(self, inputs: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, inputs))

    def forward(self, x: Float[Tensor, "*N inputs"]) -> Float[Tensor, "*N out"]:
        """Apply the map in the type of the activation."""
        return together(x, self)[0]


def together(x: Float[Tensor, "*N inputs"], *maps: Linear) -> tuple[Float[Tensor, "*N _"], ...]:
    """Several maps of one input, which run as one where the operator can; under autocast in its type."""
    if torch.is_autocast_enabled(x.device.type):
        return tuple(functional.linear(x, each.weight.to(x.dtype)) for each in maps)
    return linear.linears(x, [each.weight for each in maps])


class RMSNorm(nn.Module):
    """`x · rsqrt(mean x² + ε)` in fp32, rounded to the type of `x`, then times the weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """Normalise the last axis."""
        return gated_norm.rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """`down(SiTU(gate x, up x))` (report eq. 12); with caps of `None` it is SwiGLU."""

    def __init__(self, hidden_size: int, inner: int, caps: tuple[float | None, float | None]):
        super().__init__()
        self.gate_proj = Linear(hidden_size, inner)
        self.up_proj = Linear(hidden_size, inner)
        self.down_proj = Linear(inner, hidden_size)
        self.caps = caps

    def forward(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """Apply the feed-forward to each token."""
        return self.down_proj(situ.situ_glu(*together(x, self.gate_proj, self.up_proj), *self.caps))


def initialise(module: nn.Module, seed: int, std: float) -> None:
    """Give every parameter its starting value, in place.

    Linear maps and the embedding N(0, std); norms 1; depth queries 0, so that every depth read starts as a plain average
    (Attention Residuals §3); `A_log` 0 and `dt_bias` the inverse softplus of a log-uniform step (report §2.1.1, as in Mamba-2);
    convolutions uniform in ±W^-½. Each tensor has its own stream keyed by seed and name, so models that share
    a part share its weights.
    """
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(_seed(seed, name))
        with torch.no_grad():
            parameter.copy_(_start(name, parameter, std, generator))


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")


def _start(name: str, parameter: Tensor, std: float, generator: torch.Generator) -> Tensor:
    shape = parameter.shape
    leaf = name.rpartition(".")[2]
    if name.endswith("_res_proj.weight") or leaf == "A_log":
        return torch.zeros(shape)
    if leaf == "dt_bias":
        low, high = math.log(1e-3), math.log(1e-1)
        step = torch.exp(torch.rand(shape, generator=generator) * (high - low) + low).clamp(min=1e-4)
        return step + torch.log(-torch.expm1(-step))
    if "conv1d" in name:
        bound = shape[-1] ** -0.5
        return torch.rand(shape, generator=generator) * (2 * bound) - bound
    if parameter.dim() == 1:
        return torch.ones(shape)
    return torch.randn(shape, generator=generator) * std
