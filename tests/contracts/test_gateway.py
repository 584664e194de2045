"""The gateway: three dialects, whole and streamed, read by the clients that people use; secrets, bounds, budgets, errors in their shape."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gnomon.agent.gateway import Gateway
from gnomon.agent.gateway_visit import Bounds, Visit
from gnomon.agent.policies.scripted import ScriptedPolicy, say
from gnomon.agent.policy import ContextFull, Sampling
from gnomon.agent.record import BudgetSpent, Recorder
from gnomon.agent.task import Budget
from gnomon.agent.trajectory import Trajectory
from gnomon.data.chat import ChatFormat, chat_format
from gnomon.data.messages import Conversation, Message
from gnomon.data.tokenizer import train_tokenizer
from gnomon.errors import PolicyError

httpx = pytest.importorskip("httpx", reason="the gateway needs the extra 'serve'")
pytest.importorskip("uvicorn", reason="the gateway needs the extra 'serve'")

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
EMPTY = Trajectory(id="t-1", task_id="t")
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
CALL = say("Let me look.", ("bash", {"command": "ls <|open|>"}), reasoning="I should look.")
BODIES = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"model": "m", "input": "hello"},
    "/v1/messages": {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}]},
}


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return chat_format(train_tokenizer(TEXTS, 1024))


def visited(policy: Any, work: Callable[[Gateway, Visit], Awaitable[Any]], *, budget: Budget | None = None, bounds: Bounds | None = None,
            **admission: Any) -> tuple[Any, Recorder]:
    """What `work` gives, done while a gateway is open, and the recorder of its attempt."""
    recorder = Recorder(policy, EMPTY, budget)

    async def run() -> Any:
        async with Gateway(bounds) as gateway:
            try:
                return await work(gateway, gateway.admit(recorder, **admission))
            finally:
                await recorder.close()

    return asyncio.run(run()), recorder


async def post(gateway: Gateway, key: str, path: str, body: Any = None, **headers: str) -> Any:
    """A response to a body."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        data = json.dumps(BODIES[path] if body is None else body) if not isinstance(body, bytes) else body
        return await client.post(path, content=data, headers={"authorization": f"Bearer {key}"} | headers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_chat_completions_with_the_openai_client(chat: ChatFormat, stream: bool, tokens: bool) -> None:
    openai = pytest.importorskip("openai", reason="the client of OpenAI's API")
    tools: Any = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]

    async def work(gateway: Gateway, visit: Visit) -> None:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=visit.secret) as client:
            messages: list[Any] = [{"role": "user", "content": "hello"}]
            for _ in range(2):
                if stream:
                    parts = [part async for part in await client.chat.completions.create(
                        model="m", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True})]
                    deltas = [part.choices[0].delta for part in parts if part.choices]
                    message: dict[str, Any] = {"role": "assistant", "content": "".join(d.content or "" for d in deltas)}
                    message["reasoning_content"] = "".join(getattr(d, "reasoning_content", "") or "" for d in deltas)
                    pieces = [d.tool_calls[0] for d in deltas if d.tool_calls]
                    if pieces:
                        arguments = "".join(p.function.arguments or "" for p in pieces)
                        function = {"name": pieces[0].function.name, "arguments": arguments}
                        message["tool_calls"] = [{"id": pieces[0].id, "type": "function", "function": function}]
                    assert parts[-1].usage.completion_tokens > 0
                else:
                    whole = await client.chat.completions.create(model="m", messages=messages, tools=tools)
                    message = whole.choices[0].message.model_dump(exclude_none=True)
                messages.append(message)
                if "tool_calls" in message:
                    messages.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a b"})
            assert messages[-1]["content"] == "done"

    _, recorder = visited(ScriptedPolicy([CALL, "done"], chat if tokens else None), work)
    check(recorder)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_responses_with_the_openai_client(chat: ChatFormat, stream: bool, tokens: bool) -> None:
    openai = pytest.importorskip("openai", reason="the client of OpenAI's API")
    tools: Any = [{"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": False}]

    async def work(gateway: Gateway, visit: Visit) -> None:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=visit.secret) as client:
            items: list[Any] = [{"role": "user", "content": "hello"}]
            for _ in range(2):
                asked = {"model": "m", "input": items, "tools": tools, "store": False, "include": ["reasoning.encrypted_content"]}
                if stream:
                    events = [event async for event in await client.responses.create(**asked, stream=True)]
                    answer = events[-1].response
                else:
                    answer = await client.responses.create(**asked)
                items += [item.model_dump(exclude_none=True) for item in answer.output]
                items += [{"type": "function_call_output", "call_id": item.call_id, "output": "a b"}
                          for item in answer.output if item.type == "function_call"]
            assert answer.output_text == "done"

    _, recorder = visited(ScriptedPolicy([CALL, "done"], chat if tokens else None), work)
    check(recorder)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_messages_with_the_anthropic_client(chat: ChatFormat, stream: bool, tokens: bool) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic's API")
    asked: Any = {"model": "m", "max_tokens": 1000, "tools": [{"name": "bash", "input_schema": PARAMETERS}],
                  "thinking": {"type": "enabled", "budget_tokens": 1024}}

    async def work(gateway: Gateway, visit: Visit) -> None:
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=visit.secret) as client:
            messages: list[Any] = [{"role": "user", "content": "hello"}]
            for _ in range(2):
                if stream:
                    async with client.messages.stream(messages=messages, **asked) as events:
                        answer = await events.get_final_message()
                else:
                    answer = await client.messages.create(messages=messages, **asked)
                messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
                results = [{"type": "tool_result", "tool_use_id": block.id, "content": "a b"}
                           for block in answer.content if block.type == "tool_use"]
                if results:
                    messages.append({"role": "user", "content": results})
            assert answer.content[-1].text == "done"
            counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "hello"}])
            assert counted.input_tokens > 0
            assert [model.id async for model in client.models.list()] == ["scripted"]

    _, recorder = visited(ScriptedPolicy([CALL, "done"], chat if tokens else None), work)
    check(recorder)


