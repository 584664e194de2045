"""Anthropic's messages: read a body, write an answer, whole or as events; count tokens.

Thinking is on when `thinking` asks for it or an effort is given (`output_config.effort`), and off otherwise, as in that API. Its
`budget_tokens` has no effect, because this family is told an effort and never a number. Thinking comes back unsigned and is read back
without its signature. A `tool_result` is a message of its own. Extensions: `seed`, `min_p`, `repetition_penalty`, `cache`, `cache_salt`,
`priority`, `deadline_seconds`. Read next: `anthropic_content.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.data.chat import Delta, Reply
from gnomon.data.dialects import anthropic_content as content
from gnomon.data.dialects import openai_options as options
from gnomon.data.dialects.asked import Asked, Choice, Cost, Ending, Head, Refused, Sent, TokenLogprob
from gnomon.data.dialects.blocks import Blocks, Closed, More, Opened, Step
from gnomon.data.dialects.fields import Fields, shown
from gnomon.data.dialects.openai_chat import chosen_tool
from gnomon.data.dialects.tools import check_names, check_schema, declared
from gnomon.data.messages import Conversation, ResponseFormat, Tool

__all__ = ["Stream", "counted", "error", "read", "read_count", "stream", "whole"]

EFFORTS = ("low", "medium", "high", "max")
THINKING = ("enabled", "adaptive", "between_tools", "disabled")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SIGNATURE = "unsigned"  # the API's types need one; nothing here checks it
PIECES = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"), "call": ("input_json_delta", "partial_json")}
WITHOUT_EFFECT = ("betas", "cache_control", "context_management", "diagnostics", "inference_geo", "service_tier", "speed",
                  "user_profile_id", "workspace_id")
NOT_HERE = {
    "container": "is not supported: the server runs no code of its own; offer a tool for it",
    "mcp_servers": "is not supported: the server makes no requests of its own; offer tools",
}
ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
          503: "overloaded_error", 529: "overloaded_error"}


def read(body: Mapping[str, Any]) -> Asked:
    """What a body of `POST /v1/messages` asks. Raises `Refused` naming field, value and remedy."""
    fields = Fields(body)
    fields.require("max_tokens")
    tokens, stream = fields.integer("max_tokens", 1, options.MOST_TOKENS), fields.flag("stream")
    conversation, parallel = _conversation(fields)
    metadata = fields.object("metadata")
    seed = fields.integer("seed", -2**63, 2**64)
    asked = Asked(
        model=fields.text("model"), conversation=conversation, max_tokens=tokens, parallel_calls=parallel,
        stream=bool(stream), include_usage=True,
        temperature=fields.number("temperature", 0, 100), top_p=options.share(fields, "top_p"), top_k=options.top_k(fields),
        min_p=fields.number("min_p", 0, 1), repetition_penalty=fields.number("repetition_penalty", 0.01, 100),
        seed=None if seed is None else seed % 2**63, stop=fields.texts("stop_sequences", options.MOST_STOPS),
        session=metadata.text("user_id") if metadata else None, salt=fields.text("cache_salt") or "",
        cache=fields.flag("cache") is not False,
        priority=fields.choice("priority", options.PRIORITIES) or "interactive",  # type: ignore[arg-type]
        deadline_seconds=fields.number("deadline_seconds", 0.001, 1e6),
    )
    _refuse_others(fields)
    return asked


def read_count(body: Mapping[str, Any]) -> Asked:
    """What a body of `POST /v1/messages/count_tokens` asks: its conversation is what counts. Raises `Refused`."""
    fields = Fields(body)
    conversation, _ = _conversation(fields)
    asked = Asked(model=fields.text("model"), conversation=conversation)
    fields.without_effect("max_tokens", "metadata", "stream", "temperature", "top_k", "top_p", "stop_sequences")
    _refuse_others(fields)
    return asked


def counted(tokens: int) -> dict[str, Any]:
    """The answer to `count_tokens`."""
    return {"input_tokens": tokens}


def _conversation(fields: Fields) -> tuple[Conversation, bool]:
    """The conversation, and whether calls may run in parallel."""
    config = fields.object("output_config")
    effort = config.choice("effort", EFFORTS) if config else None
    answer = (config.object("format") if config else None) or fields.object("output_format")
    tools = tuple(_tool(entry) for entry in fields.objects("tools"))
    check_names(tools, "tools")
    choice, parallel = _tool_choice(fields.object("tool_choice"), tools)
    thinking = _thinks(fields.object("thinking"), effort)
    conversation = Conversation(
        messages=(*content.system(fields), *content.messages(fields)), tools=tools, thinking=thinking,
        effort=effort if thinking else None,  # type: ignore[arg-type]
        tool_choice=choice, response_format=_response_format(answer) if answer else None,
    )
    return conversation, parallel


def _thinks(table: Fields | None, effort: str | None) -> bool:
    if table is None:
        return effort is not None
    table.require("type")
    kind = table.choice("type", THINKING)
    table.integer("budget_tokens", 1, options.MOST_TOKENS)
    return kind != "disabled"


def _tool(entry: Fields) -> Tool:
    kind = entry.get("type")
    if kind not in (None, "custom"):
        raise Refused(f"'{entry.place('type')}' is {shown(kind)}: the server runs no tools of its own; declare a tool with 'input_schema'",
                      entry.place("type"))
    entry.require("input_schema")
    return declared(entry, "input_schema")


def _tool_choice(table: Fields | None, tools: Sequence[Tool]) -> tuple[str, bool]:
    if table is None:
        return "auto", True
    kind = table.require("type")
    table.choice("type", (*CHOICES, "tool"))
    parallel = not table.flag("disable_parallel_tool_use")
    if kind == "tool":
        table.require("name")
        return chosen_tool(table.text("name") or "", tools, "tool_choice.name"), parallel
    if kind == "any" and not tools:
        raise Refused("'tool_choice' is any, but there are no 'tools'; declare some", "tool_choice")
    return CHOICES[kind], parallel


def _response_format(entry: Fields) -> ResponseFormat:
    entry.require("type")
    entry.choice("type", ("json_schema",))
    check_schema(entry.require("schema"), entry.place("schema"))
    return ResponseFormat(kind="json_schema", schema=entry.get("schema"))


def _refuse_others(fields: Fields) -> None:
    fields.without_effect(*WITHOUT_EFFECT)
    options.refuse_old(fields, NOT_HERE)
    fields.refuse_rest()


def stream(asked: Asked, head: Head) -> Stream:
    """The stream of one answer."""
    return Stream(asked, head)


class Stream:
    """An answer as named events: `message_start`, blocks one after the other, `message_delta`, `message_stop`."""

    def __init__(self, asked: Asked, head: Head) -> None:
        self._head = head
        self._blocks = Blocks()
        self._index = -1
        self._stop: dict[str, Any] = {"stop_reason": "end_turn", "stop_sequence": None}

    def start(self, cost: Cost) -> list[Sent]:
        """The message without content; its usage says what of the prompt was cached."""
        return [_event("message_start", message=_message(self._head, [], _stopped(None, None), cost))]

    def delta(self, choice: int, delta: Delta, logprobs: Sequence[TokenLogprob] = ()) -> list[Sent]:
        """The events of one piece. The API has no log-probabilities."""
        return [sent for step in self._blocks.add(delta) for sent in self._step(step)]

    def finish(self, choice: int, reply: Reply, ending: Ending) -> list[Sent]:
        """The events that close the last block."""
        self._stop = _stopped(reply, ending)
        return [sent for step in self._blocks.finish() for sent in self._step(step)]

    def end(self, cost: Cost) -> list[Sent]:
        """The reason and the usage, and the last event."""
        return [_event("message_delta", delta=self._stop, usage=_usage(cost)), _event("message_stop")]

    def _step(self, step: Step) -> list[Sent]:
        match step:
            case Opened(kind=kind, call=call):
                self._index += 1
                block: dict[str, Any] = {"type": "text", "text": ""}
                if kind == "reasoning":
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                elif call is not None:
                    block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                return [_event("content_block_start", index=self._index, content_block=block)]
            case More(kind=kind, text=text):
                return [self._delta(*PIECES[kind], text)]
            case Closed(kind=kind):
                signed = [self._delta("signature_delta", "signature", SIGNATURE)] if kind == "reasoning" else []
                return [*signed, _event("content_block_stop", index=self._index)]

    def _delta(self, kind: str, field: str, text: str) -> Sent:
        return _event("content_block_delta", index=self._index, delta={"type": kind, field: text})


def whole(asked: Asked, head: Head, choices: Sequence[Choice], cost: Cost) -> dict[str, Any]:
    """The body of an answer that is not streamed. Arguments that are no JSON object stand as they were written under `arguments`; a call
    that was cut off is left out, and the reason to stop says that the answer is not whole."""
    choice = choices[0]
    reply = choice.reply
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": SIGNATURE})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.tool_calls:
        arguments = _object(call.arguments)
        if arguments is None and choice.ending.reason != "stop":
            continue
        entry: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name}
        blocks.append(entry | {"input": {"arguments": call.arguments} if arguments is None else arguments})
    return _message(head, blocks, _stopped(reply, choice.ending), cost)


def _message(head: Head, blocks: list[dict[str, Any]], stop: dict[str, Any], cost: Cost) -> dict[str, Any]:
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": head.model, "content": blocks, **stop,
            "usage": _usage(cost)}


def _usage(cost: Cost) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the others. `cache_note`, which says why not more was cached, is an extension."""
    return {
        "input_tokens": cost.prompt_tokens - cost.cached_tokens, "cache_read_input_tokens": cost.cached_tokens,
        "cache_creation_input_tokens": 0, "cache_note": cost.cache_note,
        "output_tokens": cost.output_tokens, "output_tokens_details": {"thinking_tokens": cost.reasoning_tokens},
    }


def _stopped(reply: Reply | None, ending: Ending | None) -> dict[str, Any]:
    if reply is None or ending is None:
        return {"stop_reason": None, "stop_sequence": None}
    if ending.reason != "stop":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if ending.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop_string}
    return {"stop_reason": "tool_use" if reply.tool_calls else "end_turn", "stop_sequence": None}


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object of a call's arguments; None where they are something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _event(name: str, **data: Any) -> Sent:
    return Sent(name, {"type": name, **data})


def error(status: int, message: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Anthropic's error object; the message names the field."""
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
