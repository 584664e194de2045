"""Shapes and costs of the parts of a model: two mixers, the feed-forward parts, the vision tower (report §2, Table 1).

Each part lists its tensors once, as the released checkpoint names and stores them; parameters and bytes are sums over that list.
FLOPs are of one forward pass for one token, a multiply-add counted as two. Free of torch: the planner uses these too.
Read next: `config.py`, which puts the parts together.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gnomon.config import setting
from gnomon.errors import ConfigError

MX_BLOCK = 32
"""Values that share one scale in the MX formats (OCP MX 1.0; report §4.1.4)."""

A_LOG_PADDING = 128
"""The released checkpoint stores `A_log` of 96 heads as 128 values, the rest zero."""

STORED_BITS = {"bf16": 16.0, "fp32": 32.0, "mxfp4": 4.0 + 8.0 / MX_BLOCK}
"""Bits per stored value."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint: its name below the module, shape `[out, in]`, storage, and how many like it there are.

    `padding` counts stored values that are not parameters.
    """

    name: str
    shape: tuple[int, ...]
    storage: str = "bf16"
    count: int = 1
    padding: int = 0

    @property
    def elements(self) -> int:
        """Parameters in all `count` tensors."""
        return math.prod(self.shape) * self.count

    @property
    def stored_bytes(self) -> int:
        """Bytes in a checkpoint, scales and padding included."""
        return round((self.elements + self.padding) * STORED_BITS[self.storage] / 8)


def linear(name: str, out: int, inputs: int) -> TensorSpec:
    """The weight of a linear map without bias."""
    return TensorSpec(f"{name}.weight", (out, inputs))


def check_positive(owner: object, *names: str) -> None:
    """Raise `ConfigError` for a field that is not a positive number."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value <= 0:
            raise ConfigError(f"'{name}' is {value}; it must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class KDAConfig:
    """Kimi Delta Attention: a linear recurrence with a decay per channel (report §2.1)."""

    num_heads: int = setting(doc="heads")
    head_dim: int = setting(doc="key and value width of a head")
    short_conv_kernel_size: int = setting(4, "taps of the causal convolution on q, k, v")
    gate_lower_bound: float | None = setting(-5.0, "bound on the log decay per step (report eq. 5); none: unbounded softplus")
    use_full_rank_gate: bool = setting(True, "one full-rank output gate; false: two low-rank factors")

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "head_dim", "short_conv_kernel_size")
        if self.gate_lower_bound is not None and self.gate_lower_bound >= 0:
            raise ConfigError(f"'gate_lower_bound' is {self.gate_lower_bound}; a log decay is bounded by a negative number, e.g. -5.0")

    @property
    def width(self) -> int:
        """Channels of all heads together."""
        return self.num_heads * self.head_dim

    def tensors(self, hidden_size: int) -> Iterator[TensorSpec]:
        """Every tensor of the mixer. Decay-gate and low-rank output-gate factors have inner width `head_dim`."""
        for name in ("q", "k", "v"):
            yield linear(f"{name}_proj", self.width, hidden_size)
            yield TensorSpec(f"{name}_conv1d.weight", (self.width, 1, self.short_conv_kernel_size), "fp32")
        yield linear("f_a_proj", self.head_dim, hidden_size)
        yield linear("f_b_proj", self.width, self.head_dim)
        yield linear("b_proj", self.num_heads, hidden_size)
        if self.use_full_rank_gate:
            yield linear("g_proj", self.width, hidden_size)
        else:
            yield linear("g_a_proj", self.head_dim, hidden_size)
            yield linear("g_b_proj", self.width, self.head_dim)
        padding = -self.num_heads % A_LOG_PADDING if self.use_full_rank_gate else 0
        yield TensorSpec("A_log", (self.num_heads,), "fp32", padding=padding)
        yield TensorSpec("dt_bias", (self.width,), "fp32")
        yield TensorSpec("o_norm.weight", (self.head_dim,), "fp32")
        yield linear("o_proj", hidden_size, self.width)

    def flops_per_token(self, hidden_size: int, context: int) -> int:
        """Projections, convolution and the recurrence (decay, read, rank-one update, read); `context` does not matter."""
        recurrence = 7 * self.num_heads * self.head_dim**2
        convolution = 2 * 3 * self.width * self.short_conv_kernel_size
        return _matrix_flops(self.tensors(hidden_size)) + recurrence + convolution

    def cached_values_per_token(self) -> int:
        """Nothing grows with the context."""
        return 0

    def state_bytes(self) -> int:
        """The recurrent matrix of one sequence, fp32."""
        return self.num_heads * self.head_dim**2 * 4

    def conv_state_values(self) -> int:
        """Projected q, k, v of the last `short_conv_kernel_size - 1` tokens."""
        return 3 * self.width * (self.short_conv_kernel_size - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAConfig:
    """Gated multi-head latent attention without positions (report §2.1, model.mixers.mla)."""

    num_attention_heads: int = setting(doc="heads")
    q_lora_rank: int | None = setting(None, "width of the query latent; none: a direct projection")
    kv_lora_rank: int = setting(doc="width of the cached key-value latent")
    qk_nope_head_dim: int = setting(128, "query-key width per head that comes from the latent")
    qk_rope_head_dim: int = setting(64, "query-key width shared by all heads; not rotated, in spite of its released name")
    v_head_dim: int = setting(128, "value width of a head")
    mla_use_output_gate: bool = setting(True, "sigmoid gate on the attention output")

    def __post_init__(self) -> None:
        check_positive(self, "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        if self.qk_rope_head_dim < 0:
            raise ConfigError(f"'qk_rope_head_dim' is {self.qk_rope_head_dim}; use 0 to have no shared key channels")

    @property
    def qk_head_dim(self) -> int:
        """Query-key width of a head; scores are scaled by its inverse square root."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def tensors(self, hidden_size: int) -> Iterator[TensorSpec]:
        """Every tensor of the mixer."""
        heads = self.num_attention_heads
        if self.q_lora_rank is None:
            yield linear("q_proj", heads * self.qk_head_dim, hidden_size)
        else:
            yield linear("q_a_proj", self.q_lora_rank, hidden_size)
            yield TensorSpec("q_a_layernorm.weight", (self.q_lora_rank,))
            yield linear("q_b_proj", heads * self.qk_head_dim, self.q_lora_rank)
        yield linear("kv_a_proj_with_mqa", self.kv_lora_rank + self.qk_rope_head_dim, hidden_size)
        yield TensorSpec("kv_a_layernorm.weight", (self.kv_lora_rank,))
        yield linear("kv_b_proj", heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)
        if self.mla_use_output_gate:
            yield linear("g_proj", heads * self.v_head_dim, hidden_size)
        yield linear("o_proj", hidden_size, heads * self.v_head_dim)

    def flops_per_token(self, hidden_size: int, context: int) -> int:
        """Projections, and scores and values over `context` cached tokens in the expanded form."""
        attention = 2 * self.num_attention_heads * (self.qk_head_dim + self.v_head_dim) * context
        return _matrix_flops(self.tensors(hidden_size)) + attention

    def cached_values_per_token(self) -> int:
        """The latent and the shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def state_bytes(self) -> int:
        """No recurrent state."""
        return 0

    def conv_state_values(self) -> int:
        """No convolution."""
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Mixture of experts, in a latent space when `routed_expert_hidden_size` is given (report §2.3)."""

    num_experts: int = setting(doc="routed experts per layer")
    num_experts_per_token: int = setting(doc="routed experts that a token visits (top-k)")
    moe_intermediate_size: int = setting(doc="inner width of one expert")
    num_shared_experts: int = setting(1, "experts that every token visits, realised as one wide feed-forward")
    routed_expert_hidden_size: int | None = setting(None, "latent width in which routed experts work; none: the full width")
    latent_moe_use_norm: bool = setting(True, "normalise the combined latent before it is projected up")
    moe_renormalize: bool = setting(True, "divide the chosen scores by their sum")
    routed_scaling_factor: float = setting(1.0, "factor on the routing weights")
    first_k_dense_replace: int = setting(1, "leading layers with a dense feed-forward")
    moe_layer_freq: int = setting(1, "a layer has experts when its index is a multiple of this")
    num_expert_group: int = setting(1, "groups of experts; with more than one, the best `topk_group` groups compete")
    topk_group: int = setting(1, "groups that a token may use")
    expert_weights: Literal["full", "mxfp4"] = setting("full", "mxfp4: routed experts act as MXFP4 stores them, in training too (QAT)")
    expert_inputs: Literal["full", "mxfp8"] = setting("full", "mxfp8: what routed experts multiply is rounded to MXFP8 first")
    expert_scales: Literal["even", "ceil"] = setting("even", "how the power of two that 32 weights share is chosen")

    def __post_init__(self) -> None:
        check_positive(self, "num_experts", "num_experts_per_token", "moe_intermediate_size", "routed_expert_hidden_size",
                       "moe_layer_freq", "num_expert_group", "topk_group")
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(f"'num_experts_per_token' is {self.num_experts_per_token}, more than the pool of "
                              f"{self.num_experts} experts; lower it or raise 'num_experts'")
        if self.num_experts % self.num_expert_group or self.topk_group > self.num_expert_group:
            raise ConfigError(f"'num_expert_group' is {self.num_expert_group} and 'topk_group' {self.topk_group}: the first must divide "
                              f"'num_experts' ({self.num_experts}) and bound the second")
        usable = self.num_experts // self.num_expert_group * self.topk_group
        if self.num_experts_per_token > usable:
            raise ConfigError(f"'num_experts_per_token' is {self.num_experts_per_token}, more than the {usable} experts of "
                              f"'topk_group' = {self.topk_group} groups")

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the 0-based layer has experts; the leading ones are dense."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def expert_width(self, hidden_size: int) -> int:
        """Input and output width of a routed expert."""
        return self.routed_expert_hidden_size or hidden_size

    def tensors(self, hidden_size: int, expert_storage: str = "bf16") -> Iterator[TensorSpec]:
        """Every tensor of one layer's feed-forward; routed experts appear once with a count."""
        width, inner = self.expert_width(hidden_size), self.moe_intermediate_size
        yield linear("gate", self.num_experts, hidden_size)
        yield TensorSpec("gate.e_score_correction_bias", (self.num_experts,), "fp32")
        yield from self.expert_tensors(hidden_size, expert_storage)
        if self.num_shared_experts:
            yield from mlp_tensors("shared_experts.", hidden_size, self.num_shared_experts * inner)
        if self.routed_expert_hidden_size:
            yield linear("routed_expert_down_proj", width, hidden_size)
            if self.latent_moe_use_norm:
                yield TensorSpec("routed_expert_norm.weight", (width,))
            yield linear("routed_expert_up_proj", hidden_size, width)

    def expert_tensors(self, hidden_size: int, storage: str = "bf16") -> Iterator[TensorSpec]:
        """`w1` (gate), `w3` (up), `w2` (down) of the routed experts."""
        width, inner = self.expert_width(hidden_size), self.moe_intermediate_size
        for name, shape in (("w1", (inner, width)), ("w3", (inner, width)), ("w2", (width, inner))):
            yield TensorSpec(f"experts.{{}}.{name}.weight", shape, storage, count=self.num_experts)

    def idle_parameters(self, hidden_size: int) -> int:
        """Parameters of the experts that one token does not visit."""
        routed = sum(t.elements for t in self.expert_tensors(hidden_size))
        return routed // self.num_experts * (self.num_experts - self.num_experts_per_token)

    def flops_per_token(self, hidden_size: int) -> int:
        """Router, latent projections, visited experts and shared experts."""
        return _matrix_flops(self.tensors(hidden_size)) - 2 * self.idle_parameters(hidden_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """MoonViT-V2 and its projector: shapes (report §2.4)."""

    patch_size: int = setting(14, "pixels per side of a patch")
    position_grid: int = setting(64, "rows and columns of the learned position table")
    vt_hidden_size: int = setting(1024, "width of the tower")
    vt_intermediate_size: int = setting(4096, "inner width of its feed-forward")
    vt_num_hidden_layers: int = setting(27, "layers of the tower")
    vt_num_attention_heads: int = setting(12, "heads of the tower")
    qkv_hidden_size: int = setting(1536, "width of queries, keys and values together over heads")
    merge_size: int = setting(2, "patches per side that become one token")

    def __post_init__(self) -> None:
        check_positive(self, "patch_size", "position_grid", "vt_hidden_size", "vt_intermediate_size", "vt_num_hidden_layers",
                       "vt_num_attention_heads", "qkv_hidden_size", "merge_size")
        if self.qkv_hidden_size % (4 * self.vt_num_attention_heads):
            raise ConfigError(f"'vision.qkv_hidden_size' is {self.qkv_hidden_size}; each of {self.vt_num_attention_heads} heads needs a "
                              "width divisible by 4, half of it turned by row and half by column")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.qkv_hidden_size // self.vt_num_attention_heads

    def flops(self, patches: int, text_hidden_size: int, frames: int = 1) -> int:
        """FLOPs to see one item of so many patches in all: the tower, attention of every patch to every other, and the projector."""
        width, merged = self.vt_hidden_size, self.vt_hidden_size * self.merge_size**2
        block = 2 * (4 * width * self.qkv_hidden_size + 2 * width * self.vt_intermediate_size)
        tower = patches * (2 * 3 * self.patch_size**2 * width + self.vt_num_hidden_layers * (block + 4 * patches * self.qkv_hidden_size))
        tokens = patches // frames // self.merge_size**2
        return tower + tokens * 2 * merged * (merged + text_hidden_size)

    def tensors(self, text_hidden_size: int) -> Iterator[TensorSpec]:
        """Tower and projector, with the released names."""
        width, inner = self.vt_hidden_size, self.vt_intermediate_size
        yield TensorSpec("vision_tower.patch_embed.proj.weight", (width, 3, self.patch_size, self.patch_size))
        yield TensorSpec("vision_tower.patch_embed.pos_emb.weight", (self.position_grid, self.position_grid, width))
        for layer in range(self.vt_num_hidden_layers):
            block = f"vision_tower.encoder.blocks.{layer}."
            yield TensorSpec(f"{block}norm0.weight", (width,))
            yield TensorSpec(f"{block}norm1.weight", (width,))
            yield linear(f"{block}wqkv", 3 * self.qkv_hidden_size, width)
            yield linear(f"{block}wo", width, self.qkv_hidden_size)
            yield linear(f"{block}mlp.fc0", inner, width)
            yield linear(f"{block}mlp.fc1", width, inner)
        yield TensorSpec("vision_tower.encoder.final_layernorm.weight", (width,))
        merged = width * self.merge_size**2
        yield linear("mm_projector.proj.0", merged, merged)
        yield linear("mm_projector.proj.2", text_hidden_size, merged)
        yield TensorSpec("mm_projector.post_norm.weight", (text_hidden_size,))


def mlp_tensors(prefix: str, hidden_size: int, inner: int) -> Iterator[TensorSpec]:
    """Gate, up and down projections of a gated feed-forward."""
    yield linear(f"{prefix}gate_proj", inner, hidden_size)
    yield linear(f"{prefix}up_proj", inner, hidden_size)
    yield linear(f"{prefix}down_proj", hidden_size, inner)


def _matrix_flops(tensors: Iterator[TensorSpec]) -> int:
    return sum(2 * t.elements for t in tensors if len(t.shape) == 2)
