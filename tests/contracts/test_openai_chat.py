"""OpenAI's chat completions: what a body asks, how answers look, and what is refused with which words."""

import base64
import json
from typing import Any

import pytest

from gnomon.data.chat import CallArguments, CallEnded, CallStarted, ReasoningDelta, Reply, TextDelta
from gnomon.data.dialects import openai_chat
from gnomon.data.dialects.asked import Asked, Choice, Cost, Ending, Head, Refused, TokenLogprob
from gnomon.data.messages import Image, Text, ToolCall

HEAD = Head(id="x1", created=5, model="m")
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d",
                                            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
HELLO = [{"role": "user", "content": "hello"}]


def read(**fields: Any) -> Asked:
    return openai_chat.read({"model": "m", "messages": HELLO} | fields)


def test_a_plain_body() -> None:
    asked = read()
    assert asked.model == "m" and asked.n == 1 and not asked.stream and asked.temperature is None and asked.top_logprobs is None
    conversation = asked.conversation
    assert conversation is not None and conversation.thinking and conversation.effort is None
    assert [(m.role, m.text) for m in conversation.messages] == [("user", "hello")]


def test_every_option_is_taken() -> None:
    asked = read(temperature=0, top_p=0.5, top_k=-1, min_p=0.1, repetition_penalty=1.1, presence_penalty=-2, frequency_penalty=2,
                 logit_bias={"7": -100}, seed=-1, stop=["a", "b"], n=2, stream=True, stream_options={"include_usage": True}, logprobs=True,
                 top_logprobs=3, max_completion_tokens=9, parallel_tool_calls=False, user="u", cache=False, cache_salt="s",
                 priority="batch", deadline_seconds=2, regex="a+", metadata={"a": "b"}, store=True, modalities=["text"])
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0, 0.5, 0, 0.1)
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (-2, 2, 1.1)
    assert asked.logit_bias == ((7, -100.0),) and asked.seed == 2**63 - 1 and asked.stop == ("a", "b") and asked.n == 2
    assert asked.stream and asked.include_usage and asked.top_logprobs == 3 and asked.max_tokens == 9 and not asked.parallel_calls
    assert (asked.session, asked.cache, asked.salt, asked.priority) == ("u", False, "s", "batch")
    assert (asked.deadline_seconds, asked.regex) == (2, "a+")


def test_a_conversation_with_everything() -> None:
    pixel = base64.b64encode(b"png").decode()
    asked = read(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}}, messages=[
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "see"},
                                                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixel}"}}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None, "audio": None, "annotations": [],
         "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "system", "content": "more", "tools": [WEATHER]},
    ])
    conversation = asked.conversation
    assert conversation is not None
    system, user, assistant, tool, later = conversation.messages
    assert (system.role, system.text, user.name) == ("system", "be brief", "ann")
    assert user.content == (Text(text="see"), Image(data=b"png", media_type="image/png"))
    away = openai_chat.image("https://x/y.png", "here")  # passed on: a server may be allowed to read it
    assert away == Image(data=b"", media_type="", address="https://x/y.png")
    assert assistant.reasoning == "hm" and assistant.tool_calls == (ToolCall(id="c1", name="weather", arguments='{"city": "Bern"}'),)
    assert tool.tool_call_id == "c1" and tool.text == "rain" and later.tools[0].declaration == WEATHER
    assert conversation.tool_choice == "weather" and conversation.tools[0].declaration == WEATHER


@pytest.mark.parametrize(("fields", "thinking", "effort"), [
    ({}, True, None), ({"reasoning_effort": "low"}, True, "low"), ({"reasoning_effort": "max"}, True, "max"),
    ({"reasoning_effort": "none"}, False, None), ({"thinking": {"type": "disabled"}}, False, None),
    ({"thinking": {"type": "enabled"}, "reasoning_effort": "high"}, True, "high"),
])
def test_thinking(fields: dict[str, Any], thinking: bool, effort: str | None) -> None:
    conversation = read(**fields).conversation
    assert conversation is not None and (conversation.thinking, conversation.effort) == (thinking, effort)


def test_an_unknown_effort_names_the_choices() -> None:
    with pytest.raises(Refused, match=r"'reasoning_effort' is 'minimal'.*choose none, low, medium, high, max"):
        read(reasoning_effort="minimal")


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": WEATHER["function"] | changes}  # type: ignore[operator]


