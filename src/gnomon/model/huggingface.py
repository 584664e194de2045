"""The released `config.json` ⇄ `ModelConfig`, for `kimi_k3` and `kimi_linear`; layer lists are 1-based there and nowhere else.

Fields have the released names on both sides, so reading is field by field. What this implementation does not do (rotary positions,
grouped key-value heads, other router activations, draft layers) is refused rather than ignored. Free of torch.
Read next: `weights.py` for the tensors.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gnomon import config as tables
from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.parts import MX_BLOCK, KDAConfig, MLAConfig, MoEConfig, VisionConfig

CONTEXT = 1048576
"""Positions the releases announce; nothing in the model depends on it."""

TEMPERATURE = 1.0
"""Sampling temperature of the report's evaluations."""

_DIRECT = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "hidden_act", "rms_norm_eps", "initializer_range",
           "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
_SITU = ("activation_situ_beta", "activation_situ_linear_beta")
_MLA = tuple(f.name for f in dataclasses.fields(MLAConfig))
_KDA = tuple(f.name for f in dataclasses.fields(KDAConfig))
_MOE = tuple(f.name for f in dataclasses.fields(MoEConfig) if not f.name.startswith("expert_"))  # how they are stored stands elsewhere
_VISION = ("patch_size", "vt_hidden_size", "vt_intermediate_size", "vt_num_hidden_layers", "vt_num_attention_heads", "qkv_hidden_size")

# What a field must be where it is given, and what it would mean otherwise.
_ONLY = {
    "mla_use_nope": ((True,), "rotary positions"),
    "moe_router_activation_func": (("sigmoid",), "another router activation"),
    "topk_method": (("noaux_tc", None), "another way to choose experts"),
    "num_nextn_predict_layers": ((0, None), "multi-token prediction layers"),
    "attention_bias": ((False, None), "biases in attention"),
}

# Defaults of the released configuration class for a field that a file may leave out; the releases state everything else.
_ABSENT = {
    "q_lora_rank": None, "mla_use_output_gate": False, "gate_lower_bound": None, "use_full_rank_gate": False,
    "routed_expert_hidden_size": None, "latent_moe_use_norm": False, "num_shared_experts": 0, "moe_renormalize": True,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "moe_layer_freq": 1, "num_expert_group": 1, "topk_group": 1,
    "hidden_act": "silu", "activation_situ_beta": 1.0, "activation_situ_linear_beta": None, "initializer_range": 0.02,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "short_conv_kernel_size": 4,
}

# Shapes of the vision tower that `VisionConfig` does not vary, as released.
_VISION_CONSTANTS = {
    "init_pos_emb_time": 4, "pos_emb_type": "divided_fixed", "pos_emb_interpolation_mode": "bilinear", "norm_type": "rmsnorm",
    "mlp_type": "mlp2", "activation_func": "gelu_pytorch_tanh", "attn_bias": False, "linear_bias": False, "patch_embed_proj_bias": False,
    "merge_type": "sd2_tpool", "mm_projector_type": "patchmergerv2", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
}

MX_BITS = 8
_MXFP8 = {"num_bits": MX_BITS, "type": "float", "strategy": "group", "group_size": MX_BLOCK, "symmetric": True, "dynamic": True,
          "scale_dtype": "torch.uint8"}

_QUANTISATION: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
                    "scale_dtype": "torch.uint8"},
        "input_activations": None, "output_activations": None,
    }},
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
               "re:.*vision_tower.*", "re:.*mm_projector.*", "re:.*block_sparse_moe.gate.*", "re:.*routed_expert_.*", "re:.*res_proj.*"],
}


