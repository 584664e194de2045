"""Kimi-Linear's chat format: turns between role markers.

::

    <|im_user|>user<|im_middle|> … <|im_end|><|im_assistant|>assistant<|im_middle|> …

The release names the markers of tool calls in its vocabulary and publishes no template for them; calls, declarations and results here have
the form of the template that was published for the same markers in Kimi K2. That they are what Kimi-Linear was trained on is not verified.
No default system message is made up. There is no reasoning channel and no effort.
"""

from __future__ import annotations

import json
import re

from gnomon.data.chat import CallGrammar, Encoded, Parser, marker_ids
from gnomon.data.kimi_linear_parser import CALL_MARKERS, KimiLinearParser
from gnomon.data.messages import Conversation, Effort, Image, Message, ToolCall
from gnomon.data.segments import Segments
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import ConfigError

MARKERS = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>")
CALL_ID = re.compile(r"functions\..+:\d+", re.DOTALL)


class Format:
    """Turns over a tokenizer that names Kimi-Linear's markers. Raises ConfigError where one is missing."""

    name = "kimi_linear"
    answer_opens: tuple[int, ...] = ()
    answer_closes: tuple[int, ...] = ()
    efforts: tuple[Effort, ...] = ()
    default_effort: Effort | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        user, assistant, system, self._middle, self._end = marker_ids(tokenizer, MARKERS, self.name)
        self._roles = {"user": user, "assistant": assistant, "system": system, "tool": system}
        self.stop_ids = frozenset((self._end, tokenizer.document_end_id))

    def encode(self, conversation: Conversation, *, generate: bool = True, images: bool = False) -> Encoded:
        """The ids of a conversation; see `ChatFormat`. Reasoning in the history is left out and a response format is not stated: the
        format has no words for them. Raises ConfigError for an image, an effort, a required tool, or tools declared on the way."""
        _require_options(conversation)
        segments = Segments(self._tokenizer)
        if conversation.tools and conversation.tool_choice != "none":
            tools = json.dumps([tool.declared for tool in conversation.tools], ensure_ascii=False, separators=(",", ":"), default=dict)
            self._turn(segments, "system", "tool_declare", tools)
        ids: dict[str, str] = {}
        count = 0
        for message in conversation.messages:
            for call in message.tool_calls:
                ids[call.id] = call_id(call, count)
                count += 1
            self._message(segments, message, ids)
        if generate:
            self._open(segments, "assistant", "assistant")
            segments.boundary()
        return segments.encoded()

    def parser(self, conversation: Conversation) -> Parser:
        """A parser for the reply to `conversation`; without the markers of calls in the vocabulary, all of it is text."""
        markers = [self._tokenizer.special_ids.get(marker, -1) for marker in CALL_MARKERS]
        return KimiLinearParser(self._tokenizer, markers, end=self._end)

    def calls(self, conversation: Conversation, *, parallel: bool = True) -> CallGrammar | None:
        """None: the format cannot say that a tool must be called, and `encode` refuses to."""
        del conversation, parallel
        return None

    def _open(self, segments: Segments, role: str, name: str) -> None:
        segments.marker(self._roles[role])
        segments.text(name)
        segments.marker(self._middle)

    def _turn(self, segments: Segments, role: str, name: str, body: str) -> None:
        self._open(segments, role, name)
        segments.text(body)
        segments.marker(self._end)
        segments.boundary()

    def _message(self, segments: Segments, message: Message, ids: dict[str, str]) -> None:
        if any(isinstance(part, Image) for part in message.content):
            raise ConfigError("an image in a message: Kimi-Linear reads text only")
        name = message.name or message.role
        if message.role == "tool":
            if message.tool_call_id is None:
                raise ConfigError("a tool message needs 'tool_call_id', the id of the call that it answers")
            self._turn(segments, "tool", name, f"## Return of {ids.get(message.tool_call_id, message.tool_call_id)}\n{message.text}")
        elif message.role == "assistant":
            self._open(segments, "assistant", name)
            segments.sampled = True
            segments.text(message.text)
            if message.tool_calls:
                self._calls(segments, message.tool_calls, ids)
            segments.marker(self._end)
            segments.sampled = False
            segments.boundary()
        else:
            self._turn(segments, message.role, name, message.text)

    def _calls(self, segments: Segments, calls: tuple[ToolCall, ...], ids: dict[str, str]) -> None:
        section, section_end, begin, argument, end = marker_ids(self._tokenizer, CALL_MARKERS, self.name)
        segments.marker(section)
        for call in calls:
            segments.marker(begin)
            segments.text(ids[call.id])
            segments.marker(argument)
            segments.text(call.arguments)
            segments.marker(end)
        segments.marker(section_end)


def call_id(call: ToolCall, number: int) -> str:
    """The id that stands in the text. It carries the tool's name, so an id of another shape is replaced; `number` counts from 0."""
    return call.id if CALL_ID.fullmatch(call.id) else f"functions.{call.name}:{number}"


def _require_options(conversation: Conversation) -> None:
    if conversation.effort is not None:
        raise ConfigError(f"effort = '{conversation.effort}': Kimi-Linear has no efforts; leave it out")
    if conversation.tool_choice not in ("auto", "none"):
        raise ConfigError(f"tool_choice = '{conversation.tool_choice}': Kimi-Linear's format can say auto and none only")
    if any(message.tools for message in conversation.messages):
        raise ConfigError("tools on a system message: Kimi-Linear declares its tools once, before the first message")
