"""`ModelConfig`: the shape of a model and what it costs: parameters, FLOPs, cache, state, checkpoint bytes (report §2, Table 1).

Field names are those of the released `config.json`; what differs there (1-based layer lists, nesting) is translated in `huggingface.py`.
Free of torch. Read next: `parts.py` for the parts, `transformer.py` for what runs.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gnomon import config as toml
from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.extend import find, kinds
from gnomon.model.parts import (
    MX_BLOCK,
    KDAConfig,
    MLAConfig,
    MoEConfig,
    TensorSpec,
    VisionConfig,
    check_positive,
    linear,
    mlp_tensors,
)

PRESETS = Path(__file__).parent / "presets"
"""The folder of named models, one TOML file each."""

MIXERS = "gnomon.model.mixers"
_MIXER_CONFIGS: dict[str, type] = {"kda": KDAConfig, "mla": MLAConfig}


def mixer_config_class(kind: str) -> type:
    """The dataclass of a mixer kind: `KDAConfig`, `MLAConfig`, or the `Config` of a plug-in's class."""
    if kind in _MIXER_CONFIGS:
        return _MIXER_CONFIGS[kind]
    return find(MIXERS, kind, "Mixer").Config


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shapes of the text model, and of the vision tower where there is one.

    Raises `ConfigError` for shapes that do not fit together, naming the field, the value and the remedy.
    """

    family: Literal["kimi_k3", "kimi_linear"] = setting("kimi_k3", "released layout in which checkpoints are written")
    vocab_size: int = setting(doc="rows of the embedding, special tokens included")
    hidden_size: int = setting(doc="width of the residual stream")
    num_hidden_layers: int = setting(doc="layers")
    layer_pattern: tuple[str, ...] = setting(("kda", "kda", "kda", "mla"), "mixer kinds, repeated over the layers")
    final_mixer: str | None = setting("mla", "mixer of the last layer whatever the pattern says; none: as the pattern says")
    mixers: dict[str, Any] = setting(factory=dict, doc="shape of each mixer kind in use", table=mixer_config_class)
    intermediate_size: int = setting(doc="inner width of dense feed-forwards")
    moe: MoEConfig | None = setting(None, "experts; none: every layer is dense")
    hidden_act: Literal["situ", "silu"] = setting("situ", "SiTU-GLU with smooth caps, or plain SwiGLU")
    activation_situ_beta: float = setting(4.0, "cap of the gate branch (report eq. 12)")
    activation_situ_linear_beta: float | None = setting(25.0, "cap of the up branch; none: linear")
    attention_residuals: Literal["block", "full", "off"] = setting("block", "depth-read sources: blocks of layers, every sublayer, none")
    attn_res_block_size: int = setting(12, "decoder layers per depth block")
    rms_norm_eps: float = setting(1e-5, "epsilon of every norm but the MLA latents' (1e-6)")
    initializer_range: float = setting(0.02, "standard deviation of initial weights")
    tie_word_embeddings: bool = setting(False, "use the embedding as output head")
    bos_token_id: int | None = setting(None, "id of [BOS]")
    eos_token_id: int | None = setting(None, "id that ends a message or document")
    pad_token_id: int | None = setting(None, "id of [PAD]")
    vision: VisionConfig | None = setting(None, "vision tower and projector")

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "attn_res_block_size",
                       "activation_situ_beta", "activation_situ_linear_beta", "rms_norm_eps")
        if self.hidden_size % MX_BLOCK:
            below, above = self.hidden_size // MX_BLOCK * MX_BLOCK, -(-self.hidden_size // MX_BLOCK) * MX_BLOCK
            raise ConfigError(f"'hidden_size' is {self.hidden_size}, which is not divisible by {MX_BLOCK} (the MX block); "
                              f"use {below or above} or {above}")
        if not self.layer_pattern:
            raise ConfigError("'layer_pattern' is empty; name at least one mixer kind, e.g. [\"kda\", \"kda\", \"kda\", \"mla\"]")
        for kind in dict.fromkeys(self.layers):
            if kind not in self.mixers:
                raise ConfigError(f"'layer_pattern' uses '{kind}', but there is no table 'mixers.{kind}' "
                                  f"(known kinds: {', '.join(kinds(MIXERS))})")
        if self.moe is not None:
            self._check_experts(self.moe)

    def _check_experts(self, moe: MoEConfig) -> None:
        for name, width in (("moe.routed_expert_hidden_size", moe.expert_width(self.hidden_size)),
                            ("moe.moe_intermediate_size", moe.moe_intermediate_size)):
            if width % MX_BLOCK:
                raise ConfigError(f"'{name}' is {width}, which is not divisible by {MX_BLOCK}, the block that shares an MXFP4 scale; "
                                  f"use {-(-width // MX_BLOCK) * MX_BLOCK}")

    @property
    def layers(self) -> tuple[str, ...]:
        """The mixer kind of each layer, 0-based."""
        repeats = -(-self.num_hidden_layers // len(self.layer_pattern))
        pattern = (self.layer_pattern * repeats)[: self.num_hidden_layers]
        return pattern if self.final_mixer is None else (*pattern[:-1], self.final_mixer)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the 0-based layer has experts."""
        return self.moe is not None and self.moe.is_moe_layer(layer)

    def routed_layers(self, before: int) -> int:
        """How many of the first `before` layers have experts."""
        return sum(self.is_moe_layer(layer) for layer in range(before))

    def tensors(self) -> Iterator[TensorSpec]:
        """Every text tensor with its released name (no family prefix) and storage; routed experts once per layer with a count."""
        yield linear("model.embed_tokens", self.vocab_size, self.hidden_size)
        for layer in range(self.num_hidden_layers):
            for spec in self.layer_tensors(layer):
                yield replace(spec, name=f"model.layers.{layer}.{spec.name}")
        if self.attention_residuals != "off":
            yield from _depth_query("model.output_attn_res", self.hidden_size)
        yield TensorSpec("model.norm.weight", (self.hidden_size,))
        if not self.tie_word_embeddings:
            yield linear("lm_head", self.vocab_size, self.hidden_size)

    def layer_tensors(self, layer: int) -> Iterator[TensorSpec]:
        """The tensors of one layer, names below `model.layers.N.`."""
        yield TensorSpec("input_layernorm.weight", (self.hidden_size,))
        yield TensorSpec("post_attention_layernorm.weight", (self.hidden_size,))
        if self.attention_residuals != "off":
            yield from _depth_query("self_attention_res", self.hidden_size)
            yield from _depth_query("mlp_res", self.hidden_size)
        mixer = self.mixers[self.layers[layer]].tensors(self.hidden_size)
        if self.moe is not None and self.is_moe_layer(layer):
            feed_forward = _below("block_sparse_moe.", self.moe.tensors(self.hidden_size, self.expert_storage))
        else:
            feed_forward = mlp_tensors("mlp.", self.hidden_size, self.intermediate_size)
        yield from _below("self_attn.", mixer)
        yield from feed_forward

    @property
    def expert_storage(self) -> str:
        """How released checkpoints of the family store routed experts."""
        return "mxfp4" if self.family == "kimi_k3" else "bf16"

    def num_parameters(self) -> int:
        """Parameters of the text model, embedding and head included."""
        alike = Counter((kind, self.is_moe_layer(layer)) for layer, kind in enumerate(self.layers))
        size = {}
        for layer, kind in enumerate(self.layers):
            key = kind, self.is_moe_layer(layer)
            if key not in size:
                size[key] = sum(t.elements for t in self.layer_tensors(layer))
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        output = self.hidden_size * (1 if self.attention_residuals == "off" else 3)
        return sum(count * size[key] for key, count in alike.items()) + tables + output

    def activated_parameters(self) -> int:
        """Parameters that one token uses: the head counts, the embedding table does not (it is a look-up)."""
        idle = 0 if self.moe is None else self.moe.idle_parameters(self.hidden_size) * self.num_moe_layers
        table = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_parameters() - idle - table

    @property
    def num_moe_layers(self) -> int:
        """Layers that have experts."""
        return sum(map(self.is_moe_layer, range(self.num_hidden_layers)))

    def flops_per_token(self, context: int) -> int:
        """FLOPs of one forward pass for one token that sees `context` tokens; training takes about three times as much."""
        moe = 0 if self.moe is None else self.moe.flops_per_token(self.hidden_size) * self.num_moe_layers
        dense = 6 * self.hidden_size * self.intermediate_size * (self.num_hidden_layers - self.num_moe_layers)
        mixers = sum(self.mixers[kind].flops_per_token(self.hidden_size, context) for kind in self.layers)
        return mixers + moe + dense + 2 * self.vocab_size * self.hidden_size + self.depth_read_flops()

    def depth_read_flops(self) -> int:
        """FLOPs of all depth reads for one token: squares, scores and the weighted sum of each source."""
        return 6 * self.hidden_size * sum(self.depth_sources())

    def depth_sources(self) -> list[int]:
        """Sources of each depth read in order: attention and feed-forward of each layer, then the output."""
        if self.attention_residuals == "off":
            return []
        if self.attention_residuals == "full":
            return [i + 1 for i in range(1, 2 * self.num_hidden_layers + 1)]
        size, counts = self.attn_res_block_size, []
        for layer in range(self.num_hidden_layers):
            banked_before = -(-layer // size)
            counts += [banked_before + 1] if layer else []
            counts.append(layer // size + 2)
        return [*counts, -(-self.num_hidden_layers // size) + 1]

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Cache that grows with each token of context: the latents of the MLA layers (bf16 by default)."""
        return bytes_per_value * sum(self.mixers[kind].cached_values_per_token() for kind in self.layers)

    def state_bytes(self) -> int:
        """Recurrent matrices of one sequence, fp32, whatever its length."""
        return sum(self.mixers[kind].state_bytes() for kind in self.layers)

    def conv_state_bytes(self, bytes_per_value: int = 2) -> int:
        """Short-convolution history of one sequence (bf16 by default)."""
        return bytes_per_value * sum(self.mixers[kind].conv_state_values() for kind in self.layers)

    def vision_parameters(self) -> int:
        """Parameters of the vision tower and projector."""
        return 0 if self.vision is None else sum(t.elements for t in self.vision.tensors(self.hidden_size))

    def checkpoint_bytes(self) -> int:
        """Tensor bytes of a checkpoint in the released layout, vision included where there is a tower."""
        text = sum(t.stored_bytes for t in self.tensors())
        return text + (0 if self.vision is None else sum(t.stored_bytes for t in self.vision.tensors(self.hidden_size)))


def preset(name: str, overrides: tuple[str, ...] = ()) -> ModelConfig:
    """A named model of `presets/`, e.g. `preset("k3-2.8t")`; overrides are `a.b=c`."""
    table = toml.apply_overrides({}, (f"extends={name}", *overrides), PRESETS)
    return toml.from_dict(ModelConfig, table, name)


def _depth_query(name: str, hidden_size: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}_norm.weight", (hidden_size,))
    yield TensorSpec(f"{name}_proj.weight", (1, hidden_size))


def _below(prefix: str, tensors: Iterator[TensorSpec]) -> Iterator[TensorSpec]:
    return (replace(t, name=prefix + t.name) for t in tensors)
