"""Whatever JSON a client sends: a dialect reads it or refuses it with words, and a conversation that was read can be written as tokens or
is refused with words."""

import copy
import json
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.data.chat import chat_format
from gnomon.data.dialects import anthropic, openai_chat, openai_responses
from gnomon.data.tokenizer import train_tokenizer
from gnomon.errors import GnomonError

CHAT = chat_format(train_tokenizer([path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))], 512))
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
ARGUMENTS = '{"a": 1}'
BODIES: dict[ModuleType, dict[str, Any]] = {
    openai_chat: {
        "model": "m", "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "reasoning_effort": "low",
        "stop": ["x"], "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": "a", "reasoning_content": "r",
             "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}]},
            {"role": "tool", "tool_call_id": "c", "content": "t"}],
    },
    openai_responses: {
        "model": "m", "tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "name": "f"}, "instructions": "i",
        "reasoning": {"effort": "high"}, "text": {"format": {"type": "json_schema", "schema": SCHEMA, "name": "n"}}, "include": [],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "aGk="},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "c", "output": "t"}],
    },
    anthropic: {
        "model": "m", "max_tokens": 5, "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}, "system": "s",
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"}, "metadata": {"user_id": "u"},
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "r", "signature": "s"}, {"type": "text", "text": "a"},
                                              {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "t"}]}]}],
    },
}
WORDS = ["", "tool", "user", "assistant", "text", "function", "auto", "none", "medium", "f", "\ud800", "{", "[1]", "data:image/png"]
leaf = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.sampled_from(WORDS)
keys = st.sampled_from(["type", "text", "a"])
anything = st.recursive(leaf, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=2))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a body."""
    inner = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    return [path] * bool(path) + [place for key, part in inner for place in places(part, (*path, key))]


@pytest.mark.parametrize("dialect", BODIES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
@given(data=st.data())
@settings(max_examples=100)
def test_any_body_is_read_or_refused(dialect: Any, data: st.DataObject) -> None:
    body = copy.deepcopy(BODIES[dialect])
    for _ in range(data.draw(st.integers(0, 2))):
        *path, name = data.draw(st.sampled_from(places(body)))
        table = body
        for key in path:
            table = table[key]
        table[name] = data.draw(anything)
    with suppress(GnomonError):
        CHAT.encode(dialect.read(body).conversation)


@pytest.mark.parametrize("dialect", BODIES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_the_bodies_are_read_as_they_stand(dialect: Any) -> None:
    assert dialect.read(BODIES[dialect]).conversation.messages
