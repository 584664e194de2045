"""The HTTP API over a scripted engine, asked by the official SDK and by hand: answers, streams, refusals, faults."""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from scripted_engine import ScriptedEngine, spoken

from gnomon.data.chat import ChatFormat
from gnomon.data.messages import ToolCall
from gnomon.data.tokenizer import Tokenizer
from gnomon.serve.server import Background
from gnomon.serve.service import Service

Make = Callable[..., Service]
HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
                                                                                   "properties": {"city": {"type": "string"}}}}}
CALLS = (ToolCall(id="a", name="weather", arguments='{"city": "Bern"}'), ToolCall(id="b", name="weather", arguments='{"city": "Basel"}'))


def client(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=options.pop("api_key", "none"), max_retries=0, timeout=20, **options)


def post(url: str, body: Any, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
    if isinstance(body, (dict, list)):
        return httpx.post(url + path, json=body, timeout=20, **options)
    return httpx.post(url + path, content=body, headers={"content-type": "application/json"} | options.pop("headers", {}), timeout=20)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that happens on another thread."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_an_answer(server_url: str, scripted: ScriptedEngine) -> None:
    scripted.cached, scripted.note = 3, "the conversation differs from token 3 on"
    raw = client(server_url).chat.completions.with_raw_response.create(model="tiny", messages=HELLO)
    answer = raw.parse()
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello world", "hm")  # type: ignore[attr-defined]
    assert answer.choices[0].finish_reason == "stop" and answer.model == "tiny" and answer.object == "chat.completion"
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None and usage.completion_tokens_details is not None
    assert usage.prompt_tokens == len(scripted.requests[0].prompt) and usage.prompt_tokens_details.cached_tokens == 3
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < (usage.completion_tokens_details.reasoning_tokens or 0) < usage.completion_tokens
    assert raw.headers["x-gnomon-cached-tokens"] == "3" and raw.headers["x-gnomon-cache-note"] == scripted.note
    assert usage.prompt_tokens_details.cache_note == scripted.note  # type: ignore[attr-defined]


def test_a_stream_says_what_the_whole_answer_says(server_url: str, scripted: ScriptedEngine) -> None:
    scripted.cached = 2
    stream = client(server_url).chat.completions.create(model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert stream.response.headers["x-gnomon-cached-tokens"] == "2"
    assert stream.response.headers["content-type"].startswith("text/event-stream")
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Hello world"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage is not None and not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == len(scripted.script(scripted.requests[0]))
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("streams", [False, True])
def test_calls_of_tools(server_url: str, scripted: ScriptedEngine, chat: ChatFormat, streams: bool) -> None:
    scripted.script = lambda request: spoken(chat, "I look.", reasoning="hm", calls=CALLS)
    api = client(server_url).chat.completions
    if streams:
        with api.stream(model="tiny", messages=HELLO, tools=[WEATHER]) as stream:
            message, reason = (found := stream.get_final_completion().choices[0]).message, found.finish_reason
    else:
        message, reason = (found := api.create(model="tiny", messages=HELLO, tools=[WEATHER]).choices[0]).message, found.finish_reason
    assert reason == "tool_calls" and message.content == "I look." and message.tool_calls is not None
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"city": "Bern"}, {"city": "Basel"}]  # type: ignore
    assert len({call.id for call in message.tool_calls}) == 2
    again: Any = [*HELLO, message.model_dump(exclude_none=True), *({"role": "tool", "tool_call_id": call.id, "content": "rain"}
                                                                  for call in message.tool_calls)]
    client(server_url).chat.completions.create(model="tiny", messages=again, tools=[WEATHER])
    assert len(scripted.requests[-1].prompt) > len(scripted.requests[0].prompt)


