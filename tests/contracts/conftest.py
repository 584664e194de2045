"""Shared by the contract tests."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_fixtures import chat, scripted, server_url, service, the_engine, the_url, vocabulary

__all__ = ["chat", "poisoned", "scripted", "server_url", "service", "the_engine", "the_url", "vocabulary"]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that was not written yet is full of NaN, so that an output which is not completely written cannot pass."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def on_ranks() -> Any:
    """`on_ranks("program.py", 2, 4, "word")` runs a program of this folder on 2 ranks, then on 4; returns what each printed, as JSON."""
    def run(program: str, *arguments: int | str) -> list[Any]:
        here = Path(__file__).resolve().parent
        environment = {**os.environ, "PYTHONPATH": str(here.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(here / program), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return run
