"""OpenAI's chat completions: read a body, write an answer, whole or as events.

Beyond OpenAI's own fields: `reasoning_content` in messages and answers (the name that reasoning models' servers use; `reasoning` is read
too), `thinking: {"type": "enabled" | "disabled"}`, `tools` on a system message, and what `openai_options.py` lists. Unknown fields of the
body are refused; unknown fields inside messages are ignored, because clients send answers back as they came.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.data.chat import CallArguments, CallEnded, CallStarted, Delta, ReasoningDelta, Reply, TextDelta
from gnomon.data.dialects import openai_options as options
from gnomon.data.dialects.asked import Asked, Choice, Cost, Ending, Head, Refused, Sent, TokenLogprob
from gnomon.data.dialects.fields import Fields, shown, wrong
from gnomon.data.dialects.openai_options import error
from gnomon.data.dialects.tools import check_names, check_schema, declared, tool_name
from gnomon.data.messages import Conversation, Image, Message, Part, ResponseFormat, Text, Tool, ToolCall

__all__ = ["Stream", "error", "read", "stream", "whole"]

ROLES = ("system", "developer", "user", "assistant", "tool")
NOT_HERE = {
    "audio": "is not supported: answers are text; leave it out",
    "function_call": "was replaced by 'tool_choice'; use that",
    "functions": "was replaced by 'tools'; use that",
    "web_search_options": "is not supported: the server makes no requests of its own; offer a tool for it",
}


def read(body: Mapping[str, Any]) -> Asked:
    """What a body of `POST /v1/chat/completions` asks. Raises `Refused` naming field, value and remedy."""
    fields = Fields(body)
    chosen = options.sampling(fields)
    thinking, effort = thought(fields)
    tools = read_tools(fields, "tools")
    conversation = Conversation(
        messages=messages(fields), tools=tools, thinking=thinking, effort=effort,  # type: ignore[arg-type]
        tool_choice=_tool_choice(fields, tools), response_format=response_format(fields.object("response_format")),
    )
    parallel = fields.flag("parallel_tool_calls")
    asked = Asked(conversation=conversation, max_tokens=_max_tokens(fields), top_logprobs=_top_logprobs(fields),
                  parallel_calls=parallel is not False, **chosen)
    options.one_constraint(asked, "response_format")
    _refuse_others(fields)
    return asked


def thought(fields: Fields) -> tuple[bool, str | None]:
    """Whether to think, and with which effort: `reasoning_effort` and `thinking`. Effort `none` is no thinking."""
    effort = fields.choice("reasoning_effort", options.EFFORTS)
    table = fields.object("thinking")
    wanted = table.choice("type", ("enabled", "disabled")) if table else None
    if wanted == "disabled" and effort not in (None, "none") or wanted == "enabled" and effort == "none":
        raise Refused(f"'reasoning_effort' is {effort} and 'thinking' is {wanted}; keep one", "reasoning_effort")
    if effort == "none" or wanted == "disabled":
        return False, None
    return True, effort


def messages(fields: Fields) -> tuple[Message, ...]:
    """The messages of a body."""
    options.require_texts(fields.require("messages"), "messages")
    return tuple(_message(entry) for entry in fields.objects("messages"))


def _message(entry: Fields) -> Message:
    role = entry.require("role")
    if role == "function":
        raise Refused(f"'{entry.place('role')}' is 'function', which was replaced by 'tool'; use that", entry.place("role"))
    entry.choice("role", ROLES)
    name = entry.text("name")
    if role == "assistant":
        return _assistant(entry, name)
    if role == "tool":
        return Message(role="tool", content=content(entry), name=name, tool_call_id=_id(entry, "tool_call_id"))
    if role == "user":
        return Message(role="user", content=content(entry), name=name)
    tools = read_tools(entry, "tools")
    return Message(role="system", content=content(entry, optional=bool(tools)), name=name, tools=tools)


def _assistant(entry: Fields, name: str | None) -> Message:
    calls = tuple(_call(call) for call in entry.objects("tool_calls"))
    reasoning = entry.text("reasoning_content")
    if reasoning is None and not isinstance(entry.get("reasoning"), Mapping):
        reasoning = entry.text("reasoning")
    return Message(role="assistant", content=content(entry, optional=True), name=name, reasoning=reasoning, tool_calls=calls)


def _call(entry: Fields) -> ToolCall:
    entry.choice("type", ("function",))
    entry.require("function")
    function = entry.object("function")
    assert function is not None
    name = tool_name(function.require("name"), function.place("name"))
    return ToolCall(id=_id(entry, "id"), name=name, arguments=function.text("arguments") or "")


def _id(entry: Fields, name: str) -> str:
    value = entry.require(name)
    if not isinstance(value, str):
        raise wrong(entry.place(name), value, "a string")
    return value


def content(entry: Fields, *, optional: bool = False) -> tuple[Part, ...]:
    """The `content` of a message: a string, or a list of parts."""
    value = entry.get("content")
    if value is None:
        if optional:
            return ()
        entry.require("content")
    if isinstance(value, str):
        return (Text(text=value),) if value else ()
    if not isinstance(value, list):
        raise wrong(entry.place("content"), value, "a string or a list of parts")
    return tuple(_part(part) for part in entry.objects("content"))


def _part(entry: Fields) -> Part:
    kind = entry.require("type")
    if kind in ("text", "refusal"):
        text = entry.require(kind)
        if not isinstance(text, str):
            raise wrong(entry.place(kind), text, "a string")
        return Text(text=text)
    if kind == "image_url":
        table = entry.get("image_url")
        url = table.get("url") if isinstance(table, Mapping) else table
        return image(url, entry.place("image_url.url"))
    raise Refused(f"'{entry.place('type')}' is {shown(kind)}; parts are 'text' or 'image_url'", entry.place("type"))


def image(url: Any, place: str) -> Image:
    """The image of a `data:` address. Addresses of files and of the web are passed on unread: a server may be allowed to read some."""
    if not isinstance(url, str):
        raise wrong(place, url, "a string")
    if url.startswith(("file:", "http:", "https:")):
        return Image(data=b"", media_type="", address=url)
    head, comma, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise Refused(f"'{place}' is {shown(url)}; send the image itself: data:image/png;base64,…", place)
    try:
        return Image(data=base64.b64decode(data, validate=True), media_type=head[5:-7])
    except (binascii.Error, ValueError):
        raise Refused(f"'{place}' is not base64", place) from None


def read_tools(fields: Fields, name: str) -> tuple[Tool, ...]:
    """The tools of a body or of a system message: `{"type": "function", "function": {…}}`."""
    tools = []
    for entry in fields.objects(name):
        kind = entry.require("type")
        if kind != "function":
            raise Refused(f"'{entry.place('type')}' is {shown(kind)}; tools are of type 'function'", entry.place("type"))
        entry.require("function")
        function = entry.object("function")
        assert function is not None
        tools.append(declared(function, "parameters", entry.table))
    check_names(tools, fields.place(name))
    return tuple(tools)


def _tool_choice(fields: Fields, tools: Sequence[Tool]) -> str:
    value = fields.get("tool_choice")
    if isinstance(value, Mapping):
        choice = Fields(value, "tool_choice")
        if choice.require("type") != "function":
            raise Refused(f"'tool_choice.type' is {shown(value['type'])}; use 'function', or a word: auto, none, required", "tool_choice")
        table = choice.object("function")
        value = tool_name(table.require("name") if table else None, "tool_choice.function.name")
        return chosen_tool(value, tools, "tool_choice.function.name")
    chosen = fields.choice("tool_choice", ("auto", "none", "required")) or "auto"
    if chosen == "required" and not tools:
        raise Refused("'tool_choice' is required, but there are no 'tools'; declare some", "tool_choice")
    return chosen


def chosen_tool(name: str, tools: Sequence[Tool], place: str) -> str:
    """The name of a tool that must be called, which must be one of `tools`."""
    if name not in [tool.name for tool in tools]:
        raise Refused(f"'{place}' is '{name}', which is not among 'tools' ({', '.join(tool.name for tool in tools) or 'none'})", place)
    return name


def response_format(entry: Fields | None) -> ResponseFormat | None:
    """What the answer must be: `{"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": …}}`."""
    if entry is None:
        return None
    entry.require("type")
    kind = entry.choice("type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        entry.require("json_schema")
        table = entry.object("json_schema")
        assert table is not None
        check_schema(table.require("schema"), table.place("schema"))
        return ResponseFormat(kind="json_schema", schema=table.get("schema"))
    return ResponseFormat(kind="json_object") if kind == "json_object" else None


def _max_tokens(fields: Fields) -> int | None:
    new = fields.integer("max_completion_tokens", 1, options.MOST_TOKENS)
    old = fields.integer("max_tokens", 1, options.MOST_TOKENS)
    if new is not None and old is not None and new != old:
        raise Refused(f"'max_tokens' is {old} and 'max_completion_tokens' is {new}; keep one", "max_tokens")
    return new if new is not None else old


def _top_logprobs(fields: Fields) -> int | None:
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, options.MOST_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise Refused("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    return (top or 0) if wanted else None


def _refuse_others(fields: Fields) -> None:
    options.refuse_old(fields, NOT_HERE)
    modalities = fields.get("modalities")
    if modalities not in (None, ["text"]):
        raise Refused(f"'modalities' is {shown(modalities)}; answers are [\"text\"]", "modalities")
    fields.refuse_rest()


def stream(asked: Asked, head: Head) -> Stream:
    """The stream of one answer."""
    return Stream(asked, head)


class Stream:
    """An answer as `chat.completion.chunk`s, closed by `[DONE]`."""

    def __init__(self, asked: Asked, head: Head) -> None:
        self._asked = asked
        self._calls: set[int] = set()
        self._chunk = {"id": f"chatcmpl-{head.id}", "object": "chat.completion.chunk", "created": head.created, "model": head.model}

    def start(self, cost: Cost) -> list[Sent]:
        """One chunk for each choice that names the role."""
        return [self._sent(index, {"role": "assistant", "content": ""}) for index in range(self._asked.n)]

    def delta(self, choice: int, delta: Delta, logprobs: Sequence[TokenLogprob] = ()) -> list[Sent]:
        """The chunk of one piece."""
        match delta:
            case TextDelta(text=text):
                return [self._sent(choice, {"content": text}, logprobs=logprobs)]
            case ReasoningDelta(text=text):
                return [self._sent(choice, {"reasoning_content": text}, logprobs=logprobs)]
            case CallStarted(index=index, id=call, name=name):
                self._calls.add(choice)
                function = {"name": name, "arguments": ""}
                return [self._sent(choice, {"tool_calls": [{"index": index, "id": call, "type": "function", "function": function}]})]
            case CallArguments(index=index, json=text):
                return [self._sent(choice, {"tool_calls": [{"index": index, "function": {"arguments": text}}]})]
            case CallEnded():
                return []

    def finish(self, choice: int, reply: Reply, ending: Ending) -> list[Sent]:
        """The chunk with the reason."""
        return [self._sent(choice, {}, _finish_reason(reply, ending), ending)]

    def end(self, cost: Cost) -> list[Sent]:
        """Usage where it was asked for, and `[DONE]`."""
        last = [Sent(None, {**self._chunk, "choices": [], "usage": options.usage(cost)})] if self._asked.include_usage else []
        return [*last, Sent(None, "[DONE]")]

    def _sent(self, choice: int, delta: dict[str, Any], reason: str | None = None, ending: Ending | None = None, *,
              logprobs: Sequence[TokenLogprob] = ()) -> Sent:
        entry: dict[str, Any] = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}
        if logprobs:
            entry["logprobs"] = options.logprobs(logprobs)
        if ending is not None:
            entry["stop_reason"] = options.stop_reason(ending)
        return Sent(None, {**self._chunk, "choices": [entry]})


def whole(asked: Asked, head: Head, choices: Sequence[Choice], cost: Cost) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    return {
        "id": f"chatcmpl-{head.id}", "object": "chat.completion", "created": head.created, "model": head.model,
        "choices": [_choice(asked, choice) for choice in choices], "usage": options.usage(cost),
    }


def _choice(asked: Asked, choice: Choice) -> dict[str, Any]:
    reply = choice.reply
    calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in reply.tool_calls]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if calls else ""), "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if calls:
        message["tool_calls"] = calls
    return {
        "index": choice.index, "message": message, "finish_reason": _finish_reason(reply, choice.ending),
        "stop_reason": options.stop_reason(choice.ending),
        "logprobs": None if asked.top_logprobs is None else options.logprobs(choice.logprobs),
    }


def _finish_reason(reply: Reply, ending: Ending) -> str:
    return "tool_calls" if reply.tool_calls and ending.reason == "stop" else options.finish_reason(ending)
