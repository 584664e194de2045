"""Trajectories: every token once, on disk as it happens, resumable, and as ATIF."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from gnomon.agent import trajectory_file
from gnomon.agent.atif import to_atif
from gnomon.agent.trajectory import Score, Span, Trajectory, Turn
from gnomon.agent.trajectory_file import TrajectoryFile
from gnomon.data.messages import Message, Text, Tool, ToolCall
from gnomon.errors import DataError, VerifierError


def said(role: str, text: str, **more: object) -> Message:
    return Message(role=role, content=(Text(text=text),), **more)


def given(*ids: int) -> Span:
    return Span(token_ids=ids)


def sampled(*ids: int, version: int = 1) -> Span:
    return Span(token_ids=ids, logprobs=tuple(-i / 8 for i in ids), loss_mask=(True,) * len(ids), policy_version=version)


CALL = ToolCall(id="c1", name="bash", arguments='{"command": "ls <|close|>"}')
BEGIN = Trajectory(id="t", task_id="task", harness="bash", model="m", effort="low", tools=(Tool(name="bash"),))
TURNS = (
    Turn(messages=(said("system", "S"), said("user", "<|open|>U")), spans=(given(1, 2, 3),)),
    Turn(messages=(said("assistant", "", reasoning="hm", tool_calls=(CALL,)),),
         spans=(given(4), sampled(5, 6), sampled(7, version=2)), parent=0),
    Turn(messages=(said("tool", "a\nb", tool_call_id="c1"),), spans=(given(8),), parent=1),
    Turn(messages=(said("assistant", "first"),), spans=(sampled(9),), parent=2),
    Turn(messages=(said("assistant", "second"),), spans=(sampled(10),), parent=2),
    Turn(messages=(said("user", "summary"),), spans=(given(20),), origin=4, purpose="compaction"),
    Turn(messages=(said("assistant", "done"),), spans=(sampled(21),), parent=5),
    Turn(messages=(said("user", "sub"), said("assistant", "sub answer")), spans=(given(30), sampled(31)), origin=6, purpose="agent"),
)


def whole() -> Trajectory:
    made = BEGIN
    for turn in TURNS:
        made = made.appended(turn)
    return made


def test_a_path_is_what_the_model_saw_and_no_token_is_trained_on_twice():
    made = whole()
    assert made.leaves() == (3, 4, 6, 7) and made.path(4) == (0, 1, 2, 4)
    assert made.token_ids(4) == (1, 2, 3, 4, 5, 6, 7, 8, 10)
    samples = made.samples()
    assert [s.token_ids for s in samples] == [(1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 6, 7, 8, 10), (20, 21), (30, 31)]
    assert [[t for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m] for s in samples] == [[5, 6, 7, 9], [10], [21], [31]]
    assert samples[0].policy_versions == (None, None, None, None, 1, 1, 2, None, 1)
    assert samples[0].logprobs[4:7] == (-5 / 8, -6 / 8, -7 / 8)
    assert made.answer() == "done" and made.sampled_tokens == 7
    assert [m.text for m in made.messages(4)] == ["S", "<|open|>U", "", "a\nb", "second"]


@pytest.mark.parametrize(("make", "says"), [
    (lambda: Span(token_ids=(1,), logprobs=(0.0, 0.0)), "'logprobs': 2 for 1"), (lambda: Span(token_ids=(-1,)), "'token_ids'"),
    (lambda: Span(token_ids=(1,), logprobs=(float("nan"),)), "finite"),
    (lambda: Span(token_ids=(1,), loss_mask=(True,)), "only what was sampled"),
    (lambda: Span(token_ids=(True,)), "'token_ids'"), (lambda: BEGIN.appended(Turn(messages=(), parent=0)), "turn 0 is not among the 0"),
    (lambda: whole().appended(Turn(messages=(), parent=0, origin=1)), "'origin'"),
    (lambda: replace(whole(), stop_reason="finished").appended(Turn(messages=())), "it ended"),
])
def test_what_cannot_have_happened(make, says):
    with pytest.raises(DataError, match=says):
        make()


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e309, "1", True, [1]])
def test_a_reward_is_a_finite_number(reward):
    with pytest.raises(VerifierError, match="'reward'"):
        Score(reward=reward)
    with pytest.raises(VerifierError, match=r"'metrics\.x'"):
        Score(reward=1.0, metrics={"x": reward})


def test_not_scored_is_not_zero():
    assert not Score(reward=None, error="judge crashed").scored and Score(reward=0.0).scored
    with pytest.raises(VerifierError, match="a failed verifier gives no reward"):
        Score(reward=0.0, error="crashed")


def test_there_and_back_on_disk(tmp_path):
    made = replace(whole(), score=Score(reward=0.5, metrics={"a": 1.0}, evidence=("why",)), stop_reason="finished", metadata={"a": [None]})
    trajectory_file.write(made, tmp_path / "t.jsonl")
    assert trajectory_file.read(tmp_path / "t.jsonl") == made
    assert len((tmp_path / "t.jsonl").read_bytes().splitlines()) == len(TURNS) + 3


def test_every_cut_loses_only_the_line_that_was_cut(tmp_path):
    path = tmp_path / "t.jsonl"
    trajectory_file.write(whole(), path)
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for cut in range(first, len(data), 97):
        path.write_bytes(data[:cut])
        kept = data[:cut].count(b"\n") - 1
        assert trajectory_file.read(path).turns == TURNS[:kept]
        with TrajectoryFile(path, BEGIN) as file:
            for turn in TURNS[kept:]:
                file.append(turn)
        assert path.read_bytes() == data


def test_a_killed_writer_loses_at_most_its_last_line(tmp_path):
    path = tmp_path / "t.jsonl"
    program = ("import sys\nfrom pathlib import Path\nfrom gnomon.agent.trajectory import Trajectory, Turn\n"
               "from gnomon.agent.trajectory_file import TrajectoryFile\nfrom gnomon.data.messages import Message, Text\n"
               "file = TrajectoryFile(Path(sys.argv[1]), Trajectory(id='t', task_id='task'))\n"
               "for i in range(10**9):\n    file.append(Turn(messages=(Message(role='user', content=(Text(text=str(i) * 999),)),)))\n"
               "    print(i, flush=True)\n")
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(20)][-1]
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(30)
    turns = trajectory_file.read(path).turns
    assert len(turns) > acknowledged and all(turn.messages[0].text == str(i) * 999 for i, turn in enumerate(turns))


@pytest.mark.parametrize(("line", "says"), [
    (b'{"kind": "turn", "messages": [{"role": "robot"}]}', r":2: 'messages\[0\].role'"), (b"{", ":2: no JSON"),
    (b'{"kind": "trun"}', ":2: 'kind'"), (b'{"kind": "turn", "parent": 7}', ":2: .*turn 7"), (b'{"kind": "turn", "more": 1}', ":2: 'more'"),
    (b'{"kind": "turn", "spans": [{"token_ids": [1], "loss_mask": "1"}]}', ":2: .*only what was sampled"),
    (b'{"kind": "end", "stop_reason": "tired"}', ":2: "),
])
def test_a_damaged_line_is_named(tmp_path, line, says):
    path = tmp_path / "t.jsonl"
    trajectory_file.write(BEGIN, path)
    path.write_bytes(path.read_bytes() + line + b"\n" + b'{"kind": "turn"}\n')
    with pytest.raises(DataError, match=says):
        trajectory_file.read(path)


def test_a_file_belongs_to_one_attempt(tmp_path):
    trajectory_file.write(BEGIN, tmp_path / "t.jsonl")
    with pytest.raises(DataError, match="name another file"):
        TrajectoryFile(tmp_path / "t.jsonl", Trajectory(id="other", task_id="task"))


def test_atif_has_every_sampled_token_once():
    document = json.loads(json.dumps(to_atif(whole())))
    assert document["schema_version"] == "ATIF-v1.8" and document["agent"]["tool_definitions"][0]["function"]["name"] == "bash"
    documents = [document, *document["subagent_trajectories"]]
    assert len({each["trajectory_id"] for each in documents}) == 4
    steps = [step for each in documents for step in each["steps"]]
    chosen = [t for step in steps for t in step.get("metrics", {}).get("completion_token_ids", ())]
    assert chosen == [5, 6, 7, 9, 10, 21, 31]
    call = document["steps"][2]
    assert call["metrics"]["prompt_token_ids"] == [1, 2, 3, 4] and call["metrics"]["extra"]["policy_versions"] == [1, 1, 2]
    assert call["tool_calls"][0]["arguments"] == {"command": "ls <|close|>"} and call["reasoning_content"] == "hm"
    assert call["observation"]["results"] == [{"source_call_id": "c1", "content": "a\nb"}]
    assert [step.get("is_copied_context", False) for step in documents[1]["steps"]] == [True, True, True, False]
    assert all([step["step_id"] for step in each["steps"]] == [*range(1, len(each["steps"]) + 1)] for each in documents)
    broken = BEGIN.appended(Turn(messages=(said("assistant", "", tool_calls=(replace(CALL, arguments="{oops"),)),)))
    assert to_atif(broken)["steps"][0]["tool_calls"][0] == {
        "tool_call_id": "c1", "function_name": "bash", "arguments": {}, "extra": {"arguments_text": "{oops"}}
    with pytest.raises(DataError, match="no turns"):
        to_atif(BEGIN)
