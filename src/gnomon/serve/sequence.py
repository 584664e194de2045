"""A request on its way: its tokens so far, and what decides how it ends. Read next: `scheduler.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnomon.data.tokenizer import Tokenizer
from gnomon.serve.constrain import Constraint
from gnomon.serve.held import Held
from gnomon.serve.request import PRIORITIES, Finished, Reason, Request, Usage
from gnomon.serve.sampler import Bent, Draw


@dataclass(slots=True, eq=False)
class Sequence:
    """A request that was accepted; `order` counts arrivals. It waits until it is a `Running`, and may wait again when memory runs out.

    `followers` are requests with the same prompt that wait for this one's prompt to be computed and then fork from it. `known` is how
    many of its tokens the cache had when it began to wait.
    """

    request: Request
    order: int
    arrived: float
    tokens: list[int]
    bent: Bent | None = None
    constraint: Constraint | None = None
    stop_ids: frozenset[int] = frozenset()
    ending: Ending | None = None
    followers: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    started: float | None = None
    first_token: float | None = None
    cached_tokens: int = 0
    cache_note: str = ""
    refusals: int = 0
    waits: int = 0
    known: int = 0
    refused_at: int = -1
    rank: tuple[int, int] = field(init=False)  # who keeps its memory: interactive before batch, then who came first

    def __post_init__(self) -> None:
        self.rank = PRIORITIES.index(self.request.priority), self.order

    @property
    def outputs(self) -> int:
        """Tokens that were sampled."""
        return len(self.tokens) - len(self.request.prompt)

    def draw(self, row: int) -> Draw:
        """The next token, from this row of logits. Raises `ConfigError` when the grammar cannot go on."""
        allowed = None if self.constraint is None else self.constraint.allowed()
        sampling = self.request.sampling
        return Draw(row=row, step=sampling.first_draw + self.outputs, sampling=sampling, bent=self.bent, allowed=allowed)

    def take(self, token: int, limit: int) -> tuple[Reason | None, str | None]:
        """Add a sampled token; why the sequence ends with it, if it does, and the stop string. `limit` is the context's."""
        self.tokens.append(token)
        if self.bent is not None:
            self.bent.add(token)
        if token in self.stop_ids:
            return "stop", None
        complete = self.constraint is not None and self.constraint.add(token)
        if (found := None if self.ending is None else self.ending.add(token)) is not None:
            return "stop", found
        if complete:
            return "stop", None
        full = self.outputs >= self.request.sampling.max_tokens or len(self.tokens) >= limit
        return ("length" if full else None), None

    def finished(self, reason: Reason, now: float, stop_string: str | None = None, error: str | None = None) -> Finished:
        """The last event."""
        first = None if self.first_token is None else self.first_token - self.arrived
        usage = Usage(
            prompt_tokens=len(self.request.prompt), cached_tokens=self.cached_tokens, output_tokens=self.outputs,
            cache_note=self.cache_note,
            queue_seconds=(now if self.started is None else self.started) - self.arrived, first_token_seconds=first,
            seconds=now - self.arrived,
        )
        whole = self.request.prompt_logprobs and len(self.prompt_logprobs) == len(self.request.prompt) - 1
        return Finished(reason=reason, usage=usage, stop_string=stop_string, error=error,
                        prompt_logprobs=tuple(self.prompt_logprobs) if whole else None)


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A sequence that has a state and pages."""

    sequence: Sequence
    held: Held

    @property
    def left(self) -> int:
        """Known tokens that did not go through the model yet."""
        return len(self.sequence.tokens) - self.held.length

    @property
    def decoding(self) -> bool:
        """Whether the last sampled token is all that is left."""
        return self.left == 1 and self.sequence.outputs > 0


class Ending:
    """Looks for stop strings in the bytes of the output, across tokens."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]):
        self._tokenizer = tokenizer
        self._stop = [(text.encode(), text) for text in stop if text]
        self._kept = max((len(text) for text, _ in self._stop), default=1) - 1
        self._tail = b""

    def add(self, token: int) -> str | None:
        """The stop string that is complete with this token, the one that begins first."""
        self._tail += self._tokenizer.decode_bytes([token])
        found = [(at, text) for raw, text in self._stop if (at := self._tail.find(raw)) >= 0]
        self._tail = self._tail[max(0, len(self._tail) - self._kept) :]
        return min(found)[1] if found else None
