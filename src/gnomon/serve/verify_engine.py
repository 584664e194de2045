"""An engine in this process as a subject, and the equivalences that need one at hand: its runner, its memory, its disk.

The reference of every answer is an engine of its own on a fresh pool without a cache. Read next: `verify_forward.py`.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from gnomon.errors import ConfigError
from gnomon.model.inference import PAGE
from gnomon.serve.cache_settings import CacheSettings
from gnomon.serve.engine import Engine, EngineSettings
from gnomon.serve.pages import Memory
from gnomon.serve.prefix import PrefixCache
from gnomon.serve.request import Finished, Request, Sampled, Sampling
from gnomon.serve.runner import Runner
from gnomon.serve.verify import Answer, Ask, Check, Finding, Prompt, joined, worst_of

TOP = 20
"""Alternatives that are compared at each token."""
SLOTS, TOKENS = 96, 32_768
"""States and tokens that the memory of a verified engine holds."""
REPEATED = 4
"""Distinct ids that make up a quarter of the content, so that text has something to attend to."""


class EngineSubject:
    """A runner behind engine and cache. `memory_bytes` (default: room for some dozens of sequences) is the budget of its cache.

    With `exact` the bound is zero: the engine promises bits. Otherwise it is rounding: 1e-4 for weights in fp32, more for fewer bits.
    Broken variants override `cache` or `engine`, or bring another runner.
    """

    seeds = salts = True

    def __init__(self, runner: Runner, *, name: str = "engine", fingerprint: str = "", block: int = 64, page_tokens: int = 64,
                 memory_bytes: int | None = None):
        self.runner, self.name, self.fingerprint, self.block, self.page_tokens = runner, name, fingerprint, block, page_tokens
        probe = runner.new_pool(1, page_tokens, page_tokens)
        self._slot_bytes, self._page_bytes = probe.slot_bytes, probe.page_bytes
        self.memory_bytes = memory_bytes or SLOTS * probe.slot_bytes + TOKENS // page_tokens * probe.page_bytes
        self._numbers = itertools.count()
        self._references: dict[Ask, Answer] = {}
        self.served = self.engine()
        self.bound = 0.0 if self.served.exact else rounding(runner)

    def cache(self, memory: Memory, disk: Path | None) -> PrefixCache:
        """The prefix cache under test."""
        return PrefixCache(memory, CacheSettings(hash_block=self.block), self.fingerprint, disk)

    def engine(self, disk: Path | None = None) -> Engine:
        """The engine under test, knowing nothing."""
        memory = Memory(self.runner, self.memory_bytes, self.page_tokens)
        return Engine(self.runner, EngineSettings(), self.cache(memory, disk))

    def text(self, tokens: int, seed: int) -> tuple[int, ...]:
        """Random ids, some of which come again and again."""
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.runner.config.vocab_size, (max(tokens, 1),), generator=draw)
        again = torch.rand(len(ids), generator=draw) < 0.25
        ids[again] = ids[torch.randint(min(REPEATED, len(ids)), (int(again.sum()),), generator=draw)]
        return tuple(ids.tolist())

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        """All of them in one engine."""
        return run(self.served, [self._request(ask) for ask in asks])

    def reference(self, ask: Ask) -> Answer:
        """The same request alone in an engine of its own; what was answered before is remembered."""
        key = replace(ask, boundaries=(), cached=True, salt="")
        if key not in self._references:
            tokens = len(ask.prompt) + ask.tokens + 2 * PAGE
            memory = Memory(self.runner, 2 * self._slot_bytes + (tokens // PAGE + 1) * (PAGE * self._page_bytes // self.page_tokens), PAGE)
            alone = Engine(self.runner, EngineSettings(), PrefixCache(memory))
            self._references[key] = run(alone, [replace(self._request(key), cache=False)])[0]
        return self._references[key]

    def said(self, answer: Answer) -> Prompt:
        """The answer's ids."""
        return tuple(token for token in answer.tokens if isinstance(token, int))

    @contextmanager
    def on(self, engine: Engine) -> Iterator[None]:
        """Serve from another engine for a while."""
        before, self.served = self.served, engine
        try:
            yield
        finally:
            self.served = before

    def _request(self, ask: Ask) -> Request:
        if isinstance(ask.prompt, str):
            raise ConfigError("'prompt' is text; an engine takes ids")
        sampling = Sampling(max_tokens=ask.tokens, temperature=0.0 if ask.seed is None else 1.0, seed=ask.seed or 0,
                            top_logprobs=min(TOP, self.runner.config.vocab_size))
        return Request(id=str(next(self._numbers)), prompt=ask.prompt, sampling=sampling, boundaries=ask.boundaries, salt=ask.salt,
                       cache=ask.cached)


