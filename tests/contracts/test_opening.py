"""`gnomon rl` and `gnomon export` as people type them: agents on servers, groups judged by a model, an adapter with what it leaves out."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from posttraining_fixtures import network, save, serving

from gnomon.agent.policies.scripted import ScriptedPolicy, say
from gnomon.cli import main
from gnomon.data.messages import Conversation
from gnomon.data.tokenizer import Tokenizer
from gnomon.model import adapter
from gnomon.posttrain.problem import Problem

KEY = "a-long-secret"


class Source:
    """What nobody can grade."""

    def problem(self, index: int) -> Problem:
        """By number."""
        return Problem(id=str(index), prompt=(3, 300 + index % 50), domain="essays", effort="max", grade=None, max_tokens=6,
                       stop_ids=frozenset({1}))


def judge(settings: Any) -> ScriptedPolicy:
    """Likes what it reads first."""
    def reply(conversation: Conversation) -> Any:
        step = sum(message.role == "assistant" for message in conversation.messages)
        return say(json.dumps([{"A": "a", "B": "b"}, [{"criterion": "c", "weight": 1}], [{"criterion": "c", "A": 9, "B": 1}]][step]))

    return ScriptedPolicy(reply)


@pytest.fixture(scope="module")
def start(vocabulary: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cold start."""
    return save(network(vocabulary.vocab_size, 1), tmp_path_factory.mktemp("runs") / "start", vocabulary)


@pytest.fixture(scope="module")
def url(start: Path, vocabulary: Tokenizer) -> Iterator[str]:
    """A server of it that takes newer weights."""
    with serving(network(vocabulary.vocab_size, 1), vocabulary, 'access.admins=["trainer"]', f'access.reload_folders=["{start.parent}"]',
                 keys={"trainer": KEY}) as address:
        yield address


def rows(run: Path) -> list[dict[str, Any]]:
    """Its metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_groups_that_a_model_judges(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws in both orders: half for everybody; l0 is measured once, and belongs to the weights that it was measured on."""
    monkeypatch.setitem(sys.modules, "judging", sys.modules[__name__])
    recipe = tmp_path / "rl.toml"
    recipe.write_text(f"""
run = "{tmp_path / "run"}"
start_from = "{start}"
problems = "judging:Source"
budget_rollouts = 4
[tournament]
judge = {{ kind = "judging:judge" }}
sigma = 10.0
lengths = "{tmp_path / "l0.json"}"
[train]
steps = 1
[train.pool]
prompts = 2
group_size = 2
""")
    assert main(["rl", str(recipe)]) == 0
    [row] = rows(tmp_path / "run")
    assert row["reward"] == 0.5 and row["failed"] == 0 and row["signal"] == 0
    assert json.loads((tmp_path / "l0.json").read_text())["budgets"][0]["tokens"] > 0
    other = json.loads((tmp_path / "l0.json").read_text()) | {"measured_on": "others"}
    (tmp_path / "l0.json").write_text(json.dumps(other))
    assert main(["rl", str(recipe), f"run={tmp_path / 'again'}"]) != 0
    assert main(["rl", str(recipe), f"run={tmp_path / 'third'}", "tournament=none"]) != 0, "nobody can judge"


def test_agents_on_servers(start: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a recipe: b0 is measured with agents too, and attempts are in the run's folder."""
    monkeypatch.setenv("TRAINER_KEY", KEY)
    tasks, harness, kept = tmp_path / "tasks.jsonl", tmp_path / "plain.toml", tmp_path / "kept.toml"
    tasks.write_text('{"id": "sum", "prompt": "2+2?", "check": {"kind": "exact", "settings": {"answer": "4"}}}\n')
    harness.write_text('system = "Answer."\npatience = 1\nthinking = false\n')
    kept.write_text('system = "Say it."\npatience = 1\nthinking = false\n')
    run, recipe = start.parent / "agents", tmp_path / "rl.toml"
    recipe.write_text(f"""
run = "{run}"
start_from = "{start}"
budgets = "{tmp_path / "b0.json"}"
budget_rollouts = 3
[agents]
tasks = [{{ kind = "jsonl", path = "{tasks}" }}]
effort = "none"
answer_tokens = 5
held_out = 0.5
[agents.draw]
harnesses = ["{harness}"]
held_out = ["{kept}"]
mixes = 0.0
[train]
steps = 2
tau = {{ target = 2.0 }}
[train.pool]
prompts = 3
group_size = 2
[train.sampling.remote]
endpoints = [{{ url = "{url}", key_variable = "TRAINER_KEY" }}]
""")
    assert main(["rl", str(recipe)]) == 0
    found = rows(run)
    assert len(found) == 2 and all(row["groups"] + row.get("held_out_groups", 0) == 3 and row["largest_gap"] < 1e-3 for row in found)
    assert json.loads((tmp_path / "b0.json").read_text())["budgets"] and len(list((run / "attempts").glob("*.jsonl"))) >= 12
    for wrong, words in (("agents=none", "neither"), ("train.sampling.remote=none", "answered by servers")):
        assert main(["rl", str(recipe), wrong]) != 0, words


def test_an_expert_as_an_adapter(start: Path, vocabulary: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written, and what it leaves out is said."""
    expert = save(network(vocabulary.vocab_size, 2), tmp_path / "expert", vocabulary)
    assert main(["export", str(expert), "--adapter-to", str(start), "--rank", "3", "--out", str(tmp_path / "adapter")]) == 0
    said = capsys.readouterr().out
    assert "rank 3" in said and "leaves out" in said
    assert all(pair.a.shape[0] == 3 for pair in adapter.load(tmp_path / "adapter").pairs.values())
