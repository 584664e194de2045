"""Each detail that implementers got wrong has a test here that fails when it is wrong; `benchmarks/mutations.py` shows that it does.

End-to-end tests compare with the oracle at 1e-5. What that cannot see (epsilons, a common factor on routing weights under a norm,
rounding points) is tested where it happens, against NumPy written from the specification.
"""

import json
import subprocess
import sys

import exported
import numpy as np
import oracle_k3
import pytest
import released
import torch
from oracle_k3 import rms_norm, sigmoid
from torch import nn

from gnomon.kernels import depth, gated_norm, kda, short_conv, situ
from gnomon.kernels.experts import experts
from gnomon.model.config import preset
from gnomon.model.transformer import Transformer

TOKENS = np.random.default_rng(5).integers(0, 300, 40)


def near(ours, theirs, tolerance=1e-6):
    """Equal up to fp32 rounding relative to the largest value."""
    ours = ours.detach().double().numpy() if isinstance(ours, torch.Tensor) else ours
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


def numpy(tensor):
    return tensor.detach().double().numpy()


@pytest.fixture(scope="module")
def model():
    return exported.build("kimi_k3").requires_grad_(False)


@pytest.fixture(scope="module")
def linear():
    return exported.build("kimi_linear").requires_grad_(False)


# ---- end to end


@pytest.mark.parametrize("arch", ["kimi_k3", "kimi_linear"])
def test_logits_equal_the_oracle(arch):
    config = released.config(arch)
    expected, margin = oracle_k3.logits(config, released.tensors(config), TOKENS)
    assert margin > 1e-5
    with torch.no_grad():
        logits = exported.build(arch)(torch.tensor(TOKENS)[None])[0]
    assert exported.relative(logits.numpy(), expected) <= 1e-5


@pytest.mark.parametrize("arch", ["kimi_k3", "kimi_linear"])
def test_decoding_continues_the_prefill(arch):
    """The state that a prefill leaves is the one that decoding expects: K and V are equally wide, so shapes would not tell."""
    model = exported.build(arch).requires_grad_(False)
    tokens = torch.tensor(TOKENS)[None]
    whole, states = model(tokens), model.new_states()
    parts = [model(tokens[:, :20], states=states), *(model(tokens[:, t : t + 1], states=states) for t in range(20, 40))]
    assert exported.relative(torch.cat(parts, 1).numpy(), whole.numpy()) <= 1e-5


# ---- KDA


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1.0])
def test_l2_epsilon_is_1e_6_added_to_the_sum(size):
    x = torch.randn(1, 3, 2, 32) * size
    q, k = kda.prepare(x, 2 * x)
    wide = numpy(x)
    near(q, wide / np.sqrt((wide**2).sum(-1, keepdims=True) + 1e-6) * 32**-0.5)
    near(k, 2 * wide / np.sqrt((4 * wide**2).sum(-1, keepdims=True) + 1e-6))


def test_bounded_decay_is_a_sigmoid_with_one_rate_per_head():
    z, a = torch.randn(1, 5, 3, 8) * 4, torch.tensor([-0.4, 0.3, 1.0])
    near(kda.decay(z, a, -5.0), -5 * sigmoid(np.exp(numpy(a))[:, None] * numpy(z)))


def test_unbounded_decay_is_a_softplus():
    z, a = torch.randn(1, 5, 3, 8) * 4, torch.tensor([-0.4, 0.3, 1.0])
    near(kda.decay(z, a, None), -np.exp(numpy(a))[:, None] * np.logaddexp(0, numpy(z)))


def recurrence(q, k, v, g, beta, state):
    """§2.1 of the model facts, one head, token by token."""
    outputs = []
    for t in range(len(q)):
        state = np.exp(g[t])[:, None] * state
        state = state + beta[t] * np.outer(k[t], v[t] - state.T @ k[t])
        outputs.append(state.T @ q[t])
    return np.stack(outputs), state


