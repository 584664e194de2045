"""Settings of the optimiser and of the balance, free of torch so that recipes can be read without it.

Read next: `muon.py`, `balance.py`, which follow them.
"""

from dataclasses import dataclass
from typing import Literal

from gnomon.config import setting
from gnomon.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonConfig:
    """The optimiser. The learning rate is the peak of the schedule and serves Muon and AdamW alike, vectors at `vector_rate` of it."""

    learning_rate: float = setting(2e-3, "peak learning rate")
    weight_decay: float = setting(0.1, "decoupled decay of matrices and token tables; vectors have none")
    vector_rate: float = setting(1.0, "share of the learning rate for vectors: norms, decay, convolutions, depth queries")
    momentum: float = setting(0.95, "Muon's momentum, Nesterov")
    newton_schulz_steps: int = setting(5, "iterations of the orthogonalisation")
    matrices: bool = setting(True, "orthogonalise the updates of matrices; false: AdamW for every parameter")
    per_head: bool = setting(True, "orthogonalise queries, keys and values head by head; false: whole projections")
    adam_betas: tuple[float, ...] = setting((0.9, 0.95), "AdamW's decay rates")
    adam_epsilon: float = setting(1e-8, "AdamW's epsilon")
    clip_gradient: float | None = setting(1.0, "largest global gradient norm; none: no clipping")
    clip_logits: float | None = setting(100.0, "tau of QK-Clip on the latent attention's logits; none: no clipping")

    def __post_init__(self) -> None:
        for name in ("learning_rate", "vector_rate", "adam_epsilon", "clip_gradient", "clip_logits"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"'{name}' is {value}; it must be positive")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"'momentum' is {self.momentum}; it must be at least 0 and below 1")
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ConfigError(f"'adam_betas' is {list(self.adam_betas)}; give two rates, each at least 0 and below 1")
        if self.weight_decay < 0 or self.newton_schulz_steps < 1:
            raise ConfigError(f"'weight_decay' {self.weight_decay} must not be negative and 'newton_schulz_steps' "
                              f"{self.newton_schulz_steps} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationRule:
    """What becomes of the tensors that some modules save for the backward pass."""

    modules: str = setting(doc="names of modules, with * and ?, as in model.layers.*.self_attn")
    policy: Literal["keep", "recompute", "quantise", "offload"] = setting(doc="quantise: as FP8; offload: GPU to host, or host to a file")


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
    """How experts are kept equally busy."""

    method: Literal["quantile", "sign", "auxiliary", "none"] = setting("quantile", "the report's quantile, or a comparator, or none")
    sign_step: float = setting(1e-3, "sign only: how far a bias moves per step")
    auxiliary_weight: float = setting(1e-2, "auxiliary only: weight of the loss term, averaged over layers")

    def __post_init__(self) -> None:
        for name in ("sign_step", "auxiliary_weight"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"'{name}' is {getattr(self, name)}; it must be positive")
