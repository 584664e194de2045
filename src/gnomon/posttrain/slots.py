"""Rollouts at work: which of them are in slots, what each keeps between two steps, and when the next one may begin.

All in work move on by one sampled id per step. What is noted at every step lies in arrays by slot, so that a step costs the interpreter
little; members of a group that begin together share the reading of their prompt. Pages of the cache are taken as rollouts grow. The
number at work follows the queue and the cache: the next one begins while a slot is free and the cache is not fuller than `cache_share`;
where pages run out all the same, who came last gives his back and waits first in line, and nobody begins until somebody has finished.
All of this goes by counts and never by the clock. Read next: `policy.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.agent.trajectory import Score, Span
from gnomon.errors import CapacityError, ConfigError, TrainingError
from gnomon.model.inference import Outputs
from gnomon.model.inference_state import PackedRows, StatePool
from gnomon.posttrain.problem import Episode, Problem
from gnomon.posttrain.rollout import End, Rollout, chosen, given
from gnomon.posttrain.worlds import Failed, answers, closed, opened
from gnomon.serve.runner import Runner
from gnomon.serve.sampler import COLDEST, uniform

PAGE_TOKENS = 32
"""Tokens of a page of latents: short, since many answers are."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Finished = Callable[[Rollout, Episode | None], None]


class Settings(Protocol):
    """What rollouts at work need of their sampler, `policy.Sampler`, where all of it is explained."""

    runner: Runner
    pool: StatePool
    slots: int
    cache_tokens: int
    cache_share: float
    temperature: float
    version: int
    world_seconds: float
    record: bool


@dataclass(slots=True, eq=False)
class _Row:
    """A rollout in a slot: `unread` are ids that the model has not read, none where it is only the one that was sampled last."""

    rollout: Rollout
    slot: int
    unread: tuple[int, ...]
    world: Episode | None
    spans: list[Span]
    heard: int  # sampled ids that the world has answered
    pages: int = 0
    failure: str | None = None
    end: End | None = None

    @property
    def problem(self) -> Problem:
        return self.rollout.problem