def rounding(runner: Runner) -> float:
    """What results may differ by where bits are not promised: fp32 weights, or fewer bits."""
    return 1e-4 if getattr(runner, "dtype", torch.float32) == torch.float32 else 0.25


def run(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """Submit together and step until all are answered. Raises `ConfigError` for a request that ended with an error."""
    sampled: dict[str, list[Sampled]] = {request.id: [] for request in requests}
    cached: dict[str, int] = {}
    engine.submit_many(requests)
    while not engine.idle:
        for name, event in engine.step():
            if isinstance(event, Sampled):
                sampled[name].append(event)
            elif isinstance(event, Finished):
                cached[name] = event.usage.cached_tokens
                if event.reason not in ("length", "stop"):
                    raise ConfigError(f"a request ended with '{event.reason}': {event.error}")
    return [Answer(tokens=tuple(one.id for one in sampled[request.id]), cached=cached[request.id],
                   top=tuple({**dict(one.top), one.id: one.logprob} for one in sampled[request.id])) for request in requests]


def eviction(subject: EngineSubject, rounds: int = 3) -> Finding:
    """More conversations than memory: whatever is thrown away, answers stay what they are, and what is hit is right."""
    block, size = subject.block, 6 * subject.block
    memory = subject.served.cache.memory
    tight = EngineSubject.__new__(type(subject))
    tight.__dict__.update(subject.__dict__)
    tight.memory_bytes = 2 * memory.bytes_for(size + 2 * block) + 3 * memory.slot_bytes
    with subject.on(tight.engine()):
        before: list[Prompt] = [subject.text(block + 3, 80 + i) for i in range(4)]
        asks, answers = list[Ask](), list[Answer]()
        for turn in range(rounds):
            for i, past in enumerate(before):
                ask = Ask(prompt=joined(past, subject.text(block - 9, 100 * turn + i)), tokens=3, boundaries=(len(past),))
                answers += subject.ask([ask])
                asks.append(ask)
                before[i] = ask.prompt
        answers += subject.ask(asks[-4:])
        asks += asks[-4:]
        stats = subject.served.cache.stats()
    worst = worst_of(subject, asks, answers)
    note = f"{stats.evicted_checkpoints} checkpoints evicted, {stats.cached_tokens} tokens reused"
    if not stats.evicted_checkpoints:
        return Finding(worst=worst, note=note + "; nothing had to go, so nothing was shown", failed=True)
    if stats.used_bytes > stats.budget_bytes:
        return Finding(worst=worst, note=f"{note}; {stats.used_bytes} bytes are used where {stats.budget_bytes} were allowed", failed=True)
    return Finding(worst=worst, note=note)


def restart(subject: EngineSubject) -> Finding:
    """What went to disk continues in a new process's engine as if nothing had happened; another model's files are not touched."""
    prompt = subject.text(4 * subject.block + 9, 90)
    asks = [Ask(prompt=joined(prompt, subject.text(15 + i, 91 + i)), boundaries=(len(prompt),)) for i in range(2)]
    with tempfile.TemporaryDirectory(prefix="gnomon-verify-") as folder:
        with subject.on(subject.engine(Path(folder))):
            subject.ask([Ask(prompt=prompt, tokens=2, boundaries=(len(prompt),))])
            subject.served.cache.close()
        with subject.on(subject.engine(Path(folder))):
            answers = [subject.ask([ask])[0] for ask in asks]
            subject.served.cache.close()
        foreign = _foreign(subject, Path(folder), asks[0])
    worst, reused = worst_of(subject, asks, answers), sum(answer.cached or 0 for answer in answers[:1])
    if foreign or not reused:
        return Finding(worst=worst, failed=True, note=foreign or "nothing was found on the disk after the restart")
    return Finding(worst=worst, note=f"{reused} tokens from the disk; other weights' files refused")


def _foreign(subject: EngineSubject, folder: Path, ask: Ask) -> str:
    """What is wrong with how an engine of other weights treats this folder; empty where it refuses or ignores it."""
    fingerprint, subject.fingerprint = subject.fingerprint, subject.fingerprint + " of other weights"
    try:
        engine = subject.engine(folder)
    except ConfigError:
        return ""
    finally:
        subject.fingerprint = fingerprint
    answer = run(engine, [subject._request(ask)])[0]
    engine.cache.close()
    return f"{answer.cached} tokens were taken from the files of other weights" if answer.cached else ""


def engine_checks(subject: EngineSubject) -> list[Check]:
    """The checks of this page."""
    return [
        Check(name="eviction", shows="eviction under a tiny budget ≡ no cache", run=lambda: eviction(subject), bound=subject.bound),
        Check(name="restart", shows="restart from disk ≡ fresh; other weights' files are refused", run=lambda: restart(subject),
              bound=subject.bound),
    ]