def check(recorder: Recorder) -> None:
    """Two turns, the second the first's continuation, with the call as it was made."""
    trajectory = recorder.trajectory
    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    assert [[m.role for m in turn.messages] for turn in trajectory.turns] == [["user", "assistant"], ["tool", "assistant"]]
    [call] = trajectory.turns[0].messages[1].tool_calls
    assert json.loads(call.arguments) == {"command": "ls <|open|>"} and trajectory.turns[0].messages[1].reasoning == "I should look."
    assert trajectory.turns[1].messages[0].tool_call_id == call.id and trajectory.answer() == "done"
    assert [tool["name"] for tool in trajectory.turns[0].notes["tools"]] == ["bash"]
    assert sum(span.sampled for turn in trajectory.turns for span in turn.spans) == (2 if recorder.trajectory.turns[0].spans else 0)


def test_a_sandbox_comes_in_by_the_socket() -> None:
    async def work(gateway: Gateway, visit: Visit) -> int:
        transport = httpx.AsyncHTTPTransport(uds=str(gateway.socket))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:3128", timeout=60) as client:
            status = (await client.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"],
                                        headers={"x-api-key": visit.secret})).status_code
            assert (await client.head("/")).status_code == 200
            return status

    assert visited(ScriptedPolicy(["a"]), work)[0] == 200


@pytest.mark.parametrize("path", BODIES)
def test_strangers_are_turned_away_in_every_dialect(path: str) -> None:
    async def work(gateway: Gateway, visit: Visit) -> list[Any]:
        answers = [await post(gateway, "sk-other", path)]
        gateway.leave(visit)
        return [*answers, await post(gateway, visit.secret, path)]

    answers, recorder = visited(ScriptedPolicy(["a"]), work)
    for answer in answers:
        body = answer.json()
        assert answer.status_code == 401 and body["error"]["type"] == "authentication_error" and recorder.turns == 0
        assert body.get("type") == ("error" if "messages" in path else None)


