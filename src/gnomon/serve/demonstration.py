"""Asking, going on, trying again, forking: a small conversation with the engine that shows what the prefix cache saves. For the tour.

Read next: `engine.py`, `prefix.py`; `gnomon serve RUN` puts an API before the same engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.data.chat import ChatFormat, chat_format
from gnomon.data.messages import Conversation, Message, Text
from gnomon.data.tokenizer import Tokenizer
from gnomon.serve.cache_settings import CacheSettings
from gnomon.serve.engine import Engine
from gnomon.serve.prefix import PrefixCache
from gnomon.serve.request import Finished, Request, Sampled, Sampling
from gnomon.serve.runner import Runner

ANSWER_TOKENS = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request of the conversation: what it was, what it took, and the tokens that answered it."""

    what: str
    prompt_tokens: int
    cached_tokens: int
    note: str
    first_token_seconds: float
    answer: tuple[int, ...]


def converse(runner: Runner, tokenizer: Tokenizer, document: str, memory_bytes: int = 256 << 20) -> list[Asked]:
    """Ask about a document, go on, try again, ask in another branch; the last two are the first question and the fork without the cache."""
    chat = chat_format(tokenizer)
    engine = Engine(runner, None, PrefixCache.build(runner, CacheSettings(memory_bytes=memory_bytes), "tour"), tokenizer)
    opening = (_said("user", f"{document}\n\nWhat is this text about?"),)
    first = _ask(engine, chat, "a question about a long text", opening, seed=1)
    answered = (*opening, _said("assistant", tokenizer.decode(first.answer)))
    onward = (*answered, _said("user", "And what follows from it?"))
    branch = (*answered, _said("user", "Say it shorter."))
    return [
        first,
        _ask(engine, chat, "the conversation goes on", onward, seed=2),
        _ask(engine, chat, "the first question again, another answer", opening, seed=3),
        _ask(engine, chat, "a fork: another second question", branch, seed=4),
        _ask(engine, chat, "back to the first branch", onward, seed=2),
        _ask(engine, chat, "the fork, without the cache", branch, seed=4, cache=False),
    ]


def _said(role: str, text: str) -> Message:
    return Message(role=role, content=(Text(text=text),))  # type: ignore[arg-type]


def _ask(engine: Engine, chat: ChatFormat, what: str, messages: Sequence[Message], *, seed: int, cache: bool = True) -> Asked:
    encoded = chat.encode(Conversation(messages=tuple(messages), thinking=False))
    sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.8, seed=seed)
    engine.submit(Request(id=what, prompt=encoded.tokens, boundaries=encoded.boundaries, sampling=sampling, cache=cache))
    answer: list[int] = []
    while True:
        for _, event in engine.step():
            if isinstance(event, Sampled):
                answer.append(event.id)
            elif isinstance(event, Finished):
                usage = event.usage
                return Asked(what=what, prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, note=usage.cache_note,
                             first_token_seconds=usage.first_token_seconds or 0.0, answer=tuple(answer))