@pytest.mark.parametrize("streams", [False, True])
def test_one_call_where_one_is_wanted(server_url: str, scripted: ScriptedEngine, chat: ChatFormat, streams: bool) -> None:
    scripted.script = lambda request: spoken(chat, reasoning="hm", calls=CALLS)
    api = client(server_url).chat.completions
    if streams:
        with api.stream(model="tiny", messages=HELLO, tools=[WEATHER], parallel_tool_calls=False) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = api.create(model="tiny", messages=HELLO, tools=[WEATHER], parallel_tool_calls=False).choices[0]  # type: ignore
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None and len(choice.message.tool_calls) == 1
    assert scripted.cancelled


@pytest.mark.parametrize("streams", [False, True])
def test_stop_strings_are_never_sent(server_url: str, scripted: ScriptedEngine, chat: ChatFormat, streams: bool) -> None:
    scripted.script = lambda request: spoken(chat, "one two three four", reasoning="three")
    body = {"model": "tiny", "messages": HELLO, "stop": [" three", "never"], "stream": streams}
    text = post(server_url, body).text
    assert "four" not in text and '"stop_reason":" three"' in text and '"finish_reason":"stop"' in text
    if streams:
        chunks = [json.loads(line[6:])["choices"][0]["delta"] for line in text.splitlines() if line.startswith("data: {")]
        assert "".join(delta.get("content", "") for delta in chunks) == "one two"
    else:
        assert json.loads(text)["choices"][0]["message"]["content"] == "one two"
    assert scripted.cancelled and not scripted.live


def test_choices_come_after_the_first_knows_the_prompt(server_url: str, scripted: ScriptedEngine, chat: ChatFormat) -> None:
    scripted.script = lambda request: spoken(chat, f"I am {request.sampling.seed}", reasoning="hm")
    answer = client(server_url).chat.completions.create(model="tiny", messages=HELLO, n=3, seed=5)
    assert [choice.message.content for choice in answer.choices] == ["I am 5", "I am 6", "I am 7"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len({request.id for request in scripted.requests}) == 3
    assert answer.usage is not None and answer.usage.prompt_tokens == len(scripted.requests[0].prompt)
    stream = client(server_url).chat.completions.create(model="tiny", messages=HELLO, n=3, seed=5, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["I am 5", "I am 6", "I am 7"]


def test_logprobs(server_url: str, scripted: ScriptedEngine, vocabulary: Tokenizer) -> None:
    answer = client(server_url).chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None
    assert b"".join(bytes(entry.bytes or ()) for entry in found.content).decode() == "Hello world"
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in found.content)
    assert "".join(entry["token"] for entry in found.reasoning_content) == "hm"  # type: ignore[attr-defined]


def test_sampling_reaches_the_engine(server_url: str, scripted: ScriptedEngine) -> None:
    client(server_url).chat.completions.create(
        model="tiny", messages=HELLO, temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1, seed=7, max_completion_tokens=5,
        logit_bias={"3": 2}, extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2, "cache": False, "cache_salt": "s",
                                         "priority": "batch", "deadline_seconds": 300})
    request = scripted.requests[0]
    s = request.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty) == (0.5, 0.9, 4, 0.1, 1.2)
    assert (s.presence_penalty, s.frequency_penalty, s.seed, s.max_tokens, s.logit_bias) == (1, -1, 7, 5, ((3, 2.0),))
    assert (request.cache, request.salt, request.priority) == (False, "s", "batch")
    assert request.deadline_seconds is not None and 0 <= request.deadline_seconds <= 300  # what is left of it
    assert request.boundaries and all(0 < boundary <= len(request.prompt) for boundary in request.boundaries)


def test_without_a_seed_answers_differ(server_url: str, scripted: ScriptedEngine) -> None:
    for _ in range(3):
        client(server_url).chat.completions.create(model="tiny", messages=HELLO)
    assert len({request.sampling.seed for request in scripted.requests}) == 3


