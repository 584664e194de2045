"""What training adds to a rank's memory and traffic: activations kept for the backward pass, gradients, master weights, moments.

Activations are what an engine keeps that saves each product's inputs once, shards the sequence over tensor ranks between products, and
never holds all logits. Selective recomputation drops what is element-wise (norms, activations, gates, convolutions), full keeps the
inputs of sublayers. Optimiser: a matrix has one momentum under Muon; everything under AdamW, and what is no matrix, has two moments.
Read next: `exchange.py`.
"""

from dataclasses import replace
from typing import Literal

from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.parts import KDAConfig, MLAConfig
from gnomon.plan.footprint import ONE_RANK, Footprint, copies, weights
from gnomon.plan.inventory import Kind, Piece, inventory, stages
from gnomon.plan.traffic import Traffic, traffic
from gnomon.plan.workload import BITS, Layout, Optimiser, Precision

Recompute = Literal["none", "selective", "full"]

CHUNK = 64
"""Tokens between recurrent states that the chunked KDA keeps for its backward pass."""

PRODUCTS = 3
"""Forward products that one training token costs: forward, and two for the gradients of inputs and weights."""


def activation_bytes(config: ModelConfig, precision: Precision, layout: Layout = ONE_RANK, *, tokens: float,
                     recompute: Recompute = "selective", micro_batches: int = 1) -> Footprint:
    """Bytes kept between forward and backward by part, on the stage that keeps most; `tokens` are those of one copy's micro-batch.

    A pipeline's stage s keeps up to `pipeline - s` micro-batches at once (one forward, one backward in turn).
    """
    size = tokens / (layout.tensor * layout.context) * max(16.0, BITS[precision.activations]) / 8
    order = inventory(config).order
    whole: dict[str, float] = {}
    best: dict[str, float] = {}
    where = 0
    for index, span in enumerate(stages(config, layout)):
        alive = min(micro_batches, layout.pipeline - index)
        parts: dict[str, float] = {}
        for layer in span:
            for part, values in _kept(config, order[layer], recompute).items():
                parts[part] = parts.get(part, 0.0) + values * size * alive
                whole[part] = whole.get(part, 0.0) + values * size * layout.tensor * layout.context
        if recompute == "full":
            parts["recomputed"] = max(sum(_kept(config, order[layer], "none").values()) for layer in span) * size
        if sum(parts.values()) > sum(best.values()):
            best, where = parts, index
    return Footprint(best, whole, where)


def _kept(config: ModelConfig, kind: Kind, recompute: Recompute) -> dict[str, float]:
    """Values that one token leaves in one layer, by part."""
    width, kept = config.hidden_size, {"residual": 2.0 * config.hidden_size}
    if recompute == "full":
        return kept
    cheap = 1 if recompute == "none" else 0  # factor of what is element-wise
    kept[kind.mixer] = width * cheap + _mixer_values(config, kind.mixer, cheap)
    if not kind.experts or config.moe is None:
        return kept | {"dense": width * cheap + (2 + cheap) * config.intermediate_size}
    moe = config.moe
    latent = moe.expert_width(width) if moe.routed_expert_hidden_size else 0
    rows = moe.num_experts_per_token
    return kept | {
        "router": moe.num_experts, "latent": (2 + cheap) * latent + width * cheap,
        "routed": rows * (moe.expert_width(width) * cheap + (2 + cheap) * moe.moe_intermediate_size),
        "shared": (2 + cheap) * moe.num_shared_experts * moe.moe_intermediate_size,
    }


def _mixer_values(config: ModelConfig, kind: str, cheap: int) -> float:
    mixer = config.mixers[kind]
    if isinstance(mixer, KDAConfig):
        products = 3 + 1 + 1 + 1 + mixer.head_dim / CHUNK  # q, k, v; decay; gate; output; states between chunks
        return mixer.width * (products + (3 + 1) * cheap) + mixer.head_dim + mixer.num_heads
    if isinstance(mixer, MLAConfig):
        heads = mixer.num_attention_heads
        output = heads * mixer.v_head_dim * (2 + cheap + (1 if mixer.mla_use_output_gate else 0))  # fp32 output counts twice
        queries = heads * mixer.qk_head_dim + (mixer.q_lora_rank or 0) * (1 + cheap)
        return queries + mixer.cached_values_per_token() + mixer.kv_lora_rank * cheap + heads * (
            mixer.qk_nope_head_dim + mixer.v_head_dim) + output + heads
    return sum(2.0 * spec.shape[0] for spec in mixer.tensors(config.hidden_size) if len(spec.shape) == 2)


