"""Quantile Balancing against exact quantiles computed another way, and its invariances."""

import math

import numpy as np
import pytest
import torch

from gnomon.kernels.router import reference, route
from gnomon.model import balance
from gnomon.model.parts import MoEConfig
from gnomon.model.router import Router


def routed(scores, bias, k):
    top = (scores + bias).topk(k + 1, dim=-1)
    return top.indices[:, :k], top.values[:, k]


def sample(tokens=4096, experts=64, seed=0, spread=0.5):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(experts, generator=torch.Generator().manual_seed(99)) * spread
    return torch.sigmoid(torch.randn(tokens, experts, generator=generator) + means)


def load_of(ids, experts):
    return torch.bincount(ids.reshape(-1), minlength=experts)


def counted(scores, bias, k, pieces=1, mask=None):
    histogram = balance.new_histogram(scores.shape[1])
    masks = [None] * pieces if mask is None else mask.chunk(pieces)
    for part, keep in zip(scores.chunk(pieces), masks, strict=True):
        balance.accumulate(histogram, part, routed(part, bias, k)[1], bias, keep)
    return histogram


def test_every_required_bias_lies_inside_the_bins():
    bias = torch.tensor([-0.7, 0.2, 0.5, 0.0])
    scores = torch.tensor([[1e-6, 1 - 1e-6, 0.5, 0.5], [1 - 1e-6, 1e-6, 1e-6, 1 - 1e-6]])
    lowest, width = balance.bin_range(bias)
    cutoff = routed(scores, bias, 2)[1]
    required = cutoff[:, None] - scores
    assert required.min() >= lowest
    assert required.max() <= lowest + width * balance.BINS
    assert lowest + width * balance.BINS == pytest.approx(1.5)


def test_the_histogram_quantile_is_within_one_bin_of_numpy():
    scores, k = sample(), 8
    experts = scores.shape[1]
    bias = torch.zeros(experts)
    cutoff = routed(scores, bias, k)[1]
    ours = balance.quantile_bias(counted(scores, bias, k), bias, k)
    required = np.sort((cutoff[:, None] - scores).double().numpy(), axis=0)
    due = len(scores) * k // experts
    wanted = (required[due - 1] + required[due]) / 2
    width = 2 / balance.BINS
    # Centring shifts by the mean of the errors, which is itself below one bin.
    np.testing.assert_allclose(ours.numpy(), wanted - wanted.mean(), atol=2 * width)
    exact = balance.exact_quantile_bias(scores, cutoff, k)
    assert (exact - torch.from_numpy(required[due] - required[due].mean())).abs().max() < 1e-6


def test_the_first_bin_that_reaches_the_due_count_is_interpolated_by_hand():
    # 4 experts, k = 1, 8 tokens: q = 2. Bins of width 0.5 on [-1, 1].
    histogram = torch.tensor([[1, 4, 3, 0], [2, 6, 0, 0], [0, 0, 8, 0], [0, 1, 0, 7]])
    bias = torch.zeros(4)
    wanted = torch.tensor([-1 + (1 + 1 / 4) * 0.5, -1 + (0 + 1) * 0.5, -1 + (2 + 2 / 8) * 0.5, -1 + (3 + 1 / 7) * 0.5])
    assert torch.allclose(balance.quantile_bias(histogram, bias, 1), wanted - wanted.mean(), atol=1e-7)


def test_a_fractional_due_count_uses_the_ceiling_for_the_bin():
    # 5 tokens, k = 1, 2 experts: q = 2.5, so the bin must hold the third token; (q - c)/h = (2.5 - 2)/3.
    histogram = torch.tensor([[2, 3, 0, 0], [5, 0, 0, 0]])
    wanted = torch.tensor([-1 + (1 + 0.5 / 3) * 0.5, -1 + (0 + 2.5 / 5) * 0.5])
    assert torch.allclose(balance.quantile_bias(histogram, torch.zeros(2), 1), wanted - wanted.mean(), atol=1e-7)


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_micro_batching_does_not_change_the_counts(pieces):
    scores, k = sample(1000, 32), 4
    bias = torch.randn(32) * 0.1
    whole = counted(scores, bias, k)
    assert torch.equal(whole, counted(scores, bias, k, pieces))
    assert whole.sum(1).eq(1000).all()


