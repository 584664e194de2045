"""Every rank gets the same number of tokens for any routing, with at most E/R copies; each token has one place; copies are few."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import ConfigError
from gnomon.parallel.expert import Routes
from gnomon.parallel.expert_plan import ExpertPlan, plan_experts


def check(plan: ExpertPlan, counts: np.ndarray) -> None:
    """What must hold of any plan."""
    ranks, experts = counts.shape
    assert (plan.assigned >= 0).all()
    assert (plan.assigned.sum(0) == counts.sum(0)).all()
    assert (plan.assigned.sum(1) == plan.capacity).all()
    assert plan.capacity.max() - plan.capacity.min() <= 1
    assert plan.capacity.sum() == counts.sum()
    for rank in range(ranks):
        assert len(plan.redundant(rank)) <= experts // ranks
        assert len(set(plan.home()[plan.redundant(rank)])) <= 1  # all from one home


@st.composite
def routings(draw: st.DrawFn) -> np.ndarray:
    """Counts of any kind: even, skewed, all on one expert, on one rank's experts, ranks without tokens."""
    ranks = draw(st.integers(1, 9))
    experts = ranks * draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens = draw(st.sampled_from([0, 1, 7, 64, 1000]))
    popularity = random.lognormal(0, draw(st.sampled_from([0.0, 1.0, 4.0])), experts)
    popularity[random.random(experts) < draw(st.sampled_from([0.0, 0.5, 0.95]))] = 0
    if not popularity.sum():
        popularity[random.integers(experts)] = 1
    each = tokens if draw(st.booleans()) else None
    return np.stack([random.multinomial(tokens if each is not None else random.integers(0, tokens + 1), popularity / popularity.sum())
                     for _ in range(ranks)])


@settings(max_examples=300)
@given(counts=routings())
def test_every_rank_gets_its_share(counts: np.ndarray) -> None:
    check(plan_experts(counts), counts)


@settings(max_examples=60)
@given(counts=routings(), seed=st.integers(0, 9))
def test_each_token_has_a_place_of_its_own(counts: np.ndarray, seed: int) -> None:
    plan = plan_experts(counts)
    random = np.random.default_rng(seed)
    taken = [np.zeros(capacity, bool) for capacity in plan.capacity]
    for source, row in enumerate(counts):
        expert = random.permutation(np.repeat(np.arange(len(row)), row))
        rank, slot = plan.destinations(source, expert)
        assert np.bincount(rank, minlength=plan.ranks).tolist() == plan.sends(source)
        routes = Routes.of(plan, source, torch.from_numpy(expert.astype(np.int64)))
        assert routes.order.tolist() == np.lexsort((slot, rank)).tolist()
        assert (routes.position[routes.order] == torch.arange(len(rank))).all()
        for where in range(plan.ranks):
            listed, bounds = plan.segments(where)
            mine = rank == where
            assert not taken[where][slot[mine]].any() and len(set(slot[mine])) == mine.sum()
            taken[where][slot[mine]] = True
            inside = np.searchsorted(bounds, slot[mine], side="right") - 1
            assert (listed[inside] == expert[mine]).all()  # the row lies in its expert's stretch
    assert all(each.all() for each in taken)


def test_the_worst_case_needs_what_the_theorem_says() -> None:
    """One rank's experts get nothing and the others' all the same: E(R-1)/R² copies are needed there, and no plan has fewer."""
    for ranks, each in ((2, 3), (4, 4), (8, 16)):
        experts = ranks * each
        counts = np.zeros((ranks, experts), int)
        counts[:, each:] = 60
        plan = plan_experts(counts)
        check(plan, counts)
        assert len(plan.redundant(0)) >= -(-experts * (ranks - 1) // ranks**2)


def test_routings_of_the_released_shape() -> None:
    """E = 896 on 64 ranks, log-normal popularity: balanced to the token, with one or two copies on a rank."""
    random, most, total, count = np.random.default_rng(0), 0, 0, 60
    for _ in range(count):
        popularity = random.lognormal(0, 1, 896)
        counts = random.multinomial(512 * 16, popularity / popularity.sum(), size=64)
        plan = plan_experts(counts)
        check(plan, counts)
        copies = [len(plan.redundant(rank)) for rank in range(64)]
        most, total = max(most, *copies), total + sum(copies)
    assert most <= 4 and total / count / 64 <= 2


def feasible(totals: np.ndarray, capacity: np.ndarray, allowed: np.ndarray) -> bool:
    """Whether tokens can be shared out when rank r may only work on experts with allowed[r, e]: Hall's condition over sets of experts."""
    experts = len(totals)
    for size in range(1, experts + 1):
        for chosen in combinations(range(experts), size):
            reachable = allowed[:, chosen].any(1)
            if totals[list(chosen)].sum() > capacity[reachable].sum():
                return False
    return True


def fewest_copies(counts: np.ndarray) -> int:
    """By trying all sets of copies, the smallest first."""
    ranks, experts = counts.shape
    home = np.arange(experts) // (experts // ranks)
    capacity = plan_experts(counts).capacity
    others = [(rank, expert) for rank in range(ranks) for expert in range(experts) if home[expert] != rank]
    for size in range(len(others) + 1):
        for chosen in combinations(others, size):
            allowed = home[None] == np.arange(ranks)[:, None]
            for rank, expert in chosen:
                allowed[rank, expert] = True
            if feasible(counts.sum(0), capacity, allowed):
                return size
    raise AssertionError


def test_copies_are_within_a_tenth_of_the_fewest() -> None:
    random, ours, fewest = np.random.default_rng(3), 0, 0
    for _ in range(40):
        popularity = random.lognormal(0, 1.5, 6)
        counts = random.multinomial(60, popularity / popularity.sum(), size=3)
        plan = plan_experts(counts)
        ours += sum(len(plan.redundant(rank)) for rank in range(3))
        fewest += fewest_copies(counts)
    assert fewest <= ours <= 1.1 * fewest


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match="7 experts cannot live on 2 ranks"):
        plan_experts(np.zeros((2, 7), int))
    with pytest.raises(ConfigError, match="none negative"):
        plan_experts(np.array([[1, -1]]))
    with pytest.raises(ConfigError, match="whole numbers"):
        plan_experts(np.zeros((2, 4)))
