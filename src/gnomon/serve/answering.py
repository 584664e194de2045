"""One request while it is answered: its choices run beside each other, and what they say is taken out in batches.

A slow listener does not hold the engine up: what has not been taken waits here, and the next batch is larger. Read next: `reading.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from gnomon.data.chat import Parser
from gnomon.data.dialects.asked import Asked, Cost, Head, TokenLogprob
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import GnomonError
from gnomon.serve.admission import Busy, Ticket
from gnomon.serve.reading import Ended, Reader, Said, shown
from gnomon.serve.request import Event, Finished, Request, Sampled, Seen, Started, Usage


class Failed(GnomonError):
    """The engine could not finish a request through no fault of the client."""


class Events(Protocol):
    """Where the events of requests come from; `live.py` has the real one."""

    def stream(self, request: Request) -> AsyncGenerator[Event, None]:
        """Run a request; closing the iterator cancels it. Raises `ConfigError` or `CapacityError` for one that cannot be."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request early; its stream still brings `Finished`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt in tokens, and how what follows it is read. `text` is what `echo` says again."""

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()
    parser: Callable[[], Parser]
    stop_ids: frozenset[int]
    text: str = ""
    images: tuple[Seen, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Began:
    """The first thing that happens. `cost` has what is known of the prompt; `known` says that this includes what was cached."""

    cost: Cost
    known: bool


Update = Began | Said | Ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What every answer of a server has in common; `between_tokens` hears the seconds between two tokens of a choice."""

    events: Events
    tokenizer: Tokenizer
    between_tokens: Callable[[float], None]


class Answer:
    """An answer on its way; `batches` runs it. The ticket of admission is given back when they end, however they end."""

    def __init__(self, source: Source, asked: Asked, head: Head, work: Sequence[tuple[Prompt, Request]], ticket: Ticket) -> None:
        self.asked = asked
        self.head = head
        self._events = source.events
        self._tokenizer = source.tokenizer
        self._between_tokens = source.between_tokens
        self.usage: Usage | None = None  # the first choice's, for the log
        self.reasons: list[str] = []
        self._work = work
        self._ticket = ticket
        self._updates: list[Update] = []
        self._wake = asyncio.Event()
        self._began = False
        self._nudged = False
        self._running = len(work)
        self._failure: GnomonError | None = None
        self._held: dict[int, list[Said]] = {}
        self._cached: dict[int, tuple[int, str]] = {}  # by the first choice of each prompt
        self._readers: list[Reader] = []

    def cost(self) -> Cost:
        """What the answer took so far. A prompt counts once for all its choices."""
        leaders = [index for index in range(len(self._work)) if index % self.asked.n == 0]
        return Cost(
            prompt_tokens=sum(len(self._work[index][0].tokens) for index in leaders),
            cached_tokens=sum(self._cached.get(index, (0, ""))[0] for index in leaders),
            output_tokens=sum(reader.output_tokens for reader in self._readers),
            reasoning_tokens=sum(reader.reasoning_tokens for reader in self._readers), cache_note=self._cached.get(0, (0, ""))[1],
        )

    async def batches(self) -> AsyncGenerator[list[Update], None]:
        """What happens, as it happens; an empty batch after a `nudge`. Closing the iterator cancels what still runs.

        Raises `Failed`, or what the engine refused."""
        tasks: list[asyncio.Task[None]] = []
        prompt_known = asyncio.Event()
        try:
            for index, (prompt, request) in enumerate(self._work):
                self._readers.append(Reader(index, prompt.parser(), self._tokenizer, self.asked))
                if self._leads(index):
                    prompt_known = asyncio.Event()  # the choices of a prompt begin once its first one has computed it
                tasks.append(asyncio.create_task(self._run(index, request, prompt_known)))
            while self._running and self._failure is None:
                await self._wake.wait()
                self._wake.clear()
                updates, self._updates = self._updates, []
                nudged, self._nudged = self._nudged, False
                if updates or nudged:
                    yield updates
            if self._failure is not None:
                raise self._failure
            await asyncio.gather(*tasks)  # a fault of ours has ended its task, and must be heard of
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.release()

    def release(self) -> None:
        """Give the place back; for an answer whose batches never began."""
        self._ticket.release()

    def nudge(self) -> None:
        """Let the listener have a batch although nothing happened."""
        self._nudged = True
        self._wake.set()

    def _leads(self, index: int) -> bool:
        return index % self.asked.n == 0

    async def _run(self, index: int, request: Request, prompt_known: asyncio.Event) -> None:
        """One choice, from its request to its end."""
        reader, last = self._readers[index], 0.0
        try:
            if not self._leads(index):
                await prompt_known.wait()
            async with aclosing(self._events.stream(request)) as events:
                async for event in events:
                    if isinstance(event, Sampled):
                        now = time.perf_counter()
                        if last:
                            self._between_tokens(now - last)
                        last = now
                        prompt_known.set()
                        self._sampled(index, reader, event, request)
                    elif isinstance(event, Started):
                        self._cached[index] = event.cached_tokens, event.cache_note
                        self._begin()
                    else:
                        self._finished(index, reader, event)
                        return
            raise Failed("the engine stopped before the answer was complete; try again")
        except GnomonError as error:
            self._failure = self._failure or error
        finally:
            prompt_known.set()
            self._running -= 1
            if not self._running:
                self.release()  # what the listener has not taken yet is no work for the engine
            self._wake.set()

    def _begin(self) -> None:
        if not self._began:
            self._began = True
            self._updates.append(Began(cost=self.cost(), known=0 in self._cached))
            self._wake.set()

    def _sampled(self, index: int, reader: Reader, event: Sampled, request: Request) -> None:
        self._begin()
        if reader.done or self.asked.max_tokens == 0:  # sampled before a cancellation arrived, or not wanted at all
            return
        self._say(index, reader.token(event))
        if reader.done:
            self._events.cancel(request.id)

    def _say(self, index: int, pieces: Sequence[Said]) -> None:
        """Hand out pieces; where the prompt is echoed, it comes first, and its log-probabilities are known at the end only."""
        if self.asked.echo:
            self._held.setdefault(index, []).extend(pieces)
        elif pieces:
            self._updates += pieces
            self._wake.set()

    def _finished(self, index: int, reader: Reader, event: Finished) -> None:
        if self._leads(index):
            self._cached[index] = event.usage.cached_tokens, event.usage.cache_note
        if index == 0:
            self.usage = event.usage
        if event.reason == "error":
            raise Failed(f"the engine failed: {event.error}")
        if event.reason == "cancelled" and not reader.done:
            raise Busy("the server is shutting down; try another one, or later", 5, draining=True)
        self._begin()
        pieces, ended = reader.finish(event.reason)
        if self.asked.echo:
            prompt = self._work[index][0]
            self._updates += [reader.echo(prompt.text, self._scored(prompt, event)), *self._held.pop(index, [])]
            ended = replace(ended, reply=replace(ended.reply, text=prompt.text + ended.reply.text))
        self._updates += [*pieces, ended]
        self.reasons.append(ended.ending.reason)

    def _scored(self, prompt: Prompt, event: Finished) -> list[TokenLogprob]:
        if self.asked.top_logprobs is None:
            return []
        values = [None, *(event.prompt_logprobs or [None] * (len(prompt.tokens) - 1))]
        return [shown(self._tokenizer, token, value) for token, value in zip(prompt.tokens, values, strict=True)]
