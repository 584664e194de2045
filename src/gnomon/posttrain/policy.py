"""The policy in process: many rollouts at once on the inference model, each with its own random numbers, worlds answering in between.

All rollouts in work move on by one sampled id per step, together; a free slot takes the next one that waits. A draw is a pure function of
(rollout's seed, how many ids it has sampled), and a row's logits do not depend on its neighbours, so a rollout is the same whatever runs
beside it, however it is cut, and the order in which rollouts finish follows their lengths and not the clock.
After new weights an unfinished rollout is read again from its first id: nothing that old weights computed is kept but the ids.
Read next: `rollout.py`, `partial.py`.
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
from gnomon.model.inference_state import PackedRows
from gnomon.model.transformer import Transformer
from gnomon.posttrain.problem import Episode, Problem
from gnomon.posttrain.rollout import End, Rollout, chosen, given
from gnomon.posttrain.worlds import Failed, answers, closed, opened
from gnomon.serve.runner import Runner, runner_for
from gnomon.serve.sampler import COLDEST, uniform

PAGE_TOKENS = 32
"""Tokens of a page of latents: short, since many answers are."""
WORLD_SECONDS = 600.0
"""What a world may take for one answer where nobody says otherwise."""

Floats = NDArray[np.float32]
Finished = Callable[[Rollout, Episode | None], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What a call of `Sampler.sample` left: finished ones in the order in which they ended, the others as far as they came.

    `steps` are calls of the model, `tokens` the ids that were sampled.
    """

    finished: tuple[Rollout, ...]
    unfinished: tuple[Rollout, ...]
    steps: int
    tokens: int


