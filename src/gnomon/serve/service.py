"""The service between any API and the engine: what was asked becomes requests in tokens, what was sampled becomes an answer.

`Service.open` checks and encodes a request, waits for admission and returns an `Answer`. Read next: `answering.py`, `admission.py`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from gnomon.data.chat import ChatFormat
from gnomon.data.dialects.asked import Asked, Head, Refused
from gnomon.data.messages import Conversation, Message, Text
from gnomon.data.tokenizer import Tokenizer
from gnomon.serve.admission import Admission
from gnomon.serve.answering import Answer, Events, Prompt, Source
from gnomon.serve.body import Room
from gnomon.serve.metrics import Metrics
from gnomon.serve.reading import PlainText
from gnomon.serve.request import Grammar, Request, Sampling
from gnomon.serve.seeing import Sight
from gnomon.serve.settings import ServeSettings

T = TypeVar("T")
ANYTHING = r"(.|\n)*"
"""Words of any kind: what an answer is that may call no tool."""
LONG_TEXT = 1 << 12
"""Characters from which on a prompt is encoded on a thread beside that of short ones."""


class LiveEngine(Events, Protocol):
    """What the service needs of an engine; `live.py` has the real one."""

    @property
    def max_tokens(self) -> int:
        """The longest sequence, prompt and output together."""
        ...

    def stats(self) -> object:
        """Numbers for the metrics: a dataclass."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """The weights that answer: a name for their bits where it is known, and the version that a trainer gave them."""

    fingerprint: str = ""
    version: int = 0


class Service:
    """A model that answers. Used inside one event loop; `close` when it ends."""

    def __init__(self, engine: LiveEngine, chat: ChatFormat | None, tokenizer: Tokenizer, settings: ServeSettings, name: str) -> None:
        self.engine = engine
        self.chat = chat
        self.tokenizer = tokenizer
        self.settings = settings
        self.name = name
        self.created = int(time.time())
        self.sight: Sight | None = None
        self.revision = Revision()
        self.exchange: Callable[[Path, int], Revision] | None = None
        self.admission = Admission(settings.admission)
        self.metrics = Metrics(self.admission, engine.stats)
        self._source = Source(events=engine, tokenizer=tokenizer, between_tokens=self.metrics.between_tokens.observe)
        self.room = Room(settings.limits.inside_bytes)
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")  # long prompts must not stop the event loop
        self._long_threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode-long")  # nor short ones

    @property
    def context(self) -> int:
        """The longest prompt and output together."""
        return self.engine.max_tokens

    def close(self) -> None:
        """Let go of what the service holds; the engine is its maker's."""
        for threads in (self._threads, self._long_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self.sight is not None:
            self.sight.close()

    async def open(self, asked: Asked, request_id: str, arrived: float | None = None) -> Answer:
        """An answer that is ready to be listened to; `arrived` is when its request came, in seconds of `time.perf_counter`.

        Raises `Refused` and other `ConfigError`s for what cannot be asked, `Busy` when no room comes up before its deadline.
        """
        began = time.perf_counter() if arrived is None else arrived
        self.check_model(asked.model)
        prompts = await self.prompts(asked)
        tokens = min(self._output_tokens(asked, prompt) for prompt in prompts)
        seed = secrets.randbelow(2**63) if asked.seed is None else asked.seed
        own = f"{request_id}-{secrets.token_hex(8)}"  # a client may send two requests under one id
        work = [(prompt, self._request(asked, prompt, f"{own}-{i * asked.n + j}", tokens, (seed + j) % 2**63))
                for i, prompt in enumerate(prompts) for j in range(asked.n)]
        whole = sum(len(prompt.tokens) for prompt in prompts) + tokens * len(work)
        deadline = began + self._seconds(asked)
        ticket = await self.admission.enter(asked.priority, max(len(prompt.tokens) for prompt in prompts), whole,
                                            deadline - time.perf_counter())
        left = max(deadline - time.perf_counter(), 0.0)
        work = [(prompt, replace(request, deadline_seconds=left)) for prompt, request in work]
        return Answer(self._source, asked, Head(id=request_id, created=int(time.time()), model=self.name), work, ticket)

    def check_model(self, name: str | None) -> None:
        """Raises `Refused` for a model that is not this one."""
        if name is None:
            raise Refused(f"'model' is required; this server has '{self.name}'", "model", "missing_required_parameter")
        if name != self.name:
            raise Refused(f"the model '{name[:100]}' does not exist here; this server has '{self.name}'", "model", "model_not_found")

    async def prompts(self, asked: Asked) -> list[Prompt]:
        """The tokens of what was asked. Raises what the chat format cannot say."""
        if asked.conversation is None:
            return [await self._plain(prompt, asked) for prompt in asked.prompts]
        if self.chat is None:
            raise Refused("this model's tokenizer names no markers of a chat format; use /v1/completions", "messages")
        chat, conversation = self.chat, self._with_effort(asked.conversation)
        threads = self._threads_for(sum(_length(message) for message in conversation.messages))
        if self.sight is not None and conversation.images:
            sight = self.sight
            read = await self.in_thread(lambda: sight.read(conversation), sight.readers)
            encoded = await self.in_thread(lambda: chat.encode(read, images=True), threads)
            tokens, boundaries, images = await self.in_thread(lambda: sight.place(encoded), sight.threads)
        else:
            encoded = await self.in_thread(lambda: chat.encode(conversation), threads)
            tokens, boundaries, images = encoded.tokens, encoded.boundaries, ()
        return [Prompt(tokens=tokens, boundaries=boundaries, parser=lambda: chat.parser(conversation), stop_ids=chat.stop_ids,
                       images=images)]

    async def in_thread(self, work: Callable[[], T], threads: ThreadPoolExecutor | None = None) -> T:
        """Do work that may take long beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(threads or self._threads, work)

    def _threads_for(self, characters: int) -> ThreadPoolExecutor:
        """Where a text of this length is encoded."""
        return self._long_threads if characters > LONG_TEXT else self._threads

    def _with_effort(self, conversation: Conversation) -> Conversation:
        wanted = self.settings.defaults.effort
        effort = self.chat.default_effort if wanted == "format" and self.chat is not None else wanted
        if effort is None or effort == "format" or conversation.effort is not None or not conversation.thinking:
            return conversation
        return replace(conversation, effort=effort)

    async def _plain(self, prompt: str | tuple[int, ...], asked: Asked) -> Prompt:
        if isinstance(prompt, str):
            text = prompt
            tokens = tuple(await self.in_thread(lambda: self.tokenizer.encode(text), self._threads_for(len(text))))
        else:
            tokens = prompt
            wrong = [token for token in tokens if not 0 <= token < self.tokenizer.vocab_size]
            if wrong:
                raise Refused(f"'prompt' has the token id {wrong[0]}; ids are from 0 to {self.tokenizer.vocab_size - 1}", "prompt")
        if not tokens:
            raise Refused("'prompt' is empty; give at least one token", "prompt")
        stop_ids = frozenset(asked.stop_token_ids) | frozenset(() if asked.ignore_eos else self.tokenizer.stop_ids)
        return Prompt(tokens=tokens, parser=lambda: PlainText(self.tokenizer, stop_ids), stop_ids=stop_ids,
                      text=self.tokenizer.decode(tokens) if asked.echo else "")

    def _output_tokens(self, asked: Asked, prompt: Prompt) -> int:
        """How many tokens may follow a prompt. Raises `Refused` naming limit and lengths when they do not fit the context."""
        length, wanted = len(prompt.tokens), asked.max_tokens
        least = max(wanted or 0, 1)
        if length + least > self.context:
            said = f"{wanted} of output" if wanted is not None else "at least one of output"
            raise Refused(f"the context is {self.context} tokens long and {length + least} were asked for: {length} of prompt and {said}; "
                          "shorten the prompt, or ask for less", "messages" if asked.conversation else "prompt", "context_length_exceeded")
        return least if wanted is not None else min(self.settings.limits.max_tokens, self.context - length)

    def _request(self, asked: Asked, prompt: Prompt, name: str, tokens: int, seed: int) -> Request:
        defaults = self.settings.defaults
        sampling = Sampling(
            max_tokens=tokens, temperature=_given(asked.temperature, defaults.temperature), top_p=_given(asked.top_p, defaults.top_p),
            top_k=_given(asked.top_k, defaults.top_k), min_p=_given(asked.min_p, defaults.min_p),
            repetition_penalty=_given(asked.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=_given(asked.presence_penalty, 0.0), frequency_penalty=_given(asked.frequency_penalty, 0.0),
            logit_bias=asked.logit_bias, seed=seed, first_draw=asked.first_draw,
            stop_ids=prompt.stop_ids, top_logprobs=asked.top_logprobs, grammar=self._grammar(asked),
        )
        return Request(
            id=name, prompt=prompt.tokens, sampling=sampling, boundaries=prompt.boundaries, priority=asked.priority, salt=asked.salt,
            images=prompt.images,
            deadline_seconds=self._seconds(asked), cache=asked.cache,
            prompt_logprobs=asked.echo and asked.top_logprobs is not None,
        )

    def _seconds(self, asked: Asked) -> float:
        """How long a request may take, from its arrival on."""
        longest = self.settings.limits.request_seconds
        return min(longest, _given(asked.deadline_seconds, longest))

    def _grammar(self, asked: Asked) -> Grammar | None:
        """What binds the answer: free while the model thinks, from the opening of its answer on. A call that must be made comes first."""
        chat, conversation = self.chat, asked.conversation
        if chat is None or conversation is None:
            return None if asked.regex is None else Grammar(kind="regex", text=asked.regex)
        after = chat.answer_opens if conversation.thinking else ()
        if (calls := chat.calls(conversation, parallel=asked.parallel_calls)) is not None:
            return Grammar(kind="lark", text=calls.text, after=after, closes=calls.closes)
        if asked.regex is not None:
            return Grammar(kind="regex", text=asked.regex, after=after, closes=chat.answer_closes)
        wanted = conversation.response_format
        if wanted is not None:
            text = json.dumps(wanted.schema) if wanted.schema is not None else ""
            return Grammar(kind=wanted.kind, text=text, after=after, closes=chat.answer_closes)
        if conversation.tools and conversation.tool_choice == "none" and chat.answer_closes:
            return Grammar(kind="regex", text=ANYTHING, after=after, closes=chat.answer_closes)
        return None


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _length(message: Message) -> int:
    """Characters of a message's texts."""
    return sum(len(part.text) for part in message.content if isinstance(part, Text)) + len(message.reasoning or "")
