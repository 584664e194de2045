"""K3's chat format: nested tags whose brackets are reserved ids (report App. F), byte for byte as the released encoder writes it.

::

    <|open|>message role="user"<|sep|> … <|close|>message<|sep|><|end_of_msg|>

Order: the tools, the effort, the messages, the options of this one request (so that the history stays a shared prefix), and the opening of
the answer. An assistant message has channels: `think`, `response`, `tools`. Tag names, attributes and text are each encoded by themselves;
only code writes the four markers, so text that looks like one stays text. Read next: `gnomon.data.xtml_parser`, the way back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gnomon.data import xtml_calls, xtml_results
from gnomon.data.chat import CallGrammar, Encoded, Parser, marker_ids
from gnomon.data.messages import Conversation, Effort, Message, ResponseFormat, Text, Tool, ToolCall
from gnomon.data.segments import Segments
from gnomon.data.tokenizer import Tokenizer
from gnomon.data.xtml_calls import escaped
from gnomon.data.xtml_parser import XtmlMarkers, XtmlParser
from gnomon.errors import ConfigError

MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
IMAGE_MARKERS = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
EFFORTS: tuple[Effort, ...] = ("low", "high", "max")  # the released text also advertises `medium`, which the released encoder rejects

TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n{}\n```"
)
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without markdown code blocks (```json) "
    "or any additional formatting."
)
SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


class Format:
    """XTML over a tokenizer that names K3's markers. Raises ConfigError where one is missing."""

    name = "xtml"
    efforts = EFFORTS
    default_effort: Effort | None = "max"  # of the released tokenizer's template; its encoder has none

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._markers = XtmlMarkers(*marker_ids(tokenizer, MARKERS, self.name))
        self.stop_ids = frozenset((self._markers.end, tokenizer.document_end_id))
        self.answer_opens = self._tag(self._markers.close, "think") + self._tag(self._markers.open, "response")
        self.answer_closes = self._tag(self._markers.close, "response") + self._tag(self._markers.close, "message")

    def encode(self, conversation: Conversation, *, generate: bool = True, images: bool = False) -> Encoded:
        """The ids of a conversation; see `ChatFormat`. Effort, tool choice and response format as the released encoder states them; a
        tool choice that names a tool is not stated, as there."""
        _require_options(conversation)
        page = _Page(self._tokenizer, self._markers, marker_ids(self._tokenizer, IMAGE_MARKERS, self.name) if images else None)
        if conversation.tools:
            page.note("tool-declare", TOOLS.format(declarations(conversation.tools)))
        if conversation.thinking and conversation.effort is not None:
            page.note("thinking-effort", EFFORT.format(conversation.effort))
        for message, result in xtml_results.in_call_order(conversation.messages):
            page.message(message, result, conversation.thinking)
        if conversation.tool_choice in TOOL_CHOICE:
            page.note("tool-choice", TOOL_CHOICE[conversation.tool_choice])
        if conversation.response_format is not None:
            page.note("response-format", response_format(conversation.response_format))
        if generate:
            page.open("message", role="assistant")
            page.open("think" if conversation.thinking else "response")
            page.segments.boundary()
        return page.segments.encoded()

    def parser(self, conversation: Conversation) -> Parser:
        """A parser for the reply to `conversation`, which begins inside the channel that the prompt opened."""
        taken = [call.id for message in conversation.messages for call in message.tool_calls]
        return XtmlParser(self._tokenizer, self._markers, thinking=conversation.thinking, taken=taken)

    def calls(self, conversation: Conversation, *, parallel: bool = True) -> CallGrammar | None:
        """What a reply must be that calls a tool as `tool_choice` demands; see `ChatFormat`."""
        if conversation.tool_choice in ("auto", "none"):
            return None
        tools = {tool.name: tool for tool in all_tools(conversation) if conversation.tool_choice in ("required", tool.name)}
        text = xtml_calls.grammar(list(tools.values()), self._markers, parallel=parallel)
        return CallGrammar(text=text, closes=self._tag(self._markers.close, "message"))

    def _tag(self, bracket: int, name: str) -> tuple[int, ...]:
        return bracket, *self._tokenizer.encode(name), self._markers.sep