class AnySampler(Protocol):
    """Whatever samples rollouts: `Sampler` here, servers in `remote.py`."""

    @property
    def version(self) -> int:
        """Of the weights that it samples from."""
        ...

    def load(self, model: Transformer, version: int) -> None:
        """Take the weights that the model has now; spans sampled from here on carry `version`."""
        ...

    def sample(self, rollouts: Sequence[Rollout], *, enough: int | None = None, on_finished: Finished | None = None) -> Sampled:
        """Let the rollouts grow until `enough` of them have finished (None: all)."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class Sampler:
    """Samples rollouts from one model's weights; `load` puts newer weights in their place.

    At most `slots` rollouts are in work, and at most `cache_tokens` ids of theirs: what does not fit waits. `temperature` 0 takes the
    likeliest id. Log-probabilities are those of the distribution that was drawn from (at temperature 0, of temperature 1).
    A world that fails, or takes longer than `world_seconds` for an answer, ends its rollout with a score that says so and has no reward.
    """

    def __init__(self, model: Transformer, *, slots: int = 256, cache_tokens: int = 65_536, temperature: float = 1.0, version: int = 0,
                 world_seconds: float = WORLD_SECONDS) -> None:
        if slots < 1 or cache_tokens < 1 or temperature < 0 or world_seconds <= 0:
            raise ConfigError(f"'slots' {slots}, 'cache_tokens' {cache_tokens} and 'world_seconds' {world_seconds} must be positive, "
                              f"'temperature' {temperature} not negative")
        self.slots, self.cache_tokens, self.temperature, self.world_seconds = slots, cache_tokens, temperature, world_seconds
        self.runner: Runner
        self.load(model, version)
        self.pool = self.runner.new_pool(slots, cache_tokens, PAGE_TOKENS)

    def load(self, model: Transformer, version: int) -> None:
        """Take the weights that the model has now; spans sampled from here on carry `version`."""
        self.runner = runner_for(model)
        self.version = version

    def sample(self, rollouts: Sequence[Rollout], *, enough: int | None = None, on_finished: Finished | None = None) -> Sampled:
        """Let the rollouts grow until `enough` of them have finished (None: all), earlier ones of the list first.

        `on_finished` is given each at once with its open world, for grading beside the sampling, and must close that world; without it
        worlds are closed here. Raises `CapacityError` for one that can never fit, `TrainingError` for logits that are no numbers and for an
        engine that fails; then all open worlds are closed.
        """
        work = _Work(self, rollouts, on_finished)
        wanted = len(rollouts) if enough is None else min(enough, len(rollouts))
        try:
            while len(work.finished) < wanted and work.step():
                pass
            return Sampled(finished=tuple(work.finished), unfinished=work.put_aside(), steps=work.steps, tokens=work.tokens)
        finally:
            work.close()

    def close(self) -> None:
        """There is nothing to give back."""

    @property
    def pages(self) -> int:
        """Pages of the cache."""
        return self.pool.pages


@dataclass(slots=True, eq=False)
class _Row:
    """A rollout in a slot: `pending` are ids that the model has not read, `past` counts those that it has."""

    rollout: Rollout
    slot: int
    table: list[int]
    pending: tuple[int, ...]
    count: int  # sampled so far, which numbers the draws
    world: Episode | None
    spans: list[Span]
    heard: int  # sampled ids that the world has answered
    failure: str | None = None
    past: int = 0
    end: End | None = None

    @property
    def problem(self) -> Problem:
        return self.rollout.problem


class _Work:
    """One call of `sample`: who waits, who is in which slot, what they said since their last span."""

    def __init__(self, sampler: Sampler, rollouts: Sequence[Rollout], on_finished: Finished | None) -> None:
        self.sampler, self.on_finished = sampler, on_finished
        self.waiting = deque(rollouts)
        self.rows: list[_Row] = []
        self.free_slots = list(range(sampler.slots))[::-1]
        self.free_pages = list(range(sampler.pages))[::-1]
        self.finished: list[Rollout] = []
        self.steps = self.tokens = 0
        longest = max((rollout.problem.max_tokens for rollout in rollouts), default=1)
        self.ids = np.zeros((sampler.slots, longest), dtype=np.int64)  # sampled since the last span, by slot
        self.logprobs = np.zeros((sampler.slots, longest), dtype=np.float64)
        self.said = np.zeros(sampler.slots, dtype=np.int64)
        vocabulary = sampler.runner.config.vocab_size
        self.notable = np.zeros(vocabulary, dtype=np.bool_)  # ids after which somebody must look
        for rollout in rollouts:
            self._check(rollout, vocabulary)
            self.notable[[i for i in (*rollout.problem.stop_ids, *rollout.problem.asks) if 0 <= i < vocabulary]] = True

    def _check(self, rollout: Rollout, vocabulary: int) -> None:
        problem = rollout.problem
        if rollout.end is not None:
            raise ConfigError(f"problem {problem.id}: its rollout has ended; sample one that has not")
        if _pages(problem) > self.sampler.pages:
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
        ids, logprobs = self._draw(logits)
        slots = np.array([row.slot for row in self.rows])
        places = self.said[slots]
        self.ids[slots, places], self.logprobs[slots, places] = ids, logprobs
        self.said[slots] += 1
        self.steps += 1
        self.tokens += len(ids)
        asking = []
        for row, token, look in zip(self.rows, ids.tolist(), self.notable[ids].tolist(), strict=True):
            row.count += 1
            row.pending = (token,)
            if look and token in row.problem.stop_ids:
                row.end = "stop"
            elif look and token in row.problem.asks and row.world is not None:
                asking.append(row)
        if asking:
            self._hear(asking)
        ended = False
        for row in self.rows:
            if row.end is None and row.count >= row.problem.max_tokens:
                row.end = "length"
            ended |= row.end is not None
        if ended:
            self._collect()
        return True

    def _admit(self) -> None:
        while self.waiting and self.free_slots and len(self.free_pages) >= _pages(self.waiting[0].problem):
            rollout = self.waiting.popleft()
            problem, slot = rollout.problem, self.free_slots.pop()
            table = [self.free_pages.pop() for _ in range(_pages(problem))]
            world = None if problem.begin is None else opened(partial(problem.begin, rollout.world))
            self.said[slot] = 0
            row = _Row(rollout=rollout, slot=slot, table=table, pending=rollout.token_ids, count=len(rollout.sampled), world=None,
                       spans=list(rollout.spans), heard=rollout.heard)
            if isinstance(world, Failed):
                row.end, row.failure = "failed", world.error
                self._finish(row)
            else:
                row.world = world
                self.rows.append(row)

    def _forward(self) -> Floats:
        rows, sizes = self.rows, [len(row.pending) for row in self.rows]
        pages = np.zeros((len(rows), max(len(row.table) for row in rows)), dtype=np.int32)
        for place, row in enumerate(rows):
            pages[place, : len(row.table)] = row.table
        packed = PackedRows(
            tokens=torch.tensor([token for row in rows for token in row.pending]),
            bounds=torch.from_numpy(np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))),
            past=torch.tensor([row.past for row in rows]), slots=torch.tensor([row.slot for row in rows]), pages=torch.from_numpy(pages))
        try:
            logits = self.sampler.runner.forward(packed, self.sampler.pool).logits
        except (RuntimeError, MemoryError, OSError) as error:
            raise TrainingError(f"the engine failed while it sampled with the weights of step {self.sampler.version} "
                                f"({type(error).__name__}: {error}); the same command again goes on from the last checkpoint") from error
        assert logits is not None
        for row, size in zip(rows, sizes, strict=True):
            row.past += size
        return logits.numpy()

    def _draw(self, logits: Floats) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        seeds = np.array([row.rollout.seed for row in self.rows], dtype=np.uint64)
        counts = np.array([row.count for row in self.rows], dtype=np.uint64)
        return draw(logits, seeds, counts, self.sampler.temperature, self.sampler.version)

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
        row.heard = row.count
        if isinstance(said, Failed):
            row.end, row.failure = "failed", said.error
        elif said is None:
            row.end = "world"
        elif said:
            row.spans.append(given(tuple(said)))
            row.pending = (*row.pending, *said)
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

    def _finish(self, row: _Row) -> None:
        """It has ended: out of its slot, and to who grades it."""
        rollout = self._leave(row)
        if row.failure is not None:
            rollout = rollout.graded(Score(reward=None, error=f"problem {row.problem.id}: {row.failure}"))
        self.finished.append(rollout)
        world, row.world = row.world, None
        if self.on_finished is not None:
            self.on_finished(rollout, world)
        else:
            closed(world)

    def _leave(self, row: _Row) -> Rollout:
        self._close_span(row)
        self.free_slots.append(row.slot)
        self.free_pages += row.table[::-1]
        return replace(row.rollout, spans=tuple(row.spans), end=row.end, heard=row.heard, world=None)

    def put_aside(self) -> tuple[Rollout, ...]:
        """The unfinished ones as they stand, those in work first."""
        worlds = [row.world for row in self.rows if row.world is not None]
        states = deque(answers([world.state for world in worlds], self.sampler.world_seconds))
        aside = []
        for row in self.rows:
            rollout = self._leave(row)
            if row.world is not None:
                state = states.popleft()
                rollout = replace(rollout, world=state) if not isinstance(state, Failed) else _anew(rollout)
                closed(row.world)
                row.world = None
            aside.append(rollout)
        self.rows = []
        return (*aside, *self.waiting)

    def close(self) -> None:
        """Give back the worlds of rollouts that are still in work, which they are only where something failed."""
        for row in self.rows:
            closed(row.world)
        self.rows = []


def _anew(rollout: Rollout) -> Rollout:
    """From its prompt again: its world could not say where it stands."""
    return replace(rollout, spans=(), heard=0, world=None)


def _pages(problem: Problem) -> int:
    return -(-problem.capacity // PAGE_TOKENS)


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
