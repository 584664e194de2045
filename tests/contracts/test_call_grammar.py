"""`tool_choice` is enforced: whatever a model would rather say, what it may say under the grammar is thinking, then whole calls."""

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest

from gnomon.data.chat import CallGrammar, chat_format
from gnomon.data.messages import Conversation, Message, Text, Tool
from gnomon.data.tokenizer import train_tokenizer
from gnomon.data.xtml_calls import types

pytest.importorskip("llguidance", reason="constrained output needs llguidance")
from gnomon.serve.constrain import Grammars
from gnomon.serve.request import Grammar

DEFS = {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}}
LOOK = Tool(name="look", parameters={"type": "object", "$defs": DEFS, "required": ["city", "days", "at"], "properties": {
    "city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["C", 'F & "K"', 7]},
    "at": {"$ref": "#/$defs/point"}, "maybe": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}, "tags": {"type": "array", "items": {
        "enum": ["a", "b"]}, "maxItems": 2, "uniqueItems": True}}})
STOP = Tool(name='st"op', parameters={"type": "object", "properties": {}})
ANY = Tool(name="any", parameters={"additionalProperties": {"type": ["number", "boolean"]}})


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([Path(textwrap.__file__).read_text(encoding="utf-8")], 400)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer)


def asked(*tools, choice="required", thinking=True):
    return Conversation(messages=(Message(role="user", content=(Text(text="q"),)),), tools=tools, tool_choice=choice, thinking=thinking)


def walk(tokenizer, grammars, conversation, seed, parallel=True):
    """The reply of a model that says anything it may; it prefers to come to an end."""
    chat, rng = chat_format(tokenizer), np.random.default_rng(seed)
    calls = chat.calls(conversation, parallel=parallel)
    after = chat.answer_opens if conversation.thinking else ()
    constraint = grammars.constraint(Grammar(kind="lark", text=calls.text, after=after, closes=calls.closes), chat.stop_ids)
    parser = chat.parser(conversation)
    for _ in range(2000):
        allowed = np.flatnonzero(constraint.allowed())
        markers = allowed[allowed >= len(tokenizer.ranks)]
        token = int(rng.choice(markers if len(markers) and rng.random() < 0.5 else allowed))
        parser.feed(token)
        assert not constraint.add(token)
        if token in chat.stop_ids:
            return token, parser.finish()
    raise AssertionError("the reply does not end")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("thinking", [True, False])
def test_a_required_call_is_made_and_its_arguments_have_the_declared_types(tokenizer, grammars, thinking, seed):
    token, reply = walk(tokenizer, grammars, asked(LOOK, STOP, thinking=thinking), seed)
    assert reply.tool_calls and reply.text == "" and reply.complete == (token == tokenizer.special_ids["<|end_of_msg|>"])
    for call in reply.tool_calls:
        given = json.loads(call.arguments or "{}")
        assert call.name in ("look", 'st"op')
        if call.name == "look":
            assert {"city", "days", "at"} <= given.keys() <= LOOK.parameters["properties"].keys()
            assert isinstance(given["city"], str) and given["days"] in range(1, 10) and isinstance(given["at"]["x"], int)
            assert given.get("unit", 7) in ("C", 'F & "K"', 7) and given.get("maybe") in (None, True, False)
            assert set(given.get("tags", [])) <= {"a", "b"}
        else:
            assert given == {}


@pytest.mark.parametrize("seed", range(4))
def test_a_named_tool_is_the_only_one_and_one_call_is_one(tokenizer, grammars, seed):
    _, named = walk(tokenizer, grammars, asked(LOOK, ANY, choice="any"), seed)
    assert {call.name for call in named.tool_calls} == {"any"}
    assert all(isinstance(value, int | float) for call in named.tool_calls for value in json.loads(call.arguments or "{}").values())
    _, single = walk(tokenizer, grammars, asked(LOOK, ANY), seed, parallel=False)
    assert len(single.tool_calls) == 1


def test_a_tool_that_declares_nothing_may_be_given_anything(tokenizer):
    pattern = chat_format(tokenizer).calls(asked(Tool(name="f"))).text
    assert all(f'type=\\"" "{kind}' in pattern or f'type=\\"{kind}' in pattern for kind in ("string", "number", "object", "array"))


def test_only_a_demand_makes_a_grammar(tokenizer):
    chat = chat_format(tokenizer)
    assert chat.calls(asked(LOOK, choice="auto")) is None and chat.calls(asked(LOOK, choice="none")) is None
    assert isinstance(chat.calls(asked(LOOK, choice="look")), CallGrammar)


def test_thinking_is_words_and_its_end_opens_the_answer(tokenizer, grammars):
    chat = chat_format(tokenizer)
    constraint = grammars.constraint(Grammar(kind="regex", text="yes", after=chat.answer_opens, closes=chat.answer_closes), chat.stop_ids)
    said = [*tokenizer.encode("so"), *chat.answer_opens]
    for token in said:
        allowed = np.flatnonzero(constraint.allowed())
        assert token in allowed and not set(allowed.tolist()) & chat.stop_ids
        constraint.add(token)
    rest = []
    while not rest or rest[-1] not in chat.stop_ids:
        allowed = np.flatnonzero(constraint.allowed())
        rest.append(int(allowed[-1]))
        assert not constraint.add(rest[-1])
    words = len(rest) - len(chat.answer_closes) - 1
    assert tokenizer.decode(rest[:words]) == "yes" and tuple(rest[words:-1]) == chat.answer_closes


@pytest.mark.parametrize(("schema", "found"), [
    ({"type": "integer"}, {"number"}), ({"type": ["string", "null"]}, {"string", "null"}), ({"const": {"a": 1}}, {"object"}),
    ({"anyOf": [{"type": "string"}, {"enum": [True, 1.5, []]}]}, {"string", "boolean", "number", "array"}),
    ({"allOf": [{"type": ["string", "number"]}, {"type": ["number", "object"]}]}, {"number"}), ({"$ref": "#/$defs/point"}, {"object"}),
    (True, {"string", "number", "boolean", "null", "object", "array"}), ({"$ref": "#/nowhere"}, {"string", "number", "boolean", "null",
                                                                                                    "object", "array"}),
])
def test_types_of_a_schema(schema, found):
    assert types(schema, {"$defs": DEFS}) == found
