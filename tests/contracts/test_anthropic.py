"""Anthropic's messages: what a body asks, how answers look to the official types and client, and what is refused with which words."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest

from gnomon.data.chat import CallArguments, CallEnded, CallStarted, Delta, ReasoningDelta, Reply, TextDelta
from gnomon.data.dialects import anthropic
from gnomon.data.dialects.asked import Asked, Choice, Cost, Ending, Head, Refused, Sent
from gnomon.data.messages import Conversation, Image, Text, ToolCall

HEAD = Head(id="x1", created=5, model="m")
COST = Cost(prompt_tokens=100, cached_tokens=64, output_tokens=9, reasoning_tokens=4, cache_note="n")
TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
HELLO = [{"role": "user", "content": "hello"}]
CALL = ToolCall(id="call_0", name="weather", arguments='{"city": "Bern"}')
DELTAS = [
    ReasoningDelta(text="h"), ReasoningDelta(text="m"), TextDelta(text="I "), TextDelta(text="look"),
    CallStarted(index=0, id="call_0", name="weather"), CallArguments(index=0, json='{"city": '), TextDelta(text="!"),
    CallArguments(index=0, json='"Bern"}'), CallEnded(index=0),
]
REPLY = Reply(reasoning="hm", text="I look!", tool_calls=(CALL,), complete=True)


def read(**fields: Any) -> Asked:
    return anthropic.read({"model": "m", "max_tokens": 5, "messages": HELLO} | fields)


def conversation(**fields: Any) -> Conversation:
    found = read(**fields).conversation
    assert found is not None
    return found


def events(deltas: Sequence[Delta], reply: Reply, ending: Ending) -> list[Sent]:
    """A whole stream."""
    stream = anthropic.stream(read(), HEAD)
    pieces = [sent for delta in deltas for sent in stream.delta(0, delta)]
    return [*stream.start(COST), *pieces, *stream.finish(0, reply, ending), *stream.end(COST)]


def wire(sent: Sequence[Sent]) -> bytes:
    """As bytes of a stream."""
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in sent).encode()


def client(body: bytes, media_type: str = "text/event-stream") -> Any:
    """The official client, which gets `body` for an answer."""
    sdk, http = pytest.importorskip("anthropic", reason="anthropic is not installed"), pytest.importorskip("httpx2")
    transport = http.MockTransport(lambda request: http.Response(200, headers={"content-type": media_type}, content=body))
    return sdk.Anthropic(api_key="k", base_url="http://here", http_client=http.Client(transport=transport), max_retries=0)


def test_a_plain_body() -> None:
    asked = read()
    assert (asked.model, asked.max_tokens, asked.n, asked.stream, asked.temperature) == ("m", 5, 1, False, None)
    assert [(m.role, m.text) for m in conversation().messages] == [("user", "hello")] and not conversation().thinking


def test_every_option_is_taken() -> None:
    asked = read(temperature=0, top_p=0.5, top_k=7, min_p=0.1, stop_sequences=["a"], stream=True, metadata={"user_id": "u"}, seed=3,
                 cache=False, cache_salt="s", priority="batch", deadline_seconds=2, service_tier="auto", tools=[TOOL],
                 tool_choice={"type": "any", "disable_parallel_tool_use": True}, context_management={"edits": []})
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.stop, asked.seed) == (0, 0.5, 7, 0.1, ("a",), 3)
    assert (asked.session, asked.cache, asked.salt, asked.priority, asked.deadline_seconds) == ("u", False, "s", "batch", 2)
    assert asked.stream and not asked.parallel_calls and asked.conversation is not None and asked.conversation.tool_choice == "required"


def test_a_conversation_with_everything() -> None:
    pixel = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"png").decode()}
    found = conversation(
        system=[{"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief"}],
        tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}, messages=[
            {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "source": pixel}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Zürich", "n": 1.5}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "c2", "is_error": True}, {"type": "text", "text": "so?"}]},
        ])
    system, user, assistant, result, failed, last = found.messages
    assert (system.role, system.text) == ("system", "be brief")
    assert user.content == (Text(text="see"), Image(data=b"png", media_type="image/png"))
    assert (assistant.reasoning, assistant.text) == ("hm", "ok")
    assert assistant.tool_calls == (ToolCall(id="c1", name="weather", arguments='{"city": "Zürich", "n": 1.5}'),)
    assert [(m.role, m.tool_call_id, m.text) for m in (result, failed, last)] == [
        ("tool", "c1", "rain"), ("tool", "c2", "error"), ("user", None, "so?")]
    assert found.tool_choice == "weather"
    function = {"name": "weather", "description": "d", "parameters": TOOL["input_schema"]}
    assert found.tools[0].declared == {"type": "function", "function": function}


@pytest.mark.parametrize(("fields", "thinking", "effort"), [
    ({}, False, None), ({"thinking": {"type": "disabled"}}, False, None), ({"thinking": {"type": "adaptive"}}, True, None),
    ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, True, None), ({"output_config": {"effort": "max"}}, True, "max"),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, True, "low"),
])
def test_thinking(fields: dict[str, Any], thinking: bool, effort: str | None) -> None:
    assert (conversation(**fields).thinking, conversation(**fields).effort) == (thinking, effort)


def test_structured_output() -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        found = conversation(**fields).response_format
        assert found is not None and found.kind == "json_schema" and found.schema == {"type": "object"}


@pytest.mark.parametrize(("fields", "words"), [
    ({"max_tokens": None}, "'max_tokens' is required"),
    ({"max_tokens": 0}, "'max_tokens' is 0"),
    ({"messages": []}, "'messages' is empty"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"'messages\[0\].role' is 'tool'.*choose user, assistant"),
    ({"messages": [{"role": "user"}]}, r"'messages\[0\].content' is required"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "{"}]}, "the last of 'messages'"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"content\[0\].type' is 'document'; blocks here are text, image"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}]}, "send the image itself"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "i", "data": "?"}}]}]},
     "is not base64"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "x"}]}]}, "must be an object"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id' is required"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "no tools of its own"),
    ({"tools": [TOOL, TOOL]}, "twice"),
    ({"tools": [{"name": "f", "input_schema": {"type": 7}}]}, "not a JSON Schema"),
    ({"tool_choice": {"type": "any"}}, "there are no 'tools'"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "not among 'tools'"),
    ({"output_config": {"effort": "xhigh"}}, "'output_config.effort' is 'xhigh'.*choose low, medium, high, max"),
    ({"thinking": {"type": "on"}}, "choose enabled"),
    ({"top_p": 0}, "'top_p' is 0"),
    ({"mcp_servers": [{}]}, "no requests of its own"),
    ({"max_token": 1}, "unknown field 'max_token'; did you mean 'max_tokens'"),
])
def test_refusals_name_field_and_remedy(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        read(**fields)


def test_tokens_are_counted_without_a_limit() -> None:
    asked = anthropic.read_count({"model": "m", "messages": HELLO, "system": "s", "tools": [TOOL]})
    assert asked.conversation is not None and len(asked.conversation.messages) == 2 and len(asked.conversation.tools) == 1
    types = pytest.importorskip("anthropic.types", reason="anthropic is not installed")
    assert types.MessageTokensCount.model_validate(anthropic.counted(7)).input_tokens == 7
    with pytest.raises(Refused, match="unknown field 'x'"):
        anthropic.read_count({"messages": HELLO, "x": 1})


@pytest.mark.parametrize(("ending", "reply", "reason", "string"), [
    (Ending(reason="stop"), REPLY, "tool_use", None), (Ending(reason="length"), REPLY, "max_tokens", None),
    (Ending(reason="stop", stop_string="#"), REPLY, "stop_sequence", "#"), (Ending(reason="deadline"), REPLY, "max_tokens", None),
    (Ending(reason="stop"), Reply(reasoning="", text="x", tool_calls=(), complete=True), "end_turn", None),
])
def test_reasons_to_stop(ending: Ending, reply: Reply, reason: str, string: str | None) -> None:
    body = anthropic.whole(read(), HEAD, [Choice(index=0, reply=reply, ending=ending)], COST)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, string)
    delta = events([], reply, ending)[-2].data
    assert isinstance(delta, dict) and delta["delta"] == {"stop_reason": reason, "stop_sequence": string}


def test_an_answer_is_a_message_of_the_official_types_and_reads_back() -> None:
    types = pytest.importorskip("anthropic.types", reason="anthropic is not installed")
    body = anthropic.whole(read(), HEAD, [Choice(index=0, reply=REPLY, ending=Ending(reason="stop"))], COST)
    message = types.Message.model_validate(body, strict=True)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"] and message.content[2].input == {"city": "Bern"}
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (36, 64, 9)
    assert usage.output_tokens_details.thinking_tokens == 4
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_0", "content": "rain"}]}
    back = conversation(messages=[*HELLO, {"role": "assistant", "content": body["content"]}, result])
    assert back.messages[1] == REPLY.message


def test_calls_without_proper_arguments() -> None:
    bad = Reply(reasoning="", text="", tool_calls=(CALL, ToolCall(id="b", name="f", arguments='{"x": "rm -rf /ho')), complete=False)
    cut = anthropic.whole(read(), HEAD, [Choice(index=0, reply=bad, ending=Ending(reason="length"))], COST)
    assert [block["id"] for block in cut["content"]] == ["call_0"] and cut["stop_reason"] == "max_tokens"
    whole = anthropic.whole(read(), HEAD, [Choice(index=0, reply=bad, ending=Ending(reason="stop"))], COST)
    assert whole["content"][1]["input"] == {"arguments": '{"x": "rm -rf /ho'}


def test_events_are_of_the_official_types_and_blocks_do_not_overlap() -> None:
    pytest.importorskip("anthropic", reason="anthropic is not installed")
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    sent = events(DELTAS, REPLY, Ending(reason="stop"))
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for name, data in sent:
        assert isinstance(data, dict) and adapter.validate_python(data, strict=True).type == data["type"] == name
    order = [(data["type"][14:], data["index"]) for _, data in sent if isinstance(data, dict) and data["type"].startswith("content_block_")]
    assert [step for step in order if step[0] != "delta"] == [(kind, index) for index in range(4) for kind in ("start", "stop")]
    assert all(index == order[at - 1][1] for at, (kind, index) in enumerate(order) if kind == "delta")


def test_the_official_client_streams_the_message() -> None:
    with client(wire(events(DELTAS, REPLY, Ending(reason="stop")))).messages.stream(model="m", max_tokens=5, messages=HELLO) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "text"]
    assert message.content[0].thinking == "hm" and message.content[2].input == {"city": "Bern"} and message.stop_reason == "tool_use"
    assert message.content[1].text + message.content[3].text == "I look!" and message.usage.output_tokens == 9


def test_text_inside_a_call_that_was_cut_comes_after_it() -> None:
    sent = events(DELTAS[:-2], REPLY, Ending(reason="length"))
    blocks = [data["content_block"]["type"] for _, data in sent if isinstance(data, dict) and data["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use", "text"]


@pytest.mark.parametrize(("status", "kind"), [
    (400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"), (413, "request_too_large"),
    (429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error"),
])
def test_errors_have_the_official_shape(status: int, kind: str) -> None:
    body = anthropic.error(status, "why", "messages", "code")
    assert body == {"type": "error", "error": {"type": kind, "message": "why"}}
    if kind != "request_too_large":
        types = pytest.importorskip("anthropic.types", reason="anthropic is not installed")
        assert types.ErrorResponse.model_validate(body).error.type == kind


def test_the_official_client_sees_an_error_in_a_stream() -> None:
    sdk = pytest.importorskip("anthropic", reason="anthropic is not installed")
    body = wire([*events([], REPLY, Ending(reason="stop"))[:1], Sent("error", anthropic.error(503, "going down"))])
    with (pytest.raises(sdk.APIStatusError, match="going down"),
          client(body).messages.stream(model="m", max_tokens=5, messages=HELLO) as stream):
        stream.get_final_message()