def test_structured_output_waits_for_the_end_of_thinking(server_url: str, scripted: ScriptedEngine, chat: ChatFormat) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    api = client(server_url).chat.completions
    api.create(model="tiny", messages=HELLO, response_format=wanted)
    api.create(model="tiny", messages=HELLO, response_format={"type": "json_object"}, reasoning_effort="none")
    api.create(model="tiny", messages=HELLO, extra_body={"regex": "a+"})
    first, second, third = (request.sampling.grammar for request in scripted.requests)
    assert first is not None and first.kind == "json_schema" and json.loads(first.text) == schema and first.after == chat.answer_opens
    assert first.closes == chat.answer_closes
    assert second is not None and second.kind == "json_object" and second.after == ()
    assert third is not None and (third.kind, third.text, third.after) == ("regex", "a+", chat.answer_opens)


def test_a_demanded_call_is_a_grammar_and_so_is_a_forbidden_one(server_url: str, scripted: ScriptedEngine, chat: ChatFormat) -> None:
    api = client(server_url).chat.completions
    other: Any = {"type": "function", "function": {"name": "clock"}}
    named: Any = {"type": "function", "function": {"name": "clock"}}
    for more in ({"tool_choice": "required"}, {"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": named},
                 {"tool_choice": "none"}, {"tool_choice": "auto"}, {"tool_choice": "required", "reasoning_effort": "none"}):
        api.create(model="tiny", messages=HELLO, tools=[WEATHER, other], **more)
    anyone, single, clock, none, auto, at_once = (request.sampling.grammar for request in scripted.requests)
    assert anyone is not None and anyone.kind == "lark" and anyone.after == chat.answer_opens and anyone.closes
    assert chat.answer_closes[-len(anyone.closes) :] == anyone.closes
    assert "weather" in anyone.text and "clock" in anyone.text and "from2" in anyone.text
    assert single is not None and "from2" not in single.text
    assert clock is not None and "weather" not in clock.text and "clock" in clock.text
    assert none is not None and (none.kind, none.after, none.closes) == ("regex", chat.answer_opens, chat.answer_closes)
    assert auto is None and at_once is not None and at_once.after == ()


def test_effort(server_url: str, scripted: ScriptedEngine, vocabulary: Tokenizer) -> None:
    api = client(server_url).chat.completions
    api.create(model="tiny", messages=HELLO, reasoning_effort="max")
    assert "thinking_effort=max" in vocabulary.decode(scripted.requests[0].prompt)
    api.create(model="tiny", messages=HELLO)
    api.create(model="tiny", messages=HELLO, reasoning_effort="none")
    unsaid, none = (vocabulary.decode(request.prompt) for request in scripted.requests[1:])
    assert "thinking_effort=max" in unsaid and "thinking_effort" not in none  # as the released tokenizer's template does
    with pytest.raises(openai.BadRequestError, match="choose none, low, medium, high, max") as refused:
        api.create(model="tiny", messages=HELLO, reasoning_effort="minimal")
    assert refused.value.param == "reasoning_effort"
    with pytest.raises(openai.BadRequestError, match="low, high"):
        api.create(model="tiny", messages=HELLO, reasoning_effort="medium")


def test_plain_completions(server_url: str, scripted: ScriptedEngine, vocabulary: Tokenizer) -> None:
    words = vocabulary.encode(" world, ü")
    scripted.script = lambda request: [*words, vocabulary.document_end_id, 5]
    api = client(server_url).completions
    assert api.create(model="tiny", prompt="Hello").choices[0].text == " world, ü"
    assert tuple(vocabulary.encode("Hello")) == scripted.requests[0].prompt
    assert "".join(chunk.choices[0].text for chunk in api.create(model="tiny", prompt=[5, 6], stream=True)) == " world, ü"
    assert scripted.requests[1].prompt == (5, 6)
    several = api.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3] and several.choices[0].finish_reason == "length"
    assert several.usage is not None and several.usage.prompt_tokens == 2 and several.usage.completion_tokens == 12


