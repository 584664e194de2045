"""OpenAI's plain completions: text, or token ids, continued as they are. No chat format, no channels, no tools.

Token ids in `prompt` and `token_ids` beside the log-probabilities (an extension) make this the door for programs that measure a model.
With `echo` and `logprobs` the prompt's own log-probabilities come back; their alternatives are not kept and are null. `max_tokens` 0 goes
with `echo`: score the prompt and add nothing. `stop_token_ids` and `ignore_eos` are named as in other servers of this API; `first_draw` is
ours: the number of the first draw under `seed`, so that a sequence that is asked for in pieces is the one that is asked for at once.
Read next: `openai_options.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.data.chat import Delta, Reply, TextDelta
from gnomon.data.dialects import openai_options as options
from gnomon.data.dialects.asked import Asked, Choice, Cost, Ending, Head, Refused, Sent, TokenLogprob
from gnomon.data.dialects.fields import Fields, wrong
from gnomon.data.dialects.openai_options import error

__all__ = ["Stream", "error", "read", "stream", "whole"]

MOST_PROMPTS = 128
DEFAULT_TOKENS = 16  # OpenAI's
MOST_LOGPROBS = 20
MOST_STOP_IDS = 256


def read(body: Mapping[str, Any]) -> Asked:
    """What a body of `POST /v1/completions` asks. Raises `Refused` naming field, value and remedy."""
    fields = Fields(body)
    chosen = options.sampling(fields)
    echo = bool(fields.flag("echo"))
    tokens = fields.integer("max_tokens", 0 if echo else 1, options.MOST_TOKENS)
    best = fields.integer("best_of", 1, options.MOST_CHOICES)
    if best not in (None, chosen["n"]):
        raise Refused(f"'best_of' is {best}; every choice is returned: leave it out, or make it 'n' ({chosen['n']})", "best_of")
    fields.refuse("suffix", "is not supported: the model only continues; leave it out")
    asked = Asked(prompts=prompts(fields), max_tokens=DEFAULT_TOKENS if tokens is None else tokens, echo=echo,
                  top_logprobs=fields.integer("logprobs", 0, MOST_LOGPROBS), stop_token_ids=_stop_ids(fields),
                  ignore_eos=bool(fields.flag("ignore_eos")),
                  first_draw=fields.integer("first_draw", 0, options.MOST_TOKENS) or 0, **chosen)
    fields.refuse_rest()
    return asked


def _stop_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.get("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(_is_id(item) and 0 <= item <= options.MOST_TOKENS for item in value):
        raise wrong("stop_token_ids", value, "a list of token ids")
    if len(value) > MOST_STOP_IDS:
        raise Refused(f"'stop_token_ids' has {len(value)} ids; give at most {MOST_STOP_IDS}", "stop_token_ids")
    return tuple(value)


def prompts(fields: Fields, name: str = "prompt") -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of either."""
    value = fields.require(name)
    if isinstance(value, str):
        return (value,)
    items = options.require_texts(value, name)
    if all(_is_id(item) for item in items):
        return (tuple(items),)
    if len(items) > MOST_PROMPTS:
        raise Refused(f"'{name}' has {len(items)} prompts; send at most {MOST_PROMPTS} at a time", name)
    return tuple(_prompt(item, f"{name}[{i}]") for i, item in enumerate(items))


def _prompt(item: Any, place: str) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and item and all(_is_id(entry) for entry in item):
        return tuple(item)
    raise wrong(place, item, "a text or a list of token ids")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def stream(asked: Asked, head: Head) -> Stream:
    """The stream of one answer."""
    return Stream(asked, head)


class Stream:
    """An answer as `text_completion` chunks, closed by `[DONE]`."""

    def __init__(self, asked: Asked, head: Head) -> None:
        self._asked = asked
        self._offsets: dict[int, int] = {}
        self._chunk = {"id": f"cmpl-{head.id}", "object": "text_completion", "created": head.created, "model": head.model}

    def start(self, cost: Cost) -> list[Sent]:
        """Nothing: a completion begins with its first text."""
        return []

    def delta(self, choice: int, delta: Delta, logprobs: Sequence[TokenLogprob] = ()) -> list[Sent]:
        """The chunk of one piece of text."""
        return [self._sent(choice, delta.text, None, logprobs)] if isinstance(delta, TextDelta) else []

    def finish(self, choice: int, reply: Reply, ending: Ending) -> list[Sent]:
        """The chunk with the reason."""
        return [self._sent(choice, "", ending)]

    def end(self, cost: Cost) -> list[Sent]:
        """Usage where it was asked for, and `[DONE]`."""
        last = [Sent(None, {**self._chunk, "choices": [], "usage": options.usage(cost)})] if self._asked.include_usage else []
        return [*last, Sent(None, "[DONE]")]

    def _sent(self, choice: int, text: str, ending: Ending | None, logprobs: Sequence[TokenLogprob] = ()) -> Sent:
        table = None
        if logprobs:
            offset = self._offsets.get(choice, 0)
            table = _logprobs(logprobs, offset)
            self._offsets[choice] = offset + sum(len(token.text) for token in logprobs)
        return Sent(None, {**self._chunk, "choices": [_entry(choice, text, ending, table)]})


def whole(asked: Asked, head: Head, choices: Sequence[Choice], cost: Cost) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    wanted = asked.top_logprobs is not None
    entries = [_entry(choice.index, choice.reply.text, choice.ending, _logprobs(choice.logprobs) if wanted else None) for choice in choices]
    return {"id": f"cmpl-{head.id}", "object": "text_completion", "created": head.created, "model": head.model, "choices": entries,
            "usage": options.usage(cost)}


def _entry(index: int, text: str, ending: Ending | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    reason = options.finish_reason(ending) if ending else None
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason,
            "stop_reason": options.stop_reason(ending) if ending else None}


def _logprobs(tokens: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    tops = [{other.text: options.finite(other.logprob) for other in token.top} if token.top else None for token in tokens]
    return {
        "tokens": [token.text for token in tokens], "token_logprobs": [options.finite(token.logprob) for token in tokens],
        "top_logprobs": tops, "text_offset": offsets, "token_ids": [token.id for token in tokens],
    }
