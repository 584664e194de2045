"""Counts: exact against the published figures, and equal between the configuration and the modules that run."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import ConfigError
from gnomon.model.config import PRESETS, preset
from gnomon.model.huggingface import to_model_config, to_released
from gnomon.model.transformer import Transformer
from gnomon.model.weights import slots

NAMES = sorted(path.stem for path in PRESETS.glob("*.toml"))
FP32 = 4
BF16 = 2


@pytest.fixture(scope="module")
def modules():
    """Each preset as modules without storage."""
    with torch.device("meta"):
        return {name: Transformer(preset(name)) for name in NAMES}


def test_the_presets_are_there():
    assert {"tiny", "small", "kimi-linear-48b", "k3-2.8t"} <= set(NAMES)


@pytest.mark.parametrize(("name", "total", "activated"), [
    ("k3-2.8t", 2_779_484_476_000, 104_189_612_640),
    ("kimi-linear-48b", 49_122_681_728, 3_106_972_544),
])
def test_published_counts(name, total, activated):
    assert preset(name).num_parameters() == total
    assert preset(name).activated_parameters() == activated


def test_k3_with_vision_and_its_checkpoint():
    k3 = preset("k3-2.8t")
    assert k3.vision_parameters() == 447_358_976
    assert k3.num_parameters() + k3.vision_parameters() == 2_779_931_834_976
    assert k3.checkpoint_bytes() == 1_560_860_324_864


def test_k3_memory_per_token_and_sequence():
    k3 = preset("k3-2.8t")
    assert k3.kv_bytes_per_token() == 27_648
    assert k3.state_bytes() == 434_110_464
    assert k3.conv_state_bytes() == 15_261_696


@pytest.mark.parametrize(("prefix", "each", "layers"), [
    ("self_attn", 443_740_384, [0]), ("self_attn", 232_196_096, [3, 92]), ("block_sparse_moe", 896 * 33_030_144 + 189_927_808, [1, 92]),
    ("mlp.", 726_663_168, [0]),
])
def test_k3_parts(prefix, each, layers):
    for layer in layers:
        assert sum(t.elements for t in preset("k3-2.8t").layer_tensors(layer) if t.name.startswith(prefix)) == each


@pytest.mark.parametrize(("prefix", "each", "layer"), [("self_attn", 39_514_272, 0), ("self_attn", 29_114_880, 3)])
def test_kimi_linear_parts(prefix, each, layer):
    assert sum(t.elements for t in preset("kimi-linear-48b").layer_tensors(layer) if t.name.startswith(prefix)) == each


def test_layers_of_k3():
    layers = preset("k3-2.8t").layers
    assert [i for i, kind in enumerate(layers) if kind == "mla"] == [*range(3, 92, 4), 92]
    assert layers.count("kda") == 69
    linear = preset("kimi-linear-48b").layers
    assert [i + 1 for i, kind in enumerate(linear) if kind == "mla"] == [4, 8, 12, 16, 20, 24, 27]


def test_depth_reads_of_k3():
    counts = preset("k3-2.8t").depth_sources()
    assert len(counts) == 186
    assert max(counts) == 9
    assert counts[:2] == [2, 2], "layer 0 reads no sources for attention; then the embedding and the running sum"
    assert counts[23] == 2, "the attention of layer 12 sees the embedding and the finished block"
    assert counts[24] == 3


@pytest.mark.parametrize("name", NAMES)
def test_modules_have_the_parameters_that_the_configuration_counts(modules, name):
    assert sum(p.numel() for p in modules[name].parameters()) + _biases(modules[name]) == preset(name).num_parameters()


def _biases(model):
    """The router biases are buffers; the published counts include them."""
    return sum(router.e_score_correction_bias.numel() for router in model.routers())


@pytest.mark.parametrize("name", NAMES)
def test_modules_activate_what_the_configuration_says(modules, name):
    model, config = modules[name], preset(name)
    idle = sum(tensor.numel() // config.moe.num_experts * (config.moe.num_experts - config.moe.num_experts_per_token)
               for target, tensor in model.named_parameters() if ".experts.w" in target)
    everything = sum(p.numel() for p in model.parameters()) + _biases(model)
    assert everything - idle - model.model.embed_tokens.weight.numel() == config.activated_parameters()


@pytest.mark.parametrize("name", NAMES)
def test_modules_have_the_tensors_that_the_configuration_lists(modules, name):
    """Names and shapes, one by one, in the released layout."""
    config = preset(name)
    prefix = "language_model." if config.family == "kimi_k3" else ""
    listed = {}
    for spec in config.tensors():
        for expert in range(spec.count):
            listed[prefix + spec.name.format(expert)] = spec.shape
    assert {slot.name: slot.shape for slot in slots(modules[name])} == listed


def test_checkpoint_bytes_from_the_modules(modules):
    """The sum over the layout that the writer uses is the size of the release."""
    k3 = preset("k3-2.8t")
    total = sum(spec.elements * BF16 for spec in k3.vision.tensors(k3.hidden_size))
    for slot in slots(modules["k3-2.8t"]):
        size = math.prod(slot.shape)
        if slot.expert is not None:
            total += size // 2 + size // 32
        elif slot.name.endswith("A_log"):
            total += 128 * FP32
        elif slot.name.endswith(("dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")):
            total += size * FP32
        else:
            total += size * BF16
    assert total == 1_560_860_324_864


@pytest.mark.parametrize("name", NAMES)
def test_states_have_the_bytes_that_the_configuration_says(name):
    config = preset(name)
    with torch.device("meta"):
        layers = Transformer(config).model.layers
    states = [layer.self_attn.new_state(1, 1, torch.bfloat16, torch.device("meta")) for layer in layers]
    assert sum(s.matrix.nbytes for s in states if hasattr(s, "matrix")) == config.state_bytes()
    assert sum(s.conv.nbytes for s in states if hasattr(s, "conv")) == config.conv_state_bytes()
    assert sum(s.rows.nbytes for s in states if hasattr(s, "rows")) == config.kv_bytes_per_token()


def test_flops_are_twice_the_activated_parameters_and_the_attention():
    """Independent of how the parts add up: matrices twice, and what depends on the context once per MLA layer."""
    k3 = preset("k3-2.8t")
    short, long = k3.flops_per_token(1), k3.flops_per_token(1_000_001)
    assert long - short == 24 * 1_000_000 * 2 * 96 * (192 + 128)
    assert abs(short / (2 * k3.activated_parameters()) - 1) < 0.01


@pytest.mark.parametrize("name", NAMES)
def test_released_configurations_come_back(name):
    config = preset(name)
    again = to_model_config(to_released(config))
    assert again.layers == config.layers
    assert list(again.tensors()) == list(config.tensors())
    assert again == config


def test_layer_lists_are_one_based_in_files():
    text = to_released(preset("k3-2.8t"))["text_config"]["linear_attn_config"]
    assert text["full_attn_layers"] == [*range(4, 93, 4), 93]
    assert text["kda_layers"][:4] == [1, 2, 3, 5]


@given(st.lists(st.sampled_from(["kda", "mla"]), min_size=1, max_size=24))
def test_any_order_of_layers_survives_the_released_format(kinds):
    config = replace(preset("tiny"), num_hidden_layers=len(kinds), layer_pattern=tuple(kinds), final_mixer=None)
    again = to_model_config(json.loads(json.dumps(to_released(config))))
    assert again.layers == tuple(kinds)
    assert list(again.tensors()) == list(config.tensors())


@pytest.mark.parametrize(("override", "words"), [
    ("hidden_size=200", ["hidden_size", "200", "192 or 224"]),
    ("moe.num_experts_per_token=17", ["num_experts_per_token", "17", "16 experts"]),
    ("moe.moe_intermediate_size=48", ["moe_intermediate_size", "48", "64"]),
    ("moe.num_expert_group=3", ["num_expert_group", "3"]),
    ("mixers.kda.gate_lower_bound=5.0", ["gate_lower_bound", "5.0", "-5.0"]),
    ("mixers.kda.num_heads=0", ["num_heads", "0", "positive"]),
    ("rms_norm_eps=0", ["rms_norm_eps", "0", "positive"]),
    ('layer_pattern=["kda", "hyena"]', ["hyena", "mixers.hyena", "kda, mla"]),
    ("layer_pattern=[]", ["layer_pattern", "empty"]),
    ("attn_res_block_size=0", ["attn_res_block_size", "0"]),
    ("hidden_sise=64", ["hidden_sise", "hidden_size"]),
    ('hidden_act="gelu"', ["hidden_act", "gelu", "situ"]),
])
def test_shapes_that_do_not_fit_are_refused(override, words):
    with pytest.raises(ConfigError) as error:
        preset("tiny", (override,))
    assert all(word in str(error.value) for word in words), str(error.value)
