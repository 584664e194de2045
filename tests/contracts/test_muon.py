"""Per-Head Muon and AdamW against independent oracles."""

import math

import pytest
import torch

from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.parts import KDAConfig, MLAConfig
from gnomon.train import muon as module
from gnomon.train.muon import Muon
from gnomon.train.settings import MuonConfig
from gnomon.train.units import all_units, head_rows, is_matrix, row_spans, split

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, layer_pattern=("kda", "mla"), intermediate_size=64, mixers={
    "kda": KDAConfig(num_heads=2, head_dim=8),
    "mla": MLAConfig(num_attention_heads=2, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=6),
})
KDA, MLA = "model.layers.0.self_attn.", "model.layers.1.self_attn."
SHAPES = {
    "model.embed_tokens.weight": (64, 32), f"{KDA}q_proj.weight": (16, 32), f"{KDA}o_proj.weight": (32, 16),
    f"{KDA}q_conv1d.weight": (16, 1, 4), f"{KDA}A_log": (2,), f"{MLA}q_b_proj.weight": (12, 16), f"{MLA}kv_b_proj.weight": (20, 8),
    f"{MLA}kv_a_proj_with_mqa.weight": (10, 32), "model.layers.1.mlp_res_proj.weight": (1, 32),
    "model.layers.1.block_sparse_moe.gate.weight": (6, 32), "model.layers.1.block_sparse_moe.experts.w1": (6, 48, 16),
    "lm_head.weight": (64, 32),
}


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for name, shape in SHAPES.items()}


