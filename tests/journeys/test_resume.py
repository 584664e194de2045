"""A run that is killed, or whose disk fills, goes on as if nothing had happened."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gnomon import config as toml
from gnomon.errors import CheckpointError
from gnomon.train import checkpoint
from gnomon.train.loop import train

PROGRAM = """
import resource, signal, sys
from pathlib import Path
from gnomon.errors import GnomonError
from gnomon.train.loop import train
from gnomon.train.recipe import load
import torch
torch.set_num_threads(1)
limit = int(sys.argv[2])
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    train(load(Path(sys.argv[1])), quiet=True)
except GnomonError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_status)
"""


def command(recipe, limit=0):
    """A training process of its own; `limit` is the largest file it may write."""
    path = recipe.run.with_suffix(".toml")
    path.write_text(toml.to_toml(recipe))
    return [sys.executable, "-c", PROGRAM, str(path), str(limit)]


@pytest.fixture
def environment(repository: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(repository / "src"), "OMP_NUM_THREADS": "1"}


def rows_written(recipe) -> int:
    path = recipe.run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_kill_9_loses_the_steps_since_the_last_checkpoint_and_not_a_bit_more(base, recipe, rows, environment):
    wanted = recipe()
    process = subprocess.Popen(command(wanted), env=environment)
    deadline = time.monotonic() + 120
    while rows_written(wanted) < 3 and time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    killed_after, saved = rows_written(wanted), checkpoint.latest(wanted.run)
    assert killed_after >= 3
    assert saved is not None
    done = checkpoint.load(saved).state["step"]
    assert killed_after - done <= 2
    summary = train(wanted, quiet=True)
    assert summary.resumed_at == done < 6
    assert rows(wanted) == rows(base)  # to the last bit: losses, norms, loads, logits
    for name in ("model", "optimizer", "run"):
        one, other = (checkpoint.load(checkpoint.latest(r.run)).tensors[name] for r in (base, wanted))
        assert one.keys() == other.keys()
        assert all(one[key].equal(other[key]) for key in one), name


def test_a_full_disk_leaves_the_previous_checkpoint_whole(recipe, environment):
    first = recipe(stages=[{"context": 128, "steps": 2}])
    train(first, quiet=True)
    wanted = recipe()
    size = max(path.stat().st_size for path in checkpoint.latest(wanted.run).iterdir())
    result = subprocess.run(command(wanted, limit=size // 2), env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stderr
    message = result.stderr.strip().splitlines()[-1]
    assert "checkpoint of step 4 could not be written" in message
    assert "step-000002, is whole" in message
    assert [path.name for path in (wanted.run / "checkpoints").iterdir()] == ["step-000002"]


def test_a_cut_or_missing_file_is_refused_by_name(base, tmp_path):
    shutil.copytree(base.run, tmp_path / "run")
    path = checkpoint.latest(tmp_path / "run")
    weights = path / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=rf"damaged: model\.safetensors has {len(data) - 100} bytes instead of {len(data)}"):
        checkpoint.load(path)
    weights.write_bytes(b"\xff" * len(data))
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(path)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read.*model\.safetensors"):
        checkpoint.load(path)


def test_metrics_that_were_cut_are_refused(base, recipe):
    longer = recipe(stages=[{"context": 128, "steps": 4}, {"context": 256, "steps": 3}])
    shutil.copytree(base.run, longer.run)
    (longer.run / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="changed since"):
        train(longer, quiet=True)