def is_muon(piece: Piece) -> bool:
    """Whether Muon takes a piece: a matrix that is no table of tokens."""
    return piece.is_matrix and piece.part not in ("embedding", "head", "vision")


def optimiser_bytes(config: ModelConfig, layout: Layout = ONE_RANK, *, optimiser: Optimiser = "muon", gradient_bytes: float = 4.0,
                    master_bytes: float = 4.0, moment_bytes: float = 4.0) -> Footprint:
    """Bytes of gradients, master weights, momentum and second moments on the stage that holds most; the vision tower is left out.

    ZeRO shares out moments and masters from stage 1, gradients from stage 2, over the ranks that hold the same shard.
    """
    whole: dict[str, float] = {}
    best: dict[str, float] = {}
    where = 0
    for index, span in enumerate(stages(config, layout)):
        parts: dict[str, float] = {}
        for piece, count in inventory(config).stage(span):
            if piece.part == "vision" or optimiser == "none":
                continue
            sizes = {"gradients": gradient_bytes, "master": master_bytes, "momentum": moment_bytes,
                     "second moment": 0.0 if optimiser == "muon" and is_muon(piece) else moment_bytes}
            for part, size in sizes.items():
                held = piece.spec.elements * count * size
                whole[part] = whole.get(part, 0.0) + held
                shared = layout.zero >= (2 if part == "gradients" else 1)
                parts[part] = parts.get(part, 0.0) + held / piece.shards(layout) / (copies(piece, layout) if shared else 1)
        if sum(parts.values()) > sum(best.values()):
            best, where = parts, index
    return Footprint(best, whole, where)


def training_bytes(config: ModelConfig, precision: Precision, layout: Layout = ONE_RANK, *, tokens: float,
                   recompute: Recompute = "selective", micro_batches: int = 1, optimiser: Optimiser = "muon") -> Footprint:
    """All that training keeps on a rank: weights, optimiser, activations, each on its own heaviest stage."""
    parts = {"weights": weights(config, precision, layout).without("vision"),
             "optimiser": optimiser_bytes(config, layout, optimiser=optimiser),
             "activations": activation_bytes(config, precision, layout, tokens=tokens, recompute=recompute, micro_batches=micro_batches)}
    return Footprint({name: item.bytes for name, item in parts.items()}, {name: item.whole_bytes for name, item in parts.items()},
                     parts["weights"].stage)


def training_traffic(config: ModelConfig, precision: Precision, layout: Layout = ONE_RANK, *, tokens: float, context: float,
                     recompute: Recompute = "selective") -> Traffic:
    """Bytes that forward and backward over one micro-batch of `tokens` tokens move on a rank; every expert is taken to be visited.

    Weights are read for each pass over them, gradients are read and written once (fp32), activations three times as often as forward.
    """
    if tokens < 1:
        raise ConfigError(f"'tokens' is {tokens}; a micro-batch has at least one token")
    passes = PRODUCTS - 1 + (1 if recompute == "full" else 0)
    forward = traffic(config, precision, layout, tokens=tokens, sequences=max(1.0, tokens / max(1.0, context)), context=context)
    held = weights(config, precision, replace(layout, pipeline=1, zero=min(layout.zero, 2))).without("vision", "embedding").parts
    read = {part: passes * size for part, size in held.items()}
    read["activations"] = (passes + 1) * forward.read["activations"]
    written = {"activations": (passes + 1) * forward.written["activations"], "gradients": _gradient_bytes(config, layout)}
    return Traffic(read | {"gradients": written["gradients"]}, written)


def _gradient_bytes(config: ModelConfig, layout: Layout) -> float:
    return sum(4.0 * piece.spec.elements * count / piece.shards(layout)
               for piece, count in inventory(config).counted() if piece.part not in ("vision", "embedding"))
