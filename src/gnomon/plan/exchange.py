"""What ranks send each other: bytes and calls by kind, for a forward pass, a pipeline and an optimiser step.

Each `Exchange` names the ranks that take part, so that the cost model can put it on the fabric inside a domain or the network between
domains. Bytes are what one rank sends. Sources: ring collectives; report §5.1.2 (KDA over context ranks), §5.2.1 (expert transport),
§5.2.2 and arXiv 2603.15031 §4 (banked blocks over a pipeline). Read next: `cost.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.parts import KDAConfig, MLAConfig
from gnomon.plan.footprint import ONE_RANK, copies
from gnomon.plan.inventory import inventory, stages
from gnomon.plan.workload import BITS, Layout, Precision

Verb = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]

COMBINE_BYTES = 2.0
"""Bytes per value on the way back from the experts: sums travel in bf16 whatever the way there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One kind of message: who (`ranks` of the `axis`), how often, and bytes that a rank sends in all calls together."""

    axis: str
    verb: Verb
    what: str
    ranks: int
    calls: float
    sent_bytes: float


def sent(exchanges: "list[Exchange]") -> float:
    """Bytes that a rank sends in all of them."""
    return sum(item.sent_bytes for item in exchanges)


def exchanges(config: ModelConfig, precision: Precision, layout: Layout = ONE_RANK, *, tokens: float,
              latent: bool = True) -> list[Exchange]:
    """Messages of a forward pass over `tokens` tokens of one copy, all stages together; `latent=False` sends experts the full width."""
    return [*_tensor(config, precision, layout, tokens), *_dealt(config, precision, layout, tokens),
            *_experts(config, precision, layout, tokens, latent), *_context(config, precision, layout, tokens),
            *_pipeline(config, precision, layout, tokens)]


def _bytes(precision: Precision) -> float:
    return max(BITS[precision.activations], 16.0) / 8


def _tensor(config: ModelConfig, precision: Precision, layout: Layout, tokens: float) -> Iterator[Exchange]:
    ranks, width = layout.tensor, config.hidden_size
    if ranks == 1:
        return
    per_token = tokens / layout.context * _bytes(precision) * 2 * (ranks - 1) / ranks
    # mixer and feed-forward of each layer, and the embedding that is cut by vocabulary
    calls = 2 * config.num_hidden_layers + 1
    yield Exchange(axis="tensor", verb="all-reduce", what="sublayer outputs", ranks=ranks, calls=calls,
                   sent_bytes=calls * width * per_token)
    moe = config.moe
    if moe is not None and moe.routed_expert_hidden_size and layout.expert <= layout.tensor:
        # the latent is normalised after it is summed, so its sum cannot wait for that of the sublayer
        yield Exchange(axis="tensor", verb="all-reduce", what="expert latents", ranks=ranks, calls=config.num_moe_layers,
                       sent_bytes=config.num_moe_layers * moe.routed_expert_hidden_size * per_token)


def _dealt(config: ModelConfig, precision: Precision, layout: Layout, tokens: float) -> Iterator[Exchange]:
    """Decoding over dealt latents: every rank gets all heads' queries, partial outputs are merged by their log-sums."""
    ranks = layout.kv_shards
    if ranks == 1:
        return
    for kind, mixer in config.mixers.items():
        layers = config.layers.count(kind)
        if isinstance(mixer, MLAConfig) and layers:
            heads = mixer.num_attention_heads / layout.tensor
            values = heads * (mixer.kv_lora_rank + mixer.qk_rope_head_dim) + heads * (mixer.kv_lora_rank + 2)
            yield Exchange(axis="kv", verb="all-gather", what="queries and partial outputs", ranks=ranks, calls=2 * layers,
                           sent_bytes=layers * values * tokens / layout.context * _bytes(precision) * (ranks - 1))


