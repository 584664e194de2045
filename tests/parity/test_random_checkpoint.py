"""A checkpoint from an independent writer, read by gnomon, against the oracle that knows only the specification."""

import numpy as np
import oracle_k3
import pytest
import released
import torch

from gnomon.model.weights import load_pretrained

# Every other way in which the layouts may be filled: each row changes one thing of a tiny model.
VARIATIONS = {
    "kimi_k3": ("kimi_k3", {}),
    "kimi_linear": ("kimi_linear", {}),
    "k3 in one block": ("kimi_k3", {"attn_res_block_size": 12}),
    "k3 in blocks of one layer": ("kimi_k3", {"attn_res_block_size": 1}),
    "k3 without depth reads": ("kimi_k3", {"attn_res_block_size": None}),
    "k3 without a query latent": ("kimi_k3", {"q_lora_rank": None}),
    "k3 without an attention gate": ("kimi_k3", {"mla_use_output_gate": False}),
    "k3 without a latent": ("kimi_k3", {"routed_expert_hidden_size": None}),
    "k3 without the latent norm": ("kimi_k3", {"latent_moe_use_norm": False}),
    "k3 with a linear up branch": ("kimi_k3", {"activation_situ_linear_beta": None}),
    "k3 with three dense layers": ("kimi_k3", {"first_k_dense_replace": 3}),
    "k3 tied": ("kimi_k3", {"tie_word_embeddings": True}),
    "linear without shared experts": ("kimi_linear", {"num_shared_experts": 0}),
    "linear without renormalisation": ("kimi_linear", {"moe_renormalize": False}),
    "linear with a query latent": ("kimi_linear", {"q_lora_rank": 24}),
}
LENGTH = 40


def relative(ours, theirs):
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def prepare(name, folder):
    """A checkpoint in `folder`; returns tokens and the oracle's logits."""
    arch, changes = VARIATIONS[name]
    config = released.config(arch, **changes)
    _, values = released.write(folder, config)
    tokens = np.random.default_rng(5).integers(0, 300, LENGTH)
    logits, margin = oracle_k3.logits(config, values, tokens)
    assert margin > 1e-5, "an expert choice hangs on rounding: take another seed"
    return torch.tensor(tokens), logits


@pytest.mark.parametrize("name", VARIATIONS)
def test_logits(name, tmp_path):
    tokens, expected = prepare(name, tmp_path)
    model = load_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(tokens[None])[0]
    assert relative(logits.numpy(), expected) <= 1e-5


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_linear"])
def test_logits_token_by_token(name, tmp_path):
    tokens, expected = prepare(name, tmp_path)
    model = load_pretrained(tmp_path, dtype=torch.float32)
    states = model.new_states()
    with torch.no_grad():
        rows = [model(token.view(1, 1), states=states)[0, 0].numpy() for token in tokens]
    assert relative(np.stack(rows), expected) <= 1e-5


def test_gates_of_the_two_families_differ(tmp_path):
    """The decay gate follows the configuration: the same weights under the other gate are another model."""
    config = released.config("kimi_k3")
    _, values = released.write(tmp_path, config)
    tokens = list(range(8))
    bounded, _ = oracle_k3.logits(config, values, tokens)
    config["linear_attn_config"]["gate_lower_bound"] = None
    unbounded, _ = oracle_k3.logits(config, values, tokens)
    assert relative(unbounded, bounded) > 0.1
