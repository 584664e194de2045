"""A rank that hangs is named by the others, one that dies is started again: the run is that of ranks which never failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnomon import config as toml
from gnomon.train.loop import train

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from gnomon.train import loop
from gnomon.train.recipe import load
take_step = loop.take_step
def failing(parts, step):
    if step == 1 and parts.mesh.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(9) if sys.argv[2] == "die" else time.sleep(100_000)
    return take_step(parts, step)
loop.take_step = failing
loop.train(load(Path(sys.argv[1])), quiet=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["die", "hang"])
def test_a_lost_rank_is_named_and_comes_back(fault, recipe, few, rows, tmp_path, repository: Path):
    alone, wanted = recipe("alone", **few), recipe("lost", mesh={"expert": 2, "patience": 60.0}, **few)
    train(alone, quiet=True)
    path, program = tmp_path / "recipe.toml", tmp_path / "program.py"
    path.write_text(toml.to_toml(wanted))
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "--nproc-per-node=2"]
    command = [*torchrun, str(program), str(path), fault]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    if fault == "hang":
        assert "TrainingError: rank 1 (process " in result.stderr and "last seen at step 1) died or hangs" in result.stderr
    for one, two in zip(rows(alone), rows(wanted), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=2e-5)
