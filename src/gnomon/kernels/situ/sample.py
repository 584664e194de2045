"""Small typical inputs of the operators here, for `gnomon kernels` and the contract tests."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Positional arguments of each operator, on a device."""
    torch.manual_seed(0)
    gate, up = (8.0 * torch.randn(2, 24, 64, device=device) for _ in range(2))
    return {"situ_glu": (gate, up, 4.0, 25.0)}