def read_config(path: Path) -> ModelConfig:
    """The model of a `config.json` on disk. Raises `ConfigError` for a file that cannot be read, else as `to_model_config`."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{path}' cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"'{path}' holds a {type(table).__name__}, not an object; give the config.json of a checkpoint")
    return to_model_config(table)


def to_model_config(table: dict[str, Any]) -> ModelConfig:
    """The model that a released `config.json` describes.

    Raises `CheckpointError` for another architecture, a missing field, or a field whose value is not implemented here.
    """
    if table.get("model_type") not in ("kimi_k3", "kimi_linear"):
        raise CheckpointError(f"config.json: model_type is {table.get('model_type')!r}; gnomon reads 'kimi_k3' and 'kimi_linear'")
    text = table.get("text_config", table) if table["model_type"] == "kimi_k3" else table
    _refuse_unknown_meaning(text)
    fields = {name: _field(text, name) for name in _DIRECT}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # a file may give several ends; the first is the message end
        fields[name] = fields[name][0] if isinstance(fields[name], list) else fields[name]
    kinds = _layer_kinds(text)
    pattern, final = _pattern(kinds)
    if fields["hidden_act"] == "situ":
        fields |= {name: _field(text, name) for name in _SITU}
    parts = {"kda": (text["linear_attn_config"], _KDA), "mla": (text, _MLA)}
    fields["mixers"] = {kind: {name: _field(part, name) for name in names} for kind, (part, names) in parts.items() if kind in kinds}
    fields |= {"family": table["model_type"], "layer_pattern": pattern, "final_mixer": final, "moe": _moe(text), "vision": _vision(table)}
    try:
        return tables.from_dict(ModelConfig, fields | _depth(text))
    except ConfigError as error:
        raise CheckpointError(f"config.json: {error}") from None


def _field(table: dict[str, Any], name: str) -> Any:
    if name in table:
        return table[name]
    if name in _ABSENT:
        return _ABSENT[name]
    raise CheckpointError(f"config.json: '{name}' is missing")


def _refuse_unknown_meaning(text: dict[str, Any]) -> None:
    for name, (allowed, meaning) in _ONLY.items():
        if name in text and text[name] not in allowed:
            raise CheckpointError(f"config.json: '{name}' is {text[name]!r}: {meaning} would be needed, which gnomon does not have")
    heads, shared = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if shared is not None and shared != heads:
        raise CheckpointError(f"config.json: 'num_key_value_heads' is {shared} and 'num_attention_heads' {heads}; latent attention has one")


def _layer_kinds(text: dict[str, Any]) -> tuple[str, ...]:
    lists = _field(text, "linear_attn_config")
    layers, kda, full = _field(text, "num_hidden_layers"), _field(lists, "kda_layers"), _field(lists, "full_attn_layers")
    if sorted([*kda, *full]) != list(range(1, layers + 1)):
        raise CheckpointError(f"config.json: 'kda_layers' and 'full_attn_layers' together must name each of the layers 1..{layers} once, "
                              f"got {sorted(kda)} and {sorted(full)}")
    return tuple("kda" if index + 1 in kda else "mla" for index in range(layers))


def _pattern(kinds: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The shortest pattern whose repetition gives every layer but the last, and the last layer's kind."""
    body = kinds[:-1]
    for length in range(1, len(body) + 1):
        if all(kind == body[index % length] for index, kind in enumerate(body)):
            return (body[:length], kinds[-1]) if length < len(body) else (kinds, kinds[-1])
    return kinds, kinds[-1]


def _moe(text: dict[str, Any]) -> dict[str, Any] | None:
    if not text.get("num_experts"):
        return None
    latent = text.get("routed_expert_hidden_size") is not None
    fields = {name: _field(text, name) for name in _MOE if latent or name != "latent_moe_use_norm"}
    groups = (text.get("quantization_config") or {}).get("config_groups") or {}
    rounded = [group["input_activations"] for group in groups.values() if group.get("input_activations") is not None]
    if any(each.get("num_bits") != MX_BITS or each.get("group_size") != MX_BLOCK for each in rounded):
        raise CheckpointError(f"config.json: 'input_activations' is {rounded[0]!r}: gnomon rounds inputs of experts to MXFP8 or not at all")
    return fields | ({"expert_inputs": "mxfp8"} if rounded else {})


def _depth(text: dict[str, Any]) -> dict[str, Any]:
    if text.get("attention_residuals") == "full":
        return {"attention_residuals": "full"}
    size = text.get("attn_res_block_size")
    return {"attention_residuals": "off"} if size is None else {"attention_residuals": "block", "attn_res_block_size": size}


def _vision(table: dict[str, Any]) -> dict[str, Any] | None:
    part = table.get("vision_config")
    if not part:
        return None
    given = {name: part[name] for name in _VISION if name in part}
    if "init_pos_emb_height" in part:
        given["position_grid"] = part["init_pos_emb_height"]
    if "merge_kernel_size" in part:
        given["merge_size"] = part["merge_kernel_size"][0]
    return given


def to_released(config: ModelConfig, dtype: str = "bfloat16", quantized: bool = True) -> dict[str, Any]:
    """The `config.json` of a model, complete: other engines take nothing from their own defaults.

    `dtype` is the type of the bulk of the tensors; `quantized` says that routed experts are stored as MXFP4 (K3 family only).
    Raises `CheckpointError` for what the released format has no field for.
    """
    _check_expressible(config)
    text = _text_config(config, dtype)
    if config.family == "kimi_linear":
        return text
    if quantized:
        text["quantization_config"] = _quantisation(config)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    table = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": dtype, **ids, "ignore_index": -100,
             "tie_word_embeddings": config.tie_word_embeddings, "text_config": text}
    if config.vision is not None:
        table["vision_config"] = _vision_config(config, config.vision)
    return table


def _quantisation(config: ModelConfig) -> dict[str, Any]:
    """How routed experts are stored, and what becomes of their inputs."""
    if config.moe is None or config.moe.expert_inputs == "full":
        return _QUANTISATION
    group = _QUANTISATION["config_groups"]["group_0"] | {"input_activations": _MXFP8}
    return _QUANTISATION | {"config_groups": {"group_0": group}}