@pytest.mark.parametrize(("path", "change", "fault"), [
    ("/v1/chat/completions", {"messages": "hello"}, "messages"), ("/v1/chat/completions", {"n": 2}, "'n' is 2"),
    ("/v1/chat/completions", {"top_k": 3}, "top_k"), ("/v1/chat/completions", {"temperature": "hot"}, "temperature"),
    ("/v1/responses", {"input": 3}, "input"), ("/v1/responses", {"logprobs": 3}, "logprobs"),
    ("/v1/messages", {"max_tokens": "x"}, "max_tokens"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "content"),
])
def test_wrong_types_are_named(path: str, change: dict[str, Any], fault: str) -> None:
    async def work(gateway: Gateway, visit: Visit) -> Any:
        return await post(gateway, visit.secret, path, BODIES[path] | change)

    answer, recorder = visited(ScriptedPolicy(["a"]), work)
    assert answer.status_code == 400 and fault in answer.json()["error"]["message"] and recorder.turns == 0


def test_bodies_are_bounded_and_json() -> None:
    async def work(gateway: Gateway, visit: Visit) -> list[int]:
        path = "/v1/responses"
        large = {"model": "m", "input": "x" * 4000}
        found = [await post(gateway, visit.secret, path, body) for body in (large, b"{", b'{"a": NaN}', b"[" * 900, b"")]
        return [*(each.status_code for each in found), (await post(gateway, visit.secret, "/v1/nothing", {})).status_code]

    assert visited(ScriptedPolicy(["a"]), work, bounds=Bounds(body_bytes=2000))[0] == [413, 400, 400, 400, 400, 404]


def test_requests_that_wait_are_bounded_together() -> None:
    class Waits(ScriptedPolicy):
        async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Any:
            asked.set()
            await go.wait()
            return await super().complete(session, conversation, sampling)

    async def work(gateway: Gateway, visit: Visit) -> list[int]:
        bodies = [{"model": "m", "input": letter * 1500} for letter in "abc"]
        first = asyncio.create_task(post(gateway, visit.secret, "/v1/responses", bodies[0]))
        await asyncio.wait_for(asked.wait(), 60)
        second = await post(gateway, visit.secret, "/v1/responses", bodies[1])
        refused = await post(gateway, visit.secret, "/v1/responses", {"input": 1})
        assert visit.held >= 1500
        go.set()
        found = [(await first).status_code, second.status_code, refused.status_code]
        found.append((await post(gateway, visit.secret, "/v1/responses", bodies[2] | {"stream": True})).status_code)
        assert visit.held == 0
        return found

    asked, go = asyncio.Event(), asyncio.Event()
    assert visited(Waits(["a", "b"]), work, bounds=Bounds(attempt_bytes=2000))[0] == [200, 429, 400, 200]


@pytest.mark.parametrize("path", BODIES)
def test_a_spent_budget_ends_the_program(path: str) -> None:
    async def work(gateway: Gateway, visit: Visit) -> Any:
        answers = [await post(gateway, visit.secret, path, BODIES[path] | {"stream": stream}) for stream in (False, False, True)]
        assert visit.wake.is_set() and isinstance(visit.failure, BudgetSpent)
        return answers

    answers, recorder = visited(ScriptedPolicy(lambda _: "a"), work, budget=Budget(turns=1))
    assert [answer.status_code for answer in answers] == [200, 403, 403] and recorder.turns == 1
    assert "budget of 1 turns is spent" in answers[1].json()["error"]["message"]


