"""The lab on tasks of its own and a model of a moment: every stage, killed in between, and the same metrics as without a kill.

What is tested is who does what when, and what is left after a kill; nothing is learnt in a few steps.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gnomon.errors import ConfigError
from gnomon.posttrain.lab import command, plan
from gnomon.posttrain.lab.findings import Findings
from gnomon.posttrain.lab.progress import Display
from gnomon.posttrain.lab.recipe import LabRecipe, load
from gnomon.posttrain.lab.run import run
from gnomon.train import metrics

HERE = Path(__file__).parent
RECIPE = """
run = "{run}"
tasks = "long_answers:Tasks"
workers = {workers}

[model]
extends = "lab"
hidden_size = 32
num_hidden_layers = 2
mixers.kda = {{num_heads = 2, head_dim = 16}}

[[cold]]
texts = 100
dense = 1.0
quantised = false
train = {{epochs = 1, batch_tokens = 512, keep = {{every = 1}}}}

[[cold]]
texts = 100
train = {{epochs = 1, batch_tokens = 512, keep = {{every = 1}}}}

[gate]
rollouts = 60

[expert]
pool = {{prompts = 4, group_size = 2}}
keep = {{every = 1}}

[[domains]]
name = "walks"
max = {{steps = 5}}
high = {{steps = 2, early = 1, tau = {{start = 2.0, target = 1.2}}}}
low = {{steps = 1, tau = {{target = 0.7}}}}

[student]
steps = 2
pool = {{prompts = 6, group_size = 1}}

[evaluate]
problems = 10
held_out = 10

[seesaw]
prompts = 3

[quantisation]
texts = 20
"""
UNTIMED = ("seconds", "sampling_seconds", "teacher_seconds")


@pytest.fixture(autouse=True, scope="module")
def own_tasks() -> Iterator[None]:
    """The tasks of these tests can be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield


def written(folder: Path, name: str, workers: int = 0) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(RECIPE.format(run=folder / name, workers=workers))
    return path


def lab(recipe: LabRecipe, **more: Any) -> str:
    """Runs it here; returns what people see."""
    shown = StringIO()
    with Display(Console(file=shown, width=200)) as display:
        run(recipe, display, **more)
    return shown.getvalue()


def found(recipe: LabRecipe) -> dict[str, Any]:
    """Everything that a seed found, without times and what depends on the process."""
    root = recipe.run / "seed-1"
    results: dict[str, Any] = {name: plan.read(root / name, plan.DONE) for name in plan.jobs(recipe)}
    for each in results.values():
        assert each.pop("cpu_seconds") > 0 and each.pop("wall_seconds") > 0 and each.pop("peak_bytes") > 0
    for path in root.rglob("metrics.jsonl"):
        rows = metrics.read(path.parent)
        results[str(path.relative_to(root))] = [{k: v for k, v in row.items() if k not in UNTIMED} for row in rows]
    return results


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[LabRecipe, str]:
    """A whole run, and what people saw of it."""
    whole = load(written(tmp_path_factory.mktemp("lab"), "whole"))
    return whole, lab(whole)


def test_every_stage(ended: tuple[LabRecipe, str]) -> None:
    whole, shown = ended
    assert "12 jobs" in shown and "experts/walks-max is done" in shown
    report = json.loads((whole.run / "report.json").read_text())["seeds"][0]
    assert report["export"]["bits_equal"] and report["gates"][0]["opens"]
    assert {row["name"] for row in report["seesaw"]} >= {"the student", "mixed reinforcement", "sequential reinforcement", "weight average"}
    assert [row["trained"] for row in report["quantisation"]] == ["full", "full", "full", "mxfp4", "mxfp4", "two bits", "two bits"]
    assert next(row["compute"] for row in report["seesaw"] if row["name"] == "mixed reinforcement") > 0.5
    page = (whole.run / "report.html").read_text()
    assert "missed" in page and "reached" in page and page.count("<svg") >= 7
    assert (whole.run / "efforts.png").stat().st_size > 1000
    compared = Findings(whole, 1, whole.run / "seed-1").claims
    assert next(each for each in compared if each.what.startswith("experts above")).asked == "3 of 3"
    with pytest.raises(ConfigError, match="experts/walks-max was begun with other settings"):
        lab(replace(whole, expert=replace(whole.expert, objective=replace(whole.expert.objective, penalty=0.5))))


@pytest.mark.slow
def test_a_kill_between(ended: tuple[LabRecipe, str], tmp_path: Path) -> None:
    whole, path = ended[0], written(tmp_path, "killed", workers=1)
    program = subprocess.Popen([sys.executable, "-m", "gnomon", "lab", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env={**os.environ, "PYTHONPATH": str(HERE)}, start_new_session=True)
    try:
        expert = tmp_path / "killed" / "seed-1" / "experts" / "walks-max" / "checkpoints"
        until = time.monotonic() + 120
        while not list(expert.glob("step-00000[12]")) and program.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        program.kill()  # its workers are not told
        assert program.stdout is not None
        said = program.stdout.read()  # ends when the last worker has left
        assert expert.exists(), said.decode()
    finally:
        if program.poll() is None or program.stdout is None or not program.stdout.closed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        if program.stdout is not None:
            program.stdout.close()
    again = load(path, ("workers=0",))
    assert "done earlier" in lab(again)
    assert found(again) == found(whole)

    assert "12 of them done earlier" in lab(again)


@pytest.mark.parametrize(("overrides", "message"), [
    (("domains=[{name=\"flies\"}]",), "'domains' names flies, but 'long_answers:Tasks' has walks, runs"),
    (("model.vocab_size=9",), "'model.vocab_size' is 9, but the tasks have an id"),
    (("domains=[{name=\"walks\", max={steps=3}}]",), "'high.early' is 12, but max has 3 steps"),
    (("domains=[{name=\"walks\", low={}}]",), "'low.tau.target' is missing"),
    (("teachers=[{domain=\"walks\", effort=\"most\", run=\"x\"}]",), "'teachers' names walks/most; cells are walks at low, high, max"),
    (("expert.tau.target=1.0",), "'expert.tau' is set; budgets belong to the cells"),
    (("tasks=\"nobody:Tasks\"",), "cannot import module 'nobody'"),
    (("workers=-1",), "'workers' is -1"),
])
def test_a_recipe_that_makes_no_sense_is_one_error(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        lab(load(written(tmp_path, "wrong"), overrides))
    assert message in str(raised.value)


def test_the_verb_knows_its_stages(tmp_path: Path) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    command.declare(parser)
    with pytest.raises(ConfigError, match="--only 'expert' is no stage; did you mean 'experts'"):
        command.run(parser.parse_args([str(written(tmp_path, "x")), "--only", "expert"]))
