"""An independent writer of checkpoints in the released layouts: NumPy, JSON and struct, nothing from `src`.

`config(arch)` gives a tiny configuration, `tensors(config)` names and draws every tensor, `write` packs the routed experts as
MXFP4 and lays shards out; what it returns are the exact values a reader must arrive at.
"""

import hashlib
import json
import struct

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def config(arch, **changes):
    """A tiny text configuration of `kimi_k3` or `kimi_linear`; `changes` replace fields."""
    fields = {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16",
        "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 9, "intermediate_size": 160, "hidden_act": "silu",
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24, "q_lora_rank": None, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": True,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 12, "num_experts_per_token": 4, "num_shared_experts": 1,
        "moe_intermediate_size": 64, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.446, "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
        "rms_norm_eps": 1e-5, "initializer_range": 0.02, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
        "rope_theta": 10000.0, "rope_scaling": None, "model_max_length": 4096, "use_cache": True,
        "bos_token_id": 304, "eos_token_id": 306, "pad_token_id": 319,
        "linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8, 9],
                               "head_dim": 32, "num_heads": 4, "short_conv_kernel_size": 4},
    }
    if arch == "kimi_k3":
        del fields["model_max_length"], fields["head_dim"], fields["rope_theta"], fields["rope_scaling"]
        fields |= {
            "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "q_lora_rank": 24,
            "mla_use_output_gate": True, "num_shared_experts": 2, "routed_scaling_factor": 1.0, "attn_res_block_size": 3,
            "routed_expert_hidden_size": 32, "latent_moe_use_norm": True, "max_position_embeddings": 4096, "topk_method": "noaux_tc",
        }
        fields["linear_attn_config"] |= {"gate_lower_bound": -5.0, "use_full_rank_gate": True}
    return fields | changes


def tensors(c, seed=0):
    """Every text tensor by its released name without prefix, float32, drawn from a generator keyed by seed and name."""
    h, lin, heads = c["hidden_size"], c["linear_attn_config"], c["num_attention_heads"]
    inner, rank = lin["num_heads"] * lin["head_dim"], c["kv_lora_rank"]
    n, r, d = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    latent, width = c.get("routed_expert_hidden_size") or h, c["moe_intermediate_size"]
    out = {}

    def draw(name, *shape, mean=0.0, std=0.15):
        key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
        out[name] = np.random.default_rng(key).normal(mean, std, shape).astype(np.float32)

    def matrices(prefix, **shapes):
        for name, shape in shapes.items():
            draw(f"{prefix}{name}.weight", *shape)

    def norms(prefix, **sizes):
        for name, size in sizes.items():
            draw(f"{prefix}{name}.weight", size, mean=1.0, std=0.1)

    draw("model.embed_tokens.weight", c["vocab_size"], h, std=1.0)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        a = layer + "self_attn."
        norms(layer, input_layernorm=h, post_attention_layernorm=h)
        if c.get("attn_res_block_size"):
            norms(layer, self_attention_res_norm=h, mlp_res_norm=h)
            matrices(layer, self_attention_res_proj=(1, h), mlp_res_proj=(1, h))
        if i + 1 in lin["kda_layers"]:
            matrices(a, q_proj=(inner, h), k_proj=(inner, h), v_proj=(inner, h), o_proj=(h, inner), b_proj=(lin["num_heads"], h))
            matrices(a, f_a_proj=(lin["head_dim"], h), f_b_proj=(inner, lin["head_dim"]))
            matrices(a, **{f"{x}_conv1d": (inner, 1, lin["short_conv_kernel_size"]) for x in "qkv"})
            if lin.get("use_full_rank_gate"):
                matrices(a, g_proj=(inner, h))
            else:
                matrices(a, g_a_proj=(lin["head_dim"], h), g_b_proj=(inner, lin["head_dim"]))
            norms(a, o_norm=lin["head_dim"])
            draw(a + "A_log", lin["num_heads"], mean=0.3, std=0.4)
            draw(a + "dt_bias", inner, mean=-2.0, std=1.0)
        else:
            if c["q_lora_rank"]:
                matrices(a, q_a_proj=(c["q_lora_rank"], h), q_b_proj=(heads * (n + r), c["q_lora_rank"]))
                norms(a, q_a_layernorm=c["q_lora_rank"])
            else:
                matrices(a, q_proj=(heads * (n + r), h))
            if c.get("mla_use_output_gate"):
                matrices(a, g_proj=(heads * d, h))
            matrices(a, kv_a_proj_with_mqa=(rank + r, h), kv_b_proj=(heads * (n + d), rank), o_proj=(h, heads * d))
            norms(a, kv_a_layernorm=rank)
        if i < c["first_k_dense_replace"]:
            size = c["intermediate_size"]
            matrices(layer + "mlp.", gate_proj=(size, h), up_proj=(size, h), down_proj=(h, size))
            continue
        m = layer + "block_sparse_moe."
        draw(m + "gate.weight", c["num_experts"], h)
        draw(m + "gate.e_score_correction_bias", c["num_experts"], std=0.2)
        if c["num_shared_experts"]:
            size = width * c["num_shared_experts"]
            matrices(m + "shared_experts.", gate_proj=(size, h), up_proj=(size, h), down_proj=(h, size))
        if c.get("routed_expert_hidden_size"):
            matrices(m, routed_expert_down_proj=(latent, h), routed_expert_up_proj=(h, latent))
            if c.get("latent_moe_use_norm"):
                norms(m, routed_expert_norm=latent)
        for e in range(c["num_experts"]):
            matrices(f"{m}experts.{e}.", w1=(width, latent), w3=(width, latent), w2=(latent, width))
    if c.get("attn_res_block_size"):
        norms("model.", output_attn_res_norm=h)
        draw("model.output_attn_res_proj.weight", 1, h)
    norms("model.", norm=h)
    if not c["tie_word_embeddings"]:
        draw("lm_head.weight", c["vocab_size"], h, std=0.3)
    return out


