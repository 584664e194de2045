"""The engine: requests in tokens go in, sampled tokens come out, one step at a time; all sequences share each step.

`step` is the whole of it: expire, plan (`scheduler.py`), one call of the runner, sample (`sampler.py`), say what happened. The engine is
synchronous, has no thread and looks at the clock for deadlines and reports only, so the same calls give the same steps.

A request's tokens depend on the request and its seed alone. Draws do by construction. Logits do as well with `exact`: the runner's
results then have the same bits however a sequence was cut, whether its beginning came from the cache, and whatever else was in the call.
Without it, or on a runner that cannot promise that, they agree up to rounding. A stop id is reported like any other token, then the end.
Read next: `scheduler.py`; `live.py` runs an engine for asyncio.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.config import setting
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import CapacityError, ConfigError
from gnomon.serve.batch import Batch, pack
from gnomon.serve.constrain import Constraint, Grammars
from gnomon.serve.pages import Memory
from gnomon.serve.prefix import CacheStats, PrefixCache
from gnomon.serve.request import Event, Reason, Request, Started
from gnomon.serve.runner import Runner
from gnomon.serve.sampler import Bent, Draw, log_probabilities, sample
from gnomon.serve.scheduler import Chunk, Scheduler, ScheduleSettings
from gnomon.serve.sequence import Ending, Running, Sequence
from gnomon.units import format_bytes

MOST_TOKENS = 1 << 20
"""Context where memory sets no limit: that of the released model."""
LOGIT_BYTES = 64 << 20
"""Most bytes of logits that a chunk of a scored prompt asks for."""
DEFAULT_MEMORY = 1 << 30
"""Bytes for states where no cache is handed over and nothing was said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How an engine runs. Without `max_tokens` a sequence may be as long as fits in memory alone."""

    max_tokens: int | None = setting(None, "longest sequence, prompt and output together; none: what memory holds")
    memory_bytes: int = setting(DEFAULT_MEMORY, "for states and pages, where no cache is handed over")
    exact: bool = setting(True, "the same bits with and without cache, in any company; costs time in long prompts")
    schedule: ScheduleSettings = setting(factory=ScheduleSettings, doc="how a step is filled")

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigError(f"'max_tokens' is {self.max_tokens}; a sequence has at least a prompt of one token and one to follow")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """What an engine does now, and has done since its start. `step_seconds` is the last step's; tokens are those computed, not cached."""

    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    step_seconds: float
    busy_seconds: float
    memory_used_bytes: int
    memory_budget_bytes: int
    max_tokens: int
    exact: bool
    cache: CacheStats


