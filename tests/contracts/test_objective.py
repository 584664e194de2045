"""The loss without logits, the weight clip and the balance update against plain computations."""

import pytest
import torch
from torch.nn import functional

from gnomon.kernels.cross_entropy import chunked, cross_entropy_sum
from gnomon.model import balance as rules
from gnomon.model.mixers.mla import Mixer
from gnomon.model.parts import MLAConfig, MoEConfig
from gnomon.model.router import Router
from gnomon.train import balance
from gnomon.train.qk_clip import clip_logits, watch
from gnomon.train.settings import BalanceConfig


def do_nothing(tensor):
    """A reduction over one rank."""


@pytest.mark.parametrize("elements", [1, 1 << 22])
def test_chunked_cross_entropy_equals_the_plain_one(monkeypatch, elements):
    monkeypatch.setattr(chunked, "LOGIT_ELEMENTS", elements)
    monkeypatch.setattr(chunked, "LEAST_ROWS", 7)
    hidden = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 30, (40,))
    plain = functional.cross_entropy(hidden @ weight.T, targets, reduction="sum") * 0.25
    wanted = torch.autograd.grad(plain, (hidden, weight))
    ours = cross_entropy_sum(hidden, weight, targets) * 0.25
    got = torch.autograd.grad(ours, (hidden, weight))
    assert torch.allclose(ours, plain, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, wanted, strict=True))


def test_cross_entropy_of_nothing_is_zero_with_zero_gradients():
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    total = cross_entropy_sum(hidden, weight, torch.zeros(0, dtype=torch.long))
    total.backward()
    assert total.item() == 0
    assert weight.grad.abs().max() == 0


def test_large_logits_do_not_overflow():
    hidden, weight = torch.full((2, 4), 1e3), torch.eye(4)[:3] * 1e3
    assert cross_entropy_sum(hidden, weight, torch.tensor([0, 1])).item() == pytest.approx(2 * torch.log(torch.tensor(3.0)).item())


def attention(q_lora_rank):
    widths = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    mixer = Mixer(MLAConfig(num_attention_heads=3, q_lora_rank=q_lora_rank, **widths), 32, 1e-5)
    for p in mixer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return mixer


def logits(mixer, x):
    """Every head's logits, from the mixer's own queries and keys."""
    c = mixer.config
    q, rows = mixer.queries(x), mixer.latent_rows(x)
    latent, shared = rows.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
    nope = mixer.kv_b_proj(latent).view(*x.shape[:2], c.num_attention_heads, -1)[..., : c.qk_nope_head_dim]
    keys = torch.cat([nope, shared.unsqueeze(2).expand(*nope.shape[:3], -1)], -1)
    scores = torch.einsum("bthq,bshq->bhts", q, keys) * mixer.scale
    return scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))


@pytest.mark.parametrize("q_lora_rank", [16, None])
@torch.no_grad()
def test_the_clip_brings_each_large_head_to_the_threshold_and_leaves_the_others(q_lora_rank):
    mixer, x = attention(q_lora_rank), torch.randn(2, 20, 32)
    before = logits(mixer, x)
    largest = before.amax((0, 2, 3))
    threshold = largest.sort().values[1].item() + 1e-3  # one head is above
    shared = mixer.kv_a_proj_with_mqa.weight.clone()
    watch({5: mixer})
    mixer(x)
    assert torch.allclose(mixer.max_logits, largest, rtol=1e-4)
    seen = clip_logits({5: mixer}, threshold, do_nothing)
    assert seen.item() == pytest.approx(largest.max().item(), rel=1e-4)
    after, gamma = logits(mixer, x), (threshold / largest).clamp(max=1)
    visible = before > float("-inf")
    assert torch.allclose(after[visible], (before * gamma[None, :, None, None])[visible], rtol=1e-3, atol=1e-3)
    assert after.amax((0, 2, 3)).max().item() == pytest.approx(threshold, rel=1e-3)
    assert mixer.max_logits is None
    assert torch.equal(mixer.kv_a_proj_with_mqa.weight, shared)


@torch.no_grad()
def test_a_layer_that_saw_nothing_is_left_alone():
    mixer = attention(16)
    before = {n: p.clone() for n, p in mixer.named_parameters()}
    assert clip_logits({0: mixer}, 1.0, do_nothing).item() == float("-inf")
    assert all(torch.equal(p, before[n]) for n, p in mixer.named_parameters())


def routers(count=3):
    config = MoEConfig(num_experts=8, num_experts_per_token=2, moe_intermediate_size=32)
    made = [Router(config, 16) for _ in range(count)]
    for router in made:
        torch.nn.init.normal_(router.weight, std=1.0)
    balance.start(made, BalanceConfig())
    return made


@torch.no_grad()
def test_all_layers_reduce_once_and_two_ranks_are_one():
    """Two sets of routers see half of the tokens each; a reduction that adds them gives the biases of the whole."""
    whole, halves, x = routers(), [routers(), routers()], torch.randn(200, 16)
    for half in halves:
        for router, one in zip(half, whole, strict=True):
            router.weight.copy_(one.weight)
    for router in whole:
        router(x)
    for half, part in zip(halves, x.split([120, 80]), strict=True):
        for router in half:
            router(part)
    other = torch.cat([*[r.load for r in halves[1]], *[r.histogram.flatten() for r in halves[1]]])
    calls = []

    def add_other_rank(tensor):
        calls.append(tensor.dtype)
        tensor += other

    loads = balance.update_balance(whole, BalanceConfig(), do_nothing)
    summed = balance.update_balance(halves[0], BalanceConfig(), add_other_rank)
    assert calls == [torch.int64]
    assert torch.equal(loads, summed)
    assert loads.sum(1).tolist() == [400] * 3
    for a, b in zip(whole, halves[0], strict=True):
        assert torch.equal(a.e_score_correction_bias, b.e_score_correction_bias)
        assert a.e_score_correction_bias.abs().max() > 0
        assert a.histogram.sum() == a.load.sum() == 0


@torch.no_grad()
def test_each_method_updates_by_its_own_rule():
    x = torch.randn(100, 16)
    for method in ("quantile", "sign", "none"):
        router = routers(1)[0]
        router(x)
        histogram, load = router.histogram.clone(), router.load.clone()
        balance.update_balance([router], BalanceConfig(method=method), do_nothing)
        zero = torch.zeros(8)
        wanted = {"quantile": rules.quantile_bias(histogram, zero, 2), "sign": rules.sign_rule(zero, load, 1e-3), "none": zero}[method]
        assert torch.equal(router.e_score_correction_bias, wanted), method