def to_bf16(x):
    """float32 → the bits of the nearest bfloat16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack(w):
    """[out, in] → (packed, scale): the smallest power of two that brings a block's largest magnitude to 6 or less."""
    blocks = w.reshape(w.shape[0], -1, 32).astype(np.float64)
    exponent = np.ceil(np.log2(np.abs(blocks).max(-1) / 6))
    scaled = blocks / 2.0 ** exponent[..., None]
    code = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1) + 8 * np.signbit(scaled)
    code = code.reshape(w.shape).astype(np.uint8)
    return code[:, 0::2] | code[:, 1::2] << 4, (exponent + 127).astype(np.uint8)


def unpack(packed, scale):
    code = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    value = E2M1[code & 7] * np.where(code & 8, -1.0, 1.0)
    return (value.reshape(*scale.shape, 32) * 2.0 ** (scale[..., None].astype(float) - 127)).reshape(code.shape).astype(np.float32)


def stored(name, value, k3):
    """How the release stores one tensor: a list of (name, dtype tag, array), and the float32 values a reader sees."""
    if ".experts." in name and k3:
        packed, scale = pack(value)
        return [(name + "_packed", "U8", packed), (name + "_scale", "U8", scale)], unpack(packed, scale)
    fp32 = name.endswith(("A_log", "dt_bias", "e_score_correction_bias")) or (k3 and ("conv1d" in name or "o_norm" in name))
    if name.endswith("A_log"):
        raw = np.concatenate([value, np.zeros(-len(value) % 128, np.float32)]) if k3 else value.reshape(1, 1, -1, 1)
        return [(name, "F32", raw)], value
    if fp32:
        return [(name, "F32", value)], value
    return [(name, "BF16", to_bf16(value))], from_bf16(to_bf16(value))


def write(folder, c, seed=0, extra=(), shards=3):
    """Write a whole checkpoint; returns (entries by stored name, values by plain name). `extra`: further (name, dtype, array)."""
    folder.mkdir(parents=True, exist_ok=True)
    k3 = c["hidden_act"] == "situ"
    entries, values = [], {}
    for name, value in tensors(c, seed).items():
        parts, values[name] = stored(name, value, k3)
        entries += [(("language_model." if k3 else "") + part, tag, array) for part, tag, array in parts]
    entries += list(extra)
    where, per = {}, -(-len(entries) // shards)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write_shard(folder / file, entries[i * per:(i + 1) * per])
        where |= {name: file for name, _, _ in entries[i * per:(i + 1) * per]}
    total = sum(array.nbytes for _, _, array in entries)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(full_config(c, bool(extra)) if k3 else c))
    return {name: (tag, array) for name, tag, array in entries}, values


def write_shard(path, entries):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tag, array in entries:
        header[name] = {"dtype": tag, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(array.tobytes() for _, _, array in entries))


def full_config(c, vision):
    """The K3 file around a text configuration."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "scale_dtype": "torch.uint8"}
    quantised = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["re:.*self_attn.*"],
                 "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
            "bos_token_id": c["bos_token_id"], "eos_token_id": c["eos_token_id"], "pad_token_id": c["pad_token_id"],
            "tie_word_embeddings": c["tie_word_embeddings"], "text_config": c | {"quantization_config": quantised},
            **({"vision_config": VISION | {"text_hidden_size": c["hidden_size"]}} if vision else {})}


VISION = {"patch_size": 2, "init_pos_emb_height": 4, "init_pos_emb_width": 4, "init_pos_emb_time": 4, "vt_hidden_size": 8,
          "vt_intermediate_size": 16, "vt_num_attention_heads": 3, "vt_num_hidden_layers": 2, "qkv_hidden_size": 12,
          "merge_kernel_size": [2, 2], "mm_hidden_size": 8}


def vision_tensors(hidden_size, seed=0):
    """The tensors of a vision tower of shape `VISION` and its projector, as (name, dtype tag, array)."""
    shapes = {"patch_embed.proj": (8, 3, 2, 2), "patch_embed.pos_emb": (4, 4, 8), "encoder.final_layernorm": (8,)}
    for b in range(2):
        for name, shape in {"norm0": (8,), "norm1": (8,), "wqkv": (36, 8), "wo": (8, 12), "mlp.fc0": (16, 8), "mlp.fc1": (8, 16)}.items():
            shapes[f"encoder.blocks.{b}.{name}"] = shape
    names = {f"vision_tower.{name}.weight": shape for name, shape in shapes.items()}
    names |= {f"mm_projector.{name}.weight": shape for name, shape in
              {"proj.0": (32, 32), "proj.2": (hidden_size, 32), "post_norm": (hidden_size,)}.items()}
    rng = np.random.default_rng(seed)
    return [(name, "BF16", to_bf16(rng.normal(size=shape))) for name, shape in names.items()]