class Engine:
    """Runs requests. Without a `cache` nothing is shared between requests; grammars and stop strings need the `tokenizer`."""

    def __init__(self, runner: Runner, settings: EngineSettings | None = None, cache: PrefixCache | None = None,
                 tokenizer: Tokenizer | None = None, clock: Callable[[], float] = time.monotonic):
        self.runner, self.settings, self.tokenizer = runner, settings or EngineSettings(), tokenizer
        self.cache = PrefixCache(Memory(runner, self.settings.memory_bytes)) if cache is None else cache
        self.vocabulary = runner.config.vocab_size
        self.exact = runner.steady(self.settings.exact) and self.settings.exact
        self.max_tokens = self._context()
        self._clock = clock
        self._scheduler = Scheduler(self.settings.schedule, self.cache, self.max_tokens, LOGIT_BYTES // (4 * self.vocabulary))
        self._scheduler.reuse = cache is not None
        self._sequences: dict[str, Sequence] = {}
        self._leaders: dict[tuple[object, ...], Sequence] = {}
        self._grammars: Grammars | None = None
        self._events: list[tuple[str, Event]] = []
        self._arrivals = self._prompt_tokens = self._output_tokens = 0
        self._step_seconds = self._busy_seconds = 0.0
        self.worked = False  # whether the last step brought anything to the model

    def submit(self, request: Request, constraint: Constraint | None = None) -> None:
        """Accept a request; `constraint` is what `prepare` made of its grammar, if that was asked before. Raises `ConfigError` for ids,
        settings or a grammar that cannot be, `CapacityError` for a prompt that is too long; the engine is then as it was."""
        self._enter([self._accept(request, constraint)])

    def submit_many(self, requests: Iterable[Request]) -> None:
        """Accept requests together, or none of them.

        A prompt is computed once: requests with the prompt of one whose prompt is not through yet are forked from it when it is. Those that
        do not use the cache share within one call only.
        """
        self._enter([self._accept(request) for request in requests])

    def _enter(self, accepted: list[Sequence]) -> None:
        names = [sequence.request.id for sequence in accepted]
        for name in names:
            if name in self._sequences or names.count(name) > 1:
                raise ConfigError(f"'id' is {name!r}, which another request has that is not finished; ids must be unique")
        here: dict[tuple[object, ...], Sequence] = {}
        for sequence in accepted:
            self._sequences[sequence.request.id] = sequence
            leaders = self._leaders if sequence.request.cache else here
            leader = leaders.setdefault(_shared(sequence.request), sequence)
            if leader is sequence:
                self._scheduler.add(sequence)
            else:
                leader.followers.append(sequence)

    def prepare(self, request: Request) -> Constraint | None:
        """Compile a request's grammar. That may take seconds; done before `submit`, on any thread, it does not hold up a step."""
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        if self.tokenizer is None:
            raise ConfigError("'grammar' needs the vocabulary as text; give the engine a tokenizer")
        self._grammars = self._grammars or Grammars(self.tokenizer)
        return self._grammars.constraint(grammar, request.sampling.stop_ids)

    def cancel(self, name: str) -> bool:
        """End a request; its last event comes with the next step. `False` where there is none of this id."""
        sequence = self._sequences.get(name)
        if sequence is not None:
            self._end(sequence, "cancelled")
        return sequence is not None

    def fail(self, error: str) -> list[tuple[str, Event]]:
        """End all requests with an error and forget what is cached: what to do when a step raised. Returns what happened."""
        for sequence in list(self._sequences.values()):
            sequence.followers.clear()
            self._end(sequence, "error", error=error)
        self.cache.clear()
        return self._take()

    def exchange(self, runner: Runner) -> list[tuple[str, Event]]:
        """Go on with other weights of the same shape. What runs ends with an error, and nothing that the old ones computed is kept.

        Raises `ConfigError` for another shape, or where prefixes are on a disk: those belong to the weights.
        """
        if runner.config != self.runner.config or type(runner) is not type(self.runner):
            raise ConfigError("the new weights have another shape than those that are served; start another server for them")
        if self.cache.disk is not None:
            raise ConfigError("'cache.folder' keeps prefixes of these weights; serve without it to exchange weights")
        events = self.fail("the weights were exchanged while the request ran; ask again")
        self.runner = runner
        return events

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not self._sequences and not self._events

    def step(self) -> list[tuple[str, Event]]:
        """One step; what happened, in order, by request id."""
        begin = self._clock()
        self._expire(begin)
        chunks = self._scheduler.plan()
        self.worked = bool(chunks)
        for sequence, reason in self._scheduler.impossible:
            self._end(sequence, "error", error=reason)
        self._scheduler.impossible.clear()
        if chunks:
            self._start(chunks, begin)
            batch = pack(chunks, self.runner)
            logits = self.runner.forward(batch.rows, self.cache.memory.pool).logits
            assert logits is not None
            for chunk in chunks:
                chunk.running.held.advance(chunk.running.sequence.tokens[chunk.start : chunk.stop])
            self._prompt_tokens += sum(chunk.stop - chunk.start for chunk in chunks if not chunk.running.sequence.outputs)
            self._score(batch, logits.numpy())
            self._sample(batch, logits.numpy())
        self._step_seconds = self._clock() - begin
        self._busy_seconds += self._step_seconds
        return self._take()

    def _take(self) -> list[tuple[str, Event]]:
        events, self._events = self._events, []
        return events

    def stats(self) -> EngineStats:
        """Numbers for a page of metrics."""
        memory, scheduler = self.cache.memory, self._scheduler
        return EngineStats(
            running=len(scheduler.running), waiting=len(self._sequences) - len(scheduler.running), steps=scheduler.steps,
            prompt_tokens=self._prompt_tokens, output_tokens=self._output_tokens, preemptions=scheduler.preemptions,
            step_seconds=self._step_seconds, busy_seconds=self._busy_seconds, memory_used_bytes=memory.used_bytes,
            memory_budget_bytes=memory.budget_bytes, max_tokens=self.max_tokens, exact=self.exact, cache=self.cache.stats(),
        )

    def _context(self) -> int:
        """The longest sequence: what was asked for, or what memory holds."""
        memory = self.cache.memory
        room = MOST_TOKENS
        if memory.page_bytes:
            pages = min((memory.budget_bytes - memory.slot_bytes) // memory.page_bytes, memory.pool.pages)
            room = min(room, pages * memory.page_tokens)
        asked = self.settings.max_tokens
        if asked is not None and asked > room:
            raise CapacityError(f"'max_tokens' is {asked} and the memory of {format_bytes(memory.budget_bytes)} holds sequences of {room}; "
                                f"{format_bytes(memory.bytes_for(asked))} are needed")
        return room if asked is None else asked

    def _accept(self, request: Request, constraint: Constraint | None = None) -> Sequence:
        """A request that can be run. Raises what `submit` says."""
        prompt, sampling = request.prompt, request.sampling
        if not prompt:
            raise ConfigError("'prompt' is empty; give at least one token")
        words = outside_images(request)
        if words and (min(words) < 0 or max(words) >= self.vocabulary):
            outside = [token for token in words if not 0 <= token < self.vocabulary]
            raise ConfigError(f"'prompt' has ids outside the vocabulary of {self.vocabulary}: {outside[:5]}")
        if len(prompt) >= self.max_tokens:
            raise CapacityError(f"'prompt' has {len(prompt)} tokens and a sequence may have {self.max_tokens}, its output included; "
                                "shorten it, or raise the context limit or the memory")
        for token, bias in sampling.logit_bias:
            if not (0 <= token < self.vocabulary and math.isfinite(bias)):
                raise ConfigError(f"'logit_bias' has {token}: {bias}; ids are below {self.vocabulary} and values finite")
        if sampling.stop and self.tokenizer is None:
            raise ConfigError("'stop' needs the vocabulary as text; give the engine a tokenizer")
        constraint = constraint or self.prepare(request)
        stop_ids = sampling.stop_ids if constraint is None else sampling.stop_ids | constraint.stop_ids
        self._arrivals += 1
        return Sequence(
            request=request, order=self._arrivals, arrived=self._clock(), tokens=list(prompt), constraint=constraint, stop_ids=stop_ids,
            bent=Bent.of(sampling, self.vocabulary, words),
            ending=Ending(self.tokenizer, sampling.stop) if self.tokenizer is not None and sampling.stop else None,
        )

    def _expire(self, now: float) -> None:
        for sequence in list(self._sequences.values()):
            seconds = sequence.request.deadline_seconds
            if seconds is not None and now - sequence.arrived >= seconds:
                self._end(sequence, "deadline")

    def _start(self, chunks: list[Chunk], now: float) -> None:
        """Say what the cache knew of those that begin."""
        for chunk in chunks:
            if chunk.running.sequence.started is None:
                held = chunk.running.held
                self._begin(chunk.running.sequence, now, held.cached_tokens, held.note)

    def _begin(self, sequence: Sequence, now: float, cached: int, note: str) -> None:
        sequence.started, sequence.cached_tokens, sequence.cache_note = now, cached, note
        self._events.append((sequence.request.id, Started(cached_tokens=cached, cache_note=note)))

    def _score(self, batch: Batch, logits: NDArray[np.float32]) -> None:
        """Log-probabilities of prompts that asked for them."""
        for scored in batch.scored:
            rows = logits[scored.first : scored.first + len(scored.ids)]
            scored.sequence.prompt_logprobs += log_probabilities(rows, np.array(scored.ids, dtype=np.int64)).tolist()

    def _sample(self, batch: Batch, logits: NDArray[np.float32]) -> None:
        """A token for each sequence whose known tokens are through, and for those that fork from it now."""
        draws: list[Draw] = []
        drawing: list[Sequence] = []
        for running, row in batch.sampling:
            for sequence in [running.sequence, *self._fork(running)]:
                try:
                    draws.append(sequence.draw(row))
                    drawing.append(sequence)
                except ConfigError as error:
                    self._end(sequence, "error", error=str(error))
        now = self._clock()
        for sequence, sampled in zip(drawing, sample(logits, draws), strict=True):
            if sampled is None:
                self._end(sequence, "error", error="the model's logits are not finite; its weights are damaged, or overflowed")
                continue
            sequence.first_token = now if sequence.first_token is None else sequence.first_token
            self._output_tokens += 1
            self._events.append((sequence.request.id, sampled))
            reason, text = sequence.take(sampled.id, self.max_tokens)
            if reason is not None:
                self._end(sequence, reason, stop_string=text)

    def _fork(self, leader: Running) -> list[Sequence]:
        """The followers that run from now on, each with a state of its own; those without room wait like anybody else."""
        if leader.sequence.outputs:
            return []
        self._unlead(leader.sequence)
        forked = []
        followers, leader.sequence.followers = leader.sequence.followers, []
        for follower in followers:
            try:
                held = None if self._scheduler.full else leader.held.fork()
            except CapacityError:
                held = None
            if held is None:
                self._scheduler.add(follower)
                continue
            self._scheduler.join(Running(follower, held))
            follower.prompt_logprobs = list(leader.sequence.prompt_logprobs)
            self._begin(follower, self._clock(), len(follower.request.prompt), "forked from a request with the same prompt")
            forked.append(follower)
        return forked

    def _unlead(self, sequence: Sequence) -> None:
        key = _shared(sequence.request)
        if self._leaders.get(key) is sequence:
            del self._leaders[key]

    def _end(self, sequence: Sequence, reason: Reason, stop_string: str | None = None, error: str | None = None) -> None:
        """The last event of a sequence; its memory is free. The first of its followers takes its place."""
        del self._sequences[sequence.request.id]
        self._unlead(sequence)
        for other in self._sequences.values():
            if sequence in other.followers:
                other.followers.remove(sequence)
        if sequence.followers:
            first, *first.followers = sequence.followers
            if first.request.cache:
                self._leaders[_shared(first.request)] = first
            self._scheduler.add(first)
        self._scheduler.remove(sequence, keep=reason != "error")
        self._events.append((sequence.request.id, sequence.finished(reason, self._clock(), stop_string, error)))


def outside_images(request: Request) -> tuple[int, ...]:
    """The ids of a prompt that are words. Raises `ConfigError` for images that overlap or leave the prompt, or that ask to be scored."""
    if not request.images:
        return request.prompt
    if request.prompt_logprobs:
        raise ConfigError("'prompt_logprobs' scores words; a prompt with images has none where its images are")
    words: list[int] = []
    done = 0
    for image in request.images:
        if not done <= image.start <= image.start + len(image.vectors) <= len(request.prompt):
            raise ConfigError(f"'images' has one from token {image.start} to {image.start + len(image.vectors)} of a prompt of "
                              f"{len(request.prompt)}, after one that ends at {done}")
        words += request.prompt[done : image.start]
        done = image.start + len(image.vectors)
    return (*words, *request.prompt[done:])


def _shared(request: Request) -> tuple[object, ...]:
    """What must be equal for one request to be forked from another."""
    return request.prompt, request.salt, request.cache, request.priority, request.prompt_logprobs
