"""A policy behind an address: our own server asked in ids and in messages, servers that withhold ids, fail, or talk nonsense."""

import asyncio
import dataclasses
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gnomon.agent import policy as policies
from gnomon.agent.policies.endpoint import Endpoint, EndpointPolicy
from gnomon.agent.policy import ContextFull, Sampling
from gnomon.agent.record import Recorder
from gnomon.agent.trajectory import Trajectory
from gnomon.data.chat import ChatFormat
from gnomon.data.messages import Conversation, Image, Message, Text, Tool, ToolCall
from gnomon.errors import ConfigError, DataError, PolicyError

pytest.importorskip("httpx", reason="an endpoint needs the extra 'serve'")
EMPTY = Trajectory(id="t-1", task_id="t")


def user(text: str) -> Message:
    """What a user says."""
    return Message(role="user", content=(Text(text=text),))


def talked(policy: EndpointPolicy, turns: int = 2, **options: Any) -> Recorder:
    """A recorder after some turns."""
    recorder = Recorder(policy, EMPTY)

    async def run() -> None:
        messages: tuple[Message, ...] = ()
        try:
            for turn in range(turns):
                messages = (*messages, user(f"question {turn}"))
                done = await recorder.complete(Conversation(messages=messages, **options), Sampling(max_tokens=100, temperature=1.0))
                messages = (*messages, done.message)
        finally:
            await recorder.close()

    asyncio.run(run())
    return recorder


def test_our_server_in_ids(server_url: str, scripted: Any, chat: ChatFormat) -> None:
    recorder = talked(EndpointPolicy(Endpoint(url=f"{server_url}/v1", model="tiny", policy_version=7, prices=(1.0, 2.0)), chat), 3)
    turns = recorder.trajectory.turns
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert [request.prompt for request in scripted.requests] == [
        recorder.trajectory.token_ids(i)[: -len(turns[i].spans[-1].token_ids)] for i in range(3)]
    said = tuple(scripted.script(scripted.requests[0]))
    for turn in turns:
        assert turn.spans[-1].token_ids == said and turn.spans[-1].policy_version == 7 and set(turn.spans[-1].logprobs) == {-0.5}
        assert turn.messages[-1].text == "Hello world" and turn.messages[-1].reasoning == "hm"
    assert recorder.spent.dollars == pytest.approx((recorder.spent.prompt_tokens + 2 * recorder.spent.output_tokens) / 1e6)


def test_our_server_in_messages(server_url: str, scripted: Any) -> None:
    recorder = talked(EndpointPolicy(Endpoint(url=f"{server_url}/v1", model="tiny")))
    assert [turn.parent for turn in recorder.trajectory.turns] == [None, 0] and recorder.trajectory.answer() == "Hello world"
    assert recorder.trajectory.turns[0].messages[-1].reasoning == "hm" and recorder.spent.output_tokens > 0


def test_a_cut_answer_says_so(server_url: str, scripted: Any, chat: ChatFormat) -> None:
    policy = EndpointPolicy(Endpoint(url=f"{server_url}/v1", model="tiny"), chat)

    async def run() -> Any:
        try:
            return await policy.complete("s", Conversation(messages=(user("hi"),)), Sampling(max_tokens=3))
        finally:
            await policy.close("s")

    done = asyncio.run(run())
    assert done.stop == "length" and done.sampled is not None and len(done.sampled.token_ids) == 3


@pytest.fixture
def pretending() -> Iterator[Callable[[list[tuple[int, Any]]], tuple[str, list[Any]]]]:
    """A server that gives prepared answers one after the other; its address, and the bodies that it got."""
    answers: list[tuple[int, Any]] = []
    bodies: list[Any] = []

    class Desk(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status, answer = answers.pop(0)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Desk)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def prepare(given: list[tuple[int, Any]]) -> tuple[str, list[Any]]:
        answers[:] = given
        return f"http://127.0.0.1:{server.server_address[1]}/v1", bodies

    yield prepare
    server.shutdown()
    thread.join()
    server.server_close()


