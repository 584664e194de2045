"""Other families beside ours, as shapes that the planner can weigh: all-MLA, DeepSeek-V3 and V3.2, Kimi-K2, DeepSeek-V4.

A family is a `ModelConfig` whose mixers may be ones that nothing here runs: they list tensors, FLOPs, caches, and which cached values a
step reads. That is all that plans need. `compare` puts families side by side; `at_equal_active` makes them cost the same per token first.
Read next: `variants.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.extend import suggestion
from gnomon.model.config import ModelConfig, preset
from gnomon.model.parts import MLAConfig, MoEConfig, TensorSpec, check_positive, linear
from gnomon.plan.footprint import kv_bytes, state_bytes
from gnomon.plan.quantity import Badge
from gnomon.plan.traffic import flops, traffic
from gnomon.plan.workload import Layout, Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseMLAConfig:
    """Latent attention over tokens that an indexer picks: all are scored, `index_topk` are read (DeepSeek-V3.2, arXiv 2512.02556)."""

    mla: MLAConfig = setting(doc="the attention itself")
    index_heads: int = setting(64, "heads of the indexer")
    index_head_dim: int = setting(128, "width of its one key per token")
    index_topk: int = setting(2048, "tokens that attention reads")

    @property
    def num_attention_heads(self) -> int:
        """Heads of the attention."""
        return self.mla.num_attention_heads

    def tensors(self, hidden_size: int) -> Iterator[TensorSpec]:
        """Those of the attention, and the indexer's query, key and head weights."""
        yield from self.mla.tensors(hidden_size)
        yield linear("indexer.wq_b", self.index_heads * self.index_head_dim, self.mla.q_lora_rank or hidden_size)
        yield linear("indexer.wk", self.index_head_dim, hidden_size)
        yield TensorSpec("indexer.k_norm.weight", (self.index_head_dim,))
        yield linear("indexer.weights_proj", self.index_heads, hidden_size)

    def flops_per_token(self, hidden_size: int, context: int) -> int:
        """Products; scores of the indexer over all tokens; attention in the latent space over those picked."""
        products = sum(2 * spec.elements for spec in self.tensors(hidden_size) if len(spec.shape) == 2)
        index = 2 * self.index_heads * self.index_head_dim * context
        width = 2 * self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        return products + index + 2 * self.num_attention_heads * width * min(context, self.index_topk)

    def cached_values_per_token(self) -> int:
        """The latent, the shared key and the indexer's key."""
        return self.mla.cached_values_per_token() + self.index_head_dim

    def values_read(self, context: float) -> float:
        """Every indexer key, and the latents picked."""
        return self.index_head_dim * context + self.mla.cached_values_per_token() * min(context, self.index_topk)

    def state_bytes(self) -> int:
        """No recurrent state."""
        return 0

    def conv_state_values(self) -> int:
        """No convolution."""
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedConfig:
    """Attention over compressed tokens (DeepSeek-V4): one entry per `ratio` tokens and a window of whole ones, one key-value for all heads.

    With `index_topk` an indexer picks which entries are read (compressed sparse attention); without, all are (heavily compressed). A ratio
    of 0 is the window alone. Ratios of 4 pool overlapping spans, which doubles the pooling projections.
    """

    num_attention_heads: int = setting(doc="query heads")
    head_dim: int = setting(512, "width of queries and of the one key-value")
    q_lora_rank: int = setting(1536, "width of the query latent")
    ratio: int = setting(doc="tokens pooled into one entry; 0: the window alone")
    index_topk: int | None = setting(None, "entries that a query reads; none: all")
    index_heads: int = setting(64, "heads of the indexer")
    index_head_dim: int = setting(128, "width of its keys, one per entry")
    window: int = setting(128, "recent tokens kept whole")
    output_groups: int = setting(16, "groups of heads that are projected apart")
    output_rank: int = setting(1024, "width of each group's output latent")

    def __post_init__(self) -> None:
        check_positive(self, "num_attention_heads", "head_dim", "q_lora_rank", "window", "output_groups", "output_rank", "index_topk")
        if self.ratio < 0 or self.num_attention_heads % self.output_groups:
            raise ConfigError(f"'ratio' is {self.ratio} and 'output_groups' {self.output_groups}: the first is 0 or more, "
                              f"the second divides the {self.num_attention_heads} heads")

    def tensors(self, hidden_size: int) -> Iterator[TensorSpec]:
        """Queries through a latent, one key-value, grouped output, pooling, and the indexer with pooling of its own."""
        heads, width = self.num_attention_heads, self.head_dim
        yield linear("wq_a", self.q_lora_rank, hidden_size)
        yield TensorSpec("q_norm.weight", (self.q_lora_rank,))
        yield linear("wq_b", heads * width, self.q_lora_rank)
        yield linear("wkv", width, hidden_size)
        yield TensorSpec("kv_norm.weight", (width,))
        yield TensorSpec("attn_sink", (heads,), "fp32")
        yield linear("wo_a", self.output_groups * self.output_rank, heads * width // self.output_groups)
        yield linear("wo_b", hidden_size, self.output_groups * self.output_rank)
        if self.ratio:
            yield from self._pooling("compressor", hidden_size, width)
        if self.index_topk is not None:
            yield linear("indexer.wq_b", self.index_heads * self.index_head_dim, self.q_lora_rank)
            yield linear("indexer.weights_proj", self.index_heads, hidden_size)
            yield from self._pooling("indexer.compressor", hidden_size, self.index_head_dim)

    def _pooling(self, name: str, hidden_size: int, width: int) -> Iterator[TensorSpec]:
        yield linear(f"{name}.wkv", self._spans * width, hidden_size)
        yield linear(f"{name}.wgate", self._spans * width, hidden_size)
        yield TensorSpec(f"{name}.ape", (1, self.ratio, self._spans * width), "fp32")
        yield TensorSpec(f"{name}.norm.weight", (width,))

    @property
    def _spans(self) -> int:
        return 2 if self.ratio == 4 else 1

    def entries(self, context: float) -> float:
        """Compressed entries and whole tokens that one query reads."""
        pooled = context / self.ratio if self.ratio else 0.0
        return min(context, self.window) + (pooled if self.index_topk is None else min(pooled, self.index_topk))

    def flops_per_token(self, hidden_size: int, context: int) -> int:
        """Products; the indexer's scores over all entries; scores and values over the entries read."""
        products = sum(2 * spec.elements for spec in self.tensors(hidden_size) if len(spec.shape) == 2)
        index = 0.0 if self.index_topk is None else 2 * self.index_heads * self.index_head_dim * context / self.ratio
        return round(products + index + 4 * self.num_attention_heads * self.head_dim * self.entries(context))

    def cached_values_per_token(self) -> float:
        """An entry, and the indexer's key for it, per `ratio` tokens."""
        return 0.0 if not self.ratio else (self.head_dim + (0 if self.index_topk is None else self.index_head_dim)) / self.ratio

    def values_read(self, context: float) -> float:
        """The indexer's keys of all entries, and the entries read."""
        keys = 0.0 if self.index_topk is None else self.index_head_dim * context / self.ratio
        return keys + self.head_dim * self.entries(context)

    def state_bytes(self) -> int:
        """Tokens that wait to be pooled, values and scores in fp32, for the attention and for the indexer."""
        widths = self.head_dim + (0 if self.index_topk is None else self.index_head_dim)
        return 2 * 4 * self._spans * self.ratio * self._spans * widths

    def conv_state_values(self) -> int:
        """The window of whole tokens."""
        return self.window * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A published model as a shape: the formats of its release, where the shape is from, and how sure it is."""

    name: str
    config: ModelConfig
    source: str
    formats: tuple[str, str] = ("fp8", "fp8")
    badge: Badge = "exact"
    uncertain: str = ""


def _deepseek(**changes: Any) -> ModelConfig:
    mla = MLAConfig(num_attention_heads=128, q_lora_rank=1536, kv_lora_rank=512, mla_use_output_gate=False)
    moe = MoEConfig(num_experts=256, num_experts_per_token=8, moe_intermediate_size=2048, num_shared_experts=1, routed_scaling_factor=2.5,
                    first_k_dense_replace=3, num_expert_group=8, topk_group=4)
    fields = {"family": "kimi_linear", "hidden_act": "silu", "attention_residuals": "off", "vocab_size": 129_280, "hidden_size": 7168,
              "num_hidden_layers": 61, "layer_pattern": ("mla",), "final_mixer": None, "mixers": {"mla": mla}, "intermediate_size": 18_432,
              "moe": moe}
    return ModelConfig(**{**fields, **changes})


def _deepseek_v4(*, layers: int, first: tuple[str, ...], moe: MoEConfig, attention: dict[str, int], topk: int,
                 hidden_size: int) -> ModelConfig:
    mixers = {"window": CompressedConfig(ratio=0, **attention), "csa": CompressedConfig(ratio=4, index_topk=topk, **attention),
              "hca": CompressedConfig(ratio=128, **attention)}
    pattern = (*first, *(("csa", "hca") * layers)[: layers - len(first)])
    return _deepseek(family="kimi_k3", num_hidden_layers=layers, hidden_size=hidden_size, layer_pattern=pattern, moe=moe,
                     mixers={kind: mixer for kind, mixer in mixers.items() if kind in pattern})


def _families() -> Iterator[Family]:
    card = "config.json of the release"
    yield Family(name="k3", formats=("mxfp4", "bf16"), config=preset("k3-2.8t"), source="arXiv 2607.24653, Table 1; " + card)
    yield Family(name="kimi-linear", formats=("bf16", "bf16"), config=preset("kimi-linear-48b"), source="arXiv 2510.26692; " + card)
    yield Family(name="deepseek-v3", config=_deepseek(), source="arXiv 2412.19437; " + card)
    sparse = SparseMLAConfig(mla=_deepseek().mixers["mla"])
    yield Family(name="deepseek-v3.2", config=_deepseek(layer_pattern=("dsa",), mixers={"dsa": sparse}), source="arXiv 2512.02556; " + card)
    moe = MoEConfig(num_experts=384, num_experts_per_token=8, moe_intermediate_size=2048, num_shared_experts=1, routed_scaling_factor=2.827)
    half = MLAConfig(num_attention_heads=64, q_lora_rank=1536, kv_lora_rank=512, mla_use_output_gate=False)
    yield Family(name="kimi-k2", config=_deepseek(vocab_size=163_840, mixers={"mla": half}, moe=moe), source="arXiv 2507.20534; " + card)
    unsure = ("left out: hyper-connections between sublayers (below 0.01 % of the parameters), hash tables of the first three routers, "
              "the layer that drafts")
    moe = MoEConfig(num_experts=384, num_experts_per_token=6, moe_intermediate_size=3072, num_shared_experts=1, routed_scaling_factor=2.5,
                    first_k_dense_replace=0)
    yield Family(name="deepseek-v4-pro", badge="validated", formats=("mxfp4", "fp8"), uncertain=unsure, source=card + " (V4-Pro)",
                 config=_deepseek_v4(layers=61, first=("hca", "hca"), moe=moe, topk=1024, hidden_size=7168,
                                     attention={"num_attention_heads": 128, "q_lora_rank": 1536, "output_groups": 16}))
    moe = replace(moe, num_experts=256, moe_intermediate_size=2048, routed_scaling_factor=1.5)
    yield Family(name="deepseek-v4-flash", badge="validated", formats=("mxfp4", "fp8"), uncertain=unsure, source=card + " (V4-Flash)",
                 config=_deepseek_v4(layers=43, first=("window", "window"), moe=moe, topk=512, hidden_size=4096,
                                     attention={"num_attention_heads": 64, "q_lora_rank": 1024, "output_groups": 8}))


@cache
def families() -> Mapping[str, Family]:
    """The published families by name."""
    return MappingProxyType({item.name: item for item in _families()})


def released(config: ModelConfig) -> Precision:
    """The formats in which a model is released: a published family's own, else those of our checkpoints; bf16 cache, fp32 states."""
    known = next((item for item in families().values() if item.config == config), None)
    return Precision.released(config) if known is None else Precision(experts=known.formats[0], rest=known.formats[1])


def family(name: str) -> Family:
    """A published family; `ConfigError` with a suggestion for an unknown one."""
    known = families()
    if name not in known:
        raise ConfigError(f"unknown family '{name}'{suggestion(name, list(known))} (known: {', '.join(known)})")
    return known[name]


def all_mla(config: ModelConfig) -> ModelConfig:
    """The same model with latent attention in every layer."""
    return _with(config, ("mla",), {"mla": _mla(config)}, None)


def layered_sparse(config: ModelConfig, topk: int = 1024, window: int = 128) -> ModelConfig:
    """The same model with DeepSeek-V4's layers: compressed sparse and heavily compressed attention in turn, the first two the latter."""
    mla = _mla(config)
    heads = mla.num_attention_heads
    shape = {"num_attention_heads": heads, "head_dim": mla.kv_lora_rank, "q_lora_rank": mla.q_lora_rank or max(32, config.hidden_size // 4),
             "index_heads": max(1, heads // 2), "index_head_dim": mla.qk_nope_head_dim, "window": window,
             "output_groups": next(n for n in (16, 8, 4, 2, 1) if heads % n == 0), "output_rank": max(16, config.hidden_size // 7)}
    mixers = {"csa": CompressedConfig(ratio=4, index_topk=topk, **shape), "hca": CompressedConfig(ratio=128, **shape)}
    pattern = ("hca", "hca", *(("csa", "hca") * config.num_hidden_layers))[: config.num_hidden_layers]
    return _with(config, pattern, {kind: mixer for kind, mixer in mixers.items() if kind in pattern}, None)


def _mla(config: ModelConfig) -> MLAConfig:
    found = next((mixer for mixer in config.mixers.values() if isinstance(mixer, MLAConfig)), None)
    if found is None:
        raise ConfigError("the model has no latent attention to take the shape of heads and latents from; add a table 'mixers.mla'")
    return found


def _with(config: ModelConfig, pattern: tuple[str, ...], mixers: Mapping[str, Any], final: str | None) -> ModelConfig:
    return replace(config, layer_pattern=pattern, mixers=dict(mixers), final_mixer=final)


def at_equal_active(config: ModelConfig, active: int) -> ModelConfig:
    """The same model with inner widths of its feed-forwards changed, in steps of the MX block, until about `active` parameters are used.

    Raises `ConfigError` where the mixers alone take more.
    """
    def sized(step: int) -> ModelConfig:
        if config.moe is None:
            return replace(config, intermediate_size=32 * step)
        return replace(config, moe=replace(config.moe, moe_intermediate_size=32 * step))

    least, each = sized(1).activated_parameters(), sized(2).activated_parameters() - sized(1).activated_parameters()
    if least > active:
        raise ConfigError(f"no feed-forward is narrow enough for {active:,} active parameters: all else takes {least:,}")
    return sized(1 + round((active - least) / each))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One family at one context: parameters, bytes that a sequence keeps, bytes and FLOPs of decoding one token of it."""

    name: str
    context: int
    total: int
    active: int
    kv_bytes: float
    state_bytes: float
    cache_traffic: float
    flops: float
    badge: Badge = "exact"


def compare(models: Mapping[str, ModelConfig], contexts: Iterable[int] = (8192, 131_072, 1_048_576), kv: str = "bf16") -> list[Row]:
    """A row per model and context; latents and windows in the format `kv`, everything of one sequence on one rank."""
    rows, here, sure = [], Layout(), {name: item.badge for name, item in families().items()}
    for name, config in models.items():
        precision = replace(released(config), kv=kv)
        for context in contexts:
            step = traffic(config, precision, tokens=1, sequences=1, context=context)
            rows.append(Row(
                name=name, context=context, badge=sure.get(name, "exact"),
                total=config.num_parameters(), active=config.activated_parameters(),
                kv_bytes=kv_bytes(config, precision, here, context), state_bytes=state_bytes(config, precision),
                cache_traffic=step.cache, flops=sum(flops(config, tokens=1, context=context, absorbed=True).values())))
    return rows
