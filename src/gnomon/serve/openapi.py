"""The description of the API for programs: what each route takes and gives, as OpenAPI. The tests try everything that it allows.

The readers in `data/dialects` are what decides; this says it in JSON Schema. Read next: `api.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.data.dialects.openai_completions import MOST_LOGPROBS, MOST_PROMPTS, MOST_STOP_IDS
from gnomon.data.dialects.openai_options import EFFORTS, MOST_CHOICES, MOST_STOPS, MOST_TOP_LOGPROBS, PRIORITIES

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
TOOL_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"}


def number(low: float, high: float, **more: Any) -> Schema:
    """A number in [low, high]."""
    return {"type": "number", "minimum": low, "maximum": high, **more}


def integer(low: int, high: int) -> Schema:
    """A whole number in [low, high]."""
    return {"type": "integer", "minimum": low, "maximum": high}


def words(*options: str) -> Schema:
    """One of some words."""
    return {"type": "string", "enum": list(options)}


def table(properties: Mapping[str, Schema], required: tuple[str, ...] = (), *, closed: bool = False) -> Schema:
    """An object; `closed` allows no other properties."""
    schema: Schema = {"type": "object", "properties": dict(properties), "required": list(required)}
    return schema | ({"additionalProperties": False} if closed else {})


def listed(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    """A list."""
    return {"type": "array", "items": items, "minItems": least} | ({} if most is None else {"maxItems": most})


PART = {"oneOf": [table({"type": words("text"), "text": TEXT}, ("type", "text")),
                  table({"type": words("image_url"), "image_url": table({"url": TEXT}, ("url",))}, ("type", "image_url"))]}
CONTENT = {"oneOf": [TEXT, listed(PART)]}
CALL = table({"id": TEXT, "type": words("function"), "function": table({"name": TOOL_NAME, "arguments": TEXT}, ("name", "arguments"))},
             ("id", "type", "function"))
TOOL = table({"type": words("function"), "function": table({"name": TOOL_NAME, "description": TEXT, "parameters": {"type": "object"}},
                                                           ("name",))}, ("type", "function"))
MESSAGE = {"oneOf": [
    table({"role": words("system", "developer", "user"), "content": CONTENT, "name": TEXT}, ("role", "content")),
    table({"role": words("assistant"), "content": CONTENT, "reasoning_content": TEXT, "tool_calls": listed(CALL)}, ("role",)),
    table({"role": words("tool"), "content": CONTENT, "tool_call_id": TEXT}, ("role", "content", "tool_call_id")),
]}
SAMPLING: dict[str, Schema] = {
    "model": TEXT, "temperature": number(0, 100), "top_p": number(0, 1, exclusiveMinimum=0), "top_k": integer(-1, 2**31 - 1),
    "min_p": number(0, 1), "repetition_penalty": number(0.01, 100), "presence_penalty": number(-2, 2), "frequency_penalty": number(-2, 2),
    "logit_bias": {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,9}$"}, "additionalProperties": number(-100, 100)},
    "seed": integer(-2**63, 2**63 - 1), "n": integer(1, MOST_CHOICES), "user": TEXT, "prompt_cache_key": TEXT, "cache_salt": TEXT,
    "stop": {"oneOf": [{"type": "string", "minLength": 1}, listed({"type": "string", "minLength": 1}, 0, MOST_STOPS)]},
    "stream": FLAG, "stream_options": table({"include_usage": FLAG}), "regex": TEXT, "cache": FLAG, "priority": words(*PRIORITIES),
    "deadline_seconds": number(0.001, 1e6),
}
CHAT = table({
    **SAMPLING, "messages": listed(MESSAGE, 1), "max_tokens": integer(1, 2**31 - 1), "max_completion_tokens": integer(1, 2**31 - 1),
    "logprobs": FLAG, "top_logprobs": integer(0, MOST_TOP_LOGPROBS), "reasoning_effort": words(*EFFORTS), "tools": listed(TOOL),
    "thinking": table({"type": words("enabled", "disabled")}), "parallel_tool_calls": FLAG,
    "tool_choice": {"oneOf": [words("auto", "none", "required"),
                              table({"type": words("function"), "function": table({"name": TOOL_NAME}, ("name",))}, ("type", "function"))]},
    "response_format": {"oneOf": [table({"type": words("text", "json_object")}, ("type",)),
                                  table({"type": words("json_schema"), "json_schema": table({"name": TEXT, "schema": {"type": "object"}},
                                                                                            ("schema",))}, ("type", "json_schema"))]},
}, ("model", "messages"), closed=True)
IDS = listed(integer(0, 2**31 - 1), 1)
COMPLETION = table({
    **SAMPLING, "prompt": {"oneOf": [TEXT, IDS, listed(TEXT, 1, MOST_PROMPTS), listed(IDS, 1, MOST_PROMPTS)]},
    "max_tokens": integer(0, 2**31 - 1), "logprobs": integer(0, MOST_LOGPROBS), "echo": FLAG, "best_of": integer(1, MOST_CHOICES),
    "stop_token_ids": listed(integer(0, 2**31 - 1), 0, MOST_STOP_IDS), "ignore_eos": FLAG, "first_draw": integer(0, 2**31 - 1),
}, ("model", "prompt"), closed=True)
# Of these two, what clients send most; the readers take everything that docs/serving.md lists.
RESPONSE = table({
    **{name: SAMPLING[name] for name in ("model", "temperature", "top_p", "stream", "seed", "cache", "priority", "user")},
    "input": {"oneOf": [
        TEXT, listed(table({"type": words("message"), "role": words("user", "system", "developer", "assistant"), "content": TEXT},
                           ("role", "content")), 1)]},
    "instructions": TEXT, "max_output_tokens": integer(1, 2**31 - 1), "reasoning": table({"effort": words(*EFFORTS)}), "store": FLAG,
    "parallel_tool_calls": FLAG, "tools": listed(table({"type": words("function"), "name": TOOL_NAME, "parameters": {"type": "object"}},
                                                       ("type", "name"))),
}, ("model", "input"))
BLOCK = table({"type": words("text"), "text": TEXT}, ("type", "text"))
COUNTED: dict[str, Schema] = {
    "model": TEXT, "system": {"oneOf": [TEXT, listed(BLOCK)]}, "messages": listed(table(
        {"role": words("user", "assistant"), "content": {"oneOf": [TEXT, listed(BLOCK, 1)]}}, ("role", "content")), 1),
    "tools": listed(table({"name": TOOL_NAME, "description": TEXT, "input_schema": {"type": "object"}}, ("name", "input_schema"))),
    "thinking": table({"type": words("enabled", "disabled", "adaptive"), "budget_tokens": integer(1, 2**31 - 1)}, ("type",)),
}
MESSAGES = table({
    **COUNTED, **{name: SAMPLING[name] for name in ("temperature", "top_p", "stream", "cache", "priority")}, "top_k": integer(0, 2**31 - 1),
    "max_tokens": integer(1, 2**31 - 1), "stop_sequences": listed({"type": "string", "minLength": 1}, 0, MOST_STOPS),
}, ("model", "messages", "max_tokens"))
ERROR = table({"error": table({"message": TEXT, "type": TEXT}, ("message", "type"))}, ("error",))
TOKENS = listed(integer(0, 2**31 - 1))
BODIES: dict[str, Schema] = {
    "/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/responses": RESPONSE, "/v1/messages": MESSAGES,
    "count_tokens": table(COUNTED, ("model", "messages")),
    "tokenize": {"anyOf": [table({"model": TEXT, "prompt": TEXT, "return_token_strs": FLAG}, ("prompt",), closed=True),
                           table({**CHAT["properties"], "return_token_strs": FLAG}, ("messages",), closed=True)]},
    "detokenize": table({"model": TEXT, "tokens": TOKENS}, ("tokens",), closed=True),
}
MODEL = table({"id": TEXT, "object": words("model"), "created": {"type": "integer"}, "owned_by": TEXT}, ("id", "object"))
ANSWERS: dict[str, Schema] = {
    "models": table({"object": words("list"), "data": listed(MODEL, 1)}, ("object", "data")), "model": MODEL,
    "tokenize": table({"count": integer(0, 2**31 - 1), "max_model_len": integer(1, 2**31 - 1), "tokens": TOKENS,
                       "token_strs": listed(TEXT)}, ("count", "max_model_len", "tokens")),
    "count_tokens": table({"input_tokens": integer(0, 2**31 - 1)}, ("input_tokens",)),
    "detokenize": table({"prompt": TEXT}, ("prompt",)), "health": table({"status": TEXT, "model": TEXT, "version": TEXT}, ("status",)),
}
SUMMARIES = {
    "/v1/chat/completions": "OpenAI's chat completions", "/v1/completions": "OpenAI's plain completions",
    "/v1/responses": "OpenAI's responses", "/v1/messages": "Anthropic's messages", "count_tokens": "The tokens of Anthropic's messages",
    "models": "The models of this server", "model": "One model", "tokenize": "The tokens of a text or of messages",
    "detokenize": "The text of tokens", "health": "Whether requests are answered", "metrics": "Numbers for Prometheus",
}
REFUSALS = {
    400: "the request cannot be served as it is; the message names field, value and remedy", 401: "an API key is missing or unknown",
    403: "a web page that may not ask", 404: "no such model", 408: "the body came too slowly", 413: "the body is too large",
    415: "the body is not JSON", 429: "no room now; Retry-After says when", 500: "the server failed", 503: "the server is shutting down",
}


def answering(path: str) -> dict[str, Any]:
    """What FastAPI is told about a route that answers in a dialect: JSON, or events with `stream`."""
    whole = {"description": "the answer", "content": {"application/json": {"schema": {"type": "object"}},
                                                      "text/event-stream": {}}}
    return _route(path, {200: whole} | _refused(REFUSALS))


def plain(name: str) -> dict[str, Any]:
    """What FastAPI is told about one of the other routes."""
    if name == "metrics":
        numbers = {"description": "the numbers", "content": {"text/plain": {"schema": TEXT}}}
        return _route(name, {200: numbers} | _refused({403: REFUSALS[403]}))
    good = {200: {"description": "the answer", "content": {"application/json": {"schema": ANSWERS[name]}}}}
    if name == "health":
        return _route(name, good | {503: good[200] | {"description": REFUSALS[503]}} | _refused({403: REFUSALS[403]}))
    statuses = (401, 403) if name == "models" else (401, 403, 404) if name == "model" else (400, 401, 403, 404, 408, 413, 415)
    return _route(name, good | _refused({status: REFUSALS[status] for status in statuses}))


def _route(name: str, responses: Mapping[int, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if name in BODIES:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": BODIES[name]}}}
    return {"responses": dict(responses), "openapi_extra": extra, "summary": SUMMARIES.get(name, name)}


def _refused(reasons: Mapping[int, str]) -> dict[int, Any]:
    return {status: {"description": text, "content": {"application/json": {"schema": ERROR}}} for status, text in reasons.items()}
