"""An engine that says what a test wrote, for tests of everything above the engine; and a model's words as the tokens that say them."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from gnomon.data.chat import ChatFormat
from gnomon.data.messages import Conversation, Message, Text, ToolCall
from gnomon.serve.request import Event, Finished, Reason, Request, Sampled, Started, Usage

Script = Callable[[Request], Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Numbers such as an engine tells."""

    running: int
    steps: int


@dataclass
class ScriptedEngine:
    """Says the tokens of `script`, one every `pause` seconds. `cached` is what it claims to have known; `fails` is an exception to raise at
    once, `error` the text of a failure after the last token. What was asked of it stands in `requests`, `cancelled`, `live`."""

    script: Script
    max_tokens: int = 4096
    pause: float = 0.0
    cached: int = 0
    note: str = "nothing like it was seen before"
    early: bool = True
    fails: Exception | None = None
    error: str | None = None
    requests: list[Request] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)

    async def stream(self, request: Request) -> AsyncGenerator[Event, None]:
        """Say it."""
        if self.fails is not None:
            raise self.fails
        self.requests.append(request)
        self.live.add(request.id)
        began = time.perf_counter()
        said = 0
        reason: Reason = "stop"
        try:
            if self.early:
                yield Started(cached_tokens=self.cached, cache_note=self.note)
            for token in self.script(request):
                if request.id in self.cancelled or said == request.sampling.max_tokens:
                    break
                await asyncio.sleep(self.pause)
                top = request.sampling.top_logprobs
                yield Sampled(id=token, logprob=-0.5, top=() if not top else tuple((token + i, -0.5 - i) for i in range(top)))
                said += 1
                if token in request.sampling.stop_ids:
                    break
            else:
                reason = "length" if said == request.sampling.max_tokens else "stop"
            if request.id in self.cancelled:
                reason = "cancelled"
            elif said == request.sampling.max_tokens:
                reason = "length"
            usage = Usage(prompt_tokens=len(request.prompt), cached_tokens=self.cached, output_tokens=said, cache_note=self.note,
                          queue_seconds=0.0, first_token_seconds=0.01, seconds=time.perf_counter() - began)
            scored = tuple(-1.0 / (i + 1) for i in range(len(request.prompt) - 1)) if request.prompt_logprobs else None
            yield Finished(reason="error" if self.error else reason, usage=usage, prompt_logprobs=scored, error=self.error)
        except (GeneratorExit, asyncio.CancelledError):
            self.closed.add(request.id)
            raise
        finally:
            self.live.discard(request.id)

    def cancel(self, request_id: str) -> None:
        """End one early."""
        self.cancelled.add(request_id)

    def stats(self) -> Stats:
        """Two numbers."""
        return Stats(running=len(self.live), steps=len(self.requests))


def spoken(chat: ChatFormat, text: str = "", *, reasoning: str | None = None, calls: Sequence[ToolCall] = ()) -> tuple[int, ...]:
    """The tokens with which a model says this, thinking if `reasoning` is given."""
    user = Message(role="user", content=(Text(text="hello"),))
    content = (Text(text=text),) if text else ()
    reply = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls))
    thinking = reasoning is not None
    whole = chat.encode(Conversation(messages=(user, reply), thinking=thinking), generate=False).tokens
    opened = chat.encode(Conversation(messages=(user,), thinking=thinking)).tokens
    assert whole[:len(opened)] == opened
    return whole[len(opened):]


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)
