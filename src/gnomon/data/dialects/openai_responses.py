"""OpenAI's responses: read a body, write an answer, whole or as events.

Nothing is stored: each request brings its history, and what refers to an earlier response is refused. Thinking is an item `reasoning` with
its text; `encrypted_content` holds the same text in base64, because some clients give back nothing else. Read next: `responses_items.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.data.chat import Delta, Reply
from gnomon.data.dialects import openai_options as options
from gnomon.data.dialects import responses_items as items
from gnomon.data.dialects.asked import Asked, Choice, Cost, Ending, Head, Refused, Sent, TokenLogprob
from gnomon.data.dialects.blocks import Blocks, Closed, More, Opened, Step
from gnomon.data.dialects.fields import Fields, shown
from gnomon.data.dialects.openai_chat import chosen_tool
from gnomon.data.dialects.openai_options import error
from gnomon.data.dialects.tools import check_names, check_schema, declared
from gnomon.data.messages import Conversation, ResponseFormat, Tool

__all__ = ["Stream", "error", "read", "stream", "whole"]

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
WITHOUT_EFFECT = ("access_programs", "background_options", "client_metadata", "context_management", "image", "max_tool_calls")
NOT_HERE = {
    "background": "is not supported: answers come while the client waits; leave it out",
    "conversation": "is not supported: nothing is stored; send the history in 'input'",
    "previous_response_id": "is not supported: nothing is stored; send the history in 'input'",
    "prompt": "is not supported: nothing is stored; send the text in 'input'",
}


def read(body: Mapping[str, Any]) -> Asked:
    """What a body of `POST /v1/responses` asks. Raises `Refused` naming field, value and remedy."""
    fields = Fields(body)
    chosen = options.sampling(fields)
    if chosen["n"] != 1:
        raise Refused(f"'n' is {chosen['n']}; this API gives one answer: leave it out", "n")
    tools = tuple(_tool(entry) for entry in fields.objects("tools"))
    check_names(tools, "tools")
    reasoning, text = fields.object("reasoning"), fields.object("text")
    effort = reasoning.choice("effort", options.EFFORTS) if reasoning else None
    conversation = Conversation(
        messages=items.messages(fields), tools=tools, thinking=effort != "none",
        effort=None if effort == "none" else effort,  # type: ignore[arg-type]
        tool_choice=_tool_choice(fields, tools), response_format=_response_format(text.object("format") if text else None),
    )
    parallel = fields.flag("parallel_tool_calls")
    asked = Asked(conversation=conversation, max_tokens=fields.integer("max_output_tokens", 1, options.MOST_TOKENS),
                  top_logprobs=_top_logprobs(fields), parallel_calls=parallel is not False, **chosen)
    options.one_constraint(asked, "text.format")
    if fields.choice("truncation", ("auto", "disabled")) == "auto":
        raise Refused("'truncation' is auto; input is never dropped here: leave it out, and shorten 'input' yourself", "truncation")
    fields.without_effect(*WITHOUT_EFFECT)
    options.refuse_old(fields, NOT_HERE)
    fields.refuse_rest()
    return asked


def _tool(entry: Fields) -> Tool:
    kind = entry.require("type")
    if kind != "function":
        raise Refused(f"'{entry.place('type')}' is {shown(kind)}: the server runs no tools of its own; tools are of type 'function'",
                      entry.place("type"))
    return declared(entry, "parameters")


def _tool_choice(fields: Fields, tools: Sequence[Tool]) -> str:
    value = fields.get("tool_choice")
    if isinstance(value, Mapping):
        choice = Fields(value, "tool_choice")
        if choice.require("type") != "function":
            raise Refused(f"'tool_choice.type' is {shown(value['type'])}; use 'function', or a word: auto, none, required", "tool_choice")
        choice.require("name")
        return chosen_tool(choice.text("name") or "", tools, "tool_choice.name")
    chosen = fields.choice("tool_choice", ("auto", "none", "required")) or "auto"
    if chosen == "required" and not tools:
        raise Refused("'tool_choice' is required, but there are no 'tools'; declare some", "tool_choice")
    return chosen


def _response_format(entry: Fields | None) -> ResponseFormat | None:
    if entry is None:
        return None
    entry.require("type")
    kind = entry.choice("type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        check_schema(entry.require("schema"), entry.place("schema"))
        return ResponseFormat(kind="json_schema", schema=entry.get("schema"))
    return ResponseFormat(kind="json_object") if kind == "json_object" else None


def _top_logprobs(fields: Fields) -> int | None:
    included = fields.texts("include", 16)
    for name in included:
        if name not in INCLUDABLE:
            raise Refused(f"'include' has {shown(name)}; choose {', '.join(INCLUDABLE)}", "include")
    top = fields.integer("top_logprobs", 0, options.MOST_TOP_LOGPROBS)
    return (top or 0) if LOGPROBS in included or top else None


def stream(asked: Asked, head: Head) -> Stream:
    """The stream of one answer."""
    return Stream(asked, head)


class Stream:
    """An answer as named, numbered events: the response as it begins, its items one after the other, the response as it ends."""

    def __init__(self, asked: Asked, head: Head) -> None:
        self._asked = asked
        self._head = head
        self._number = -1
        self._blocks = Blocks()
        self._output: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._ending = Ending(reason="stop")

    def start(self, cost: Cost) -> list[Sent]:
        """The response without output, twice, as the API sends it."""
        response = _response(self._asked, self._head, "in_progress", [], None)
        return [self._event("response.created", response=response), self._event("response.in_progress", response=response)]

    def delta(self, choice: int, delta: Delta, logprobs: Sequence[TokenLogprob] = ()) -> list[Sent]:
        """The events of one piece."""
        entries = items.logprobs(logprobs)
        self._logprobs += entries
        return [sent for step in self._blocks.add(delta) for sent in self._step(step, entries)]

    def finish(self, choice: int, reply: Reply, ending: Ending) -> list[Sent]:
        """The events that close the last item."""
        self._ending = ending
        return [sent for step in self._blocks.finish() for sent in self._step(step, [])]

    def end(self, cost: Cost) -> list[Sent]:
        """The whole response with its usage."""
        status = _status(self._ending)
        return [self._event(f"response.{status}", response=_response(self._asked, self._head, status, self._output, cost, self._ending))]

    def _step(self, step: Step, logprobs: list[dict[str, Any]]) -> list[Sent]:
        match step:
            case Opened(kind=kind, call=call):
                item = items.item(kind, self._head.id, len(self._output), "", "in_progress", call=call)
                self._output.append(item)
                added = [self._event("response.output_item.added", output_index=len(self._output) - 1, item=items.empty(item))]
                return added if kind == "call" else [*added, self._on_part("response.content_part.added", part=items.part(kind, "", []))]
            case More(kind="text", text=text):
                return [self._on_part("response.output_text.delta", delta=text, logprobs=logprobs)]
            case More(kind="reasoning", text=text):
                return [self._on_part("response.reasoning_text.delta", delta=text)]
            case More(text=text):
                return [self._on_item("response.function_call_arguments.delta", delta=text)]
            case Closed():
                return self._close(step)

    def _close(self, step: Closed) -> list[Sent]:
        kind, text = step.kind, step.text
        status = "completed" if step.whole and self._ending.reason == "stop" else "incomplete"
        number = len(self._output) - 1
        logprobs = self._logprobs if kind == "text" else []
        item = items.item(kind, self._head.id, number, text, status, call=step.call, logprobs=logprobs)
        self._output[number] = item
        done: list[Sent]
        if kind == "call":
            done = [self._on_item("response.function_call_arguments.done", arguments=text, name=item["name"])]
        else:
            name, extra = ("output_text", {"logprobs": logprobs}) if kind == "text" else ("reasoning_text", {})
            done = [self._on_part(f"response.{name}.done", text=text, **extra),
                    self._on_part("response.content_part.done", part=items.part(kind, text, logprobs))]
        if kind == "text":
            self._logprobs = []
        return [*done, self._event("response.output_item.done", output_index=number, item=item)]

    def _on_item(self, event: str, /, **data: Any) -> Sent:
        number = len(self._output) - 1
        return self._event(event, item_id=self._output[number]["id"], output_index=number, **data)

    def _on_part(self, event: str, /, **data: Any) -> Sent:
        return self._on_item(event, content_index=0, **data)

    def _event(self, event: str, /, **data: Any) -> Sent:
        self._number += 1
        return Sent(event, {"type": event, "sequence_number": self._number, **data})


def whole(asked: Asked, head: Head, choices: Sequence[Choice], cost: Cost) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice = choices[0]
    status = _status(choice.ending)
    output = items.output(choice.reply, head.id, status, items.logprobs(choice.logprobs) if asked.top_logprobs is not None else [])
    return _response(asked, head, status, output, cost, choice.ending)


def _status(ending: Ending) -> str:
    return "completed" if ending.reason == "stop" else "incomplete"


def _response(asked: Asked, head: Head, status: str, output: list[dict[str, Any]], cost: Cost | None,
              ending: Ending | None = None) -> dict[str, Any]:
    """A response in some state, with what was asked as far as it is known."""
    conversation = asked.conversation
    assert conversation is not None
    choice = conversation.tool_choice
    cut = status == "incomplete"
    return {
        "id": f"resp_{head.id}", "object": "response", "created_at": head.created, "model": head.model, "status": status, "output": output,
        "error": None, "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "instructions": None, "metadata": {},
        "max_output_tokens": asked.max_tokens, "temperature": asked.temperature, "top_p": asked.top_p, "top_logprobs": asked.top_logprobs,
        "parallel_tool_calls": asked.parallel_calls, "previous_response_id": None, "store": False, "truncation": "disabled",
        "reasoning": {"effort": conversation.effort if conversation.thinking else "none", "summary": None},
        "tool_choice": choice if choice in ("auto", "none", "required") else {"type": "function", "name": choice},
        "tools": [{"type": "function", "name": tool.name, "description": tool.description or None, "parameters": tool.parameters,
                   "strict": None} for tool in conversation.tools],
        "text": {"format": _format(conversation.response_format)}, "usage": None if cost is None else _usage(cost),
        "stop_reason": None if ending is None else options.stop_reason(ending),
    }


def _format(wanted: ResponseFormat | None) -> dict[str, Any]:
    if wanted is None:
        return {"type": "text"}
    return {"type": wanted.kind, **({"name": "answer", "schema": wanted.schema} if wanted.kind == "json_schema" else {})}


def _usage(cost: Cost) -> dict[str, Any]:
    """The API's usage. `cache_note`, which says why not more was cached, is an extension."""
    return {
        "input_tokens": cost.prompt_tokens, "output_tokens": cost.output_tokens, "total_tokens": cost.prompt_tokens + cost.output_tokens,
        "input_tokens_details": {"cached_tokens": cost.cached_tokens, "cache_write_tokens": 0, "cache_note": cost.cache_note},
        "output_tokens_details": {"reasoning_tokens": cost.reasoning_tokens},
    }
