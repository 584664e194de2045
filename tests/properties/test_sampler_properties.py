"""Any logits and settings: the set that is drawn from and the token drawn are those of a plain sorted implementation, in any batch."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.serve.request import Sampling
from gnomon.serve.sampler import Draw, _keep, sample, uniform

logits = st.integers(1, 300).flatmap(lambda size: st.builds(
    lambda seed, scale, steps: np.round(np.random.default_rng(seed).standard_normal(size) * scale * steps).astype(np.float32) / steps,
    st.integers(0, 10**6), st.sampled_from([0.01, 1.0, 4.0, 30.0]), st.sampled_from([1, 4, 1000])))  # coarse steps make ties
samplings = st.builds(
    Sampling, temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.5]), top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 64, 1000]), min_p=st.sampled_from([0.0, 0.05, 0.5]), seed=st.integers(0, 2**63 - 1))


def plain(row, sampling, step):
    """Sort everything, keep a prefix, walk what is kept in the order of ids."""
    if sampling.temperature == 0:
        return int(row.argmax())
    weights = np.exp(((row - row.max()) / sampling.temperature).astype(np.float32)).astype(np.float64)
    kept = np.zeros(len(row), dtype=bool)
    kept[sorted_set(weights, sampling)] = True
    target = uniform(np.array([sampling.seed], dtype=np.uint64), np.array([step], dtype=np.uint64))[0]
    ids = np.flatnonzero(kept & (weights > 0))
    reached = np.cumsum(weights[ids])
    return int(ids[min(np.searchsorted(reached, target * reached[-1], side="right"), len(ids) - 1)])


def sorted_set(weights, sampling):
    """Ids that top-k, top-p and min-p leave, the largest first, equal ones by id."""
    order = np.argsort(-weights, kind="stable")[: sampling.top_k or None]
    total = weights[order].sum() if sampling.top_k and sampling.top_k < len(weights) else weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    order = order[(before < sampling.top_p * total) | (sampling.top_p == 1)]
    return order[weights[order] >= np.float32(sampling.min_p)]


def near_an_edge(weights, sampling):
    """Whether a sum lies so near to top-p that the order of summing decides."""
    order = np.argsort(-weights, kind="stable")[: sampling.top_k or None]
    reached = np.cumsum(weights[order]) / weights[order].sum()
    return sampling.top_p < 1 and bool((np.abs(reached - sampling.top_p) < 1e-9).any())


@given(row=logits, sampling=samplings)
@settings(max_examples=300)
def test_the_kept_set_is_that_of_a_sort(row, sampling):
    weights = np.exp(row - row.max())
    if near_an_edge(weights.astype(np.float64), sampling):
        return
    ours = weights.copy()
    _keep(ours, sampling)
    wanted = np.zeros_like(weights)
    ids = sorted_set(weights.astype(np.float64), sampling)
    wanted[ids] = weights[ids]
    assert np.array_equal(ours, wanted)


@given(row=logits, many=st.lists(st.tuples(samplings, st.integers(0, 10**6)), min_size=1, max_size=8))
@settings(max_examples=150)
def test_a_draw_is_that_of_the_plain_walk_alone_and_in_company(row, many):
    stack = np.stack([np.roll(row, i) for i in range(len(many))])
    drawn = sample(stack, [Draw(row=i, step=step, sampling=sampling) for i, (sampling, step) in enumerate(many)])
    for i, (sampling, step) in enumerate(many):
        alone = sample(stack[i : i + 1], [Draw(row=0, step=step, sampling=sampling)])
        assert alone == [drawn[i]]
        temperature = sampling.temperature or 1.0
        weights = np.exp(((stack[i] - stack[i].max()) / temperature).astype(np.float32)).astype(np.float64)
        if not near_an_edge(weights, sampling):
            assert drawn[i].id == plain(stack[i], sampling, step)
