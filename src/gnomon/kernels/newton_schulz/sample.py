"""Small typical inputs of Newton-Schulz, for the survey and the contract test. Read next: `reference.py`."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of the operator: a batch of three tall matrices."""
    return {"newton_schulz": (torch.randn(3, 24, 10, generator=torch.Generator().manual_seed(0)).to(device),)}