def give_gradients(named, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p in named.values():
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def iterated(matrix, steps=5):
    """The quintic on singular values, through an SVD."""
    u, s, v = torch.linalg.svd(matrix.detach().double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def expected_blocks(name):
    """Row ranges that must be orthogonalised alone, written down by hand."""
    return {
        f"{KDA}q_proj.weight": [(0, 8), (8, 16)],
        f"{MLA}q_b_proj.weight": [(0, 6), (6, 12)],
        f"{MLA}kv_b_proj.weight": [(0, 4), (4, 10), (10, 14), (14, 20)],
        f"{MLA}kv_a_proj_with_mqa.weight": [(0, 8), (8, 10)],
    }.get(name, [(0, SHAPES[name][0])])


def test_matrices_follow_muon_block_by_block():
    named = parameters()
    config = MuonConfig(weight_decay=0.1)
    optimiser = Muon(named.items(), config, head_rows(CONFIG))
    wanted = {n: p.detach().double().clone() for n, p in named.items() if is_matrix(n, p.shape)}
    momentum = {n: torch.zeros_like(w) for n, w in wanted.items()}
    assert len(wanted) == 7
    for step, rate in enumerate([0.01, 0.02, 0.005]):
        give_gradients(named, step)
        for name, weight in wanted.items():
            gradient = named[name].grad.double()
            momentum[name] = 0.95 * momentum[name] + gradient
            direction = gradient + 0.95 * momentum[name]
            stacked = weight.ndim == 3
            for matrix, update in [(weight[e], direction[e]) for e in range(len(weight))] if stacked else [(weight, direction)]:
                ranges = [(0, matrix.shape[0])] if stacked else expected_blocks(name)
                for start, stop in ranges:
                    block = update[start:stop]
                    matrix[start:stop] -= rate * (0.2 * math.sqrt(max(block.shape)) * iterated(block) + 0.1 * matrix[start:stop])
        optimiser.step(rate)
    for name, weight in wanted.items():
        assert torch.allclose(named[name].detach().double(), weight, atol=2e-5), name


@pytest.mark.parametrize("vector_rate", [1.0, 0.1])
def test_the_rest_follows_torch_adamw(vector_rate):
    named, twin = parameters(), parameters()
    optimiser = Muon(named.items(), MuonConfig(weight_decay=0.1, vector_rate=vector_rate), head_rows(CONFIG))
    others = [n for n in SHAPES if not is_matrix(n, named[n].shape)]
    tables = ["model.embed_tokens.weight", "lm_head.weight"]
    assert set(others) == {*tables, f"{KDA}q_conv1d.weight", f"{KDA}A_log", "model.layers.1.mlp_res_proj.weight"}
    peer = torch.optim.AdamW([{"params": [twin[n] for n in tables], "weight_decay": 0.1},
                              {"params": [twin[n] for n in others if n not in tables], "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-8)
    for step, rate in enumerate([0.01, 0.02, 0.005]):
        give_gradients(named, step)
        give_gradients(twin, step)
        for group, share in zip(peer.param_groups, (1.0, vector_rate), strict=True):
            group["lr"] = rate * share
        optimiser.step(rate)
        peer.step()
    for name in others:
        assert torch.allclose(named[name], twin[name], atol=1e-6), name


def test_batching_and_its_memory_bound_do_not_change_the_update(monkeypatch):
    results = []
    for limit in (1 << 24, 1, 900):
        monkeypatch.setattr(module, "BATCH_ELEMENTS", {"cpu": limit})
        named = parameters(torch.float64)
        optimiser = Muon(named.items(), MuonConfig(), head_rows(CONFIG))
        give_gradients(named, 0)
        optimiser.step(0.01)
        results.append(named)
    for other in results[1:]:
        assert all(torch.allclose(results[0][n], other[n], atol=1e-12) for n in SHAPES)


def test_a_head_with_a_large_gradient_does_not_take_the_update_of_a_small_one():
    def rms_of_heads(per_head):
        weight = torch.zeros(16, 32, requires_grad=True)
        weight.grad = torch.randn(16, 32, generator=torch.Generator().manual_seed(3))
        weight.grad[:8] *= 1000
        optimiser = Muon([(f"{KDA}q_proj.weight", weight)], MuonConfig(per_head=per_head), head_rows(CONFIG))
        optimiser.step(1.0)
        return [part.square().mean().sqrt().item() for part in weight.detach().chunk(2)]

    large, small = rms_of_heads(per_head=True)
    assert large == pytest.approx(small, rel=0.15)
    assert large == pytest.approx(0.2, rel=0.2)
    large, small = rms_of_heads(per_head=False)
    assert small < 0.5 * large


def test_units_are_named_and_cover_each_matrix_once():
    named = parameters()
    units = all_units(named, head_rows(CONFIG))
    assert len(units) == len(set(units)) == 2 + 1 + 2 + 4 + 2 + 1 + 6
    assert str(units[0]) == f"{KDA}q_proj.weight[0:0]"
    for name, p in named.items():
        if is_matrix(name, p.shape):
            assert sum(part.numel() for part in split(name, p, head_rows(CONFIG).get(name))) == p.numel()


def test_parameters_of_which_rows_are_here_are_updated_by_what_their_owners_return():
    """Rows are halves; whoever makes matrices whole is asked for the directions of all of them, and for nothing else."""
    whole = parameters(torch.float64)
    give_gradients(whole, 0)
    rows, seen = head_rows(CONFIG), {}
    heights = {name: (shape[0] + 1) // 2 for name, shape in SHAPES.items()}

    class Halves:
        def __init__(self, rank):
            self.shapes = dict(SHAPES)
            self.part = {n: slice(0, h) if rank == 0 else slice(h, None) for n, h in heights.items()}

        def apply(self, here, work, most):
            found = {}
            for name, local in here.items():
                direction = whole[name].grad * (1 + 0.95)
                assert torch.allclose(direction[self.part[name]], local, atol=1e-12)
                spans = row_spans(SHAPES[name], rows.get(name))
                seen[name] = spans
                done = torch.cat([work([direction[a:b].reshape(-1, direction.shape[-1])])[0] for a, b in spans])
                found[name] = done.view(SHAPES[name])[self.part[name]]
            return found

    shards = []
    for rank in (0, 1):
        halves = Halves(rank)
        shard = {n: p.detach()[halves.part[n]].clone().requires_grad_() for n, p in whole.items()}
        for name, p in shard.items():
            p.grad = whole[name].grad[halves.part[name]].clone()
        Muon(shard.items(), MuonConfig(), rows, (halves,)).step(0.01)
        shards.append(shard)
    Muon(whole.items(), MuonConfig(), rows).step(0.01)
    assert seen == {name: expected_blocks(name) if len(SHAPES[name]) == 2 else [(i, i + 1) for i in range(6)]
                    for name, p in whole.items() if is_matrix(name, p.shape)}
    for name in SHAPES:
        assert torch.allclose(torch.cat([shard[name] for shard in shards]), whole[name], atol=1e-12), name


def test_state_round_trips_to_the_last_bit_and_refuses_another_model():
    named, twin = parameters(), parameters()
    one = Muon(named.items(), MuonConfig(), head_rows(CONFIG))
    for step in range(2):
        give_gradients(named, step)
        one.step(0.01)
    two = Muon(twin.items(), MuonConfig(), head_rows(CONFIG))
    with torch.no_grad():
        for name, p in twin.items():
            p.copy_(named[name])
    two.load_state_dict({n: t.clone() for n, t in one.state_dict().items()})
    for optimiser, tensors in ((one, named), (two, twin)):
        give_gradients(tensors, 7)
        optimiser.step(0.01)
    assert all(torch.equal(named[n], twin[n]) for n in SHAPES)
    state = one.state_dict()
    state["momentum.extra"] = state.pop(f"momentum.{KDA}q_proj.weight")
    with pytest.raises(CheckpointError, match=r"q_proj.*momentum\.extra"):
        two.load_state_dict(state)


def test_a_parameter_without_gradient_stays():
    named = parameters()
    before = {n: p.detach().clone() for n, p in named.items()}
    optimiser = Muon(named.items(), MuonConfig(), head_rows(CONFIG))
    named["lm_head.weight"].grad = torch.ones(64, 32)
    optimiser.step(0.1)
    assert [n for n in SHAPES if not torch.equal(named[n], before[n])] == ["lm_head.weight"]


def test_clipping_scales_to_the_global_norm():
    named = parameters()
    give_gradients(named, 0)
    optimiser = Muon(named.items(), MuonConfig(clip_gradient=1.0), {})
    before = torch.cat([p.grad.flatten() for p in named.values()]).norm()
    assert optimiser.clip_gradient().item() == pytest.approx(before.item(), rel=1e-5)
    assert torch.cat([p.grad.flatten() for p in named.values()]).norm().item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(("field", "value"), [("learning_rate", 0.0), ("momentum", 1.0), ("adam_betas", (0.9,)), ("clip_logits", -1.0)])
def test_settings_out_of_range_are_named(field, value):
    with pytest.raises(ConfigError, match=field):
        MuonConfig(**{field: value})


def test_heads_that_do_not_divide_the_rows_are_named():
    with pytest.raises(ConfigError, match=r"'odd' has 10 rows, which heads of 4\+2 rows"):
        split("odd", torch.zeros(10, 3), (4, 2))