@pytest.mark.parametrize("form", ["chunk", "step"])
def test_delta_rule_corrects_the_decayed_state_and_reads_the_updated_one(form):
    q, k, v = torch.randn(3, 1, 6, 1, 8).unbind()
    q, k = kda.prepare(q, k)
    g, beta, state = -5 * torch.rand(1, 6, 1, 8), torch.rand(1, 6, 1), torch.randn(1, 1, 8, 8)
    o, last = recurrence(*(numpy(x[0, :, 0]) for x in (q, k, v, g, beta)), numpy(state[0, 0]))
    if form == "chunk":
        ours, final = kda.chunk(q, k, v, g, beta, state)
    else:
        rows, final = [], state
        for t in range(6):
            row, final = kda.step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], final)
            rows.append(row)
        ours = torch.stack(rows, 1)
    near(ours[0, :, 0], o, 1e-5)
    near(final[0, 0], last, 1e-5)


def test_last_tap_multiplies_the_current_token():
    u, weight = torch.randn(1, 7, 5), torch.randn(5, 4)
    padded = np.concatenate([np.zeros((3, 5)), numpy(u[0])])
    sums = np.stack([sum(numpy(weight)[:, j] * padded[t + j] for j in range(4)) for t in range(7)])
    near(short_conv.short_conv(u, weight)[0][0], sums * sigmoid(sums))


def test_beta_stays_fp32_after_the_sigmoid(model):
    mixer = exported.build("kimi_k3").model.layers[0].self_attn.to(torch.bfloat16)
    x = torch.randn(1, 9, 64, dtype=torch.bfloat16)
    beta = mixer.inputs(x, None, None).beta
    assert beta.dtype == torch.float32
    near(beta, sigmoid(numpy(mixer.b_proj(x))), 1e-7)
    x = torch.randn(1, 9, 64)
    mixer = model.model.layers[0].self_attn
    near(mixer.inputs(x, None, None).beta, sigmoid(numpy(mixer.b_proj(x))), 1e-6)


def test_norm_comes_before_a_sigmoid_gate():
    o, weight, gate = torch.randn(1, 3, 2, 8), torch.rand(8) + 0.5, torch.randn(1, 3, 2, 8)
    near(gated_norm.gated_norm(o, weight, gate, 1e-5), rms_norm(numpy(o), numpy(weight), 1e-5) * sigmoid(numpy(gate)))


def test_output_norm_of_kda_uses_the_configured_epsilon(model):
    mixer = model.model.layers[0].self_attn
    x, o = torch.randn(1, 3, 64), torch.randn(1, 3, 4, 32) * 1e-3
    gate = sigmoid(numpy(mixer.g_proj(x))).reshape(1, 3, 4, 32)
    expected = (rms_norm(numpy(o), numpy(mixer.o_norm.weight), 1e-5) * gate).reshape(1, 3, -1) @ numpy(mixer.o_proj.weight).T
    near(mixer.output(x, o), expected, 1e-5)


# ---- MLA


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_latent_norms_use_1e_6(model, size):
    mixer = model.model.layers[3].self_attn
    x = torch.randn(1, 5, 64) * size
    latent = rms_norm(numpy(x) @ numpy(mixer.q_a_proj.weight).T, numpy(mixer.q_a_layernorm.weight), 1e-6)
    near(mixer.queries(x).flatten(2), latent @ numpy(mixer.q_b_proj.weight).T, 1e-5)
    row = numpy(x) @ numpy(mixer.kv_a_proj_with_mqa.weight).T
    near(mixer.latent_rows(x)[..., :32], rms_norm(row[..., :32], numpy(mixer.kv_a_layernorm.weight), 1e-6), 1e-5)


def test_shared_key_is_neither_normalised_nor_rotated(model):
    mixer = model.model.layers[3].self_attn
    x = torch.randn(1, 5, 64)
    near(mixer.latent_rows(x)[..., 32:], (numpy(x) @ numpy(mixer.kv_a_proj_with_mqa.weight).T)[..., 32:], 1e-5)