def test_the_order_of_tokens_and_small_chunks_do_not_change_the_counts(monkeypatch):
    scores, k = sample(500, 16), 2
    bias = torch.zeros(16)
    whole = counted(scores, bias, k)
    assert torch.equal(whole, counted(scores[torch.randperm(500)], bias, k))
    monkeypatch.setenv("GNOMON_KERNELS", "reference")
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 100)
    assert torch.equal(whole, counted(scores, bias, k))


def test_masked_tokens_do_not_exist():
    scores, k = sample(600, 16), 2
    bias = torch.zeros(16)
    mask = torch.arange(600) < 431
    poisoned = torch.where(mask[:, None], scores, torch.full_like(scores, 0.999))
    assert torch.equal(counted(scores[:431], bias, k), counted(poisoned, bias, k, 4, mask))


def test_two_steps_from_a_cold_start_reach_the_sampling_floor():
    k, experts = 8, 128
    bias, violations = torch.zeros(experts), []
    for step in range(4):
        scores = sample(8192, experts, seed=step)
        ids = routed(scores, bias, k)[0]
        violations.append(float(balance.max_violation(load_of(ids, experts))))
        bias = balance.quantile_bias(counted(scores, bias, k), bias, k)
    floor = math.sqrt(2 * math.log(experts) / (8192 * k / experts))
    assert violations[0] > 2
    assert violations[2] < 2 * floor


def test_the_bias_is_centred_and_an_empty_step_keeps_it():
    scores, k = sample(), 8
    bias = torch.randn(64) * 0.05
    assert balance.quantile_bias(counted(scores, bias, k), bias, k).mean().abs() < 1e-6
    assert torch.equal(balance.quantile_bias(balance.new_histogram(64), bias, k), bias)


def test_averaging_the_quantiles_of_two_halves_is_a_different_estimator():
    scores = torch.cat([sample(300, 16, seed=1, spread=0), sample(300, 16, seed=2, spread=2.0)])
    bias, k = torch.zeros(16), 2
    whole = balance.quantile_bias(counted(scores, bias, k), bias, k)
    halves = [balance.quantile_bias(counted(part, bias, k), bias, k) for part in scores.chunk(2)]
    assert (whole - (halves[0] + halves[1]) / 2).abs().max() > 0.01


def test_groups_that_leave_no_other_expert_are_counted_at_the_smallest_chosen():
    """A cutoff of minus infinity would put every token of every expert into the first bin, and the bias would never move."""
    router = Router(MoEConfig(num_experts=8, num_experts_per_token=2, moe_intermediate_size=4, num_expert_group=4, topk_group=1), 6)
    torch.nn.init.normal_(router.weight)
    scores = router.scores(torch.randn(500, 6))
    ids, _, cutoff = route(scores, router.e_score_correction_bias, router.choice)
    assert (ids[:, 0] // 2 == ids[:, 1] // 2).all()
    assert torch.equal(cutoff, scores.gather(1, ids).amin(1))
    router.start_observing()
    router(torch.randn(500, 6))
    assert balance.quantile_bias(router.histogram, router.e_score_correction_bias, 2).abs().max() > 1e-3


def test_the_sign_rule_moves_against_the_load():
    moved = balance.sign_rule(torch.zeros(4), torch.tensor([10, 2, 4, 0]), 0.01)
    assert torch.equal(moved, torch.tensor([-0.01, 0.01, 0.0, 0.01]))


def test_max_violation_of_known_loads():
    loads = torch.tensor([[4, 4, 4, 4], [8, 4, 4, 0], [0, 0, 0, 0]])
    assert torch.equal(balance.max_violation(loads), torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))


def test_the_auxiliary_loss_is_one_at_balance_and_pushes_the_busy_expert_down():
    even = torch.full((8, 4), 0.5)
    ids = torch.arange(8)[:, None] % 4
    assert balance.auxiliary_loss(even, ids).item() == pytest.approx(1.0)
    scores = torch.full((8, 4), 0.5, requires_grad=True)
    balance.auxiliary_loss(scores, torch.zeros(8, 1, dtype=torch.long)).backward()
    assert (scores.grad[:, 0] > 0).all()
    assert (scores.grad[:, 1:] < 0).all()
