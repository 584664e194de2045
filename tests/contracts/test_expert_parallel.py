"""Experts over 2 and 4 ranks: outputs and gradients of one rank, equal buffers, bytes as counted, for even and for hopeless routing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_over_ranks_are_those_of_one(ranks: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("expert_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(found) == 18
    for name, every in found.items():
        assert max(rank["worst"] for rank in every) < 1e-6, name
        rows = [rank["rows"] for rank in every]
        assert sum(rows) == every[0]["moved"], name
        assert all(rank["bytes"] == rank["expected_bytes"] for rank in every), name  # there and back
        if "planned" in name:
            assert max(rows) - min(rows) <= 1, name
            assert all(rank["copies"] <= 4 for rank in every), name
        else:
            assert not any(rank["copies"] or rank["weights"] for rank in every), name
    hopeless = found[f"same, planned, {[40] * ranks}"], found[f"same, at home, {[40] * ranks}"]
    assert max(rank["rows"] for rank in hopeless[0]) == 120 and max(rank["rows"] for rank in hopeless[1]) == 120 * ranks
    assert sum(rank["weights"] for rank in hopeless[0]) > 0
