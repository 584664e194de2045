"""What OpenAI's APIs have in common: sampling options, usage, log-probabilities and the shape of an error.

Fields that OpenAI does not have but other servers of this API do keep their names there: `top_k`, `min_p`, `repetition_penalty`,
`cache_salt`. Ours alone: `regex`, `cache`, `priority`, `deadline_seconds`. Read next: `openai_chat.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.data.dialects.asked import Asked, Cost, Ending, Refused, TokenLogprob
from gnomon.data.dialects.fields import Fields, shown, wrong

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_TOKENS = 2**31 - 1
MOST_TOP_LOGPROBS = 20
PRIORITIES = ("interactive", "batch")
EFFORTS = ("none", "low", "medium", "high", "max")
# Known to OpenAI's API and without effect on the answer here: nothing is stored, billed or predicted.
WITHOUT_EFFECT = ("metadata", "moderation", "prediction", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
                  "service_tier", "store", "verbosity")


def sampling(body: Fields) -> dict[str, Any]:
    """The options of `Asked` that chat and plain completions spell alike."""
    session = body.text("prompt_cache_key") or body.text("user")
    body.without_effect("user", *WITHOUT_EFFECT)
    seed = body.integer("seed", -2**63, 2**64)
    cache = body.flag("cache")
    return {
        "model": body.text("model"),
        "temperature": body.number("temperature", 0, 100), "top_p": share(body, "top_p"), "top_k": top_k(body),
        "min_p": body.number("min_p", 0, 1), "repetition_penalty": body.number("repetition_penalty", 0.01, 100),
        "presence_penalty": body.number("presence_penalty", -2, 2), "frequency_penalty": body.number("frequency_penalty", -2, 2),
        "logit_bias": _logit_bias(body), "seed": None if seed is None else seed % 2**63, "stop": body.texts("stop", MOST_STOPS),
        "n": body.integer("n", 1, MOST_CHOICES) or 1, **streaming(body), "regex": body.text("regex"), "session": session,
        "salt": body.text("cache_salt") or "", "cache": cache is not False,
        "priority": body.choice("priority", PRIORITIES) or "interactive",
        "deadline_seconds": body.number("deadline_seconds", 0.001, 1e6),
    }


def one_constraint(asked: Asked, place: str) -> None:
    """Refuse a regular expression beside a response format at `place`: both would bind the answer."""
    if asked.regex is not None and asked.conversation is not None and asked.conversation.response_format is not None:
        raise Refused(f"'regex' and '{place}' are both given; keep one", "regex")


def streaming(body: Fields) -> dict[str, Any]:
    """`stream` and `stream_options.include_usage`."""
    stream = bool(body.flag("stream"))
    options = body.object("stream_options")
    if options is not None and not stream:
        raise Refused("'stream_options' is only for 'stream': true; leave it out or stream", "stream_options")
    return {"stream": stream, "include_usage": bool(options and options.flag("include_usage"))}


def share(body: Fields, name: str) -> float | None:
    """A number above 0 and at most 1, such as `top_p`."""
    value = body.number(name, 0, 1)
    if value == 0:
        raise Refused(f"'{name}' is 0; it must be above 0 and at most 1 (use 'temperature': 0 for the likeliest token)", name)
    return value


def top_k(body: Fields) -> int | None:
    """`top_k`: 0 and -1 are no limit."""
    value = body.integer("top_k", -1, MOST_TOKENS)
    return 0 if value == -1 else value  # other servers write "no limit" as -1


def _logit_bias(body: Fields) -> tuple[tuple[int, float], ...]:
    entries = body.object("logit_bias")
    if entries is None:
        return ()
    for name in entries.table:
        if not (isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10):
            raise Refused(f"'logit_bias' has the key {shown(name)}; keys are token ids", "logit_bias")
    found = ((int(name), entries.number(name, -100, 100)) for name in entries.table)
    return tuple((index, bias) for index, bias in found if bias is not None)


def usage(cost: Cost) -> dict[str, Any]:
    """OpenAI's usage. `cache_note`, which says why not more was cached, is an extension."""
    return {
        "prompt_tokens": cost.prompt_tokens,
        "completion_tokens": cost.output_tokens,
        "total_tokens": cost.prompt_tokens + cost.output_tokens,
        "prompt_tokens_details": {"cached_tokens": cost.cached_tokens, "cache_note": cost.cache_note},
        "completion_tokens_details": {"reasoning_tokens": cost.reasoning_tokens},
    }


def logprob(token: TokenLogprob) -> dict[str, Any]:
    """A token's log-probability as chat completions show it; `token_id` is an extension."""
    entry = _logprob(token)
    entry["top_logprobs"] = [_logprob(other) for other in token.top]
    return entry


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.raw), "token_id": token.id}


def finite(value: float | None) -> float | None:
    """A log-probability for JSON, which has no infinity: -inf becomes -9999, as OpenAI writes it."""
    return value if value is None or math.isfinite(value) else -9999.0


def logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` of a choice: those of the answer in `content`, those of the thinking beside it (an extension)."""
    return {
        "content": [logprob(token) for token in tokens if not token.thinking], "refusal": None,
        "reasoning_content": [logprob(token) for token in tokens if token.thinking],
    }


def stop_reason(ending: Ending) -> str | None:
    """The extension beside `finish_reason`: the stop string that matched, or `deadline`."""
    return "deadline" if ending.reason == "deadline" else ending.stop_string


def finish_reason(ending: Ending) -> str:
    """`stop` or `length`; a deadline cut the answer as a limit of length does."""
    return "stop" if ending.reason == "stop" else "length"


def error(status: int, message: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def refuse_old(body: Fields, names: Mapping[str, str]) -> None:
    """Refuse fields that the API has dropped or that cannot be honoured here, each with its remedy."""
    for name, why in names.items():
        body.refuse(name, why)


def require_texts(value: Any, place: str) -> list[Any]:
    """A list that is not empty."""
    if not isinstance(value, list):
        raise wrong(place, value, "a list")
    if not value:
        raise Refused(f"'{place}' is empty; give at least one", place)
    return value
