"""Messages of Anthropic's API: blocks of text, images, thinking, uses of tools and their results, read into messages.

Unknown fields inside blocks are ignored, because clients send answers back as they came. Read next: `anthropic.py`.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from gnomon.data.dialects import openai_options as options
from gnomon.data.dialects.asked import Refused
from gnomon.data.dialects.fields import Fields, shown, wrong
from gnomon.data.dialects.openai_chat import image
from gnomon.data.dialects.tools import DEEPEST, depth, tool_name
from gnomon.data.messages import Image, Message, Part, Text, ToolCall


def system(fields: Fields) -> tuple[Message, ...]:
    """The `system` of a body, a string or text blocks, as the first message."""
    parts = tuple(part for block in _blocks(fields, "system") for part in _parts(block, ("text",)))
    return (Message(role="system", content=parts),) if parts else ()


def messages(fields: Fields) -> tuple[Message, ...]:
    """The messages of a body. Raises `Refused` for one that an assistant's message ends: answers are not continued."""
    options.require_texts(fields.require("messages"), "messages")
    found: list[Message] = []
    for entry in fields.objects("messages"):
        role = entry.require("role")
        entry.choice("role", ("user", "assistant", "system"))
        entry.require("content")
        if role == "assistant":
            found.append(_assistant(entry))
        elif role == "user":
            found += _user(entry)
        else:
            parts = tuple(part for block in _blocks(entry, "content") for part in _parts(block, ("text",)))
            found.append(Message(role="system", content=parts))
    if found[-1].role == "assistant":
        raise Refused("the last of 'messages' is the assistant's; a begun answer is not continued here: end with the user's", "messages")
    return tuple(found)


def _assistant(entry: Fields) -> Message:
    text: list[Part] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in _blocks(entry, "content"):
        kind = block.require("type")
        if kind == "thinking":
            thoughts.append(_text(block, "thinking"))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind != "redacted_thinking":
            text += _parts(block, ("text", "thinking", "tool_use"))
    return Message(role="assistant", content=tuple(text), reasoning="".join(thoughts) or None, tool_calls=tuple(calls))


def _call(block: Fields) -> ToolCall:
    value = block.require("input")
    if not isinstance(value, dict):
        raise wrong(block.place("input"), value, "an object")
    if depth(value) > DEEPEST:
        raise Refused(f"'{block.place('input')}' is nested more than {DEEPEST} deep; make it flatter", block.place("input"))
    name = tool_name(block.require("name"), block.place("name"))
    return ToolCall(id=_text(block, "id"), name=name, arguments=json.dumps(value, ensure_ascii=False))


def _user(entry: Fields) -> list[Message]:
    """One message for each result, and one for what stands between them."""
    found: list[Message] = []
    parts: list[Part] = []
    for block in _blocks(entry, "content"):
        if block.require("type") == "tool_result":
            if parts:
                found.append(Message(role="user", content=tuple(parts)))
                parts = []
            found.append(_result(block))
        else:
            parts += _parts(block, ("text", "image", "tool_result"))
    return [*found, Message(role="user", content=tuple(parts))] if parts or not found else found


def _result(block: Fields) -> Message:
    """What a tool gave. An error without words gets one, so that the model can tell it from an empty result."""
    parts = tuple(part for inner in _blocks(block, "content") for part in _parts(inner, ("text", "image")))
    if block.flag("is_error") and not parts:
        parts = (Text(text="error"),)
    return Message(role="tool", content=parts, tool_call_id=_text(block, "tool_use_id"))


def _blocks(entry: Fields, name: str) -> list[Fields]:
    """The blocks of a field; a string is one block of text."""
    value = entry.get(name)
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, entry.place(name))] if value else []
    if value is not None and not isinstance(value, list):
        raise wrong(entry.place(name), value, "a string or a list of blocks")
    return entry.objects(name)


def _parts(block: Fields, known: tuple[str, ...]) -> list[Part]:
    """The text or image of a block; none for empty text."""
    kind = block.require("type")
    if kind == "text" and "text" in known:
        text = _text(block, "text")
        return [Text(text=text)] if text else []
    if kind == "image" and "image" in known:
        return [_image(block)]
    raise Refused(f"'{block.place('type')}' is {shown(kind)}; blocks here are {', '.join(known)}", block.place("type"))


def _image(block: Fields) -> Image:
    block.require("source")
    source = block.object("source")
    assert source is not None
    if source.require("type") == "url":
        return image(source.require("url"), source.place("url"))
    if source.get("type") != "base64":
        raise Refused(f"'{source.place('type')}' is {shown(source.get('type'))}; send the image itself, as base64", source.place("type"))
    media = _text(source, "media_type")
    try:
        return Image(data=base64.b64decode(_text(source, "data"), validate=True), media_type=media)
    except (binascii.Error, ValueError):
        raise Refused(f"'{source.place('data')}' is not base64", source.place("data")) from None


def _text(entry: Fields, name: str) -> str:
    value: Any = entry.require(name)
    if not isinstance(value, str):
        raise wrong(entry.place(name), value, "a string")
    return value