def test_failures_of_the_policy_are_no_answers() -> None:
    def broken(conversation: Conversation) -> Message:
        if len(conversation.messages) == 2:
            raise ContextFull("http://10.0.0.1/v1: status 400: secret words")
        raise PolicyError("nobody at home") if len(conversation.messages) == 1 else KeyError("bug")

    async def work(gateway: Gateway, visit: Visit) -> Any:
        first = await post(gateway, visit.secret, "/v1/messages")
        assert isinstance(visit.failure, PolicyError)
        two = {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "a"}]}
        full = {"messages": two["messages"][:2]}
        return (first, await post(gateway, visit.secret, "/v1/messages", BODIES["/v1/messages"] | two),
                await post(gateway, visit.secret, "/v1/messages", BODIES["/v1/messages"] | full))

    (first, second, third), recorder = visited(ScriptedPolicy(broken), work)
    said = first.json()["error"]["message"]
    assert first.status_code == 502 and "did not answer" in said and "nobody at home" not in said
    assert third.status_code == 400 and "prompt is too long" in third.text and "10.0.0.1" not in third.text and "secret" not in third.text
    assert second.status_code == 500 and second.json()["type"] == "error" and "bug" not in second.text and recorder.turns == 0


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_slow_answer_is_streamed_with_signs_of_life(ends: str) -> None:
    heard = asyncio.Event()

    class Slow(ScriptedPolicy):
        async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Any:
            await heard.wait()
            if ends == "badly":
                raise PolicyError("nobody at home")
            return await super().complete(session, conversation, sampling)

    async def work(gateway: Gateway, visit: Visit) -> str:
        text = ""
        body = BODIES["/v1/messages"] | {"stream": True}
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client, client.stream(
                "POST", "/v1/messages", json=body, headers={"x-api-key": visit.secret}) as answer:
            async for piece in answer.aiter_text():
                text += piece
                heard.set()
        return text

    text, _ = visited(Slow(["a"]), work, bounds=Bounds(quiet_seconds=0.01))
    assert text.startswith(": still here\n\n")
    assert ('data: {"type":"message_stop"}' in text) == (ends == "well") and ("event: error" in text) == (ends == "badly")


def test_who_tries_again_gets_the_same_answer() -> None:
    async def work(gateway: Gateway, visit: Visit) -> list[str]:
        path = "/v1/chat/completions"
        first = await asyncio.gather(*(post(gateway, visit.secret, path) for _ in range(3)))
        again = await post(gateway, visit.secret, path, None, **{"x-stainless-retry-count": "1"})
        named = [await post(gateway, visit.secret, path, None, **{"idempotency-key": "mine"}) for _ in range(2)]
        return [each.json()["choices"][0]["message"]["content"] for each in (*first, again, *named)]

    texts, recorder = visited(ScriptedPolicy([str(i) for i in range(9)], delay_seconds=0.05), work)
    assert texts[3] in texts[:3] and texts[4] == texts[5] and recorder.turns == len(set(texts))


def test_the_attempt_decides_effort_and_sampling() -> None:
    seen: list[tuple[Any, Any]] = []

    class Watching(ScriptedPolicy):
        async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Any:
            seen.append((conversation, sampling))
            return await super().complete(session, conversation, sampling)

    async def work(gateway: Gateway, visit: Visit) -> list[int]:
        asked = {"/v1/chat/completions": {"reasoning_effort": "xhigh", "temperature": 0.2, "stop": ["END"]},
                 "/v1/responses": {"reasoning": {"effort": "minimal", "summary": "auto"}},
                 "/v1/messages": {"output_config": {"effort": "xhigh"}}}
        return [(await post(gateway, visit.secret, path, BODIES[path] | more)).status_code for path, more in asked.items()]

    statuses, _ = visited(Watching(lambda _: "a"), work, sampling=Sampling(temperature=1.0, max_tokens=50), effort="high")
    assert statuses == [200, 200, 200]
    assert all(c.effort == "high" and c.thinking and s.temperature == 1.0 and s.max_tokens == 50 for c, s in seen)
    assert seen[0][1].stop == ("END",)


def test_one_call_at_a_time_for_those_who_say_so() -> None:
    two = say("", ("bash", {"command": "a"}), ("bash", {"command": "b"}))

    async def work(gateway: Gateway, visit: Visit) -> Any:
        tools = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]
        body = BODIES["/v1/chat/completions"] | {"tools": tools, "parallel_tool_calls": False}
        return await post(gateway, visit.secret, "/v1/chat/completions", body)

    answer, recorder = visited(ScriptedPolicy([two]), work)
    assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == 1
    assert len(recorder.trajectory.turns[0].messages[-1].tool_calls) == 2
