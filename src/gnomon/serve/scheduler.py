"""Who works in a step: decoding sequences first, then pieces of prompts under a budget of tokens.

A prompt is cut at multiples of 64 only, counted from its beginning: the ends of the cache's hash blocks. Pieces are dealt one at a time.
Which class comes next is decided by credit: each class with work earns its share of every step's budget and pays for its pieces, so that
long prompts of one class cannot starve the other. Within a class those come first that were put aside amid their output, then the prompt
with the least left, so a short request does not wait behind a long one. A step that takes a short prompt takes no long one, but every
fourth is the oldest's, so a long one always moves. Nor should the next short one wait for the end of a large step: for some time after the
last, long prompts move in single pieces.

A sequence that begins like a prompt on its way waits a few steps for what they share, rather than compute it a second time. It is admitted
when all of its known tokens fit in memory, whole or not at all. When a decoding sequence finds no page, the last in rank (batch before
interactive, then the youngest) is put aside and computed again later through the cache. Nothing here looks at a clock: the same requests
in the same order give the same steps. Read next: `engine.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gnomon.config import setting
from gnomon.errors import CapacityError, ConfigError
from gnomon.serve.prefix import PrefixCache
from gnomon.serve.request import PRIORITIES, Priority
from gnomon.serve.sequence import Running, Sequence

PIECE = 64
"""Tokens of a piece of a prompt: pieces end at multiples of it, as hash blocks do."""
OLDEST_EVERY = 4
"""Every so many steps the oldest prompt of a class comes first; beside short ones it waits for at most so many."""
CAREFUL = 64
"""Steps after a short interactive prompt in which others may come, so that steps stay small."""
HEADROOM = 64
"""Tokens of room beyond its known ones that a sequence needs to be admitted, so that it is not put aside at once."""
PATIENCE = 8
"""After so many refusals for want of memory nobody else is admitted before this sequence."""
WAITS = 16
"""Steps for which a sequence waits at most for another one that computes a beginning both have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSettings:
    """How a step is filled."""

    max_sequences: int = setting(64, "sequences that run at a time; others wait")
    step_tokens: int = setting(512, "tokens of prompts in a step where nothing decodes")
    mixed_tokens: int = setting(128, "the same in a step that also decodes, or soon after a short prompt: what bounds others' wait")
    careful_tokens: int = setting(64, "tokens of long prompts in a step soon after a short one: what bounds the wait of the next short one")
    interactive_share: float = setting(0.75, "share of the prompts' budget that the interactive class earns while both have work")

    def __post_init__(self) -> None:
        for name in ("step_tokens", "mixed_tokens", "careful_tokens"):
            if getattr(self, name) < PIECE:
                raise ConfigError(f"'{name}' is {getattr(self, name)}; a step takes prompts in pieces of {PIECE}, use at least that")
        if self.max_sequences < 1:
            raise ConfigError(f"'max_sequences' is {self.max_sequences}; use at least 1")
        if not 0 < self.interactive_share < 1:
            raise ConfigError(f"'interactive_share' is {self.interactive_share}; it must be between 0 and 1, or one class would starve")

    def share(self, priority: Priority) -> float:
        """A class's share."""
        return self.interactive_share if priority == "interactive" else 1 - self.interactive_share


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens `start` to `stop` of a sequence: what it brings to a step."""

    running: Running
    start: int
    stop: int


class Scheduler:
    """Sequences that wait, sequences that run, and the memory that the latter have."""

    def __init__(self, settings: ScheduleSettings, cache: PrefixCache, max_tokens: int, logprob_rows: int):
        self.settings, self.cache, self._max_tokens = settings, cache, max_tokens
        self._logprob_rows = max(PIECE, logprob_rows // PIECE * PIECE)
        self.reuse = True
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Running] = {}
        self.impossible: list[tuple[Sequence, str]] = []
        self.steps = self.preemptions = self._releases = 0
        self._short_at = -CAREFUL  # the step that last worked on a short interactive prompt
        self._passed = 0  # steps in a row that took short prompts while long ones of their class waited
        self._credit: dict[Priority, float] = dict.fromkeys(PRIORITIES, 0.0)

    def add(self, sequence: Sequence) -> None:
        """A sequence waits from now on."""
        request = sequence.request
        if self.reuse and request.cache and not request.prompt_logprobs:
            sequence.known = self.cache.known(sequence.tokens, request.salt)
        self.waiting[sequence.order] = sequence

    def join(self, running: Running) -> None:
        """A fork runs from now on."""
        self.running[running.sequence.order] = running

    def remove(self, sequence: Sequence, keep: bool = True) -> None:
        """A sequence ends; `keep` says whether what it computed stays in the cache."""
        self.waiting.pop(sequence.order, None)
        running = self.running.pop(sequence.order, None)
        if running is not None:
            running.held.close(keep=keep)
            self._releases += 1

    @property
    def full(self) -> bool:
        """Whether no more sequences may run."""
        return len(self.running) >= self.settings.max_sequences

    def plan(self) -> list[Chunk]:
        """What goes through the model now; pages for all of it are reserved. `impossible` receives those that can never fit."""
        self.steps += 1
        before = self.preemptions
        decoding = self._decoding()
        chunks = [Chunk(running, running.held.length, running.held.length + 1) for running in decoding]
        careful = self.steps - self._short_at < CAREFUL
        budget = self.settings.mixed_tokens if decoding or careful else self.settings.step_tokens
        long = min(budget, self.settings.careful_tokens) if careful else budget
        return chunks + self._prompts(budget, long, admit=self.preemptions == before)

    def _decoding(self) -> list[Running]:
        """Those that decode, with room for one more token each."""
        ready: list[Running] = []
        for running in sorted(self.running.values(), key=lambda running: running.sequence.rank):
            if running.decoding and running.sequence.order in self.running and self._grow(running):
                ready.append(running)
        return ready

    def _grow(self, running: Running) -> bool:
        """Room for one more token, if need be by putting others aside; `False` when it was this one's turn to go."""
        while not running.held.reserve(1):
            last = max(self.running.values(), key=lambda other: other.sequence.rank)
            self.remove(last.sequence)
            self.preemptions += 1
            last.sequence.refused_at = -1
            self.add(last.sequence)
            if last is running:
                return False
        return True

    def _prompts(self, budget: int, long: int, admit: bool) -> list[Chunk]:
        """Deal the budget in pieces, at most `long` of it to prompts that are not short."""
        groups = {priority: self._ordered(priority, admit) for priority in PRIORITIES}
        self._earn(budget, [priority for priority in PRIORITIES if groups[priority]])
        patient, behind = self._passed < OLDEST_EVERY - 1, any(not self._short(entry) for entry in groups["interactive"])
        planned: dict[int, Chunk] = {}
        while budget > 0 and any(groups.values()):
            priority = max((p for p in PRIORITIES if groups[p]), key=lambda p: self._credit[p])
            entry, group = groups[priority][0], groups[priority]
            waits = priority == "interactive" and patient and self._short_at == self.steps  # a short one's step
            if not self._short(entry) and (waits or long <= 0):
                group.popleft()
                continue
            running = entry if isinstance(entry, Running) else self._admit(entry)
            if running is None:
                group.popleft()
                continue
            group[0] = running
            sequence, short = running.sequence, self._short(running)
            start, done = running.held.length, planned[sequence.order].stop if sequence.order in planned else running.held.length
            stop = min(len(sequence.tokens), (done // PIECE + 1) * PIECE)
            if stop - done > budget:
                break
            if not short and stop - done > long:
                group.popleft()
                continue
            planned[sequence.order] = Chunk(running, start, stop)
            budget -= stop - done
            self._credit[priority] -= stop - done
            if short:
                self._short_at = self.steps
            else:
                long -= stop - done
                behind = behind and priority != "interactive"
            full = sequence.request.prompt_logprobs and stop - start >= self._logprob_rows
            shares = not short and any(self._short(other) for other in group)  # an oldest one's turn; the others have theirs
            if stop == len(sequence.tokens) or full or shares:
                group.popleft()
        self._passed = self._passed + 1 if behind else 0
        return list(planned.values())

    def _ordered(self, priority: Priority, admit: bool) -> deque[Running | Sequence]:
        """A class's prompts in the order in which they are served in this step."""
        found: list[tuple[bool, int, int, Running | Sequence]] = [
            (not running.sequence.outputs, running.left, order, running) for order, running in self.running.items()
            if running.sequence.request.priority == priority and not running.decoding
        ]
        if admit and not self.full:
            found += [(not s.outputs, len(s.tokens) - s.known, order, s) for order, s in self.waiting.items()
                      if s.request.priority == priority and s.refused_at != self._releases]
        oldest = self._passed >= OLDEST_EVERY - 1 or self.steps % OLDEST_EVERY == 0 and not any(self._short(entry[3]) for entry in found)
        found.sort(key=lambda entry: entry[2] if oldest else entry[:3])
        return deque(entry[3] for entry in found)

    def _short(self, entry: Running | Sequence) -> bool:
        """Whether a prompt is an interactive one that takes no more than a large step from its beginning to its end."""
        sequence, known = (entry.sequence, entry.held.cached_tokens) if isinstance(entry, Running) else (entry, entry.known)
        return sequence.request.priority == "interactive" and len(sequence.tokens) - known <= self.settings.step_tokens

    def _earn(self, budget: int, active: list[Priority]) -> None:
        """Classes with work earn their share; a class alone, or without work, neither saves nor owes."""
        total = sum(self.settings.share(priority) for priority in active)
        for priority in PRIORITIES:
            if len(active) < 2 or priority not in active:
                self._credit[priority] = 0.0
            else:
                earned = self._credit[priority] + budget * self.settings.share(priority) / total
                self._credit[priority] = min(max(earned, -budget), float(budget))

    def _admit(self, sequence: Sequence) -> Running | None:
        """A state and pages for a waiting sequence, or `None` where it has to wait on."""
        held_up = [other for other in self.waiting.values() if other.refusals >= PATIENCE]
        if self.full or (held_up and min(held_up, key=lambda other: other.order) is not sequence):
            return None
        request, tokens = sequence.request, sequence.tokens
        reuse = self.reuse and request.cache and not request.prompt_logprobs
        if reuse and self._awaits(sequence):
            return None
        try:
            held = self.cache.open(tokens, salt=request.salt, boundaries=request.boundaries, reuse=reuse)
        except CapacityError as error:
            self._refuse(sequence, str(error))
            return None
        reach = min(len(tokens) + HEADROOM, len(request.prompt) + request.sampling.max_tokens, self._max_tokens)
        if not held.reserve(reach - held.length):
            held.close(keep=False)
            self._refuse(sequence, f"{len(tokens)} tokens do not fit in the memory of {self.cache.memory.budget_bytes} bytes")
            return None
        del self.waiting[sequence.order]
        running = self.running[sequence.order] = Running(sequence, held)
        sequence.refusals = 0
        if len(sequence.prompt_logprobs) < len(request.prompt) - 1:
            sequence.prompt_logprobs.clear()  # it was put aside amid its prompt and begins again
        return running

    def _awaits(self, sequence: Sequence) -> bool:
        """Whether a running prompt is about to compute the block that this one would begin with: after that it can be shared."""
        block, tokens = self.cache.settings.hash_block, sequence.tokens
        for running in self.running.values() if sequence.waits < WAITS else ():
            other, reach = running.sequence, (running.held.length // block + 1) * block
            shared = other.request.cache and not other.request.prompt_logprobs and not other.outputs
            shared = shared and other.request.salt == sequence.request.salt
            if shared and reach < len(tokens) and reach <= len(other.tokens) and tokens[:reach] == other.tokens[:reach]:
                sequence.waits += 1
                return True
        return False

    def _refuse(self, sequence: Sequence, reason: str) -> None:
        sequence.refusals += 1
        sequence.refused_at = self._releases
        if not self.running:
            del self.waiting[sequence.order]
            self.impossible.append((sequence, reason))
