"""Mixture of experts in a latent space (report §2.3): y = Σ shared(x) + W↑ RMSNorm( Σ p_e E_e(W↓ x) ).

Routed experts are three stacked tensors. Two seams make them distributable without touching a forward: `dispatch` decides where
tokens go (here: nowhere), `lookup` gives the weights that are used (here: the parameters), and gradients come back through it.
Read next: `router.py`; `gnomon/kernels/experts/reference.py` for the grouped product.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gnomon.kernels import experts as operator
from gnomon.kernels.mxfp import fake_mxfp4
from gnomon.kernels.operator import Operator
from gnomon.model.layers import GatedMLP, Linear, RMSNorm
from gnomon.model.parts import MoEConfig
from gnomon.model.router import Router

Caps = tuple[float | None, float | None]
"""The two SiTU caps; `(None, None)` is SwiGLU."""


class RoutedExperts(nn.Module):
    """All experts of a layer: `w1` (gate) and `w3` (up) `[E, I, L]`, `w2` (down) `[E, L, I]`.

    `dispatch(experts, z, ids, weights)` returns the combined latent; `lookup()` returns `(w1, w3, w2)`. Both may be replaced.
    """

    def __init__(self, config: MoEConfig, hidden_size: int, caps: Caps):
        super().__init__()
        width, inner = config.expert_width(hidden_size), config.moe_intermediate_size
        self.w1 = nn.Parameter(torch.empty(config.num_experts, inner, width))
        self.w3 = nn.Parameter(torch.empty(config.num_experts, inner, width))
        self.w2 = nn.Parameter(torch.empty(config.num_experts, width, inner))
        self.caps, self.config = caps, config
        self.dispatch: Callable[[RoutedExperts, Tensor, Tensor, Tensor], Tensor] = local_dispatch
        self.lookup: Callable[[], tuple[Tensor, Tensor, Tensor]] = self.own_weights

    def own_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """The parameters themselves, or what MXFP4 makes of them; gradients then go straight through to the parameters."""
        if self.config.expert_weights == "mxfp4":
            return tuple(fake_mxfp4(w, self.config.expert_scales) for w in (self.w1, self.w3, self.w2))
        return self.w1, self.w3, self.w2

    @property
    def operator(self) -> Operator:
        """The product of tokens with experts: on inputs as they are, or rounded to MXFP8."""
        return operator.experts_mxfp8 if self.config.expert_inputs == "mxfp8" else operator.experts

    def forward(self, z: Float[Tensor, "N L"], ids: Tensor, weights: Tensor) -> Float[Tensor, "N L"]:
        """Weighted sum of the chosen experts' outputs for each token; autocast's type applies, as it does to the other products."""
        if torch.is_autocast_enabled(z.device.type):
            z = z.to(torch.get_autocast_dtype(z.device.type))
        return self.dispatch(self, z, ids, weights)

    def run(self, z: Float[Tensor, "N L"], ids: Tensor, weights: Tensor) -> Float[Tensor, "N L"]:
        """The grouped products over tokens that are here."""
        w1, w3, w2 = (w.to(z.dtype) for w in self.lookup())
        return self.operator(z, w1, w3, w2, ids, weights, *self.caps)


def local_dispatch(experts: RoutedExperts, z: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every token and every expert is on this rank."""
    return experts.run(z, ids, weights)


class LatentMoE(nn.Module):
    """The feed-forward of a layer with experts; without `routed_expert_hidden_size` it is a plain mixture of experts."""

    def __init__(self, config: MoEConfig, hidden_size: int, caps: Caps, eps: float):
        super().__init__()
        self.config = config
        self.gate = Router(config, hidden_size)
        self.experts = RoutedExperts(config, hidden_size, caps)
        if config.num_shared_experts:
            self.shared_experts = GatedMLP(hidden_size, config.num_shared_experts * config.moe_intermediate_size, caps)
        if config.routed_expert_hidden_size:
            latent = config.routed_expert_hidden_size
            self.routed_expert_down_proj = Linear(hidden_size, latent)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = RMSNorm(latent, eps)
            self.routed_expert_up_proj = Linear(latent, hidden_size)

    def forward(self, x: Float[Tensor, "B T D"], mask: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "B T D"]:
        """Route on the full-width input, work in the latent, add the shared experts."""
        flat = x.flatten(0, -2)
        ids, weights = self.gate(flat, None if mask is None else mask.flatten())
        y = self._routed(flat, ids, weights)
        if self.config.num_shared_experts:
            y = y + self.shared_experts(flat)
        return y.view(x.shape)

    def _routed(self, x: Float[Tensor, "N D"], ids: Tensor, weights: Tensor) -> Float[Tensor, "N D"]:
        if not self.config.routed_expert_hidden_size:
            return self.experts(x, ids, weights)
        u = self.experts(self.routed_expert_down_proj(x), ids, weights)
        if self.config.latent_moe_use_norm:
            u = self.routed_expert_norm(u)
        return self.routed_expert_up_proj(u)