def attention(mixer, x):
    """§3 of the model facts for one sequence."""
    q = numpy(mixer.queries(x))[0]
    rows = numpy(mixer.latent_rows(x))[0]
    kv = (rows[:, :32] @ numpy(mixer.kv_b_proj.weight).T).reshape(-1, 4, 32)
    out = np.zeros((len(rows), 4, 16))
    for h in range(4):
        keys = np.concatenate([kv[:, h, :16], rows[:, 32:]], -1)
        for t in range(len(rows)):
            scores = keys[: t + 1] @ q[t, h] * 24**-0.5
            p = np.exp(scores - scores.max())
            out[t, h] = p / p.sum() @ kv[: t + 1, h, 16:]
    return out.reshape(len(rows), -1)


def test_attention_scales_by_the_whole_width_and_gates_with_a_sigmoid(model):
    mixer = model.model.layers[3].self_attn
    x = torch.randn(1, 9, 64) * 2
    gated = attention(mixer, x) * sigmoid(numpy(x[0]) @ numpy(mixer.g_proj.weight).T)
    near(mixer(x)[0], gated @ numpy(mixer.o_proj.weight).T, 1e-5)


def test_attention_does_not_see_the_order_of_past_tokens(model):
    mixer = model.model.layers[3].self_attn
    x = torch.randn(1, 9, 64)
    mixed = x[:, [3, 0, 7, 1, 2, 6, 5, 4, 8]]
    near(mixer(mixed)[0, -1], numpy(mixer(x)[0, -1]), 1e-5)


# ---- depth reads


def mix(values, query, eps=1e-5):
    """§4.1 of the model facts: normalised keys, raw values, no scale."""
    scores = rms_norm(values, 1, eps) @ query
    p = np.exp(scores - scores.max(0))
    return ((p / p.sum(0))[..., None] * values).sum(0)


@pytest.mark.parametrize("size", [3e-3, 3.0])
def test_a_depth_read_scores_normalised_keys_and_sums_raw_values(size):
    values, query = torch.randn(4, 1, 6, 32) * size * torch.tensor([1.0, 3.0, 0.3, 2.0])[:, None, None, None], torch.randn(32)
    near(depth.depth_read(list(values), query, 1e-5), mix(numpy(values), numpy(query)), 1e-5)


def test_the_depth_query_is_a_product_in_fp32(model):
    layer = exported.build("kimi_k3").model.layers[2].to(torch.bfloat16)
    expected = numpy(layer.mlp_res_norm.weight) * numpy(layer.mlp_res_proj.weight)[0]
    near(layer.query("mlp_res"), expected, 1e-7)
    assert layer.query("mlp_res").dtype == torch.float32
    layer = model.model.layers[2]
    near(layer.query("mlp_res"), numpy(layer.mlp_res_norm.weight) * numpy(layer.mlp_res_proj.weight)[0], 1e-6)


class Sublayer(nn.Module):
    """A stand-in whose output is a simple function of its input."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x, *rest):
        return torch.tanh(x * self.factor)


def test_depth_stream_follows_the_algorithm():
    """§4.1 of the model facts with sublayers that are known functions: 9 layers in blocks of 3, then the output's own read."""
    model = exported.build("kimi_k3")
    state = {name: numpy(value) for name, value in model.state_dict().items()}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = Sublayer(0.5 + index)
        setattr(layer, "mlp" if index == 0 else "block_sparse_moe", Sublayer(-0.3 * index - 0.2))

    def read(sources, name):
        return mix(np.stack(sources), state[f"{name}_norm.weight"] * state[f"{name}_proj.weight"][0])

    bank, total = [], state["model.embed_tokens.weight"][TOKENS[:12]]
    for index in range(9):
        name = f"model.layers.{index}."
        h = read([*bank, total], name + "self_attention_res") if bank else total
        if index % 3 == 0:
            bank.append(total)
            total = 0
        total = total + np.tanh(rms_norm(h, state[name + "input_layernorm.weight"], 1e-5) * (0.5 + index))
        h = read([*bank, total], name + "mlp_res")
        total = total + np.tanh(rms_norm(h, state[name + "post_attention_layernorm.weight"], 1e-5) * (-0.3 * index - 0.2))
    assert len(bank) == 3
    out = rms_norm(read([*bank, total], "model.output_attn_res"), state["model.norm.weight"], 1e-5)
    near(model.hidden(torch.tensor(TOKENS[None, :12]))[0], out, 1e-5)


