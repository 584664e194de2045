"""Two small demonstrations for the tour: a conversation that shows what the prefix cache saves, and a picture that a model describes.

Read next: `engine.py`, `prefix.py`; `gnomon serve RUN` puts an API before the same engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image as Picture
from rich.text import Text as Coloured

from gnomon.data.chat import ChatFormat, chat_format
from gnomon.data.drawing import png
from gnomon.data.messages import Conversation, Image, Message, Text
from gnomon.data.picture_tasks import Shown, stills
from gnomon.data.tokenizer import Tokenizer
from gnomon.model.multimodal import PAD, Eye
from gnomon.serve.cache_settings import CacheSettings
from gnomon.serve.engine import Engine
from gnomon.serve.prefix import PrefixCache
from gnomon.serve.request import Finished, Request, Sampled, Sampling, Usage
from gnomon.serve.runner import Runner
from gnomon.serve.seeing import Sight
from gnomon.serve.settings import SightSettings

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


def describe(runner: Runner, eye: Eye, tokenizer: Tokenizer, tasks: Sequence[Shown]) -> list[str]:
    """What a model says to pictures and questions, the likeliest token at every place, as `gnomon chat --image` would."""
    chat, engine = chat_format(tokenizer), Engine(runner, None, None, tokenizer)
    sight = Sight(eye, tokenizer.special_ids[PAD], SightSettings())
    said = []
    try:
        for task in tasks:
            content = [Text(text=part) if isinstance(part, str) else Image(data=png(part), media_type="image/png")
                       for part in (*stills(task.parts), task.question)]
            user = Message(role="user", content=tuple(content))
            prompt, boundaries, seen = sight.place(chat.encode(Conversation(messages=(user,), thinking=False), images=True))
            request = Request(id="picture", prompt=prompt, boundaries=boundaries, images=seen, cache=False,
                              sampling=Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, stop_ids=frozenset(tokenizer.stop_ids)))
            closes = {tokenizer.eos_id, *chat.answer_closes}
            said.append(tokenizer.decode([token for token in _answer(engine, request)[0] if token not in closes]))
    finally:
        sight.close()
    return said


def in_blocks(picture: Picture.Image) -> Coloured:
    """A picture for a terminal: one column a pixel, two pixels in each character, the upper as its colour, the lower as its ground."""
    pixels = np.asarray(picture.convert("RGB"))
    text = Coloured()
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=False):
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", "rgb({},{},{}) on rgb({},{},{})".format(*above, *below))
        text.append("\n")
    return text


def _said(role: str, text: str) -> Message:
    return Message(role=role, content=(Text(text=text),))  # type: ignore[arg-type]


def _ask(engine: Engine, chat: ChatFormat, what: str, messages: Sequence[Message], *, seed: int, cache: bool = True) -> Asked:
    encoded = chat.encode(Conversation(messages=tuple(messages), thinking=False))
    sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.8, seed=seed)
    request = Request(id=what, prompt=encoded.tokens, boundaries=encoded.boundaries, sampling=sampling, cache=cache)
    answer, usage = _answer(engine, request)
    return Asked(what=what, prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, note=usage.cache_note,
                 first_token_seconds=usage.first_token_seconds or 0.0, answer=answer)


def _answer(engine: Engine, request: Request) -> tuple[tuple[int, ...], Usage]:
    """The tokens that answer a request, and what it took."""
    engine.submit(request)
    answer: list[int] = []
    while True:
        for _, event in engine.step():
            if isinstance(event, Sampled):
                answer.append(event.id)
            elif isinstance(event, Finished):
                return tuple(answer), event.usage
