"""OpenAI's responses: what a body asks, how answers look to the official types and client, and what is refused with which words."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest

from gnomon.data.chat import CallArguments, CallEnded, CallStarted, Delta, ReasoningDelta, Reply, TextDelta
from gnomon.data.dialects import openai_responses
from gnomon.data.dialects.asked import Asked, Choice, Cost, Ending, Head, Refused, Sent, TokenLogprob
from gnomon.data.messages import Conversation, Image, Message, Text, ToolCall

HEAD = Head(id="x1", created=5, model="m")
COST = Cost(prompt_tokens=100, cached_tokens=64, output_tokens=9, reasoning_tokens=4, cache_note="n")
PARAMETERS = {"type": "object", "properties": {"city": {}}}
TOOL = {"type": "function", "name": "weather", "description": "d", "strict": True, "parameters": PARAMETERS}
CALL = ToolCall(id="call_0", name="weather", arguments='{"city": "Bern"}')
DELTAS = [
    ReasoningDelta(text="h"), ReasoningDelta(text="m"), TextDelta(text="I "), TextDelta(text="look"),
    CallStarted(index=0, id="call_0", name="weather"), CallArguments(index=0, json='{"city": '), TextDelta(text="!"),
    CallArguments(index=0, json='"Bern"}'), CallEnded(index=0),
]
REPLY = Reply(reasoning="hm", text="I look!", tool_calls=(CALL,), complete=True)
LOGPROB = TokenLogprob(id=7, raw=b"I ", logprob=-0.5, top=(TokenLogprob(id=8, raw=b"A", logprob=-2.0),))


def read(**fields: Any) -> Asked:
    return openai_responses.read({"model": "m", "input": "hello"} | fields)


def conversation(**fields: Any) -> Conversation:
    found = read(**fields).conversation
    assert found is not None
    return found


def events(asked: Asked, deltas: Sequence[Delta], reply: Reply, ending: Ending) -> list[Sent]:
    """A whole stream; the first piece of the answer has log-probabilities."""
    stream, pieces = openai_responses.stream(asked, HEAD), []
    started = stream.start(COST)
    for delta in deltas:
        pieces += stream.delta(0, delta, [LOGPROB] if delta == TextDelta(text="I ") else [])
    return [*started, *pieces, *stream.finish(0, reply, ending), *stream.end(COST)]


def last(sent: Sequence[Sent]) -> Any:
    """The response that the last event carries."""
    assert isinstance(sent[-1].data, dict)
    return sent[-1].data["response"]


def test_a_plain_body() -> None:
    asked = read()
    assert (asked.model, asked.max_tokens, asked.n, asked.stream, asked.top_logprobs) == ("m", None, 1, False, None)
    assert [(m.role, m.text) for m in conversation().messages] == [("user", "hello")]
    assert conversation().thinking and conversation().effort is None


def test_every_option_is_taken() -> None:
    asked = read(temperature=0, top_p=0.5, max_output_tokens=9, stream=True, parallel_tool_calls=False, prompt_cache_key="u", store=True,
                 include=["message.output_text.logprobs", "reasoning.encrypted_content"], top_logprobs=3, seed=4, metadata={"a": "b"},
                 tools=[TOOL], tool_choice={"type": "function", "name": "weather"}, truncation="disabled",
                 reasoning={"effort": "low", "summary": "auto"},
                 text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}, "verbosity": "low"})
    assert (asked.temperature, asked.top_p, asked.max_tokens, asked.stream, asked.parallel_calls) == (0, 0.5, 9, True, False)
    assert (asked.session, asked.top_logprobs, asked.seed) == ("u", 3, 4)
    found = asked.conversation
    assert found is not None and (found.effort, found.tool_choice) == ("low", "weather")
    assert found.response_format is not None and found.response_format.schema == {"type": "object"}
    function = {"name": "weather", "description": "d", "parameters": PARAMETERS}
    assert found.tools[0].declared == {"type": "function", "function": function}


def test_items_become_messages() -> None:
    url = f"data:image/png;base64,{base64.b64encode(b'png').decode()}"
    found = conversation(instructions="be brief", input=[
        {"role": "developer", "content": "more"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "status": "completed", "id": "m",
         "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":1}', "id": "f"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": base64.b64encode("naïve".encode()).decode()},
        {"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "three"},
    ])
    calls = (ToolCall(id="c1", name="weather", arguments='{"city":1}'), ToolCall(id="c2", name="weather", arguments=""))
    said = [Message(role="assistant", content=(Text(text=text),)) for text in ("two", "three")]
    assert found.messages == (
        Message(role="system", content=(Text(text="be brief"),)), Message(role="system", content=(Text(text="more"),)),
        Message(role="user", content=(Text(text="see"), Image(data=b"png", media_type="image/png"))),
        Message(role="assistant", content=(Text(text="ok"),), reasoning="hm", tool_calls=calls),
        Message(role="tool", content=(Text(text="rain"),), tool_call_id="c1"),
        Message(role="tool", content=(Text(text="sun"),), tool_call_id="c2"),
        Message(role="assistant", content=(Text(text="one"),), reasoning="short\nnaïve"), *said)


@pytest.mark.parametrize(("fields", "words"), [
    ({"input": None}, "'input' is required"),
    ({"input": []}, "'input' is empty"),
    ({"input": 7}, "'input' must be a list"),
    ({"input": [{"content": "x"}]}, r"'input\[0\].type' is required"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "'item_reference'; items here are message"),
    ({"input": [{"role": "tool", "content": "x"}]}, "choose user, assistant"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "'input_file'; parts here are"),
    ({"input": [{"type": "reasoning", "encrypted_content": "gAAAA"}]}, "was not written by this server"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id' is required"),
    ({"previous_response_id": "resp_1"}, "send the history in 'input'"),
    ({"background": True}, "leave it out"),
    ({"tools": [{"type": "web_search"}]}, "no tools of its own"),
    ({"tools": [TOOL, TOOL]}, "twice"),
    ({"tool_choice": "required"}, "there are no 'tools'"),
    ({"tool_choice": {"type": "allowed_tools"}}, "'tool_choice.type' is 'allowed_tools'"),
    ({"reasoning": {"effort": "xhigh"}}, "'reasoning.effort' is 'xhigh'.*choose none, low"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "'text.format.schema' is not a JSON Schema"),
    ({"include": ["file_search_call.results"]}, "choose message.output_text.logprobs"),
    ({"truncation": "auto"}, "'truncation' is auto"),
    ({"n": 2}, "'n' is 2"),
    ({"max_tokens": 2}, "unknown field 'max_tokens'"),
])
def test_refusals_name_field_and_remedy(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        read(**fields)


def test_an_answer_is_a_response_of_the_official_types_and_reads_back() -> None:
    types = pytest.importorskip("openai.types.responses", reason="openai is not installed")
    asked = read(tools=[TOOL], include=["message.output_text.logprobs"], text={"format": {"type": "json_object"}})
    body = openai_responses.whole(asked, HEAD, [Choice(index=0, reply=REPLY, ending=Ending(reason="stop"), logprobs=(LOGPROB,))], COST)
    response = types.Response.model_validate(body)
    assert (response.status, response.output_text, [item.type for item in response.output]) == (
        "completed", "I look!", ["reasoning", "message", "function_call"])
    assert (response.output[2].call_id, response.output[2].arguments) == ("call_0", CALL.arguments)
    assert response.output[1].content[0].logprobs[0].top_logprobs[0].token == "A"
    assert (response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens, response.usage.output_tokens) == (100, 64, 9)
    back = conversation(input=[{"role": "user", "content": "q"}, *body["output"]])
    assert back.messages[1] == REPLY.message
    sealed = [{key: value for key, value in item.items() if item["type"] != "reasoning" or key != "content"} for item in body["output"]]
    assert conversation(input=sealed).messages == (REPLY.message,)


@pytest.mark.parametrize(("ending", "status"), [
    (Ending(reason="stop"), "completed"), (Ending(reason="stop", stop_string="#"), "completed"),
    (Ending(reason="length"), "incomplete"), (Ending(reason="deadline"), "incomplete"),
])
def test_how_an_answer_ended(ending: Ending, status: str) -> None:
    body = openai_responses.whole(read(), HEAD, [Choice(index=0, reply=REPLY, ending=ending)], COST)
    assert (body["status"], body["output"][-1]["status"], body["output"][0]["status"]) == (status, status, "completed")
    sent = events(read(), DELTAS[:-3], REPLY, ending)
    assert sent[-1].name == f"response.{status}" and last(sent)["status"] == status
    assert [item["status"] for item in last(sent)["output"]] == ["completed", "completed", "incomplete"]


def test_events_are_of_the_official_types_and_in_order() -> None:
    pytest.importorskip("openai", reason="openai is not installed")
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    sent = events(read(tools=[TOOL]), DELTAS, REPLY, Ending(reason="stop"))
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for number, (name, data) in enumerate(sent):
        assert isinstance(data, dict) and adapter.validate_python(data).type == data["type"] == name and data["sequence_number"] == number
    places = [data["output_index"] for _, data in sent if isinstance(data, dict) and "output_index" in data]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}
    added = [data["item"]["id"] for name, data in sent if isinstance(data, dict) and name == "response.output_item.added"]
    done = [data["item"] for name, data in sent if isinstance(data, dict) and name == "response.output_item.done"]
    assert added == [item["id"] for item in done] and done == last(sent)["output"]
    assert [len(data["logprobs"]) for name, data in sent if isinstance(data, dict) and name == "response.output_text.delta"] == [1, 0, 0]


def test_the_official_client_streams_the_response() -> None:
    sdk, http = pytest.importorskip("openai", reason="openai is not installed"), pytest.importorskip("httpx2")
    sent = events(read(tools=[TOOL]), DELTAS, REPLY, Ending(reason="stop"))
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in sent).encode()
    transport = http.MockTransport(lambda request: http.Response(200, headers={"content-type": "text/event-stream"}, content=body))
    client = sdk.OpenAI(api_key="k", base_url="http://here", http_client=http.Client(transport=transport), max_retries=0)
    with client.responses.stream(model="m", input="hello") as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert response.output_text == "I look!" and response.output[2].arguments == CALL.arguments
    assert response.output[0].content[0].text == "hm"
    assert kinds.count("response.reasoning_text.delta") == 2 and kinds[-1] == "response.completed"


def test_errors_have_the_official_shape() -> None:
    assert openai_responses.error(400, "why", "input", "code")["error"] == {
        "message": "why", "type": "invalid_request_error", "param": "input", "code": "code"}