def test_the_bank_keeps_its_values():
    """A later addition must not reach a source that was banked before."""
    model = Transformer(preset("tiny")).initialise()
    tokens = torch.arange(6)[None]
    embedding = model.embed(tokens)
    before = embedding.clone()
    model.hidden(None, embeddings=embedding)
    assert torch.equal(embedding, before)


# ---- experts


def route(gate, x):
    """(scores, biased scores) by the specification."""
    scores = sigmoid(numpy(x) @ numpy(gate.weight).T)
    return scores, scores + numpy(gate.e_score_correction_bias)


@pytest.mark.parametrize("family", ["model", "linear"])
def test_routing_weights_are_renormalised_and_scaled(family, request):
    """Under the latent norm a common factor is all but invisible in logits (1.5e-4), so it is tested here."""
    gate = request.getfixturevalue(family).model.layers[2].block_sparse_moe.gate
    _, weights = gate(torch.randn(50, 64))
    near(weights.sum(-1), np.full(50, {"model": 1.0, "linear": 2.446}[family]))


def test_bias_takes_part_in_the_choice_and_not_in_the_weights(model):
    gate = model.model.layers[2].block_sparse_moe.gate
    x = torch.randn(200, 64)
    ids, weights = gate(x)
    scores, biased = route(gate, x)
    best = np.sort(np.argsort(-biased, -1)[:, :4], -1)
    assert (np.sort(ids.numpy(), -1) == best).mean() > 0.999
    chosen = np.take_along_axis(scores, ids.numpy(), -1)
    near(weights, chosen / chosen.sum(-1, keepdims=True), 1e-5)
    assert (best != np.sort(np.argsort(-scores, -1)[:, :4], -1)).any(), "the biases change no choice, so the test shows nothing"


def test_the_router_works_in_fp32_in_a_bf16_model():
    gate = exported.build("kimi_k3").model.layers[2].block_sparse_moe.gate
    gate.weight.data = gate.weight.data.to(torch.bfloat16)
    x = torch.randn(50, 64).to(torch.bfloat16)
    near(gate.scores(x), sigmoid(numpy(x) @ numpy(gate.weight).T), 1e-6)
    assert gate.e_score_correction_bias.dtype == torch.float32


def glu(g, u, beta1, beta2):
    return beta1 * np.tanh(g / beta1) * sigmoid(g) * beta2 * np.tanh(u / beta2)


def test_situ_caps_both_branches_and_gates_with_the_raw_value():
    g, u = torch.randn(100, 8) * 6, torch.randn(100, 8) * 40
    near(situ.situ_glu(g, u, 4.0, 25.0), glu(numpy(g), numpy(u), 4, 25))


def test_situ_acts_inside_the_experts():
    z, w1, w3, w2 = torch.randn(5, 8), *torch.randn(2, 3, 16, 8).mul(2).unbind(), torch.randn(3, 8, 16)
    ids, weights = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]]), torch.rand(5, 2)
    expected = np.stack([sum(
        float(weights[n, i]) * numpy(w2[e]) @ glu(numpy(w1[e]) @ numpy(z[n]), numpy(w3[e]) @ numpy(z[n]), 4, 25)
        for i, e in enumerate(ids[n])) for n in range(5)])
    near(experts(z, w1, w3, w2, ids, weights, 4.0, 25.0), expected, 1e-5)


