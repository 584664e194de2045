"""The way to a model: ids that were sampled stay, every answer is one turn of the right context, budgets end, retries do not fork."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gnomon.agent import policy as policies
from gnomon.agent.ledger import Ledger
from gnomon.agent.policies.scripted import ScriptedPolicy, say
from gnomon.agent.policy import Completion, Sampling, Spent
from gnomon.agent.record import BudgetSpent, Recorder
from gnomon.agent.task import Budget
from gnomon.agent.trajectory import Span, Trajectory, Turn
from gnomon.agent.trajectory_file import TrajectoryFile, read
from gnomon.data.chat import ChatFormat, chat_format
from gnomon.data.messages import Conversation, Message, Text, Tool, ToolCall
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.errors import ConfigError, DataError, PolicyError

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
EMPTY = Trajectory(id="t-1", task_id="t")
BASH = Tool(name="bash", description="Run a command.", parameters={"type": "object"})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 1024)


@pytest.fixture(scope="module")
def chat(tokenizer: Tokenizer) -> ChatFormat:
    return chat_format(tokenizer)


def user(text: str) -> Message:
    """What a user says."""
    return Message(role="user", content=(Text(text=text),))


def result(text: str, call: str) -> Message:
    """What a tool gave."""
    return Message(role="tool", content=(Text(text=text),), tool_call_id=call)


def talk(*messages: Message, **options: Any) -> Conversation:
    """A conversation."""
    return Conversation(messages=messages, **options)


def by_bytes(tokenizer: Tokenizer, chat: ChatFormat, text: str) -> tuple[int, ...]:
    """An answer sampled in a way in which no tokenizer writes it: byte by byte."""
    single = {token: index for index, token in enumerate(tokenizer.ranks) if len(token) == 1}
    return (*(single[bytes([byte])] for byte in text.encode()), *chat.answer_opens, *(single[bytes([b])] for b in b"yes"),
            *chat.answer_closes, min(chat.stop_ids - {tokenizer.document_end_id}))


def test_sampled_ids_stay_when_the_answer_comes_back(tokenizer: Tokenizer, chat: ChatFormat) -> None:
    ledger = Ledger(chat)
    first = ledger.prepare("s", talk(user("hello")))
    assert first.token_ids == chat.encode(talk(user("hello"))).tokens and first.known == 0
    ids = by_bytes(tokenizer, chat, "the argument")
    reply = ledger.took("s", first, ids)
    assert reply.complete and reply.reasoning == "the argument" and reply.text == "yes"
    again = talk(user("hello"), reply.message, user("more"))
    second = ledger.prepare("s", again)
    assert second.token_ids[: second.known] == (*first.token_ids, *ids) and second.known == len(first.token_ids) + len(ids)
    assert second.token_ids != chat.encode(again).tokens
    assert second.token_ids[-len(second.opening):] == first.token_ids[-len(first.opening):]
    assert ledger.prepare("other", again).token_ids == chat.encode(again).tokens  # sessions share nothing
    ledger.forget("s")
    assert ledger.prepare("s", again).token_ids == chat.encode(again).tokens


@pytest.mark.parametrize("change", [
    {"reasoning": None}, {"reasoning": "other"}, {"content": (Text(text="no"),)}, {"name": "me"},
    {"tool_calls": (ToolCall(id="call_0", name="bash", arguments="{}"),)},
])
def test_what_a_client_changed_is_given_text(tokenizer: Tokenizer, chat: ChatFormat, change: dict[str, Any]) -> None:
    ledger = Ledger(chat)
    first = ledger.prepare("s", talk(user("hello")))
    reply = ledger.took("s", first, by_bytes(tokenizer, chat, "the argument"))
    again = talk(user("hello"), dataclasses.replace(reply.message, **change), user("more"))
    assert ledger.prepare("s", again).token_ids == chat.encode(again).tokens and ledger.prepare("s", again).known == 0


def test_another_beginning_keeps_the_answers_and_is_a_branch(tokenizer: Tokenizer, chat: ChatFormat) -> None:
    ledger = Ledger(chat)
    first = ledger.prepare("s", talk(user("hello")))
    ids = by_bytes(tokenizer, chat, "the argument")
    reply = ledger.took("s", first, ids)
    moved = ledger.prepare("s", talk(user("HELLO"), reply.message, user("more")))
    assert moved.known == 0 and any(moved.token_ids[i : i + len(ids)] == ids for i in range(len(moved.token_ids)))
    silent = talk(user("hello"), reply.message, user("more"), thinking=False)  # without thinking, this format leaves it out of histories
    assert ledger.prepare("s", silent).token_ids == chat.encode(silent).tokens


def test_of_equal_words_those_that_were_said_here(tokenizer: Tokenizer, chat: ChatFormat) -> None:
    ledger = Ledger(chat)
    sampled = {}
    for start in ("one", "two"):
        prompt = ledger.prepare("s", talk(user(start)))
        ids = by_bytes(tokenizer, chat, "so") if start == "one" else (
            *tokenizer.encode("so"), *chat.answer_opens, *tokenizer.encode("yes"), *chat.answer_closes,
            min(chat.stop_ids - {tokenizer.document_end_id}))
        sampled[start] = (prompt, ids, ledger.took("s", prompt, ids))
    assert sampled["one"][1] != sampled["two"][1] and sampled["one"][2].message == sampled["two"][2].message
    for start, (prompt, ids, reply) in sampled.items():
        again = ledger.prepare("s", talk(user(start), reply.message, user("more")))
        assert again.token_ids[: again.known] == (*prompt.token_ids, *ids)


def test_a_cut_answer_that_comes_back_is_given_text(tokenizer: Tokenizer, chat: ChatFormat) -> None:
    ledger = Ledger(chat)
    first = ledger.prepare("s", talk(user("hello")))
    reply = ledger.took("s", first, by_bytes(tokenizer, chat, "the argument")[:4])
    again = talk(user("hello"), reply.message, user("go on"))
    assert not reply.complete and ledger.prepare("s", again).token_ids == chat.encode(again).tokens


def test_json_that_was_written_anew_is_the_same_call(chat: ChatFormat) -> None:
    script = [say("Looking.", ("bash", {"command": "ls", "n": 1.0, "deep": {"a": [1, 2]}})), "done"]
    recorder = Recorder(ScriptedPolicy(script, chat), EMPTY)

    async def run() -> None:
        first = await recorder.complete(talk(user("hello"), tools=(BASH,)))
        [call] = first.message.tool_calls
        back = dataclasses.replace(call, arguments='{"n":1,"command":"ls","deep":{"a":[1,2]}}')
        sent = dataclasses.replace(first.message, tool_calls=(back,), content=(Text(text="Looking.\n"),))
        await recorder.complete(talk(user("hello"), sent, result("a", call.id), tools=(BASH,)))

    asyncio.run(run())
    assert [turn.parent for turn in recorder.trajectory.turns] == [None, 0]


class Spy:
    """A policy that writes down what it was asked; it makes up what it samples."""

    name = "spy"

    def __init__(self) -> None:
        self.sent: list[tuple[int, ...]] = []
        self.closed: list[str] = []

    async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Completion:
        ids = tuple(range(len(conversation.messages) * 3))
        self.sent.append(ids)
        span = Span(token_ids=(100 + len(self.sent), 7), logprobs=(-1.0, -2.0), loss_mask=(True, True), policy_version=3)
        return Completion(message=Message(role="assistant", content=(Text(text=str(len(self.sent))),)), prompt_ids=ids, sampled=span,
                          spent=Spent(prompt_tokens=len(ids), output_tokens=2, dollars=0.5))

    async def close(self, session: str) -> None:
        self.closed.append(session)


def conversation_of(turns: Sequence[str], answers: Sequence[Message]) -> Conversation:
    """User and assistant in turn."""
    parts: list[Message] = []
    for index, text in enumerate(turns):
        parts += [user(text), *answers[index : index + 1]]
    return talk(*parts)


def test_turns_put_together_are_what_was_sent_and_sampled(chat: ChatFormat) -> None:
    recorder = Recorder(ScriptedPolicy([say("a", reasoning="r"), "b", "c", "d", "e"], chat), EMPTY)
    sent: list[tuple[int, ...]] = []

    async def run() -> None:
        async def ask(conversation: Conversation, **more: Any) -> Message:
            done = await recorder.complete(conversation, **more)
            assert done.sampled is not None
            sent.append((*done.prompt_ids, *done.sampled.token_ids))
            return done.message

        one = await ask(conversation_of(["1"], []))
        two = await ask(conversation_of(["1", "2"], [one]))
        await ask(conversation_of(["1", "2", "3"], [one, two]))
        await ask(conversation_of(["1", "other"], [one]))  # a branch
        await ask(talk(user("summary of 1, 2, 3")), purpose="compaction")

    asyncio.run(run())
    trajectory = recorder.trajectory
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, 0, None]
    assert [(turn.purpose, turn.origin) for turn in trajectory.turns][-2:] == [(None, None), ("compaction", 3)]
    assert [trajectory.token_ids(i) for i in range(5)] == sent
    assert [[m.text for m in turn.messages] for turn in trajectory.turns] == [
        ["1", "a"], ["2", "b"], ["3", "c"], ["other", "d"], ["summary of 1, 2, 3", "e"]]
    masked = [t for sample in trajectory.samples() for t, keep in zip(sample.token_ids, sample.loss_mask, strict=True) if keep]
    assert len(masked) == trajectory.sampled_tokens == recorder.spent.output_tokens


def test_ids_that_are_no_continuation_are_a_branch_whatever_the_messages_say() -> None:
    spy = Spy()
    recorder = Recorder(spy, EMPTY)

    async def run() -> None:
        first = (await recorder.complete(talk(user("1")))).message
        await recorder.complete(talk(user("1"), first, user("2")))  # the spy writes its own answer into no later prompt

    asyncio.run(run())
    assert [turn.parent for turn in recorder.trajectory.turns] == [None, None]
    assert [recorder.trajectory.token_ids(i)[:-2] for i in range(2)] == spy.sent


def test_without_ids_messages_decide_and_lost_thinking_is_no_branch() -> None:
    recorder = Recorder(ScriptedPolicy([say("a", reasoning="because"), "b", "c"]), EMPTY)

    async def run() -> None:
        first = (await recorder.complete(talk(user("1")))).message
        await recorder.complete(talk(user("1"), dataclasses.replace(first, reasoning=None), user("2")))
        await recorder.complete(talk(user("1"), dataclasses.replace(first, content=(Text(text="edited"),)), user("2")))

    asyncio.run(run())
    assert [turn.parent for turn in recorder.trajectory.turns] == [None, 0, None]
    assert recorder.trajectory.answer() == "c" and len(recorder.trajectory.turns[1].messages) == 2


def test_tools_are_noted_when_they_change() -> None:
    recorder = Recorder(ScriptedPolicy(["a", "b", "c"]), EMPTY)

    async def run() -> None:
        one = (await recorder.complete(conversation_of(["1"], []))).message
        two = (await recorder.complete(dataclasses.replace(conversation_of(["1", "2"], [one]), tools=(BASH,)))).message
        await recorder.complete(dataclasses.replace(conversation_of(["1", "2", "3"], [one, two]), tools=(BASH,)))

    asyncio.run(run())
    assert [[tool["name"] for tool in turn.notes.get("tools", ())] for turn in recorder.trajectory.turns] == [[], ["bash"], []]


@pytest.mark.parametrize(("budget", "limit", "turns"), [
    (Budget(turns=2), "turns", 2), (Budget(tokens=3), "tokens", 2), (Budget(dollars=1.2), "dollars", 3)])
def test_a_budget_ends_the_attempt(budget: Budget, limit: str, turns: int) -> None:
    recorder = Recorder(Spy(), EMPTY, budget)

    async def run() -> None:
        for _ in range(9):
            await recorder.complete(talk(user("1")))

    with pytest.raises(BudgetSpent) as caught:
        asyncio.run(run())
    assert caught.value.limit == limit and recorder.turns == turns


def test_tokens_that_are_left_limit_an_answer(chat: ChatFormat) -> None:
    recorder = Recorder(ScriptedPolicy(["a long answer that does not fit"], chat), EMPTY, Budget(tokens=6))
    done = asyncio.run(recorder.complete(talk(user("1"))))
    assert done.stop == "length" and recorder.spent.output_tokens == 6 and recorder.trajectory.turns[0].notes["stop"] == "length"


def test_seconds_end_an_answer_that_does_not_come() -> None:
    recorder = Recorder(ScriptedPolicy(["late"], delay_seconds=3600), EMPTY, Budget(seconds=0.05))
    with pytest.raises(BudgetSpent, match="seconds"):
        asyncio.run(recorder.complete(talk(user("1"))))
    assert recorder.turns == 0
    now = [0.0]
    recorder = Recorder(ScriptedPolicy(["a", "b"]), EMPTY, Budget(seconds=1000), clock=lambda: now[0])
    asyncio.run(recorder.complete(talk(user("1"))))
    now[0] = 1000.0
    with pytest.raises(BudgetSpent, match="1000 seconds"):
        asyncio.run(recorder.complete(talk(user("1"))))


def test_turns_beside_each_other_share_the_budget() -> None:
    recorder = Recorder(ScriptedPolicy(lambda _: "a", delay_seconds=0.01), EMPTY, Budget(turns=3))

    async def run() -> list[Any]:
        return await asyncio.gather(*(recorder.complete(talk(user(str(i)))) for i in range(5)), return_exceptions=True)

    done = asyncio.run(run())
    assert sum(isinstance(each, BudgetSpent) for each in done) == 2 and recorder.turns == 3


def test_a_request_that_is_tried_again_is_one_turn() -> None:
    recorder = Recorder(ScriptedPolicy(["a", "b"], delay_seconds=0.01), EMPTY)

    async def run() -> None:
        first = asyncio.create_task(recorder.complete(talk(user("1")), key="k"))
        await asyncio.sleep(0)
        first.cancel()  # the client went away
        second = await recorder.complete(talk(user("1")), key="k")
        third = await recorder.complete(talk(user("1")), key="k", again=True)
        assert second.message.text == third.message.text == "a" and recorder.turns == 1
        assert (await recorder.complete(talk(user("1")), key="k")).message.text == "b"  # asked anew, not again
        await recorder.close()
        with pytest.raises(BudgetSpent, match="ended"):
            await recorder.complete(talk(user("1")), key="k2")

    asyncio.run(run())
    assert recorder.turns == 2


def test_a_policy_that_fails_leaves_no_turn() -> None:
    recorder = Recorder(ScriptedPolicy(["only"]), EMPTY, Budget(turns=5))
    asyncio.run(recorder.complete(talk(user("1"))))
    with pytest.raises(PolicyError, match="1 replies"):
        asyncio.run(recorder.complete(talk(user("1"))))
    assert recorder.turns == 1


def test_who_goes_on_with_a_record_keeps_the_ids_that_were_sampled(tmp_path: Path, tokenizer: Tokenizer, chat: ChatFormat) -> None:
    class Bytes(ScriptedPolicy):
        """Samples as no tokenizer writes."""

        def __init__(self) -> None:
            super().__init__(["never asked"])
            self._ledger = self.ledger = Ledger(chat)

        async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Completion:
            prompt = self.ledger.prepare(session, conversation)
            ids = by_bytes(tokenizer, chat, "the argument")
            span = Span(token_ids=ids, logprobs=(-1.0,) * len(ids), loss_mask=(True,) * len(ids), policy_version=0)
            return Completion(message=self.ledger.took(session, prompt, ids).message, prompt_ids=prompt.token_ids, sampled=span)

    async def ask(*messages: Message) -> Message:
        with TrajectoryFile(tmp_path / "t.jsonl", EMPTY) as file:
            return (await Recorder(Bytes(), file).complete(talk(*messages))).message

    said = [user("hello")]
    for more in ("more", "and more"):  # each time another process
        said += [asyncio.run(ask(*said)), user(more)]
    asyncio.run(ask(*said))
    found = read(tmp_path / "t.jsonl")
    assert [turn.parent for turn in found.turns] == [None, 0, 1] and len(found.samples()) == 1
    ledger = Ledger(chat)
    ledger.recall("s", found.token_ids(0)[:5], (1, 2), found.turns[0].messages[-1])  # opened by no format of ours: given text
    assert ledger.prepare("s", talk(*said)).token_ids == chat.encode(talk(*said)).tokens


def test_a_file_goes_on_where_it_stopped(tmp_path: Path, chat: ChatFormat) -> None:
    path = tmp_path / "t.jsonl"
    policy = ScriptedPolicy(["a", "b", "c"], chat)

    async def run(record: TrajectoryFile, turns: list[str], answers: list[Message], budget: Budget) -> Message:
        recorder = Recorder(policy, record, budget)
        return (await recorder.complete(dataclasses.replace(conversation_of(turns, answers), tools=(BASH,)))).message

    with TrajectoryFile(path, EMPTY) as record:
        one = asyncio.run(run(record, ["1"], [], Budget()))
    with TrajectoryFile(path, EMPTY) as record:
        asyncio.run(run(record, ["1", "2"], [one], Budget(turns=2)))
        with pytest.raises(BudgetSpent):
            asyncio.run(run(record, ["1", "2"], [one], Budget(turns=2)))
    back = read(path)
    assert [turn.parent for turn in back.turns] == [None, 0] and "tools" in back.turns[0].notes and "tools" not in back.turns[1].notes


def test_who_is_cancelled_while_a_line_is_written_leaves_a_whole_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, real = threading.Event(), threading.Event(), TrajectoryFile.append

    def slow(file: TrajectoryFile, turn: Turn) -> Trajectory:
        began.set()
        assert go.wait(60)
        return real(file, turn)

    async def run(record: TrajectoryFile) -> Recorder:
        recorder = Recorder(Spy(), record, Budget(turns=2))
        call = asyncio.create_task(recorder.complete(conversation_of(["1"], [])))
        assert await asyncio.to_thread(began.wait, 60)
        call.cancel()
        go.set()
        assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], asyncio.CancelledError)
        assert (recorder.turns, recorder.spent.output_tokens) == (1, 2)
        await recorder.complete(talk(user("another")))
        with pytest.raises(BudgetSpent):
            await recorder.complete(talk(user("a third")))
        return recorder

    monkeypatch.setattr(TrajectoryFile, "append", slow)
    with TrajectoryFile(tmp_path / "t.jsonl", EMPTY) as record:
        asyncio.run(run(record))
    assert [turn.parent for turn in read(tmp_path / "t.jsonl").turns] == [None, None]


def test_policies_are_opened_by_name() -> None:
    policy = policies.opened("scripted", {"replies": ["a", {"text": "b", "calls": [{"name": "bash", "arguments": {"command": "ls"}}]}]})

    async def run() -> list[Completion]:
        return [await policy.complete("s", talk(user("1")), Sampling()) for _ in range(2)]

    first, second = asyncio.run(run())
    assert first.message.text == "a" and second.message.tool_calls == (ToolCall(id="call_0", name="bash", arguments='{"command": "ls"}'),)
    with pytest.raises(ConfigError, match=r"choices: .*scripted"):
        policies.opened("scriptd", {})
    for settings, fault in (
        ({}, "replies"), ({"replies": [{"txt": "a"}]}, r"replies\[0\].*txt"), ({"replies": ["a"], "delay": 1}, "delay")):
        with pytest.raises(DataError, match=fault):
            policies.opened("scripted", settings)
