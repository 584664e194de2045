"""What one step computes and moves, part by part: FLOPs, bytes read and written, distinct experts touched.

A step is described by three numbers: the new `tokens` of one copy, the `sequences` that they belong to, and the `context` that each of them
sees on average. Decoding 16 sequences is `tokens=16, sequences=16`; with 3 drafts each, `tokens=64, sequences=16`; a prefill chunk is
`tokens=8192, sequences=1`. Figures are per rank, summed over the stages of a pipeline. Read next: `exchange.py` for what ranks send.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from gnomon.model.config import ModelConfig
from gnomon.model.parts import MLAConfig
from gnomon.plan.footprint import ONE_RANK, state_bytes, weights
from gnomon.plan.inventory import ROW_CUT, ByValue, inventory
from gnomon.plan.workload import BITS, Layout, Precision

CACHES = ("kv", "state")
"""The parts of a step's traffic that are no weights and no activations: cached latents, and states with their convolution taps."""

OVER_CONTEXT = ("attention", "recurrence")
"""The parts of a step's FLOPs that are no product with a weight."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes by part that a rank reads and writes in one step."""

    read: Mapping[str, float]
    written: Mapping[str, float]

    @property
    def bytes(self) -> float:
        """All bytes, both ways."""
        return sum(self.read.values()) + sum(self.written.values())

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by part, both ways together."""
        return {part: self.read.get(part, 0.0) + self.written.get(part, 0.0) for part in {**self.read, **self.written}}

    @property
    def weights(self) -> float:
        """Bytes of weights: all that is neither cache nor activation."""
        return sum(size for part, size in self.parts.items() if part not in (*CACHES, "activations"))

    @property
    def cache(self) -> float:
        """Bytes of caches and states, both ways."""
        return sum(self.parts.get(part, 0.0) for part in CACHES)


def touched_experts(config: ModelConfig, tokens: float) -> float:
    """Distinct experts of one layer that `tokens` tokens visit, when each chooses its k evenly: E (1 - (1 - k/E)^tokens)."""
    if config.moe is None:
        return 0.0
    pool, visited = config.moe.num_experts, config.moe.num_experts_per_token
    return pool * (1 - (1 - visited / pool) ** tokens)


def tokens_of_group(layout: Layout, tokens: float) -> float:
    """Tokens that reach one set of experts when each copy has `tokens`: expert ranks beyond one copy's serve several copies."""
    return tokens * max(1.0, layout.expert / (layout.tensor * layout.context))


def traffic(config: ModelConfig, precision: Precision, layout: Layout = ONE_RANK, *, tokens: float, sequences: float,
            context: float) -> Traffic:
    """Bytes of a decode step or a prefill chunk on a rank: weights once, each sequence's cache once, states both ways."""
    key, flat = ByValue(config), replace(layout, pipeline=1)
    held = weights(config, precision, flat).parts
    read = {part: size for part, size in held.items() if part not in ("routed", "embedding", "vision")}
    if config.tie_word_embeddings:
        read["head"] = held["embedding"]
    row = config.hidden_size * BITS[precision.rest] / 8
    read["embedding"] = tokens * row / layout.tensor
    if config.moe is not None:
        read["routed"] = held["routed"] * touched_experts(config, tokens_of_group(layout, tokens)) / config.moe.num_experts
    values = BITS[precision.kv] / 8 / (layout.kv_shards * layout.context)
    read["kv"] = sequences * _values_read(key, context) * values
    state = state_bytes(config, precision, flat, sequences)
    read["state"] = state
    moved = tokens / layout.context * BITS[precision.activations] / 8
    ins, outs, depth = _per_token(key, layout.tensor)
    read["activations"], read["depth"] = moved * ins, read.get("depth", 0.0) + moved * depth[0]
    new = sum(config.mixers[kind].cached_values_per_token() for kind in config.layers)
    written = {"kv": tokens * new * values, "state": state, "activations": moved * outs, "depth": moved * depth[1]}
    return Traffic({k: v for k, v in read.items() if v}, {k: v for k, v in written.items() if v})


def flops(config: ModelConfig, layout: Layout = ONE_RANK, *, tokens: float, context: float, absorbed: bool = False,
          logits: float | None = None) -> dict[str, float]:
    """FLOPs of a forward pass on a rank, by part; `attention` is scores and values, `recurrence` the rest that is no product with a weight.

    Decoding attends in the latent space (`absorbed`): more FLOPs per cached token, none to expand it. `logits` is the number of tokens
    whose logits are taken (none: all). The backward pass takes twice as much, recomputation once more.
    """
    once, share = _matrices(ByValue(config)), tokens / (layout.tensor * layout.context)
    found = {part: 2 * size * share for part, size in once.items()}
    found["head"] = 2 * config.vocab_size * config.hidden_size * (tokens if logits is None else logits) / layout.tensor / layout.context
    found["depth"] = config.depth_read_flops() * tokens / layout.context / layout.tensor
    found |= dict.fromkeys(OVER_CONTEXT, 0.0)
    for kind, mixer in config.mixers.items():
        count = config.layers.count(kind)
        still = mixer.flops_per_token(config.hidden_size, 0)
        if absorbed and isinstance(mixer, MLAConfig):
            over = 2 * mixer.num_attention_heads * (2 * mixer.kv_lora_rank + mixer.qk_rope_head_dim) * context
        else:
            over = mixer.flops_per_token(config.hidden_size, round(context)) - still
        found["attention"] += count * over * share
        found["recurrence"] += (count * still - 2 * once.get(kind, 0.0)) * share
    return {part: size for part, size in found.items() if size}


def _values_read(key: ByValue, context: float) -> float:
    """Cached values that one sequence's step reads over all layers; a mixer that reads less than it keeps says so by `values_read`."""
    config, total = key.config, 0.0
    for kind, mixer in config.mixers.items():
        sparse = getattr(mixer, "values_read", None)
        total += config.layers.count(kind) * (mixer.cached_values_per_token() * context if sparse is None else sparse(context))
    return total


@lru_cache(maxsize=512)
def _matrices(key: ByValue) -> dict[str, float]:
    """Elements of the matrices that one token is multiplied with, by part; of the experts those that it visits."""
    found: dict[str, float] = {}
    for piece, count in inventory(key.config).counted():
        if piece.is_matrix and piece.part not in ("embedding", "head", "depth", "vision"):
            found[piece.part] = found.get(piece.part, 0.0) + piece.spec.elements * count
    if key.config.moe is not None:
        found["routed"] *= key.config.moe.num_experts_per_token / key.config.moe.num_experts
    return found


@lru_cache(maxsize=1024)
def _per_token(key: ByValue, tensor: int) -> tuple[float, float, tuple[float, float]]:
    """Values that a rank reads and writes per token as inputs and outputs of products, and for depth reads."""
    config, ins, outs = key.config, 0.0, 0.0
    share = 0.0 if config.moe is None else config.moe.num_experts_per_token / config.moe.num_experts
    for piece, count in inventory(config).counted():
        if not piece.is_matrix or piece.part in ("embedding", "depth", "vision"):
            continue
        out, into = piece.spec.shape
        each = count * piece.spec.count
        if piece.part == "routed":
            ins, outs = ins + each * share * into / tensor, outs + each * share * out / tensor
        else:
            along_rows = piece.spec.name.endswith(ROW_CUT)
            cut = tensor if piece.cut == "tensor" else 1
            ins += each * into / (cut if along_rows else 1)
            outs += each * out / (1 if along_rows else cut)
    sources = config.depth_sources()
    return ins, outs, (config.hidden_size * sum(sources), config.hidden_size * len(sources))