def test_scoring_a_prompt(server_url: str, vocabulary: Tokenizer) -> None:
    ids = vocabulary.encode("Hello world")
    body = {"model": "tiny", "prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
    choice = post(server_url, body, "/v1/completions").json()["choices"][0]
    assert choice["text"] == "Hello world" and choice["logprobs"]["token_ids"] == ids
    assert choice["logprobs"]["token_logprobs"] == [None, *(-1.0 / (i + 1) for i in range(len(ids) - 1))]
    streamed = post(server_url, body | {"stream": True, "max_tokens": 1}, "/v1/completions").text
    first = json.loads(streamed.splitlines()[0][6:])["choices"][0]
    assert first["text"] == "Hello world" and first["logprobs"]["token_ids"] == ids


def test_models(server_url: str) -> None:
    api = client(server_url)
    assert [model.id for model in api.models.list()] == ["tiny"] and api.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        api.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'") as missing:
        api.chat.completions.create(model="gpt", messages=HELLO)
    assert missing.value.code == "model_not_found"


def test_tokens_there_and_back(server_url: str, scripted: ScriptedEngine, vocabulary: Tokenizer) -> None:
    found = post(server_url, {"model": "tiny", "prompt": "Hello ü", "return_token_strs": True}, "/tokenize").json()
    assert found["tokens"] == vocabulary.encode("Hello ü") and found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 4096
    assert post(server_url, {"tokens": found["tokens"]}, "/detokenize").json() == {"prompt": "Hello ü"}
    assert post(server_url, {"tokens": []}, "/detokenize").json() == {"prompt": ""}
    body = {"model": "tiny", "messages": HELLO, "tools": [WEATHER]}
    tokens = post(server_url, body, "/tokenize").json()["tokens"]
    post(server_url, body)
    assert tuple(tokens) == scripted.requests[0].prompt
    for path, wrong in (("/tokenize", {}), ("/tokenize", {"prompt": 3}), ("/tokenize", {"prompt": "a", "x": 1}), ("/detokenize", {}),
                        ("/detokenize", {"tokens": [10**6]}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": "a"})):
        assert post(server_url, wrong, path).status_code == 400


@pytest.mark.parametrize(("body", "status", "words"), [
    (b"", 400, "not JSON"),
    (b"{", 400, "not JSON"),
    (b"\xff\xfe\x00", 400, "not JSON"),
    (b"[" * 100_000, 400, "nested too deep"),
    (b'{"model": "tiny", "messages": [], "temperature": NaN}', 400, "NaN is not a number"),
    (b'{"model": "tiny", "messages": [], "temperature": 1e999}', 400, "larger than any number"),
    (b'{"a": ' + b"9" * 5000 + b"}", 400, "not JSON"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "half a character"),
    (b"[]", 400, "must be an object"),
    (b"null", 400, "must be an object"),
    (b'"a"', 400, "must be an object"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}', 200, ""),
])
def test_what_is_no_proper_json(server_url: str, body: bytes, status: int, words: str) -> None:
    response = post(server_url, body)
    assert response.status_code == status and words in response.text
    if status != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert post(server_url, {"model": "tiny", "messages": HELLO}).status_code == 200


def test_other_statuses(server_url: str) -> None:
    assert httpx.get(server_url + "/nothing").status_code == 404
    wrong = httpx.get(server_url + "/v1/chat/completions")
    assert wrong.status_code == 405 and "error" in wrong.json()
    form = httpx.post(server_url + "/v1/chat/completions", data={"a": "b"})
    assert form.status_code == 415 and "content-type: application/json" in form.json()["error"]["message"]


def test_context_overflow_names_limit_and_length(server_url: str, scripted: ScriptedEngine) -> None:
    scripted.max_tokens = 100
    with pytest.raises(openai.BadRequestError, match=r"the context is 100 tokens long and \d+ were asked for: \d+ of prompt") as refused:
        client(server_url).chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello " * 200}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="95 of output"):
        client(server_url).chat.completions.create(model="tiny", messages=HELLO, max_tokens=95, reasoning_effort="none")
    client(server_url).chat.completions.create(model="tiny", messages=HELLO, reasoning_effort="none")
    request = scripted.requests[0]
    assert request.sampling.max_tokens == 100 - len(request.prompt)


def test_limits(service: Make, scripted: ScriptedEngine) -> None:
    with Background(service(limits={"body_bytes": 300, "body_seconds": 0.2})) as url:
        large = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 400}]}
        assert post(url, large).status_code == 413

        def slowly() -> Any:
            yield b'{"model": '
            time.sleep(0.6)
            yield b'"tiny"}'

        def endless() -> Any:
            for _ in range(100):
                yield b" " * 100

        headers = {"content-type": "application/json"}
        assert httpx.post(url + "/v1/chat/completions", content=slowly(), headers=headers).status_code == 408
        assert httpx.post(url + "/v1/chat/completions", content=endless(), headers=headers).status_code == 413


