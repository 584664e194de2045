"""Shared by the contract tests."""

from collections.abc import Iterator

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
