"""Four ranks, laid out in the ways that recipes can name, are one run: the same losses, biases, balance and weights."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon import config as toml
from gnomon.train import checkpoint
from gnomon.train.loop import train


def run_all(recipes: list[Any], folder: Path, repository: Path, ranks: int = 4) -> subprocess.CompletedProcess[str]:
    """Train one recipe after another on the same ranks."""
    program, paths = repository / "tests" / "contracts" / "train_ranks.py", []
    for number, recipe in enumerate(recipes):
        paths.append(folder / f"recipe{number}.toml")
        paths[-1].write_text(toml.to_toml(recipe))
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), str(ranks), *map(str, paths)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)


def check_meshes(meshes: dict[str, list[dict[str, int]]], recipe: Any, few: Any, rows: Any, folder: Path, repository: Path) -> None:
    """Each run goes through its meshes, a step on each but the last, which does the rest; all are the run of one rank."""
    alone = recipe("alone", **few)
    train(alone, quiet=True)
    started, ended = [], {}
    for name, stretch in meshes.items():
        begun = {**few, "stages": few["stages"][:1]}
        started += [recipe(name, mesh=mesh, **begun) for mesh in stretch[:-1]]
        ended[name] = recipe(name, mesh=stretch[-1], **few)
    result = run_all([*started, *ended.values()], folder, repository)
    assert result.returncode == 0, result.stderr[-6000:]
    for name, other in ended.items():
        for one, two in zip(rows(alone), rows(other), strict=True):
            assert one["loss"] == pytest.approx(two["loss"], abs=2e-5), name
            assert one["gradient_norm"] == pytest.approx(two["gradient_norm"], rel=1e-3), name
            assert one["max_violation_by_layer"] == pytest.approx(two["max_violation_by_layer"], abs=0.02), name
            assert one["max_logit"] == pytest.approx(two["max_logit"], rel=1e-3), name
            assert one["tokens"] == two["tokens"], name
        whole, joined = (checkpoint.load(checkpoint.latest(r.run)).tensors for r in (alone, other))
        for group in ("model", "optimizer"):
            assert whole[group].keys() == joined[group].keys(), name
            assert all(torch.allclose(whole[group][key], joined[group][key], atol=1e-3) for key in whole[group]), name
        assert (other.run / "report.html").exists()


def test_a_run_moves_from_mesh_to_mesh_and_stays_that_of_one_rank(recipe, few, rows, tmp_path, repository):
    meshes = {"from experts to stages and tokens": [{"expert": 2, "zero": 3}, {"pipeline": 2, "virtual": 2, "context": 2, "zero": 1}]}
    check_meshes(meshes, recipe, few, rows, tmp_path, repository)


@pytest.mark.slow
def test_single_axes_give_the_run_of_one_rank(recipe, few, rows, tmp_path, repository):
    meshes = {"copies": [{}], "cut weights": [{"zero": 3}], "experts and shared-out copies": [{"expert": 2, "data": 2, "zero": 1}],
              "experts and tokens": [{"expert": 2, "context": 2}],
              "from experts to tokens": [{"expert": 4}, {"context": 2, "zero": 1}],
              "stages": [{"pipeline": 4}], "stages and copies": [{"pipeline": 2, "virtual": 1}],
              "stages and experts": [{"pipeline": 2, "expert": 2}], "shared-out copies": [{"zero": 1}],
              "experts and copies": [{"expert": 2}],
              "experts": [{"expert": 4}], "tokens": [{"context": 4}]}
    check_meshes(meshes, recipe, few, rows, tmp_path, repository)