class Work:
    """One call of `Sampler.sample`: who waits, who is in which slot, what they said since their last span."""

    def __init__(self, sampler: Settings, rollouts: Sequence[Rollout], on_finished: Finished | None) -> None:
        self.sampler, self.on_finished = sampler, on_finished
        self.waiting = deque(rollouts)
        self.rows: list[_Row] = []
        self.slots = np.zeros(0, dtype=np.int64)  # of the rows, in their order
        self.free_slots = list(range(sampler.slots))[::-1]
        self.free_pages = list(range(sampler.pool.pages))[::-1]
        self.full = False  # pages ran out, and nobody has finished since
        self.worlds: dict[int, Episode] = {}  # of those that gave way, by the id of the object that waits
        self.finished: list[Rollout] = []
        self.steps = self.tokens = self.set_back = 0
        longest = max((rollout.problem.max_tokens for rollout in rollouts), default=1)
        widest = max((_pages(rollout.problem.capacity) for rollout in rollouts), default=1)
        slots = sampler.slots
        self.ids = np.zeros((slots, longest), dtype=np.int64)  # sampled since the last span, by slot
        self.logprobs = np.zeros((slots, longest), dtype=np.float64)
        self.tables = np.zeros((slots, min(widest, sampler.pool.pages)), dtype=np.int32)
        self.said, self.count, self.most, self.last, self.size, self.past, self.held = np.zeros((7, slots), dtype=np.int64)
        self.seeds = np.zeros(slots, dtype=np.uint64)
        shape = sampler.runner.config  # where ids were sent, by slot and position; memory is taken as it is written
        routed = (shape.routed_layers(shape.num_hidden_layers), shape.moe.num_experts_per_token) if shape.moe else (0, 0)
        self.experts = np.empty((slots, self.tables.shape[1] * PAGE_TOKENS, *routed), dtype=np.int16) if sampler.record else None
        vocabulary = sampler.runner.config.vocab_size
        self.notable = np.zeros(vocabulary, dtype=np.bool_)  # ids after which somebody must look
        for rollout in rollouts:
            self._check(rollout, vocabulary)
            self.notable[[i for i in (*rollout.problem.stop_ids, *rollout.problem.asks) if 0 <= i < vocabulary]] = True

    def _check(self, rollout: Rollout, vocabulary: int) -> None:
        problem = rollout.problem
        if rollout.end is not None:
            raise ConfigError(f"problem {problem.id}: its rollout has ended; sample one that has not")
        if _pages(problem.capacity) > self.sampler.pool.pages:
            raise CapacityError(f"problem {problem.id}: {problem.capacity} ids do not fit a cache of {self.sampler.cache_tokens}; "
                                f"raise 'cache_tokens' to {problem.capacity} or lower 'max_tokens'")
        outside = [i for i in rollout.token_ids if not 0 <= i < vocabulary]
        if outside:
            raise ConfigError(f"problem {problem.id}: id {outside[0]} is outside the vocabulary of {vocabulary}")

    def step(self) -> bool:
        """One id more for every rollout in work; false when there is none."""
        self._admit()
        if not self.rows:
            return False
        logits = self._forward()
        slots = self.slots
        ids, logprobs = draw(logits, self.seeds[slots], self.count[slots].astype(np.uint64), self.sampler.temperature, self.sampler.version)
        places = self.said[slots]
        self.ids[slots, places], self.logprobs[slots, places] = ids, logprobs
        self.last[slots] = ids
        self.said[slots] += 1
        self.count[slots] += 1
        self.steps += 1
        self.tokens += len(ids)
        self._look(ids)
        return True

    def _look(self, ids: Ints) -> None:
        """Stop ids, ids that ask a world, limits: what ends a rollout or makes its world speak."""
        looked, asking = [self.rows[place] for place in np.flatnonzero(self.notable[ids])], []
        for row in looked:
            token = int(self.last[row.slot])
            if token in row.problem.stop_ids:
                row.end = "stop"
            elif token in row.problem.asks and row.world is not None:
                asking.append(row)
        if asking:
            self._hear(asking)
        for place in np.flatnonzero(self.count[self.slots] >= self.most[self.slots]):
            row = self.rows[place]
            row.end = row.end or "length"
            looked.append(row)
        if any(row.end is not None for row in looked):
            self._collect()

    def _admit(self) -> None:
        """As many as wait and may begin."""
        begun = False
        while self.waiting and self.free_slots and self._may_begin(self.waiting[0]):
            rollout = self.waiting.popleft()
            problem, slot = rollout.problem, self.free_slots.pop()
            world: Episode | Failed | None = self.worlds.pop(id(rollout), None)
            if world is None and problem.begin is not None:
                world = opened(partial(problem.begin, rollout.world))
            self.said[slot] = self.past[slot] = 0
            self.count[slot], self.most[slot], self.seeds[slot] = len(rollout.sampled), problem.max_tokens, rollout.seed
            row = _Row(rollout=rollout, slot=slot, unread=rollout.token_ids, world=None, spans=list(rollout.spans), heard=rollout.heard)
            self.last[slot], self.size[slot] = row.unread[-1], len(row.unread)
            if isinstance(world, Failed):
                row.end, row.failure = "failed", world.error
                self._finish(row)
                continue
            row.world = world
            self.rows.append(row)
            self._take_pages(row, _pages(len(row.unread)))
            begun = True
        if begun:
            self._order()

    def _may_begin(self, rollout: Rollout) -> bool:
        if not self.rows:
            return True
        used = self.sampler.pool.pages - len(self.free_pages) + _pages(len(rollout.token_ids) + 1)
        return not self.full and used <= self.sampler.cache_share * self.sampler.pool.pages

    def _order(self) -> None:
        self.slots = np.array([row.slot for row in self.rows], dtype=np.int64)

    def _take_pages(self, row: _Row, count: int) -> None:
        for place in range(row.pages, count):
            self.tables[row.slot, place] = self.free_pages.pop()
        row.pages = self.held[row.slot] = max(row.pages, count)

    def _grow(self) -> Ints:
        """Pages for what is read now; returns how many ids each row that goes on reads."""
        while True:
            sizes = self.size[self.slots]
            missing = -(-(self.past[self.slots] + sizes) // PAGE_TOKENS) - self.held[self.slots]
            if int(missing.clip(0).sum()) <= len(self.free_pages):
                break
            self._give_way()
        for place in np.flatnonzero(missing > 0):
            row = self.rows[place]
            self._take_pages(row, row.pages + int(missing[place]))
        return sizes

    def _give_way(self) -> None:
        """Who came last waits first in line, with all its ids; what was kept of it in the cache is gone."""
        row = self.rows.pop()
        rollout = self._leave(row)
        if row.world is not None:
            self.worlds[id(rollout)] = row.world
        self.waiting.appendleft(rollout)
        self.full = True
        self.set_back += 1
        self._order()

    def _forward(self) -> Floats:
        """Logits after the ids that are unread. Who begins with the same ids as another takes over what that one has read."""
        sizes = self._grow()
        slots, past = self.slots, self.past[self.slots]
        lead = self._leaders(past)
        readers = np.flatnonzero(lead == np.arange(len(lead)))
        own, counts = slots[readers], sizes[readers]
        if int(counts.max()) == 1:
            tokens = self.last[own]
        else:
            tokens = np.array([i for place in readers for i in self._next(self.rows[place])], dtype=np.int64)
        packed = PackedRows(
            tokens=torch.from_numpy(tokens), bounds=torch.from_numpy(np.concatenate(([0], counts.cumsum()))),
            past=torch.from_numpy(past[readers]), slots=torch.from_numpy(own),
            pages=torch.from_numpy(self.tables[own, : int(self.held[own].max())]))
        outputs = self._run(packed)
        if self.experts is not None and outputs.experts is not None:
            positions = np.concatenate([np.arange(done, done + n) for done, n in zip(past[readers], counts, strict=True)])
            self.experts[np.repeat(own, counts), positions] = outputs.experts.numpy()
        assert outputs.logits is not None
        logits = outputs.logits.numpy()
        self.past[slots] += sizes
        self.size[slots] = 1
        if len(readers) == len(slots):
            return logits
        self._take_over(lead, np.flatnonzero(lead != np.arange(len(lead))))
        return logits[np.searchsorted(readers, lead)]

    def _next(self, row: _Row) -> tuple[int, ...]:
        return row.unread if self.size[row.slot] > 1 else (int(self.last[row.slot]),)

    def _run(self, packed: PackedRows) -> Outputs:
        try:
            return self.sampler.runner.forward(packed, self.sampler.pool, **({"experts": True} if self.experts is not None else {}))
        except (RuntimeError, MemoryError, OSError) as error:
            raise TrainingError(f"the engine failed while it sampled with the weights of step {self.sampler.version} "
                                f"({type(error).__name__}: {error}); the same command again goes on from the last checkpoint") from error

    def _leaders(self, past: Ints) -> Ints:
        """For each row the place of the one that reads for it: the first of those that begin with the same ids, else itself."""
        lead, first = np.arange(len(past)), dict[tuple[int, ...], int]()
        for place in np.flatnonzero(past == 0).tolist():
            lead[place] = first.setdefault(self.rows[place].unread, place)
        return lead

    def _take_over(self, lead: Ints, places: Ints) -> None:
        """The states and pages of who has read the same ids."""
        counts = -(-self.past[self.slots[places]] // PAGE_TOKENS)
        sources, targets = self.slots[lead[places]], self.slots[places]
        pages = np.arange(int(counts.max())) < counts[:, None]
        width = pages.shape[1]
        self.sampler.pool.fork(sources, targets, self.tables[sources, :width][pages], self.tables[targets, :width][pages])
        if self.experts is not None:
            self.experts[targets, : width * PAGE_TOKENS] = self.experts[sources, : width * PAGE_TOKENS]

    def _hear(self, asking: Sequence[_Row]) -> None:
        """Worlds answer ids that ask them."""
        questions = []
        for row in asking:
            self._close_span(row)
            sampled = [i for span in row.spans if span.sampled for i in span.token_ids]
            assert row.world is not None
            questions.append(partial(row.world.reply, tuple(sampled[row.heard :])))
        for row, said in zip(asking, answers(questions, self.sampler.world_seconds), strict=True):
            self._take(row, said)

    def _take(self, row: _Row, said: tuple[int, ...] | Failed | None) -> None:
        """What a world said goes into its rollout, or ends it."""
        row.heard = int(self.count[row.slot])
        if isinstance(said, Failed):
            row.end, row.failure = "failed", said.error
        elif said is None:
            row.end = "world"
        elif said:
            row.spans.append(given(tuple(said)))
            row.unread = (int(self.last[row.slot]), *said)
            self.size[row.slot] = len(row.unread)
            if sum(len(span.token_ids) for span in row.spans if not span.sampled) > row.problem.room:
                raise ConfigError(f"problem {row.problem.id}: its world said more than the {row.problem.room} ids of 'room'")

    def _close_span(self, row: _Row) -> None:
        count = int(self.said[row.slot])
        if count:
            ids, logprobs = self.ids[row.slot, :count].tolist(), self.logprobs[row.slot, :count].tolist()
            row.spans.append(chosen(tuple(ids), tuple(logprobs), self.sampler.version))
            self.said[row.slot] = 0

    def _collect(self) -> None:
        """Those that ended leave their slots."""
        going = [row for row in self.rows if row.end is None]
        for row in self.rows:
            if row.end is not None:
                self._finish(row)
        self.rows = going
        self._order()

    def _finish(self, row: _Row) -> None:
        """It has ended: out of its slot, and to who grades it."""
        rollout = self._leave(row)
        if row.failure is not None:
            rollout = rollout.graded(Score(reward=None, error=f"problem {row.problem.id}: {row.failure}"))
        self.finished.append(rollout)
        self.full = False
        world, row.world = row.world, None
        if self.on_finished is not None:
            self.on_finished(rollout, world)
        else:
            closed(world)

    def _leave(self, row: _Row) -> Rollout:
        self._close_span(row)
        self.free_slots.append(row.slot)
        self.free_pages += self.tables[row.slot, : row.pages].tolist()[::-1]
        self.held[row.slot] = 0
        experts = row.rollout.experts
        if self.experts is not None:
            read = self.experts[row.slot, : self.past[row.slot]]
            experts = read.copy() if experts is None else np.concatenate([experts, read[len(experts) :]])
        return replace(row.rollout, spans=tuple(row.spans), end=row.end, heard=row.heard, world=None, experts=experts)

    def put_aside(self) -> tuple[Rollout, ...]:
        """The unfinished ones as they stand, those in work first."""
        aside = [*((self._leave(row), row.world) for row in self.rows), *((each, self.worlds.get(id(each))) for each in self.waiting)]
        states = deque(answers([world.state for _, world in aside if world is not None], self.sampler.world_seconds))
        found = []
        for rollout, world in aside:
            if world is not None:
                state = states.popleft()
                rollout = replace(rollout, world=state) if not isinstance(state, Failed) else _anew(rollout)
            found.append(rollout)
        self.close()
        return tuple(found)

    def close(self) -> None:
        """Give back the worlds of rollouts that have not finished."""
        for world in (*(row.world for row in self.rows), *self.worlds.values()):
            closed(world)
        self.rows, self.worlds = [], {}


def _anew(rollout: Rollout) -> Rollout:
    """From its prompt again: its world could not say where it stands."""
    return replace(rollout, spans=(), heard=0, world=None, experts=None)


def _pages(ids: int) -> int:
    return -(-ids // PAGE_TOKENS)


def draw(logits: Floats, seeds: NDArray[np.uint64], counts: NDArray[np.uint64], temperature: float, version: int = 0
         ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """An id and its log-probability for each row of `logits` [N, V]: a pure function of the row, its seed and its count.

    Raises `TrainingError` for a row without a finite largest value.
    """
    peak = logits.max(1, keepdims=True)
    if not np.isfinite(peak).all():
        raise TrainingError(f"the policy of version {version} gives logits that are no finite numbers; go back to an earlier checkpoint "
                            "and lower the learning rate")
    weights = np.exp((logits - peak).astype(np.float64) / max(temperature or 1.0, COLDEST))
    reached = weights.cumsum(1)
    total = reached[:, -1]
    if temperature == 0:
        ids = logits.argmax(1)
    else:
        targets = uniform(seeds, counts) * total
        ids = np.minimum((reached <= targets[:, None]).sum(1), logits.shape[1] - 1)
    rows = np.arange(len(ids))
    return ids, np.log(weights[rows, ids] / total)
