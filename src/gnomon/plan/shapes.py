"""Models of the K3 family at any size: the shape that has about so many active parameters, by the proportions of the known ones.

`tiny`, `small`, Kimi Linear and K3 mark the way; between them depth grows with the 0.6th power of the width, and the pool of experts,
the vocabulary and the heads grow in steps. Any field can be set afterwards. Read next: `knobs.py`.
"""

from dataclasses import replace

from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.parts import KDAConfig, MLAConfig, MoEConfig

SMALLEST, LARGEST = 2.5e5, 1e12
"""Active parameters between which a shape is offered."""

POOLS = ((2e7, 4, 16), (3e8, 4, 32), (7e8, 8, 64), (2e10, 8, 256), (LARGEST, 16, 896))
"""Up to so many active parameters: experts per token, experts in the pool."""

VOCABULARIES = ((2e7, 4096), (3e8, 16384), (2e9, 65536), (LARGEST, 163840))


def shape(active: float) -> ModelConfig:
    """The member of the family with the nearest number of active parameters (within about 15 %).

    Raises `ConfigError` outside 250 thousand to 1 trillion.
    """
    if not SMALLEST <= active <= LARGEST:
        raise ConfigError(f"a model of {active:,.0f} active parameters is outside what the family's proportions cover "
                          f"({SMALLEST:,.0f} to {LARGEST:,.0f})")
    low, high = 1, 1024
    while high - low > 1:  # the active parameters grow with the width
        middle = (low + high) // 2
        low, high = (middle, high) if of_width(32 * middle, active).activated_parameters() <= active else (low, middle)
    return min((of_width(32 * n, active) for n in (low, high)), key=lambda m: abs(m.activated_parameters() - active))


def of_width(width: int, active: float) -> ModelConfig:
    """The family's shape with a hidden width, and the pool and vocabulary that fit so many active parameters."""
    per_token, pool = next((k, n) for limit, k, n in POOLS if active <= limit)
    head = 128 if width >= 1024 else 64 if width >= 384 else 32
    channels = width * (1.7 if width >= 1024 else 1.0)
    heads = _multiple(channels / head, 8 if channels / head >= 8 else 2)
    return ModelConfig(
        vocab_size=next(size for limit, size in VOCABULARIES if active <= limit), hidden_size=width,
        num_hidden_layers=_multiple(0.35 * width**0.6, 4), intermediate_size=_multiple(3 * width, 32),
        attn_res_block_size=_multiple(0.35 * width**0.6 / 8, 1),
        mixers={
            "kda": KDAConfig(num_heads=heads, head_dim=head),
            "mla": MLAConfig(num_attention_heads=heads, q_lora_rank=_multiple(min(1536, width / 2), 16),
                             kv_lora_rank=_multiple(min(512, width / 3), 16), qk_nope_head_dim=head, qk_rope_head_dim=head // 2,
                             v_head_dim=head),
        },
        moe=MoEConfig(num_experts=pool, num_experts_per_token=per_token, moe_intermediate_size=_multiple(0.43 * width, 32),
                      num_shared_experts=2, routed_expert_hidden_size=_multiple(width / 2, 32)))


def with_depth(config: ModelConfig, layers: int) -> ModelConfig:
    """The same model with another number of layers."""
    return replace(config, num_hidden_layers=max(1, layers))


def with_experts(config: ModelConfig, pool: int, per_token: int) -> ModelConfig:
    """The same model with another pool of experts, and another number of them per token. Raises `ConfigError` without experts."""
    if config.moe is None:
        raise ConfigError("the model has no experts, so their number cannot change")
    return replace(config, moe=replace(config.moe, num_experts=pool, num_experts_per_token=min(per_token, pool)))


def with_latent(config: ModelConfig, width: int) -> ModelConfig:
    """The same model with another width of the space in which its experts work."""
    if config.moe is None:
        raise ConfigError("the model has no experts, so their latent cannot change")
    return replace(config, moe=replace(config.moe, routed_expert_hidden_size=_multiple(width, 32)))


def with_mix(config: ModelConfig, kda_per_mla: int) -> ModelConfig:
    """The same model with so many KDA layers for each MLA layer; 0 is all MLA."""
    missing = [kind for kind in ("mla", *(("kda",) if kda_per_mla else ())) if kind not in config.mixers]
    if missing:
        raise ConfigError(f"the model has no table 'mixers.{missing[0]}', so the mix cannot change")
    return replace(config, layer_pattern=("kda",) * kda_per_mla + ("mla",), final_mixer="mla")


def _multiple(value: float, of: int) -> int:
    return max(of, round(value / of) * of)
