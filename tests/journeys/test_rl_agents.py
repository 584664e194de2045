"""`gnomon rl` with agents in real sandboxes, killed in the middle: the same command goes on, and no machine is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from posttraining_fixtures import network, save, serving

from gnomon.agent import trajectory_file
from gnomon.data.tokenizer import Tokenizer

KEY, WAIT = "a-long-secret", 900.0
HARNESS = """
system = "Work."
patience = 1
turns = 2
thinking = false
[tools.bash]
kind = "bash"
about = "Run."
settings = { form = "json", seconds = 30.0 }
[tools.bash.arguments.command]
to = "command"
doc = "Command"
required = true
"""
TEST = """#!/bin/sh
mkdir -p /logs/verifier
coin=$(( $(od -An -N1 -tu1 /dev/urandom) % 2 ))
if [ -f /home/user/work/here ]; then echo $coin; else echo 7; fi > /logs/verifier/reward.txt
"""
"""By chance, so that groups have answers of different worth and something is learnt; 7 where the task's file did not reach the machine."""


@pytest.fixture
def recipe(vocabulary: Tokenizer, tmp_path: Path) -> Iterator[Path]:
    """One task in a machine, a policy behind a server that takes newer weights."""
    start = save(network(vocabulary.vocab_size, 1), tmp_path / "start", vocabulary)
    task = {"id": "touch", "prompt": "Do it.", "image": "host", "workdir": "/home/user/work", "budget": {"turns": 2},
            "files": {"/home/user/work/here": "yes"}, "check": {"kind": "tests", "settings": {"files": {"test.sh": TEST}}}}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    (tmp_path / "works.toml").write_text(HARNESS)
    with serving(network(vocabulary.vocab_size, 1), vocabulary, 'access.admins=["trainer"]', f'access.reload_folders=["{tmp_path}"]',
                 keys={"trainer": KEY}) as url:
        (tmp_path / "rl.toml").write_text(f"""
run = "{tmp_path / "run"}"
start_from = "{start}"
[agents]
tasks = [{{ kind = "jsonl", path = "{tmp_path / "tasks.jsonl"}" }}]
effort = "none"
answer_tokens = 6
held_out = 0.0
backend = "namespaces"
concurrency = 3
[agents.draw]
harnesses = ["{tmp_path / "works.toml"}"]
held_out = []
mixes = 0.0
[train]
steps = 3
keep = {{ every = 1 }}
[train.pool]
prompts = 2
group_size = 3
[train.sampling.remote]
endpoints = [{{ url = "{url}", key_variable = "TRAINER_KEY" }}]
""")
        yield tmp_path / "rl.toml"


def rows(run: Path) -> list[dict[str, float]]:
    """Its metrics so far."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


@pytest.mark.slow
def test_agents_in_sandboxes_survive_a_kill(recipe: Path, repository: Path) -> None:
    """Every step is there once, every attempt has a score from its machine, spans carry the versions that the server read."""
    run = recipe.parent / "run"
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), "TRAINER_KEY": KEY, "OMP_NUM_THREADS": "1",
                   "GNOMON_SANDBOX_HOME": str(recipe.parent / "boxes")}
    typed = [sys.executable, "-m", "gnomon", "rl", str(recipe)]
    with (recipe.parent / "said").open("wb") as said:
        first = subprocess.Popen(typed, env=environment, stdout=said, stderr=said, start_new_session=True)
        try:
            deadline = time.monotonic() + WAIT
            while not (rows(run) and list((run / "attempts").glob("2-*.jsonl"))):  # in the middle of the second step
                assert first.poll() is None and time.monotonic() < deadline, (recipe.parent / "said").read_text()[-3000:]
                time.sleep(0.05)
        finally:
            if first.poll() is None:
                os.killpg(first.pid, signal.SIGKILL)
            first.wait()
    done = subprocess.run(typed, env=environment, capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = rows(run)
    assert [row["step"] for row in found] == [1, 2, 3] and all(row["failed"] == 0 and row["groups"] == 2 for row in found)
    assert all(row["largest_gap"] < 1e-3 for row in found)
    attempts = [trajectory_file.read(path) for path in sorted((run / "attempts").glob("[0-5]-*.jsonl"))]
    assert len(attempts) == 18 and all(each.score is not None and each.score.reward in (0.0, 1.0) for each in attempts)
    listed = [*typed[:3], "sandbox", "ls", "--json"]
    left = subprocess.run(listed, env=environment, capture_output=True, text=True, timeout=WAIT, check=True)
    assert json.loads(left.stdout) == [], "no machine is left"
    versions = {version for each in attempts for sample in each.samples() for version in sample.policy_versions if version is not None}
    assert versions == {0, 1, 2}
