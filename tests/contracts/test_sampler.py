"""The sampler: a generator that anybody can write again, penalties as their definitions say, log-probabilities of the model itself."""

import math

import numpy as np
import pytest
import torch

from gnomon.serve.request import Sampling
from gnomon.serve.sampler import Bent, Draw, log_probabilities, sample, uniform

MASK = (1 << 64) - 1


def rows(count, vocabulary=200, seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal((count, vocabulary)) * scale).astype(np.float32)


def one(logits, step=0, bent=None, allowed=None, **settings):
    """The token of a single row."""
    return sample(logits[None], [Draw(row=0, step=step, sampling=Sampling(**settings), bent=bent, allowed=allowed)])[0]


def mixed(x):
    """SplitMix64's output function in whole numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_the_generator_is_splitmix64_of_seed_and_step():
    """Its first output for the seed 1234567 is published with the reference program."""
    assert mixed((1234567 + 0x9E3779B97F4A7C15) & MASK) == 6457827717110365317
    for seed, step in ((0, 0), (1234567, 0), (2**63 - 1, 10**9), (5, 41)):
        wanted = mixed((mixed((seed + 0x9E3779B97F4A7C15) & MASK) + 0x9E3779B97F4A7C15 * (step + 1)) & MASK) >> 11
        got = uniform(np.array([seed], dtype=np.uint64), np.array([step], dtype=np.uint64))
        assert got[0] == wanted / 2**53


def test_numbers_are_spread_and_neighbours_do_not_follow_each_other():
    grid = uniform(*(x.ravel() for x in np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64)))).reshape(200, 200)
    counts = np.bincount((grid.ravel() * 100).astype(int), minlength=100)
    assert ((counts - 400) ** 2 / 400).sum() < 160  # 99 degrees of freedom
    for a, b in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


def test_draws_follow_the_probabilities():
    logits = rows(1, 12, scale=1.5)[0]
    draws = [Draw(row=0, step=i, sampling=Sampling(temperature=0.8, seed=9)) for i in range(20_000)]
    counts = np.bincount([token.id for token in sample(logits[None], draws)], minlength=12)
    wanted = torch.softmax(torch.from_numpy(logits).double() / 0.8, -1).numpy() * 20_000
    assert ((counts - wanted) ** 2 / wanted).sum() < 40  # 11 degrees of freedom


def test_log_probabilities_are_those_of_the_model_whatever_the_settings():
    logits = rows(3)
    exact = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    settings = [Sampling(top_logprobs=5, temperature=0.3, top_k=3, seed=4), Sampling(top_logprobs=20, presence_penalty=1.5), Sampling()]
    bent = Bent(settings[1], 200, (1, 2))
    drawn = sample(logits, [Draw(row=i, step=0, sampling=s, bent=bent if i == 1 else None) for i, s in enumerate(settings)])
    for row, (token, sampling) in enumerate(zip(drawn, settings, strict=True)):
        assert token.logprob == pytest.approx(exact[row, token.id], abs=1e-6)
        assert len(token.top) == (sampling.top_logprobs or 0)
        order = np.argsort(-exact[row], kind="stable")
        assert [i for i, _ in token.top] == order[: len(token.top)].tolist()
        assert [p for _, p in token.top] == pytest.approx(exact[row, order[: len(token.top)]].tolist(), abs=1e-6)
    ids = np.array([5, 7, 199])
    assert log_probabilities(logits, ids) == pytest.approx(exact[np.arange(3), ids], abs=1e-6)


def test_penalties_and_bias_as_defined():
    prompt, output = (3, 3, 4), (5, 5, 6)
    sampling = Sampling(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25,
                        logit_bias=((7, 2.0), (3, -1.0), (3, -1.0)))
    bent = Bent.of(sampling, 10, prompt)
    for token in output:
        bent.add(token)
    row = np.array([1, -1, 2, 3, -4, 5, -6, 7, 8, 9], dtype=np.float32)
    bent.apply(row)
    wanted = [1, -1, 2, 3 / 1.5 - 2, -4 * 1.5, 5 / 1.5 - 0.5 - 0.5, -6 * 1.5 - 0.5 - 0.25, 9, 8, 9]
    assert row == pytest.approx(np.array(wanted, dtype=np.float32))
    assert Bent.of(Sampling(), 10, prompt) is None
    assert one(np.arange(10, dtype=np.float32), temperature=0.0, bent=Bent(Sampling(logit_bias=((2, 50.0),)), 10, ())).id == 2


def test_a_mask_leaves_only_what_is_allowed_and_ends_where_the_vocabulary_of_the_model_is_larger():
    logits = np.arange(12, dtype=np.float32)
    allowed = np.zeros(8, dtype=np.bool_)
    allowed[[2, 5]] = True
    assert one(logits, temperature=0.0, allowed=allowed).id == 5
    assert {one(logits, step=i, temperature=100.0, allowed=allowed).id for i in range(50)} == {2, 5}


@pytest.mark.parametrize("settings", [
    {"temperature": 0.0}, {"temperature": 1e-30}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 10**6, "top_p": 1e-6},
])
def test_settings_that_leave_one_token(settings):
    logits = rows(1)[0]
    assert {one(logits, step=i, **settings).id for i in range(20)} == {int(logits.argmax())}


def test_equal_weights_go_by_id():
    logits = np.zeros(50, dtype=np.float32)
    assert {one(logits, step=i, top_k=3).id for i in range(100)} == {0, 1, 2}
    assert {one(logits, step=i, top_p=0.1).id for i in range(200)} == {0, 1, 2, 3, 4}
    assert one(logits, temperature=0.0, top_logprobs=3).top == tuple((i, pytest.approx(-math.log(50))) for i in range(3))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_give_nothing_and_spare_the_others(bad):
    logits = rows(3)
    logits[1, 7] = bad
    first, second, third = sample(logits, [Draw(row=i, step=0, sampling=Sampling()) for i in range(3)])
    assert first is not None and second is None and third is not None
    logits[1] = -np.inf
    assert sample(logits, [Draw(row=1, step=0, sampling=Sampling(temperature=0.0))]) == [None]


def test_a_large_vocabulary_is_taken_in_blocks():
    logits = rows(3, 163_840)
    draws = [Draw(row=i % 3, step=i, sampling=Sampling(seed=i, top_p=0.9, temperature=0.7)) for i in range(5)]
    assert sample(logits, draws) == [sample(logits, [draw])[0] for draw in draws]
