"""Small typical inputs of SiTU-GLU, for the survey and the contract test. Read next: `reference.py`."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of the operator: 5 x 9 tokens of width 40, large enough to reach both caps."""
    draw = torch.Generator().manual_seed(0)
    gate, up = (8.0 * torch.randn(5, 9, 40, generator=draw).to(device) for _ in range(2))
    return {"situ_glu": (gate, up, 4.0, 25.0)}
