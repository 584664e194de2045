"""From logits to tokens: bias, penalties and a grammar's mask, then temperature, top-k, top-p, min-p, and one draw.

A draw is a pure function of the row of logits, the request's settings and `(seed, step)`: `uniform` is a counter-based generator, so
nothing has to be kept or replayed when a sequence is put aside and computed again, and no row knows of its neighbours. Rows are taken
together in blocks, and every operation acts within a row, so a row's token has the same bits in any batch.

The vocabulary is not sorted. Top-k and top-p need the largest weights only: some of them are taken and sorted, eight times as many until
they cover what is asked for, and the smallest one that belongs to the set is a threshold for all. Of equal weights the lowest ids belong.
The draw then walks the kept ids in their own order, so no order of weights is needed for it. Read next: `engine.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.serve.request import Sampled, Sampling

Floats = NDArray[np.float32]
Bits = NDArray[np.bool_]

BLOCK = 1 << 18
"""Logits of one block of rows: what stays in the second-level cache while a block is worked on."""
FIRST = 64
"""Largest weights that are looked at first; when they do not cover top-p, eight times as many are."""
COLDEST = 1e-30
"""Temperatures below this one are taken for it, since fp32 ends there; nothing but the likeliest token has a weight then."""

_GOLDEN, _MIX1, _MIX2 = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # SplitMix64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draw:
    """One token to draw: from which row of the logits, the how-manieth of its request, and what changes the row before."""

    row: int
    step: int
    sampling: Sampling
    bent: Bent | None = None
    allowed: Bits | None = None


class Bent:
    """What a request's own settings do to its logits: bias, and penalties on what was said before.

    The repetition penalty counts the prompt, the other two only the output, as in the released engines.
    """

    def __init__(self, sampling: Sampling, vocabulary: int, prompt: tuple[int, ...]):
        self.sampling = sampling
        self.bias_ids = np.array([token for token, _ in sampling.logit_bias], dtype=np.int64)
        self.bias = np.array([value for _, value in sampling.logit_bias], dtype=np.float32)
        self.counts = np.zeros(vocabulary, dtype=np.float32)
        self.seen = np.zeros(vocabulary, dtype=np.bool_)
        self.seen[list(prompt)] = True

    @classmethod
    def of(cls, sampling: Sampling, vocabulary: int, prompt: tuple[int, ...]) -> Bent | None:
        """`None` where the settings leave logits as they are."""
        neutral = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (1, 0, 0, ())
        return None if neutral else cls(sampling, vocabulary, prompt)

    def add(self, token: int) -> None:
        """A token of the output."""
        self.counts[token] += 1
        self.seen[token] = True

    def apply(self, row: Floats) -> None:
        """Change a row of logits in place."""
        s = self.sampling
        if s.repetition_penalty != 1:
            ids = np.flatnonzero(self.seen)
            old = row[ids]
            row[ids] = np.where(old > 0, old / np.float32(s.repetition_penalty), old * np.float32(s.repetition_penalty))
        if s.presence_penalty or s.frequency_penalty:
            ids = np.flatnonzero(self.counts)
            row[ids] -= np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * self.counts[ids]
        if len(self.bias_ids):
            np.add.at(row, self.bias_ids, self.bias)


def uniform(seeds: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair: SplitMix64's output function on the seed, moved on by the step, and again. 53 bits are used."""
    bits = _mix(_mix(seeds + _GOLDEN) + _GOLDEN * (steps + np.uint64(1))) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def sample(logits: Floats, draws: list[Draw]) -> list[Sampled | None]:
    """A token for each draw from `logits` [W, V]; `None` where the row it draws from has no finite largest value.

    Log-probabilities are those of the model: temperature 1, no penalties, no mask. Nothing in `logits` is changed.
    """
    size = max(1, BLOCK // logits.shape[1])
    return [token for first in range(0, len(draws), size) for token in _block(logits, draws[first : first + size])]


def log_probabilities(logits: Floats, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """The log-probability of one id per row."""
    size = max(1, BLOCK // logits.shape[1])
    parts = []
    for first in range(0, len(ids), size):
        rows = logits[first : first + size]
        parts.append(rows[np.arange(len(rows)), ids[first : first + size]].astype(np.float64) - _log_sums(rows))
    return np.concatenate(parts) if parts else np.zeros(0)


def _block(logits: Floats, draws: list[Draw]) -> list[Sampled | None]:
    rows = np.fromiter((draw.row for draw in draws), np.int64, len(draws))
    raw = logits[rows]
    sums = _log_sums(raw)
    finite = np.isfinite(sums)
    ids = np.zeros(len(draws), dtype=np.int64)
    plain = [i for i, draw in enumerate(draws) if finite[i] and draw.sampling.temperature == 0 and draw.bent is draw.allowed is None]
    if plain:
        ids[plain] = (raw if len(plain) == len(draws) else raw[plain]).argmax(1)
    rest = [i for i, draw in enumerate(draws) if finite[i] and not (draw.sampling.temperature == 0 and draw.bent is draw.allowed is None)]
    if rest:
        changed = raw[rest]
        for row, i in zip(changed, rest, strict=True):
            _change(row, draws[i])
        ids[rest] = _choose(changed, [draws[i] for i in rest])
    chosen = raw[np.arange(len(draws)), ids] - sums
    return [Sampled(id=int(ids[i]), logprob=float(chosen[i]), top=_top(raw[i], float(sums[i]), draw.sampling.top_logprobs))
            if finite[i] else None for i, draw in enumerate(draws)]


def _log_sums(rows: Floats) -> NDArray[np.float64]:
    """log Σ exp of each row; NaN for a row that holds NaN, infinite for one without any finite value."""
    peak = rows.max(1)
    with np.errstate(invalid="ignore"):
        return peak + np.log(np.exp(rows - peak[:, None]).sum(1)).astype(np.float64)


def _change(row: Floats, draw: Draw) -> None:
    if draw.bent is not None:
        draw.bent.apply(row)
    if draw.allowed is not None:
        row[: len(draw.allowed)][~draw.allowed] = -np.inf
        row[len(draw.allowed) :] = -np.inf


def _choose(scores: Floats, draws: list[Draw]) -> NDArray[np.int64]:
    """One id per row of changed logits; `scores` is overwritten."""
    scores -= scores.max(1)[:, None]
    greedy = np.array([draw.sampling.temperature == 0 for draw in draws])
    best = scores.argmax(1) if greedy.any() else np.zeros(len(draws), dtype=np.int64)
    if greedy.all():
        return best
    with np.errstate(over="ignore"):  # a temperature near zero: what is not the largest becomes -inf, and its weight 0
        scores /= np.array([[max(draw.sampling.temperature, COLDEST)] for draw in draws], dtype=np.float32)
        weights = np.exp(scores, out=scores)
    for row, draw in zip(weights, draws, strict=True):
        s = draw.sampling
        if s.temperature > 0 and (s.top_k or s.top_p < 1 or s.min_p > 0):
            _keep(row, s)
    reached = torch.from_numpy(weights).cumsum(1, dtype=torch.float64).numpy()
    seeds = np.array([draw.sampling.seed for draw in draws], dtype=np.uint64)
    targets = uniform(seeds, np.array([draw.step for draw in draws], dtype=np.uint64)) * reached[:, -1]
    ids = np.array([row.searchsorted(target, side="right") for row, target in zip(reached, targets, strict=True)])
    for i in np.flatnonzero(ids == scores.shape[1]):  # the product was rounded up to the whole
        ids[i] = np.flatnonzero(weights[i])[-1]
    return np.where(greedy, best, ids)


def _keep(weights: Floats, sampling: Sampling) -> None:
    """Set the weights to zero that top-k, top-p or min-p exclude; the largest weight is 1."""
    limit = min(sampling.top_k or len(weights), len(weights))
    if limit < len(weights) or sampling.top_p < 1:
        count, least = _largest(weights, limit, sampling.top_p)
        excluded = weights < least
        ties = np.flatnonzero(weights == least)
        excluded[ties[count - (len(weights) - int(excluded.sum()) - len(ties)) :]] = True
        weights[excluded] = 0
    if sampling.min_p > 0:
        weights[weights < np.float32(sampling.min_p)] = 0


def _largest(weights: Floats, limit: int, top_p: float) -> tuple[int, float]:
    """How many of the largest weights to keep, and the least of them: `limit` at most, and of those the fewest that have `top_p`."""
    if top_p == 1:
        return limit, float(np.partition(weights, len(weights) - limit)[len(weights) - limit])
    whole = float(weights.sum(dtype=np.float64)) if limit == len(weights) else None
    size = min(limit, FIRST) if whole is not None else limit
    while True:
        rest = len(weights) - size
        largest = np.sort(np.partition(weights, rest)[rest:] if rest else weights)[::-1]
        reached = np.cumsum(largest, dtype=np.float64)
        total = float(reached[-1]) if whole is None else whole
        count = 1 + int(np.searchsorted(reached[:-1], top_p * total, side="left"))
        if count < size or size == limit:
            return count, float(largest[count - 1])
        size = min(limit, 8 * size)


def _top(row: Floats, log_sum: float, count: int | None) -> tuple[tuple[int, float], ...]:
    """The likeliest ids of a row of logits with their log-probabilities, equal ones by id."""
    if not count:
        return ()
    count = min(count, len(row))
    least = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= least)
    ids = ids[np.argsort(-row[ids], kind="stable")][:count]
    return tuple((int(i), float(row[i]) - log_sum) for i in ids)