@pytest.mark.parametrize(("fields", "place", "words"), [
    ({"messages": []}, "messages", "empty"),
    ({"messages": None}, "messages", "required"),
    ({"messages": "hi"}, "messages", "a list"),
    ({"messages": ["hi"]}, "messages[0]", "an object"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "choose system"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a string or a list of parts"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type", "text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "ftp://x/y.png"}}]}]},
     "messages[0].content[0].image_url.url", "send the image itself"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,??"}}]}]},
     "messages[0].content[0].image_url.url", "base64"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "required"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f g"}}]}]},
     "messages[0].tool_calls[0].function.name", "letters"),
    ({"temperature": "hot"}, "temperature", "a number"),
    ({"temperature": True}, "temperature", "a number"),
    ({"temperature": -1}, "temperature", "from 0"),
    ({"temperature": 10**400}, "temperature", "more than 20 digits"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"n": 0}, "n", "from 1 to 16"),
    ({"n": 1.5}, "n", "whole number"),
    ({"max_tokens": 0}, "max_tokens", "from 1"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "keep one"),
    ({"stop": ["a", ""]}, "stop", "none of them empty"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": {"a": 1}}, "stop", "a list of strings"),
    ({"logit_bias": {"the": 1}}, "logit_bias", "token ids"),
    ({"top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only for"),
    ({"temprature": 1}, "temprature", "temperature"),
    ({"functions": [{"name": "f"}]}, "functions", "tools"),
    ({"modalities": ["audio"]}, "modalities", "text"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}}, "response_format.json_schema.schema",
     "not a JSON Schema"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex", "keep one"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", "function"),
    ({"tools": [tool(name="")]}, "tools[0].function.name", "letters"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "twice"),
    ({"tools": [tool(parameters={"type": "objet"})]}, "tools[0].function.parameters", "at type"),
    ({"tools": [tool(parameters={"type": "object", "properties": {"a": {"type": 3}}})]}, "tools[0].function.parameters",
     "properties.a.type"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "an object"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters", "arguments are an object"),
    ({"tools": [tool(parameters=nested(100))]}, "tools[0].function.parameters", "deep"),
    ({"tools": [tool(parameters={"$schema": 3})]}, "tools[0].function.parameters", "schema"),
    ({"tool_choice": "required"}, "tool_choice", "declare some"),
    ({"tool_choice": "some"}, "tool_choice", "choose auto, none, required"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "whether"}}}, "tool_choice.function.name", "not among"),
    ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "reasoning_effort", "keep one"),
    ({"priority": "urgent"}, "priority", "interactive, batch"),
    ({"deadline_seconds": 0}, "deadline_seconds", "from 0.001"),
])
def test_what_is_refused(fields: dict[str, Any], place: str, words: str) -> None:
    with pytest.raises(Refused) as error:
        read(**fields)
    assert error.value.field == place
    assert words in str(error.value) and f"'{place}" in str(error.value)


def test_a_body_that_is_no_object() -> None:
    with pytest.raises(Refused, match="'body' must be an object, not a list"):
        openai_chat.read([])  # type: ignore[arg-type]


REPLY = Reply(reasoning="hm", text="ok", tool_calls=(ToolCall(id="c1", name="weather", arguments='{"city": "Bern"}'),), complete=True)
COST = Cost(prompt_tokens=10, cached_tokens=8, output_tokens=5, reasoning_tokens=2, cache_note="why")


def test_a_whole_answer() -> None:
    body = openai_chat.whole(read(), HEAD, [Choice(index=0, reply=REPLY, ending=Ending(reason="stop"))], COST)
    choice = body["choices"][0]
    assert (body["id"], body["object"]) == ("chatcmpl-x1", "chat.completion")
    assert choice["finish_reason"] == "tool_calls" and choice["logprobs"] is None
    assert choice["message"]["reasoning_content"] == "hm" and choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert body["usage"]["total_tokens"] == 15 and body["usage"]["prompt_tokens_details"] == {"cached_tokens": 8, "cache_note": "why"}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


@pytest.mark.parametrize(("ending", "reason", "stop"), [
    (Ending(reason="stop"), "stop", None), (Ending(reason="stop", stop_string="END"), "stop", "END"),
    (Ending(reason="length"), "length", None),
    (Ending(reason="deadline"), "length", "deadline"),
])
def test_reasons(ending: Ending, reason: str, stop: str | None) -> None:
    reply = Reply(reasoning="", text="ok", tool_calls=(), complete=True)
    choice = openai_chat.whole(read(), HEAD, [Choice(index=0, reply=reply, ending=ending)], COST)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)


def test_a_stream_says_what_the_whole_answer_says() -> None:
    asked = read(stream=True, stream_options={"include_usage": True})
    stream = openai_chat.stream(asked, HEAD)
    deltas = [ReasoningDelta(text="h"), ReasoningDelta(text="m"), TextDelta(text="ok"), CallStarted(index=0, id="c1", name="weather"),
              CallArguments(index=0, json='{"city": '), CallArguments(index=0, json='"Bern"}'), CallEnded(index=0)]
    sent = stream.start(COST)
    for delta in deltas:
        sent += stream.delta(0, delta)
    sent += stream.finish(0, REPLY, Ending(reason="stop"))
    sent += stream.end(COST)
    assert sent[-1].data == "[DONE]" and all(event.name is None for event in sent)
    chunks = [json.loads(json.dumps(event.data)) for event in sent[:-1]]
    pieces = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert pieces[0]["role"] == "assistant"
    assert "".join(piece.get("reasoning_content", "") for piece in pieces) == "hm" and "".join(p.get("content", "") for p in pieces) == "ok"
    calls = [call for piece in pieces for call in piece.get("tool_calls", [])]
    assert calls[0]["id"] == "c1" and "".join(call["function"]["arguments"] for call in calls) == '{"city": "Bern"}'
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls" and chunks[-1]["usage"]["prompt_tokens"] == 10


def test_logprobs_keep_thinking_apart() -> None:
    token = TokenLogprob(id=3, raw=b"\xe4", logprob=-0.5, top=(TokenLogprob(id=4, raw=b"a", logprob=float("-inf")),))
    thought = TokenLogprob(id=5, raw=b"t", logprob=-1.0, thinking=True)
    choice = Choice(index=0, reply=REPLY, ending=Ending(reason="stop"), logprobs=(thought, token))
    found = openai_chat.whole(read(logprobs=True, top_logprobs=1), HEAD, [choice], COST)["choices"][0]["logprobs"]
    assert [entry["token_id"] for entry in found["content"]] == [3] and [entry["token_id"] for entry in found["reasoning_content"]] == [5]
    assert found["content"][0]["bytes"] == [0xE4] and found["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
    json.dumps(found, allow_nan=False)


def test_an_error_has_the_shape_that_the_sdk_reads() -> None:
    assert openai_chat.error(400, "no", "n", "invalid_value") == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}}
    assert openai_chat.error(500, "no")["error"]["type"] == "server_error"
