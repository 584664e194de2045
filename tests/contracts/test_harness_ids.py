"""Harnesses over a policy that knows ids: whatever a harness does to its history, each sampled token is on record once."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gnomon.agent.harness import harness
from gnomon.agent.policies.scripted import ScriptedPolicy, say
from gnomon.agent.policy import Completion, Sampling
from gnomon.agent.record import Recorder
from gnomon.agent.task import Check, Task
from gnomon.agent.trajectory import Trajectory
from gnomon.data.chat import ChatFormat, chat_format
from gnomon.data.messages import Conversation, Message
from gnomon.data.tokenizer import train_tokenizer

TASK = Task(id="t", prompt="Count to three.", check=Check(kind="exact", settings={"answer": "x"}))


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return chat_format(train_tokenizer([path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))], 512))


class Spy:
    """Passes everything on, and writes down what was sent and what was sampled."""

    def __init__(self, policy: ScriptedPolicy) -> None:
        self.policy, self.name = policy, policy.name
        self.log: list[tuple[Sequence[int], Sequence[int]]] = []

    async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Completion:
        completion = await self.policy.complete(session, conversation, sampling)
        assert completion.sampled is not None
        self.log.append((completion.prompt_ids, completion.sampled.token_ids))
        return completion

    async def close(self, session: str) -> None:
        await self.policy.close(session)


GIVE = say("", ("Agent", {"prompt": "Think of a number.", "description": "number"}))


def note(text: str) -> Message:
    """A turn of work under the preset below."""
    return say(f"I note {text}.", ("TodoList", {"todos": [{"title": text * 30, "status": "done"}]}))


def told(conversation: Conversation) -> Message | str:
    """Works in three steps, gives one part away, sums up when asked."""
    last = conversation.messages[-1].text
    if "will be cleared" in last:
        return "One and two are noted."
    if last == "Think of a number.":
        return note("seven ")
    if "seven" in last:
        return "Seven."
    if "Seven." in last:
        return note("one ")
    return "Three." if "noted" in last or "three " in last else GIVE


@pytest.mark.parametrize("context", ["none", "compact", "truncate"])
def test_every_sampled_token_is_on_record_once(context: str, chat: ChatFormat) -> None:
    script = [GIVE, note("seven "), "Seven.", note("one "), note("two "), note("three "), "Three."]
    spy = Spy(ScriptedPolicy(told if context == "compact" else script, chat))
    settings = {"none": "{}", "compact": "{tokens = 2500}", "truncate": "{tokens = 2500, keep = 1}"}[context]
    opened = harness.opened("kimi-code", [f"context={{kind='{context}', settings={settings}}}"])
    recorder = Recorder(spy, Trajectory(id="a", task_id="t"))
    assert asyncio.run(opened.run(TASK, recorder, None)) == "finished"
    trajectory = recorder.trajectory
    assert len(trajectory.turns) == len(spy.log)
    for index, (sent, sampled) in enumerate(spy.log):
        assert trajectory.token_ids(index) == (*sent, *sampled)
    trained = sum(sum(sample.loss_mask) for sample in trajectory.samples())
    assert trained == sum(len(sampled) for _, sampled in spy.log)
    assert trajectory.answer() == "Three."
    purposes = [turn.purpose for turn in trajectory.turns if turn.parent is None]
    assert purposes[0] is None and "agent" in purposes and ("compaction" in purposes) == (context == "compact"), purposes
