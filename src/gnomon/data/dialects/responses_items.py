"""The items of OpenAI's responses: read into messages, and written from a reply.

One answer of a model is several items (reasoning, message, calls); together they are one message. Unknown fields inside items are ignored,
because clients send answers back as they came. Read next: `openai_responses.py`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gnomon.data.chat import CallStarted, Reply
from gnomon.data.dialects import openai_options as options
from gnomon.data.dialects.asked import Refused, TokenLogprob
from gnomon.data.dialects.blocks import Kind
from gnomon.data.dialects.fields import Fields, shown, wrong
from gnomon.data.dialects.openai_chat import image
from gnomon.data.dialects.tools import tool_name
from gnomon.data.messages import Message, Part, Text, ToolCall

ROLES = ("user", "assistant", "system", "developer")
KINDS = ("message", "function_call", "function_call_output", "reasoning")


@dataclass
class _Answer:
    """The items of one answer, until they are a message."""

    reasoning: list[str] = field(default_factory=list)
    content: list[Part] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        reasoning = "\n".join(self.reasoning) or None
        return Message(role="assistant", content=tuple(self.content), reasoning=reasoning, tool_calls=tuple(self.calls))


def messages(fields: Fields) -> tuple[Message, ...]:
    """The messages of `instructions` and `input`."""
    instructions = fields.text("instructions")
    first = [Message(role="system", content=(Text(text=instructions),))] if instructions else []
    value = fields.require("input")
    if isinstance(value, str):
        return (*first, Message(role="user", content=(Text(text=value),) if value else ()))
    options.require_texts(value, "input")
    return (*first, *_joined(fields.objects("input")))


def _joined(entries: Iterable[Fields]) -> Iterable[Message]:
    answer: _Answer | None = None
    for entry in entries:
        kind = entry.get("type") or ("message" if entry.get("role") else entry.require("type"))
        if kind not in KINDS:
            raise Refused(f"'{entry.place('type')}' is {shown(kind)}; items here are {', '.join(KINDS)}", entry.place("type"))
        said = kind == "message" and entry.choice("role", ROLES) == "assistant"
        begins = answer is not None and (kind == "reasoning" and (answer.content or answer.calls) or said and answer.content)
        if answer is not None and (begins or not (said or kind in ("reasoning", "function_call"))):
            yield answer.message()
            answer = None
        if said or kind in ("reasoning", "function_call"):
            answer = answer or _Answer()
            _add(answer, entry, kind)
        elif kind == "function_call_output":
            yield Message(role="tool", content=_content(entry, "output"), tool_call_id=_text(entry, "call_id"))
        else:
            role = entry.require("role")
            yield Message(role="user" if role == "user" else "system", content=_content(entry, "content"))
    if answer is not None:
        yield answer.message()


def _add(answer: _Answer, entry: Fields, kind: str) -> None:
    if kind == "reasoning":
        answer.reasoning += [text for text in [_reasoning(entry)] if text]
    elif kind == "function_call":
        name = tool_name(entry.require("name"), entry.place("name"))
        answer.calls.append(ToolCall(id=_text(entry, "call_id"), name=name, arguments=entry.text("arguments") or ""))
    else:
        answer.content += _content(entry, "content")


def _reasoning(entry: Fields) -> str:
    """The text of a reasoning item: its content, else what `encrypted_content` holds, else its summary."""
    content = "".join(_text(part, "text") for part in entry.objects("content"))
    sealed = entry.text("encrypted_content")
    if content or not sealed:
        return content or "\n".join(_text(part, "text") for part in entry.objects("summary"))
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError):
        place = entry.place("encrypted_content")
        raise Refused(f"'{place}' was not written by this server; leave it out", place) from None


def _content(entry: Fields, name: str) -> tuple[Part, ...]:
    value = entry.require(name)
    if isinstance(value, str):
        return (Text(text=value),) if value else ()
    if not isinstance(value, list):
        raise wrong(entry.place(name), value, "a string or a list of parts")
    return tuple(part for part in map(_part, entry.objects(name)) if part != Text(text=""))


def _part(entry: Fields) -> Part:
    kind = entry.require("type")
    if kind in ("input_text", "output_text", "text"):
        return Text(text=_text(entry, "text"))
    if kind == "refusal":
        return Text(text=_text(entry, "refusal"))
    if kind == "input_image":
        return image(entry.require("image_url"), entry.place("image_url"))
    raise Refused(f"'{entry.place('type')}' is {shown(kind)}; parts here are input_text, input_image, output_text", entry.place("type"))


def _text(entry: Fields, name: str) -> str:
    value = entry.require(name)
    if not isinstance(value, str):
        raise wrong(entry.place(name), value, "a string")
    return value


def output(reply: Reply, answer_id: str, status: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a reply. With a status other than `completed` the last one was cut."""
    found: list[dict[str, Any]] = []
    if reply.reasoning:
        found.append(item("reasoning", answer_id, len(found), reply.reasoning, "completed"))
    if reply.text:
        found.append(item("text", answer_id, len(found), reply.text, "completed", logprobs=logprobs))
    for index, call in enumerate(reply.tool_calls):
        started = CallStarted(index=index, id=call.id, name=call.name)
        found.append(item("call", answer_id, len(found), call.arguments, "completed", call=started))
    if found:
        found[-1]["status"] = status
    return found


def item(kind: Kind, answer_id: str, number: int, text: str, status: str, *, call: CallStarted | None = None,
         logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """An item of the output with all of its text."""
    if call is not None:
        return {"id": f"fc_{answer_id}_{number}", "type": "function_call", "call_id": call.id, "name": call.name, "arguments": text,
                "status": status}
    if kind == "reasoning":
        return {"id": f"rs_{answer_id}_{number}", "type": "reasoning", "summary": [], "content": [part(kind, text, [])],
                "encrypted_content": base64.b64encode(text.encode()).decode(), "status": status}
    return {"id": f"msg_{answer_id}_{number}", "type": "message", "role": "assistant", "content": [part(kind, text, logprobs)],
            "status": status}


def empty(entry: dict[str, Any]) -> dict[str, Any]:
    """The item as it is announced: its parts come later."""
    return entry | {"content": []} if "content" in entry else entry


def part(kind: Kind, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The one part of an item."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Log-probabilities of an answer's tokens; those of the thinking have no place in this API."""
    return [options.logprob(token) for token in tokens if not token.thinking]
