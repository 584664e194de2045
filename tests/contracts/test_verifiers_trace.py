"""Trajectories as traces of `verifiers`: every token in one node, paths that give back what the model saw, nothing scored by accident."""

import json
from dataclasses import replace
from typing import Any

import pytest

from gnomon.agent.task import Check, Task
from gnomon.agent.trajectory import Score, Span, Trajectory, Turn
from gnomon.agent.verifiers_trace import to_trace
from gnomon.data.messages import Image, Message, Text, Tool, ToolCall
from gnomon.errors import DataError

# Fields of version 1, as verifiers 0.4 declares them, that are written here.
TRACE = {"version", "id", "task", "agent", "tools", "nodes", "rewards", "metrics", "info", "is_completed", "ok", "stop_condition",
         "is_timeout", "errors", "timing"}
NODE = {"parent", "tools", "semantic_parents", "message", "sampled", "timestamp", "token_ids", "mask", "logprobs"}


def said(role: Any, text: str, **more: Any) -> Message:
    return Message(role=role, content=(Text(text=text),) if text else (), **more)


def turn(given: tuple[int, ...], chosen: tuple[int, ...], *messages: Message, **more: Any) -> Turn:
    spans = (Span(token_ids=given), Span(token_ids=chosen, logprobs=tuple(-float(i) for i in chosen), loss_mask=(True,) * len(chosen),
                                         policy_version=3))
    return Turn(messages=messages, spans=spans, seconds=2.0, **more)


def trajectory() -> Trajectory:
    call = ToolCall(id="c1", name="bash", arguments='{"command": "ls"}')
    made = Trajectory(id="t", task_id="task", harness="bash", model="m", tools=(Tool(name="bash", description="Run."),))
    for each in [
        turn((1, 2), (3, 4), said("system", "Be brief."), said("user", "Look."), said("assistant", "", reasoning="hm", tool_calls=(call,))),
        turn((5,), (6,), said("tool", "a b", tool_call_id="c1"), said("assistant", "done"), parent=0),
        turn((7,), (8,), said("user", "again"), said("assistant", "other"), parent=0),
        turn((9,), (10,), said("user", "short"), said("assistant", "sub"), origin=1, purpose="agent"),
    ]:
        made = made.appended(each)
    return replace(made, stop_reason="finished", score=Score(reward=0.5, metrics={"share": 1.0}, evidence=("why",)))


def path(trace: dict[str, Any], node: int | None) -> list[int]:
    found: list[int] = []
    while node is not None:
        found = [*trace["nodes"][node].get("token_ids", []), *found]
        node = trace["nodes"][node]["parent"]
    return found


def test_paths_give_back_what_the_model_saw():
    made = trajectory()
    trace = to_trace(made)
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace and set(trace) == TRACE
    leaves = sorted(set(range(len(trace["nodes"]))) - {node["parent"] for node in trace["nodes"]})
    assert [path(trace, leaf) for leaf in leaves] == [list(made.token_ids(leaf)) for leaf in made.leaves()]
    for node in trace["nodes"]:
        assert set(node) <= NODE and len(node.get("mask", [])) == len(node.get("token_ids", []))
        assert len(node.get("logprobs", [])) == sum(node.get("mask", []))
    assert sum(sum(node.get("mask", [])) for node in trace["nodes"]) == made.sampled_tokens  # each once, though two leaves share a turn
    assert [node["sampled"] for node in trace["nodes"]] == [False, False, True, False, True, False, True, False, True]


def test_messages_tools_links_and_scores():
    trace = to_trace(trajectory(), Task(id="task", prompt="Look.", check=Check(kind="exact", settings={"answer": "secret"})), started=100.0)
    third = trace["nodes"][2]
    assert third["message"] == {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
        {"id": "c1", "type": "function", "name": "bash", "arguments": '{"command": "ls"}'}]} and third["timestamp"] == 102.0
    assert trace["nodes"][3]["message"] == {"role": "tool", "content": "a b", "tool_call_id": "c1"}
    assert trace["nodes"][0]["tools"][0]["name"] == "bash" and "tools" not in trace["nodes"][1]
    assert trace["nodes"][7]["semantic_parents"] == [{"node": 4, "type": "agent"}] and trace["nodes"][7]["parent"] is None
    assert trace["rewards"] == {"reward": {"score": 0.5, "weight": 1.0}} and trace["metrics"] == {"share": 1.0} and trace["ok"]
    assert trace["task"]["data"]["prompt"] == "Look." and "secret" not in json.dumps(trace)


def test_what_failed_is_no_zero():
    made = replace(trajectory(), score=Score(reward=None, error="the judge crashed"))
    trace = to_trace(made)
    assert trace["rewards"] == {"reward": None} and not trace["ok"] and trace["errors"][0]["message"] == "the judge crashed"
    late = to_trace(replace(trajectory(), stop_reason="deadline"))
    assert late["is_timeout"] and late["ok"] and not to_trace(replace(trajectory(), stop_reason=None))["is_completed"]


def test_images_and_trajectories_without_ids():
    picture = Message(role="user", content=(Text(text="see"), Image(data=b"png", media_type="image/png")))
    made = Trajectory(id="t", task_id="t").appended(Turn(messages=(picture, said("assistant", "a cat")), notes={"spent": {}}))
    trace = to_trace(made)
    assert trace["nodes"][0]["message"]["content"][1]["image_url"]["url"] == "data:image/png;base64,cG5n"
    assert trace["nodes"][1]["sampled"] and "token_ids" not in trace["nodes"][1]
    for wrong in (Trajectory(id="t", task_id="t"), made):
        with pytest.raises(DataError, match=r"has no turns|is of task"):
            to_trace(wrong, Task(id="other", prompt="", check=Check(kind="exact")) if wrong.turns else None)
