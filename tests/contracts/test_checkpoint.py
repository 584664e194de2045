"""Checkpoint folders by themselves; `tests/journeys/test_resume.py` kills whole runs."""

import torch

from gnomon.train import checkpoint


def test_the_millionth_step_is_newer_than_the_one_before_and_is_kept(tmp_path):
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        checkpoint.save(tmp_path, step, {"seed": 0}, {"run": {"at": torch.tensor(step)}}, keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-1000000", "step-1000001"]
    saved = checkpoint.load(checkpoint.latest(tmp_path))
    assert saved.state["step"] == saved.tensors["run"]["at"].item() == 1_000_001
