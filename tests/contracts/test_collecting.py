"""What experts did, as files: what `gnomon sft` learns from is what was sampled, and traces are those of `verifiers`."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from posttraining_fixtures import network

from gnomon.agent.trajectory import Score
from gnomon.agent.verifiers_trace import to_trace
from gnomon.data.chat import ChatFormat
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import ConfigError, DataError
from gnomon.posttrain import demonstrations
from gnomon.posttrain.collecting import CollectConfig, collect, record, trajectory
from gnomon.posttrain.keeping import KeepConfig
from gnomon.posttrain.partial import Group, PoolConfig
from gnomon.posttrain.problem import Episode, Problem
from gnomon.posttrain.rl import RLConfig, SamplingConfig, Start, train
from gnomon.posttrain.rollout import Rollout, chosen, given
from gnomon.posttrain.sft import SFTConfig, fit


def grade(sampled: tuple[int, ...], world: Episode | None) -> Score:
    """Even sums are good."""
    return Score(reward=float(sum(sampled) % 2 == 0))


PROBLEM = Problem(id="p", prompt=(3, 4), domain="d", effort="low", grade=grade, max_tokens=8, stop_ids=frozenset({1}))
TALK = Rollout(problem=PROBLEM, group=2, member=1, seed=0, end="stop", score=Score(reward=0.5), spans=(
    chosen((50, 51), (-0.5, -0.25), 3), given((60,)), chosen((52, 1), (-1.0, -2.0), 4)))


def test_a_file_is_what_was_sampled(chat: ChatFormat, tmp_path: Path) -> None:
    """Only rollouts above the reward, of the last steps only; ids and mask are the rollout's, and what is only read weighs nothing."""
    bad, failed = replace(TALK, score=Score(reward=0.0)), replace(TALK, score=Score(reward=None, error="machine"))
    groups = [Group(number=2, problem=PROBLEM, rollouts=(TALK, bad, failed))]
    config = CollectConfig(last=2)
    for step in (1, 2, 3):
        collect(groups, config, tmp_path, step, 3)
    collect(groups, CollectConfig(), tmp_path / "off", 3, 3)
    assert [path.name for path in sorted((tmp_path / "collected").iterdir())] == ["step-000002.jsonl", "step-000003.jsonl"]
    assert not (tmp_path / "off").exists()
    [example] = demonstrations.read([tmp_path / "collected" / "step-000003.jsonl"], chat)
    assert example.token_ids == (3, 4, 50, 51, 60, 52, 1) and example.weights == (0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0)
    said = json.loads((tmp_path / "collected" / "step-000003.jsonl").read_text())
    assert (said["domain"], said["effort"], said["reward"]) == ("d", "low", 0.5)


@pytest.mark.parametrize("change", [{"loss_mask": "0011"}, {"loss_mask": "0000000"}, {"loss_mask": "1011011"}, {"loss_mask": "00110x1"},
                                    {"token_ids": [3, -4, 50, 51, 60, 52, 1]}, {"token_ids": "abcdefg"}])
def test_lines_that_are_none_are_refused(change: dict[str, object], chat: ChatFormat, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record(TALK) | change))
    with pytest.raises(DataError, match=r"a\.jsonl:1"):
        list(demonstrations.read([tmp_path / "a.jsonl"], chat))
    with pytest.raises(ConfigError, match="'last' is -1"):
        CollectConfig(last=-1)


def test_a_rollout_as_a_trace(vocabulary: Tokenizer) -> None:
    """Every id once and in order, with the mask and log-probabilities of what was sampled; its score, or why there is none."""
    for tokenizer in (vocabulary, None):
        trace = to_trace(trajectory(TALK, tokenizer))
        nodes = trace["nodes"]
        assert [i for node in nodes for i in node.get("token_ids", ())] == list(TALK.token_ids)
        assert [flag for node in nodes for flag in node.get("mask", ())] == list(TALK.mask)
        assert [value for node in nodes for value in node.get("logprobs", ())] == list(TALK.logprobs)
        assert [node["message"]["role"] for node in nodes] == ["user", "assistant", "user", "assistant"]
        assert [node["parent"] for node in nodes] == [None, 0, 1, 2] and [node["sampled"] for node in nodes] == [False, True, False, True]
        assert trace["rewards"]["reward"]["score"] == 0.5 and trace["ok"] and trace["info"]["group"] == "2"
    failed = to_trace(trajectory(replace(TALK, score=Score(reward=None, error="the machine was lost"))))
    assert failed["rewards"]["reward"] is None and not failed["ok"] and "lost" in failed["errors"][0]["message"]


class Source:
    """One short problem after the other."""

    def problem(self, index: int) -> Problem:
        """By number; every third is held out."""
        return replace(PROBLEM, id=str(index), prompt=(3, 5 + index % 30), held_out=index % 3 == 2)


def test_a_run_collects_what_a_further_run_learns(chat: ChatFormat, vocabulary: Tokenizer, tmp_path: Path) -> None:
    """From reinforcement into fine-tuning; held-out groups are scored beside the others, and neither learnt from nor collected."""
    config = RLConfig(steps=3, pool=PoolConfig(prompts=6, group_size=2), sampling=SamplingConfig(slots=16, cache_tokens=2048),
                      keep=KeepConfig(every=9), collect=CollectConfig(last=2, traces=True))
    rows = train(Start(model=network(vocabulary.vocab_size), source=Source()), config, tmp_path / "run")
    for row in rows:
        assert row["groups"] == 4 and row["held_out_groups"] == 2 and 0 <= row["held_out_accuracy"] <= 1
        assert math.isfinite(row["held_out_reward"]) and row["held_out_tokens"] > 0
    files = sorted((tmp_path / "run" / "collected").glob("*.jsonl"))
    assert [file.name for file in files] == ["step-000002.jsonl", "step-000003.jsonl"]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(lines) == sum(round(row["accuracy"] * 8) for row in rows[1:]) and all(int(line["problem"]) % 3 != 2 for line in lines)
    traces = (tmp_path / "run" / "traces" / "step-000003.jsonl").read_text().splitlines()
    assert len(traces) == 8 and all(json.loads(line)["version"] == 1 for line in traces)
    examples = list(demonstrations.read(files, chat))
    assert len(examples) == len(lines)
    learnt = fit(network(vocabulary.vocab_size), examples, SFTConfig(epochs=2), tmp_path / "sft")
    assert learnt[-1]["loss"] < learnt[0]["loss"] or len(learnt) == 1


def test_an_iteration_of_held_out_groups_alone(vocabulary: Tokenizer, tmp_path: Path) -> None:
    """Nothing is learnt, and the row says so."""
    class Held:
        def problem(self, index: int) -> Problem:
            return replace(PROBLEM, id=str(index), prompt=(3, 5), held_out=True)

    config = RLConfig(steps=1, pool=PoolConfig(prompts=2, group_size=2), sampling=SamplingConfig(slots=4, cache_tokens=512),
                      collect=CollectConfig(last=1))
    [row] = train(Start(model=network(vocabulary.vocab_size), source=Held()), config, tmp_path / "run")
    assert row["groups"] == 0 and row["held_out_groups"] == 2 and row["signal"] == 0 and row["loss"] == 0
