"""Where each routed token goes so that every rank gets the same number of them, whatever the router chose (report §5.2.1, App. E).

Experts live on home ranks, E/R each. When their tokens pile up on some ranks, others take a part: they fetch copies of a few experts, the
*redundant* ones, for one micro-batch. The planner matches ranks pair by pair: the one with the least is filled exactly, from the one with
the most. So each rank is filled at most once, from one home, and needs at most E/R copies; that is always enough, for any routing.

Integers and numpy only. All ranks plan alike from the same counts, so nothing but the counts is exchanged. Read next: `mesh.py`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnomon.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertPlan:
    """Tokens of each expert by the rank that works on them.

    A *token* here is a routed pair: one token for one of its experts; `counts` [R, E] are those of each source rank. `assigned` [R, E]
    counts them by who works on them; each row sums to that rank's
    `capacity` [R], and capacities differ by at most one. Tokens of an expert are numbered over all ranks, source rank by source rank
    (`offset` [R, E] is the number of the first from each source); the home works on the first of them, other ranks on the next, in the
    order of ranks: `first` [R, E] is where each rank's share begins, where it has one.
    """

    counts: np.ndarray
    assigned: np.ndarray
    first: np.ndarray
    offset: np.ndarray
    capacity: np.ndarray

    @property
    def ranks(self) -> int:
        """R."""
        return self.assigned.shape[0]

    @property
    def experts(self) -> int:
        """E."""
        return self.assigned.shape[1]

    def home(self) -> np.ndarray:
        """The home rank of each expert [E]."""
        return np.arange(self.experts) // (self.experts // self.ranks)

    def redundant(self, rank: int) -> np.ndarray:
        """The experts that a rank fetches copies of, ascending: at most E/R."""
        return np.flatnonzero((self.assigned[rank] > 0) & (self.home() != rank))

    def segments(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The experts that a rank works on, its own first, and the bounds of their rows in its buffer (one more than experts).

        Its own experts are all listed, with no rows where they have none; so shapes depend on the copies alone.
        """
        listed = np.concatenate([np.flatnonzero(self.home() == rank), self.redundant(rank)])
        return listed, np.concatenate([[0], np.cumsum(self.assigned[rank, listed])])

    def destinations(self, source: int, expert: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For the tokens of a source rank, in order, by expert [N]: the rank that each goes to, and its row in that rank's buffer."""
        order = np.argsort(expert, kind="stable")
        sorted_experts = expert[order]
        starts = np.searchsorted(sorted_experts, sorted_experts)  # of each token, where its expert begins
        number = np.empty(len(expert), np.int64)
        number[order] = np.arange(len(expert)) - starts + self.offset[source, sorted_experts]
        last = self.first + self.assigned  # [R, E]
        inside = (number >= self.first[:, expert]) & (number < last[:, expert])  # [R, N]
        rank = inside.argmax(0)
        return rank, self.bases()[rank, expert] + number - self.first[rank, expert]

    def sends(self, source: int) -> list[int]:
        """How many of a source rank's tokens go to each rank."""
        start = np.maximum(self.offset[source], self.first)
        stop = np.minimum(self.offset[source] + self.counts[source], self.first + self.assigned)
        return np.maximum(stop - start, 0).sum(1).tolist()

    def bases(self) -> np.ndarray:
        """Row at which each expert's tokens begin in each rank's buffer [R, E]; meaningless where there are none."""
        bases = np.zeros_like(self.assigned)
        for rank in range(self.ranks):
            listed, bounds = self.segments(rank)
            bases[rank, listed] = bounds[:-1]
        return bases

    def moved(self) -> int:
        """Tokens that are worked on away from their expert's home."""
        return int(self.assigned.sum() - self.assigned[self.home(), np.arange(self.experts)].sum())


def plan_experts(counts: np.ndarray) -> ExpertPlan:
    """The plan for `counts` [R, E], the tokens that each source rank has for each expert.

    Raises `ConfigError` for experts that cannot be shared out over the ranks, and for counts that are none.
    """
    counts = np.asarray(counts)
    if counts.ndim != 2 or counts.dtype.kind not in "iu" or (counts.size and counts.min() < 0):
        raise ConfigError(f"'counts' has shape {list(counts.shape)} and type {counts.dtype}; give whole numbers [ranks, experts], "
                          "none negative")
    ranks, experts = counts.shape
    if not ranks or not experts or experts % ranks:
        raise ConfigError(f"{experts} experts cannot live on {ranks} ranks in equal numbers; use a divisor of {experts}")
    totals = counts.sum(0, dtype=np.int64)
    each = experts // ranks
    whole, rest = divmod(int(totals.sum()), ranks)
    capacity = whole + (np.arange(ranks) < rest)
    quotas = _matched((totals.reshape(ranks, each).sum(1) - capacity).tolist())
    counted = np.int32 if totals.sum() < 2**31 else np.int64  # memory is most of what a plan costs
    assigned = np.zeros((ranks, experts), counted)
    expert = np.arange(experts)
    assigned[expert // each, expert] = totals
    loads = totals.tolist()
    moves = [move for home, wanted in quotas.items() for move in _moves(loads, range(home * each, (home + 1) * each), wanted)]
    if moves:  # each rank takes an expert over at most once
        ranks_to, experts_of, tokens = np.array(moves, np.int64).T
        assigned[ranks_to, experts_of] = tokens
        assigned[expert // each, expert] -= np.bincount(experts_of, tokens, experts).astype(counted)
    return ExpertPlan(counts=counts, assigned=assigned, first=_first(assigned, totals, each),
                      offset=_offset(counts, counted), capacity=capacity)


def _matched(balance: list[int]) -> dict[int, list[tuple[int, int]]]:
    """Who gives how much to whom, as home → [(tokens, rank)]: the rank with the least is filled exactly, by the rank with the most.

    The giver may then have too little itself; it is filled in its turn. Each step settles one rank for good.
    """
    quotas: dict[int, list[tuple[int, int]]] = {}
    most = [(-value, rank) for rank, value in enumerate(balance) if value > 0]
    least = [(value, rank) for rank, value in enumerate(balance) if value < 0]
    heapq.heapify(most)
    heapq.heapify(least)
    while least:
        lacking, rank = heapq.heappop(least)
        surplus, giver = heapq.heappop(most)
        quotas.setdefault(giver, []).append((-lacking, rank))
        left = -surplus + lacking
        if left > 0:
            heapq.heappush(most, (-left, giver))
        elif left < 0:
            heapq.heappush(least, (left, giver))
    return quotas


def _moves(loads: list[int], own: range, wanted: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Who takes how many tokens of a home's experts, as (rank, expert, tokens): the largest wish first, always of the expert that has
    most left, so that copies are few.
    """
    left = [(-loads[expert], expert) for expert in own if loads[expert]]
    wishes = [(-tokens, rank) for tokens, rank in wanted]
    heapq.heapify(left)
    heapq.heapify(wishes)
    moves = []
    while wishes:
        wish, rank = heapq.heappop(wishes)
        tokens, expert = heapq.heappop(left)
        moved = min(-wish, -tokens)
        moves.append((rank, expert, moved))
        if moved < -wish:
            heapq.heappush(wishes, (wish + moved, rank))
        if moved < -tokens:
            heapq.heappush(left, (tokens + moved, expert))
    return moves


def _first(assigned: np.ndarray, totals: np.ndarray, each: int) -> np.ndarray:
    """Number of the first token of each expert that each rank works on: the home's come first, then the others' in order of ranks.

    Only few experts are worked on away from home, and the others have nothing to number.
    """
    first, expert = np.zeros_like(assigned), np.arange(assigned.shape[1])
    shared = np.flatnonzero(assigned[expert // each, expert] != totals)
    home = shared // each, np.arange(len(shared))
    away = assigned[:, shared]
    at_home = away[home]
    away[home] = 0
    columns = np.cumsum(away, 0) - away + at_home
    columns[home] = 0
    first[:, shared] = columns
    return first


def _offset(counts: np.ndarray, counted: Any = np.int64) -> np.ndarray:
    """Number of the first token of each expert from each source rank."""
    offset = np.zeros(counts.shape, counted)
    for source in range(1, len(counts)):  # row by row, as memory lies; a cumulative sum would go down each column
        np.add(offset[source - 1], counts[source - 1], out=offset[source], casting="unsafe")
    return offset


def plan_at_home(counts: np.ndarray) -> ExpertPlan:
    """Conventional expert parallelism in the same form: every token goes to its expert's home, however many they are there."""
    counts = np.asarray(counts, np.int64)
    ranks, experts = counts.shape
    each, expert = experts // ranks, np.arange(experts)
    assigned = np.zeros((ranks, experts), np.int64)
    assigned[expert // each, expert] = counts.sum(0)
    return ExpertPlan(counts=counts, assigned=assigned, first=np.zeros_like(assigned), offset=_offset(counts),
                      capacity=assigned.sum(1))
