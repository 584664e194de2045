"""For every message: it comes back as it was written. For all ids, in any order: the parser reads them and loses no text."""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.data import special_tokens
from gnomon.data.chat import CallArguments, CallEnded, CallStarted, ChatFormat, ReasoningDelta, Reply, TextDelta, chat_format
from gnomon.data.messages import Conversation, Message, Text, Tool, ToolCall
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.errors import ConfigError

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
K3 = train_tokenizer([*TEXTS, "response message argument think ☃ " * 50], 1024)
LINEAR_NAMES = [
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "[PAD]",
]
LINEAR = Tokenizer(K3.ranks, special_tokens.fill(dict(enumerate(LINEAR_NAMES)), len(K3.ranks), 16))
XTML, TURNS = chat_format(K3), chat_format(LINEAR)
BYTES = {token: index for index, token in enumerate(K3.ranks) if len(token) == 1}

unicode = st.characters(exclude_categories=("Cs",))
words = st.sampled_from(
    ["<|open|>", "<|close|>think<|sep|>", "<|end_of_msg|>", "<|tool_call_end|>", '"', "&quot;", "&amp;", " ", "\n", "{", "☃", "é"])
text = st.lists(words | st.text(unicode, max_size=8), max_size=6).map("".join)
scalar = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | text
json_value = st.recursive(scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6)
arguments = st.dictionaries(text, json_value, max_size=4).map(lambda value: json.dumps(value, ensure_ascii=False))
broken = text.map(lambda value: "{" + value).filter(lambda value: not is_json(value))
calls = st.lists(st.tuples(text.filter(str.strip), arguments | broken), max_size=3)
piece = (
    st.sampled_from([K3.special_ids[name] for name in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")]).map(lambda i: [i])
    | st.sampled_from(["think", "response", "tools", 'call tool="☃"', 'argument key="☃" type="string"', 'argument key="k" type="number"',
                       "json", "message", "call", "argument", "☃", '{"a": 1}', "functions.f☃:0"]).map(K3.encode)
    | st.integers(-1, K3.vocab_size + 2).map(lambda i: [i])
)
opening = st.tuples(st.sampled_from(["<|open|>", "<|close|>"]), piece).map(
    lambda pair: [K3.special_ids[pair[0]], *pair[1], K3.special_ids["<|sep|>"]])
marker = st.integers(len(K3.ranks), LINEAR.vocab_size).map(lambda i: [i])
noise = st.lists(piece | opening, max_size=30).map(lambda parts: [index for part in parts for index in part])
turns_noise = st.lists(piece | marker, max_size=30).map(lambda parts: [index for part in parts for index in part])


def is_json(value: str) -> bool:
    """Whether Python reads it as JSON."""
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


def read(chat: ChatFormat, ids: list[int], conversation: Conversation) -> Reply:
    """The reply, after checking that its deltas say the same."""
    parser, deltas = chat.parser(conversation), []
    for token in ids:
        deltas += parser.feed(token)
    reply = parser.finish()
    assert parser.finish() == reply
    deltas += reply.tail
    assert "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)) == reply.reasoning
    assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == reply.text
    assert [(d.index, d.id, d.name) for d in deltas if isinstance(d, CallStarted)] == [
        (i, call.id, call.name) for i, call in enumerate(reply.tool_calls)]
    for index, call in enumerate(reply.tool_calls):
        own: list[Any] = [d for d in deltas if isinstance(d, CallStarted | CallArguments | CallEnded) and d.index == index]
        assert isinstance(own[0], CallStarted) and not any(isinstance(d, CallEnded) for d in own[:-1])
        assert "".join(d.json for d in own if isinstance(d, CallArguments)) == call.arguments
    return reply


@given(text, text, calls, st.booleans(), st.lists(text, max_size=3))
@settings(max_examples=60)
def test_a_message_comes_back(reasoning: str, answer: str, made: list[tuple[str, str]], thinking: bool, more: list[str]) -> None:
    made_calls = tuple(ToolCall(id=f"call_{i}", name=name, arguments=value) for i, (name, value) in enumerate(made))
    message = Message(role="assistant", content=(Text(text=answer),), reasoning=reasoning if thinking else None, tool_calls=made_calls)
    asked = tuple(Message(role="user", content=(Text(text=t),)) for t in more)
    before = Conversation(messages=asked, tools=(Tool(name="f"),), thinking=thinking)
    after = dataclasses.replace(before, messages=(*before.messages, message))
    prompt, history = XTML.encode(before), XTML.encode(after, generate=False)
    start = len(prompt.tokens)
    assert history.tokens[:start] == prompt.tokens and all(history.mask[start:]) and not any(prompt.mask)
    tag = [K3.special_ids["<|open|>"], *K3.encode("think" if thinking else "response"), K3.special_ids["<|sep|>"]]
    assert history.mask.index(True) == start - len(tag) and sum(history.mask) == len(history.tokens) - start + len(tag)

    reply = read(XTML, list(history.tokens[start:]), before)
    assert reply.complete and reply.text == answer and reply.reasoning == (reasoning if thinking and reasoning.strip() else "")
    assert [(call.id, call.name) for call in reply.tool_calls] == [(call.id, call.name) for call in made_calls]
    for call, (_, value) in zip(reply.tool_calls, made, strict=True):
        assert json.loads(call.arguments) == json.loads(value) if is_json(value) else call.arguments == value
    again = dataclasses.replace(before, messages=(*before.messages, reply.message))
    assert XTML.encode(again, generate=False).tokens == history.tokens


@given(text, st.lists(st.tuples(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), arguments), max_size=3))
@settings(max_examples=60)
def test_a_turn_of_kimi_linear_comes_back(answer: str, made: list[tuple[str, str]]) -> None:
    made_calls = tuple(ToolCall(id=f"functions.{name}:{i}", name=name, arguments=value) for i, (name, value) in enumerate(made))
    message = Message(role="assistant", content=(Text(text=answer),), tool_calls=made_calls)
    start = len(TURNS.encode(Conversation(messages=())).tokens)
    history = TURNS.encode(Conversation(messages=(message,)), generate=False)
    reply = read(TURNS, list(history.tokens[start:]), Conversation(messages=()))
    assert reply == Reply(reasoning="", text=answer, tool_calls=made_calls, complete=True)


@given(noise, st.booleans())
@settings(max_examples=200)
def test_any_ids_are_read_and_no_text_is_lost(ids: list[int], thinking: bool) -> None:
    conversation = Conversation(messages=(), thinking=thinking)
    reply = read(XTML, ids, conversation)
    known = "".join(K3.decode([i]) if 0 <= i < K3.vocab_size else "" for i in ids)
    kept = "".join([reply.reasoning, reply.text, *(call.name + call.arguments for call in reply.tool_calls)])
    assert kept.count("☃") >= known.count("☃")
    if K3.special_ids["<|sep|>"] not in ids and not set(ids) & {*XTML.stop_ids, *range(K3.vocab_size, K3.vocab_size + 3), -1}:
        assert kept == K3.decode(ids)
    kept.encode()
    # A `json` block may hold other JSON than an object; nothing else that was sampled keeps a conversation from going on.
    strange = [call for call in reply.tool_calls if is_json(call.arguments) and not isinstance(json.loads(call.arguments), dict)]
    with pytest.raises(ConfigError) if strange else nullcontext():
        XTML.encode(dataclasses.replace(conversation, messages=(reply.message,)))


@given(noise)
@settings(max_examples=80)
def test_how_text_is_cut_into_ids_changes_nothing(ids: list[int]) -> None:
    letters = [letter for i in ids for letter in ([BYTES[bytes([b])] for b in K3.ranks[i]] if 0 <= i < len(K3.ranks) else [i])]
    assert dataclasses.replace(read(XTML, ids, Conversation(messages=())), tail=()) == dataclasses.replace(
        read(XTML, letters, Conversation(messages=())), tail=())


@given(turns_noise)
@settings(max_examples=80)
def test_kimi_linear_reads_any_ids(ids: list[int]) -> None:
    reply = read(TURNS, ids, Conversation(messages=()))
    known = "".join(LINEAR.decode([i]) if 0 <= i < LINEAR.vocab_size else "" for i in ids)
    kept = "".join([reply.text, *(call.id + call.arguments for call in reply.tool_calls)])
    assert kept.count("☃") >= known.count("☃")
    kept.encode()