def test_an_engine_that_refuses_or_fails(server_url: str, scripted: ScriptedEngine) -> None:
    from gnomon.errors import CapacityError, ConfigError

    body = {"model": "tiny", "messages": HELLO}
    for streams in (False, True):
        scripted.fails = ConfigError("'grammar' cannot be compiled: x")
        assert post(server_url, body | {"stream": streams}).status_code == 400
        scripted.fails = CapacityError("too long")
        assert post(server_url, body | {"stream": streams}).status_code == 400
        scripted.fails = None
        scripted.error = "logits are not finite"
        response = post(server_url, body | {"stream": streams})
        assert "logits are not finite" in response.text and response.status_code == (200 if streams else 500)
        scripted.error = None
    scripted.error = "logits are not finite"
    with pytest.raises(openai.APIError, match="not finite"):
        list(client(server_url).chat.completions.create(model="tiny", messages=HELLO, stream=True))


@pytest.mark.parametrize("streams", [False, True])
def test_what_nobody_foresaw_is_a_500_and_the_server_goes_on(server_url: str, scripted: ScriptedEngine, streams: bool) -> None:
    good = scripted.script
    scripted.script = lambda request: [1, 10 // request.sampling.top_k]
    response = post(server_url, {"model": "tiny", "messages": HELLO, "stream": streams})
    assert "division" not in response.text and "error" in response.text
    scripted.script = good
    assert post(server_url, {"model": "tiny", "messages": HELLO}).status_code == 200


def test_a_client_that_leaves_ends_its_request(server_url: str, scripted: ScriptedEngine) -> None:
    scripted.pause = 0.05
    scripted.script = lambda request: [5] * 1000
    with httpx.stream("POST", server_url + "/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert scripted.live
    until(lambda: not scripted.live)
    assert scripted.closed
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server_url + "/v1/chat/completions", json={"model": "tiny", "messages": HELLO}, timeout=0.3)
    until(lambda: not scripted.live)
    assert len(scripted.closed) == 2


def test_request_ids_and_headers(server_url: str, scripted: ScriptedEngine) -> None:
    given = post(server_url, {"model": "tiny", "messages": HELLO}, headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1" and given.json()["id"] == "chatcmpl-abc-1"
    assert given.headers["x-content-type-options"] == "nosniff" and given.headers["cache-control"] == "no-store"
    post(server_url, {"model": "tiny", "messages": HELLO}, headers={"x-request-id": "abc-1"})
    assert len({request.id for request in scripted.requests}) == 2  # one that is tried again may meet the first on its way
    made = post(server_url, {"model": "tiny", "messages": HELLO}, headers={"x-request-id": "no good"})
    assert made.headers["x-request-id"] not in ("no good", "")


def test_health_and_metrics(service: Make, scripted: ScriptedEngine) -> None:
    with Background(service()) as url:
        assert httpx.get(url + "/health").json()["status"] == "ok"
        post(url, {"model": "tiny", "messages": HELLO})
        page = httpx.get(url + "/metrics").text
    assert 'gnomon_requests_total{path="/v1/chat/completions",status="200"} 1.0' in page
    assert f"gnomon_prompt_tokens_total {float(len(scripted.requests[0].prompt))}" in page and "gnomon_engine_steps 1.0" in page
    assert 'gnomon_running_requests{lane="interactive"} 0.0' in page and "gnomon_between_tokens_seconds_bucket" in page