GOOD = {"choices": [{"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]}


def in_ids(**choice: Any) -> dict[str, Any]:
    """An answer of plain completions."""
    return {"choices": [{"text": "x", "finish_reason": "length"} | choice]}


@pytest.mark.parametrize(("answer", "fault"), [
    (in_ids(), "logprobs"), (in_ids(logprobs={"token_logprobs": [-1.0]}), "1 for 0 ids"),
    (in_ids(token_ids=[1, 2], logprobs={"token_logprobs": [-1.0]}), "1 for 2 ids"),
    (in_ids(token_ids=[1], logprobs={"token_logprobs": [None]}), "finite"), (in_ids(token_ids=[1], logprobs=None), "logprobs"),
    (in_ids(token_ids=[1], logprobs={"token_logprobs": [-1.0]}, finish_reason="stop"), "not whole"), ({"choices": []}, "no ids"),
    (in_ids(token_ids=["a"], logprobs={"token_logprobs": [-1.0]}), "whole numbers"),
])
def test_ids_that_are_withheld_are_never_made_up(pretending: Any, chat: ChatFormat, answer: Any, fault: str) -> None:
    url, bodies = pretending([(200, answer)])
    with pytest.raises(PolicyError, match=fault):
        talked(EndpointPolicy(Endpoint(url=url, model="m", server="vllm"), chat), 1)
    assert bodies[0]["return_token_ids"] is True and bodies[0]["stop_token_ids"] and all(isinstance(i, int) for i in bodies[0]["prompt"])


def test_what_may_pass_is_tried_again(pretending: Any) -> None:
    url, bodies = pretending([(503, {}), (200, GOOD)])
    assert talked(EndpointPolicy(Endpoint(url=url, model="m")), 1).trajectory.answer() == "yes" and len(bodies) == 2


@pytest.mark.parametrize(("status", "answer", "kind", "fault"), [
    (400, {"error": {"code": "context_length_exceeded"}}, ContextFull, "400"), (401, {"error": "key"}, PolicyError, "401"),
    (200, b"<html>", PolicyError, "no JSON"), (200, {"choices": [{"message": {"content": 3}}]}, PolicyError, "content"),
])
def test_what_is_no_answer_is_an_error(pretending: Any, status: int, answer: Any, kind: Any, fault: str) -> None:
    url, bodies = pretending([(status, answer)])
    with pytest.raises(kind, match=fault):
        talked(EndpointPolicy(Endpoint(url=url, model="m")), 1)
    assert len(bodies) == 1


def test_text_that_is_none_is_refused_before_it_is_sent(pretending: Any) -> None:
    url, bodies = pretending([(200, GOOD)])
    with pytest.raises(DataError, match="surrogate"):
        talked(EndpointPolicy(Endpoint(url=url, model="m")), 1, tools=(Tool(name="t", description="\ud800"),))
    assert not bodies


def test_pictures_go_out_in_messages_where_ids_are_asked_for(pretending: Any, chat: ChatFormat) -> None:
    url, bodies = pretending([(200, GOOD), (200, GOOD)])
    policy = EndpointPolicy(Endpoint(url=url, model="m"), chat)
    recorder = Recorder(policy, EMPTY)
    seen = Message(role="user", content=(Text(text="see"), Image(data=b"x", media_type="image/png")))

    async def run() -> None:
        first = await recorder.complete(Conversation(messages=(seen,), thinking=False), Sampling(max_tokens=10))
        await recorder.complete(Conversation(messages=(seen, first.message, user("and now?"))), Sampling(max_tokens=10))
        await recorder.close()

    asyncio.run(run())
    assert ["messages" in body and "prompt" not in body for body in bodies] == [True, True]
    assert [body.get("thinking") for body in bodies] == [{"type": "disabled"}, None]
    assert bodies[1]["messages"][0]["content"][1]["image_url"]["url"] == "data:image/png;base64,eA=="
    assert [turn.parent for turn in recorder.trajectory.turns] == [None, 0]


def test_a_conversation_goes_out_whole(pretending: Any) -> None:
    url, bodies = pretending([(200, GOOD)])
    call = ToolCall(id="c", name="bash", arguments="{}")
    messages = (Message(role="system", content=(Text(text="s"),)), user("u"),
                Message(role="assistant", reasoning="r", tool_calls=(call,)),
                Message(role="tool", content=(Text(text="o"),), tool_call_id="c"),
                Message(role="user", content=(Text(text="see"), Image(data=b"x", media_type="image/png"))))
    policy = EndpointPolicy(Endpoint(url=url, model="m", extra={"top_k": 5}))

    async def run() -> None:
        asked = Conversation(messages=messages, tools=(Tool(name="bash"),), effort="low", tool_choice="bash")
        await policy.complete("s", asked, Sampling(seed=3))
        await policy.close("s")

    asyncio.run(run())
    [body] = bodies
    assert body["messages"][2:4] == [
        {"role": "assistant", "reasoning_content": "r",
         "tool_calls": [{"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]},
        {"role": "tool", "content": "o", "tool_call_id": "c"}]
    assert body["messages"][4]["content"][1]["image_url"]["url"] == "data:image/png;base64,eA=="
    assert (body["seed"], body["reasoning_effort"], body["top_k"], body["model"]) == (3, "low", 5, "m")
    assert body["tool_choice"] == {"type": "function", "function": {"name": "bash"}} and body["tools"][0]["function"]["name"] == "bash"


def test_nobody_there_and_wrong_settings(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(url="http://127.0.0.1:9/v1", model="m", retries=0)
    with pytest.raises(PolicyError, match=r"127\.0\.0\.1:9"):
        talked(EndpointPolicy(endpoint), 1)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for change, kind, fault in (
        ({"url": "localhost"}, DataError, "url"), ({"server": "other"}, DataError, "gnomon, vllm"),
        ({"tokens": True}, DataError, "tokenizer"), ({"key_variable": "NO_SUCH_KEY"}, ConfigError, "NO_SUCH_KEY"),
        ({"urll": "x"}, DataError, "urll"), ({"retries": "x"}, DataError, "retries"),
    ):
        with pytest.raises(kind, match=fault):
            policies.opened("endpoint", {"url": endpoint.url, "model": "m"} | change)
    assert policies.opened("endpoint", {"url": endpoint.url, "model": "m"}).name == "m"
    assert dataclasses.replace(endpoint, key="k").key == "k"
