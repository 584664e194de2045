"""Quantile Balancing for any scores: close to the exact quantile, additive, centred."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.model import balance


@st.composite
def problems(draw):
    """Scores, a bias and k."""
    experts = draw(st.integers(2, 12))
    tokens = draw(st.integers(1, 80))
    k = draw(st.integers(1, experts - 1))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    spread = draw(st.sampled_from([0.0, 0.3, 3.0]))
    scores = torch.sigmoid(torch.randn(tokens, experts, generator=generator) + spread * torch.randn(experts, generator=generator))
    bias = draw(st.sampled_from([0.0, 0.2])) * torch.randn(experts, generator=generator)
    return scores, bias, k


def cutoffs(scores, bias, k):
    return (scores + bias).topk(k + 1, dim=-1).values[:, k]


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_estimate_lies_within_a_bin_of_the_quantile_it_estimates(problem):
    scores, bias, k = problem
    tokens, experts = scores.shape
    histogram = balance.new_histogram(experts)
    balance.accumulate(histogram, scores, cutoffs(scores, bias, k), bias)
    estimate = balance.quantile_bias(histogram, bias, k).double().numpy()
    required = np.sort((cutoffs(scores, bias, k)[:, None] - scores).double().numpy(), axis=0)
    quantile = required[-(-tokens * k // experts) - 1]  # the first with enough tokens at or below it
    width = (bias.max() - bias.min() + 2).item() / balance.BINS
    assert abs(estimate.mean()) < 1e-6
    assert np.abs(estimate - (quantile - quantile.mean())).max() <= 2 * width + 1e-6


@settings(max_examples=30, deadline=None)
@given(problems(), st.integers(0, 80))
def test_counts_of_any_two_parts_add_up(problem, cut):
    scores, bias, k = problem
    cutoff = cutoffs(scores, bias, k)
    whole, parts = balance.new_histogram(scores.shape[1]), balance.new_histogram(scores.shape[1])
    balance.accumulate(whole, scores, cutoff, bias)
    balance.accumulate(parts, scores[:cut], cutoff[:cut], bias)
    balance.accumulate(parts, scores[cut:], cutoff[cut:], bias)
    assert torch.equal(whole, parts)