def carried(table: dict[str, Any]) -> dict[str, Any]:
    """The fields of a K3 file that belong to its vision part: written back as they were."""
    names = ("vision_config", "image_placeholder", "media_placeholder_token_id")
    return {name: table[name] for name in names if name in table}


def generation_config(config: ModelConfig) -> dict[str, Any]:
    """The `generation_config.json`: where to stop, and the temperature of the report's evaluations."""
    return {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id,
            "do_sample": True, "temperature": TEMPERATURE}


def _check_expressible(config: ModelConfig) -> None:
    foreign = sorted(set(config.layers) - {"kda", "mla"})
    if foreign:
        raise CheckpointError(f"mixers {', '.join(foreign)} have no place in the released layouts, which know 'kda' and 'mla'; "
                              "keep this model as a training checkpoint")
    if config.family == "kimi_linear" and (features := k3_features(config)):
        raise CheckpointError(f"family 'kimi_linear' has no field for {', '.join(features)}, and its readers would ignore them; "
                              "set family = \"kimi_k3\"")


def k3_features(config: ModelConfig) -> list[str]:
    """What a model has that Kimi-Linear does not."""
    kda, mla, moe = config.mixers.get("kda"), config.mixers.get("mla"), config.moe
    found = {
        "attention_residuals": config.attention_residuals != "off", "hidden_act = situ": config.hidden_act == "situ",
        "mla_use_output_gate": mla is not None and mla.mla_use_output_gate,
        "gate_lower_bound": kda is not None and kda.gate_lower_bound is not None,
        "use_full_rank_gate": kda is not None and kda.use_full_rank_gate,
        "routed_expert_hidden_size": moe is not None and moe.routed_expert_hidden_size is not None,
    }
    return [name for name, present in found.items() if present]


def _text_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    kda, mla, moe = config.mixers.get("kda"), config.mixers.get("mla"), config.moe
    heads = config.mixers["kda"].num_heads if mla is None else mla.num_attention_heads
    text: dict[str, Any] = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": dtype}
    text |= {name: getattr(config, name) for name in _DIRECT}
    text |= {"num_attention_heads": heads, "num_key_value_heads": heads, "mla_use_nope": True, "use_cache": True,
             "num_nextn_predict_layers": 0}
    lists: dict[str, Any] = {"kda_layers": _numbers(config, "kda"), "full_attn_layers": _numbers(config, "mla")}
    text["linear_attn_config"] = lists | (_present(kda, _KDA) if kda is not None else {})
    text |= {} if mla is None else {name: getattr(mla, name) for name in _MLA if name != "mla_use_output_gate"}
    dense = {"num_experts": 0, "num_experts_per_token": 1, "moe_intermediate_size": 0, "first_k_dense_replace": config.num_hidden_layers}
    text |= dense if moe is None else _present(moe, _MOE)
    text |= {"moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "topk_method": "noaux_tc"}
    if config.family == "kimi_linear":
        return text | {"model_max_length": CONTEXT, "head_dim": config.hidden_size // heads, "rope_theta": 10000.0, "rope_scaling": None}
    text |= {"max_position_embeddings": CONTEXT, "mla_use_output_gate": mla is not None and mla.mla_use_output_gate}
    if config.hidden_act == "situ":
        text |= {name: getattr(config, name) for name in _SITU}
    if config.attention_residuals == "block":
        text["attn_res_block_size"] = config.attn_res_block_size
    elif config.attention_residuals == "full":
        text["attention_residuals"] = "full"  # no released field: other engines stop at the tensors, which is better than a wrong model
    return text


def _numbers(config: ModelConfig, kind: str) -> list[int]:
    return [index + 1 for index, own in enumerate(config.layers) if own == kind]


def _present(part: Any, names: Iterable[str]) -> dict[str, Any]:
    """Fields of a part; one that is absent by default and off is left out, as the releases do."""
    absent = {name for name in ("gate_lower_bound", "use_full_rank_gate", "routed_expert_hidden_size")
              if getattr(part, name, None) in (None, False)}
    if "routed_expert_hidden_size" in absent:
        absent.add("latent_moe_use_norm")
    return {name: getattr(part, name) for name in names if name not in absent}


def _vision_config(config: ModelConfig, vision: VisionConfig) -> dict[str, Any]:
    own = {name: getattr(vision, name) for name in _VISION}
    return {"model_type": "kimi_k3_vision", **own, "init_pos_emb_height": vision.position_grid, "init_pos_emb_width": vision.position_grid,
            **_VISION_CONSTANTS, "merge_kernel_size": [vision.merge_size, vision.merge_size], "mm_hidden_size": vision.vt_hidden_size,
            "text_hidden_size": config.hidden_size}
