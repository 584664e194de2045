"""Any logits and settings: the plain loop draws what a stable sort of the vocabulary and `torch.multinomial` draw, again and again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import TrainingError
from gnomon.model.generate import FIRST, Sampling, draw


def by_sorting(logits, sampling, random):
    """The definition."""
    probabilities, order = torch.softmax(logits / sampling.temperature, -1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    return int(order[torch.multinomial(torch.where(before < sampling.top_p, probabilities, 0.0), 1, generator=random)])


@given(seed=st.integers(0, 10**6), size=st.sampled_from([1, 2, FIRST, FIRST + 1, 16 * FIRST, 16 * FIRST + 1, 5000]),
       scale=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]), steps=st.sampled_from([1, 4, 1000]),  # coarse steps make ties
       temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]), top_p=st.sampled_from([1.0, 0.999999, 0.95, 0.5, 1e-6]))
@settings(max_examples=120)
def test_draws_are_those_of_a_full_sort(seed, size, scale, steps, temperature, top_p):
    logits = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale * steps).round() / steps
    sampling = Sampling(temperature=temperature, top_p=top_p)
    ours, theirs = (torch.Generator().manual_seed(seed) for _ in range(2))
    for _ in range(3):  # the generator goes on the same way
        assert draw(logits, sampling, ours) == by_sorting(logits, sampling, theirs)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_large_vocabulary_too(scale):
    logits = torch.randn(163_840, generator=torch.Generator().manual_seed(0)) * scale
    for top_p in (0.95, 1.0):
        sampling = Sampling(temperature=0.8, top_p=top_p)
        ours, theirs = (torch.Generator().manual_seed(1) for _ in range(2))
        assert [draw(logits, sampling, ours) for _ in range(3)] == [by_sorting(logits, sampling, theirs) for _ in range(3)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [10, 5000])
def test_logits_that_are_not_finite_are_refused(bad, size):
    logits = torch.zeros(size)
    logits[3] = bad
    with pytest.raises(TrainingError, match="no finite numbers"):
        draw(logits, Sampling(), torch.Generator())
