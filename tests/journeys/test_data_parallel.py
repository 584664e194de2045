"""Two ranks under torchrun are one run: the same losses, the same router biases, the same balance."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gnomon import config as toml
from gnomon.train import checkpoint

PROGRAM = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from gnomon.train.loop import train
from gnomon.train.recipe import load
train(load(Path(sys.argv[1])), quiet=True)
"""


def run_on(ranks: int, recipe, folder: Path, repository: Path) -> subprocess.CompletedProcess[str]:
    """Train under torchrun."""
    path, program = folder / "recipe.toml", folder / "program.py"
    path.write_text(toml.to_toml(recipe))
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(program), str(path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def test_two_ranks_give_the_losses_and_biases_of_one(base, recipe, rows, tmp_path, repository):
    wanted = recipe(micro_batch_tokens=256, evaluate={"tokens": 256})  # accumulation too: no exchange before the last piece
    result = run_on(2, wanted, tmp_path, repository)
    assert result.returncode == 0, result.stderr[-3000:]
    for one, two in zip(rows(base), rows(wanted), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=2e-5)
        assert one["gradient_norm"] == pytest.approx(two["gradient_norm"], rel=1e-3)
        assert one["max_violation_by_layer"] == two["max_violation_by_layer"]
        assert one["max_logit"] == pytest.approx(two["max_logit"], rel=1e-3)
        assert one["tokens"] == two["tokens"]
    one, two = (checkpoint.load(checkpoint.latest(r.run)).tensors["model"] for r in (base, wanted))
    biases = [name for name in one if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in biases)
    assert all(torch.allclose(one[name], two[name], atol=1e-3) for name in one)