class _Page:
    """Writes tags and messages as segments; without `image_markers`, images are refused."""

    def __init__(self, tokenizer: Tokenizer, markers: XtmlMarkers, image_markers: tuple[int, ...] | None) -> None:
        self.segments = Segments(tokenizer)
        self._markers = markers
        self._image_markers = image_markers

    def open(self, tag: str, **attributes: str | int) -> None:
        """An opening tag; each attribute is four pieces."""
        self.segments.marker(self._markers.open)
        self.segments.text(tag)
        for key, value in attributes.items():
            for piece in (f" {key}", '="', escaped(str(value)), '"'):
                self.segments.text(piece)
        self.segments.marker(self._markers.sep)

    def close(self, tag: str) -> None:
        """A closing tag."""
        self.segments.marker(self._markers.close)
        self.segments.text(tag)
        self.segments.marker(self._markers.sep)

    def end(self) -> None:
        """Close a message and end it."""
        self.close("message")
        self.segments.marker(self._markers.end)
        self.segments.sampled = False
        self.segments.boundary()

    def note(self, kind: str, body: str) -> None:
        """A message of the system itself: its body is one piece."""
        self.open("message", role="system", type=kind)
        self.segments.text(body.strip())
        self.end()

    def message(self, message: Message, result: xtml_results.Result | None, thinking: bool) -> None:
        """One message of the conversation; `result` says which call a tool message answers."""
        named = {"name": message.name} if message.name else {}
        if message.role == "system" and message.tools:
            self.note("tool-declare", MORE_TOOLS.format(declarations(message.tools)))
        elif message.role == "assistant":
            self.open("message", role="assistant", **named)
            self.segments.sampled = True
            self._channels(message, thinking)
            self.end()
        else:
            self.open("message", role=message.role, **(named if result is None else {"tool": result.tool, "index": result.index}))
            self._content(message)
            self.end()

    def _content(self, message: Message) -> None:
        for part in message.content:
            if isinstance(part, Text):
                self.segments.text(part.text)
            elif self._image_markers is None:
                raise ConfigError("an image in a message: what runs here reads text only; send text")
            else:
                self.segments.image(part, self._image_markers)

    def _channels(self, message: Message, thinking: bool) -> None:
        if thinking:
            self.open("think")
            if message.reasoning and message.reasoning.strip():
                self.segments.text(message.reasoning)
            self.close("think")
        self.open("response")
        self._content(message)
        self.close("response")
        if message.tool_calls:
            self.open("tools")
            for index, call in enumerate(message.tool_calls, start=1):
                self.open("call", tool=call.name, index=index)
                self._arguments(call)
                self.close("call")
            self.close("tools")

    def _arguments(self, call: ToolCall) -> None:
        arguments = arguments_of(call)
        if arguments is None:
            self.segments.fallback = True
            self.open("json", type="object")
            self.segments.text(call.arguments)
            self.close("json")
            self.segments.fallback = False
            return
        for key, value in arguments.items():
            self.open("argument", key=key, type=type_of(value))
            self.segments.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            self.close("argument")


def type_of(value: Any) -> str:
    """The type that an argument's tag states for a JSON value."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """The arguments of a call, in the order in which they were given; None for text that is no JSON, which is written as it stands.

    Raises ConfigError for JSON that is no object.
    """
    if not call.arguments.strip():
        return {}
    try:
        value = json.loads(call.arguments)
        json.dumps(value, ensure_ascii=False).encode()  # escapes may spell half a surrogate pair, which is no text
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        raise ConfigError(f"the arguments of the call of '{call.name}' are a JSON {type_of(value)}; they must be a JSON object")
    return value


def declarations(tools: tuple[Tool, ...]) -> str:
    """Tools as JSON: compact, characters kept, keys sorted at every depth."""
    return _sorted_json([tool.declared for tool in tools], "tools")


def response_format(wanted: ResponseFormat) -> str:
    """The body of the message that states what the answer must be."""
    body = RESPONSE_FORMAT.format(wanted.kind)
    if wanted.kind == "json_object":
        return body
    if wanted.schema is None:
        raise ConfigError("response_format = json_schema needs a schema; give one, or ask for json_object")
    return body + SCHEMA.format(_sorted_json(wanted.schema, "response_format"))


def _sorted_json(value: Any, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"'{field}' is not JSON: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _require_options(conversation: Conversation) -> None:
    if conversation.effort is not None and conversation.effort not in EFFORTS:
        why = "; the released encoder lists it in its text and rejects it" if conversation.effort == "medium" else ""
        raise ConfigError(f"effort = '{conversation.effort}': use one of {', '.join(EFFORTS)}{why}")
    named = conversation.tool_choice not in ("auto", *TOOL_CHOICE)
    if named and conversation.tool_choice not in [tool.name for tool in all_tools(conversation)]:
        raise ConfigError(f"tool_choice = '{conversation.tool_choice}': use auto, none, required, or the name of a declared tool")


def all_tools(conversation: Conversation) -> list[Tool]:
    """The tools declared up front and those that system messages added."""
    return [*conversation.tools, *(tool for message in conversation.messages for tool in message.tools)]