def test_experts_are_summed_in_fp32():
    """In bf16 each output is rounded once, then all are weighted and added in fp32, then rounded once."""
    z, w1, w3, w2 = (t.to(torch.bfloat16) for t in (torch.randn(40, 32), *torch.randn(2, 8, 32, 32).unbind(), torch.randn(8, 32, 32)))
    ids, weights = torch.stack([torch.randperm(8)[:4] for _ in range(40)]), torch.rand(40, 4)
    one = torch.ones(40, 1)
    outputs = [experts(z, w1, w3, w2, ids[:, i : i + 1], one, 4.0, 25.0) for i in range(4)]  # one expert each, rounded
    expected = sum(weights[:, i : i + 1] * output.float() for i, output in enumerate(outputs)).to(torch.bfloat16)
    assert (experts(z, w1, w3, w2, ids, weights, 4.0, 25.0) == expected).float().mean() > 0.995


def test_the_combined_latent_is_normalised_and_the_shared_expert_reads_the_full_width(model):
    moe = model.model.layers[2].block_sparse_moe
    x = torch.randn(1, 6, 64)
    ids, weights = moe.gate(x[0])
    z = moe.routed_expert_down_proj(x[0])
    u = experts(z, moe.experts.w1, moe.experts.w3, moe.experts.w2, ids, weights, 4.0, 25.0)
    routed = rms_norm(numpy(u), numpy(moe.routed_expert_norm.weight), 1e-5) @ numpy(moe.routed_expert_up_proj.weight).T
    shared = glu(*(numpy(x[0]) @ numpy(p.weight).T for p in (moe.shared_experts.gate_proj, moe.shared_experts.up_proj)), 4, 25)
    near(moe(x)[0], routed + shared @ numpy(moe.shared_experts.down_proj.weight).T, 1e-5)


@pytest.mark.parametrize("name", ["input_layernorm", "post_attention_layernorm", "norm", "routed_expert_norm"])
def test_other_norms_use_the_configured_epsilon(model, name):
    (norm, *_) = [module for path, module in model.named_modules() if path.endswith(name)]
    x = torch.randn(4, norm.weight.numel()) * 1e-3
    near(norm(x), rms_norm(numpy(x), numpy(norm.weight), 1e-5))


def test_norms_round_before_the_weight_multiplies():
    x, weight = torch.randn(50, 64).to(torch.bfloat16), torch.rand(64).to(torch.bfloat16)
    normalised = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).to(torch.bfloat16)
    assert torch.equal(gated_norm.rms_norm(x, weight, 1e-5), normalised * weight)


@pytest.mark.parametrize(("layer", "part"), [(0, "self_attn"), (3, "self_attn"), (0, "mlp"), (2, "block_sparse_moe")])
def test_parts_in_bf16_stay_near_fp32(layer, part):
    """The same bf16 weights and inputs, computed in bf16 and in fp32: rounding of activations alone, about 2^-8 per operation."""
    rounded = getattr(exported.build("kimi_k3").model.layers[layer], part).to(torch.bfloat16)
    x = torch.randn(1, 40, 64).to(torch.bfloat16)
    with torch.no_grad():
        ours = rounded(x).float().numpy()
        assert exported.relative(ours, rounded.float()(x.float()).numpy()) <= 1e-2


@pytest.mark.slow
def test_every_wrong_variant_is_caught(repository):
    """The mutation table, one wrong variant at a time: none passes, and each fails the test that is named for it."""
    program = [sys.executable, str(repository / "benchmarks" / "mutations.py"), "--json"]
    result = subprocess.run(program, capture_output=True, text=True, check=False, cwd=repository)
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(row["named"] in row["failed"] for row in json.loads(result.stdout)["mutations"])