def _experts(config: ModelConfig, precision: Precision, layout: Layout, tokens: float, latent: bool) -> Iterator[Exchange]:
    moe, ranks = config.moe, layout.expert
    if moe is None or ranks <= layout.tensor:
        return  # tensor ranks hold the same tokens: their pieces of the experts are summed with the sublayer
    width = moe.expert_width(config.hidden_size) if latent else config.hidden_size
    mine = tokens / (layout.tensor * layout.context)  # each rank sends its share of a copy's tokens
    # a token goes once to a rank however many of its experts stand there
    remote = (ranks - 1) * (1 - _none_there(moe.num_experts, moe.num_experts // ranks, moe.num_experts_per_token))
    rows = config.num_moe_layers * mine * remote
    there = BITS[precision.activations] / 8
    for what, size in (("dispatch", there), ("combine", COMBINE_BYTES)):
        yield Exchange(axis="expert", verb="all-to-all", what=what, ranks=ranks, calls=config.num_moe_layers,
                       sent_bytes=rows * width * size)


def _none_there(pool: int, local: int, visited: int) -> float:
    """Chance that none of a token's experts stands on a given rank."""
    chance = 1.0
    for taken in range(visited):
        chance *= (pool - local - taken) / (pool - taken)
    return max(0.0, chance)


def _context(config: ModelConfig, precision: Precision, layout: Layout, tokens: float) -> Iterator[Exchange]:
    ranks = layout.context
    if ranks == 1:
        return
    for kind, mixer in config.mixers.items():
        layers = config.layers.count(kind)
        if isinstance(mixer, KDAConfig) and layers:
            transition = mixer.num_heads / layout.tensor * 2 * mixer.head_dim**2 * 4  # state from nothing, and the map of a state, fp32
            halo = (mixer.short_conv_kernel_size - 1) * 3 * mixer.width / layout.tensor * _bytes(precision)
            yield Exchange(axis="context", verb="all-gather", what="segment transitions", ranks=ranks, calls=layers,
                           sent_bytes=layers * transition * (ranks - 1))
            yield Exchange(axis="context", verb="send", what="convolution history", ranks=2, calls=layers, sent_bytes=layers * halo)
        elif layers and (values := mixer.cached_values_per_token()):
            yield Exchange(axis="context", verb="all-gather", what="latents", ranks=ranks, calls=layers,
                           sent_bytes=layers * tokens / ranks * values * _bytes(precision) * (ranks - 1))


def _pipeline(config: ModelConfig, precision: Precision, layout: Layout, tokens: float) -> Iterator[Exchange]:
    if layout.pipeline == 1:
        return
    widths = pipeline_payload(config, layout)
    per_token = tokens / (layout.context * layout.tensor) * _bytes(precision)
    yield Exchange(axis="pipeline", verb="send", what="running sum and banked blocks", ranks=2, calls=layout.pipeline - 1,
                   sent_bytes=widths * config.hidden_size * per_token)


def pipeline_payload(config: ModelConfig, layout: Layout, virtual: int = 1, cached: bool = True) -> int:
    """Rows of the hidden width that one token sends over all hops of a pipeline: the running sum, and the blocks banked so far.

    With `virtual` stages per rank, stage s stands on rank s mod `pipeline`; a rank that keeps what it saw (`cached`) is sent only the
    blocks banked since. The backward pass sends as much.
    """
    if virtual < 1 or layout.pipeline * virtual > config.num_hidden_layers:
        raise ConfigError(f"'virtual' is {virtual}: {layout.pipeline} x {virtual} stages need as many layers, the model has "
                          f"{config.num_hidden_layers}; use {max(1, config.num_hidden_layers // layout.pipeline)} or less")
    chunks = stages(config, Layout(tensor=layout.tensor, pipeline=layout.pipeline * virtual))
    banked = [blocks_before(config, span.start) for span in chunks]
    total = 0
    for chunk in range(1, len(chunks)):
        back = chunk - layout.pipeline
        known = banked[back + 1] if cached and back >= 0 else 0
        total += 1 + banked[chunk] - known
    return total


def blocks_before(config: ModelConfig, layer: int) -> int:
    """Sources that stand in the bank when a layer starts: the embedding and finished blocks, or every sublayer so far."""
    if config.attention_residuals == "off":
        return 0
    return 2 * layer if config.attention_residuals == "full" else -(-layer // config.attn_res_block_size)


def optimiser_exchanges(config: ModelConfig, layout: Layout, *, gradient_bytes: float = 4.0, weight_bytes: float = 2.0,
                        gathers: int = 1) -> list[Exchange]:
    """Messages between copies for one optimiser step, on the stage that holds most: gradients out, weights back.

    With ZeRO-3 weights are gathered `gathers` times (twice per micro-batch: forward and backward).
    """
    best: dict[int, float] = {}
    for span in stages(config, layout):
        held: dict[int, float] = {}
        for piece, count in inventory(config).stage(span):
            if piece.part != "vision":
                ranks = copies(piece, layout)
                held[ranks] = held.get(ranks, 0.0) + piece.spec.elements * count / piece.shards(layout)
        best = max(best, held, key=lambda sizes: sum(sizes.values()))
    return [item for ranks, size in sorted(best.items()) if ranks > 1
            for item in _shared_out(layout.zero, ranks, size * (ranks - 1) / ranks, (gradient_bytes, weight_bytes, gathers))]


def _shared_out(zero: int, ranks: int, ring: float, sizes: tuple[float, float, int]) -> Iterator[Exchange]:
    gradient, weight, gathers = sizes
    if zero == 0:
        yield Exchange(axis="data", verb="all-reduce", what="gradients", ranks=ranks, calls=1, sent_bytes=2 * ring * gradient)
        return
    times = gathers if zero == 3 else 1
    yield Exchange(axis="data", verb="reduce-scatter", what="gradients", ranks=ranks, calls=1, sent_bytes=ring * gradient)
    yield Exchange(axis="data", verb="all-gather", what="weights", ranks=ranks, calls=times, sent_bytes=times * ring * weight)
