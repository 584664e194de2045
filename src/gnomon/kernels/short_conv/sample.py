"""Small typical inputs of the operators here, for `gnomon kernels` and the contract tests."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Positional arguments of each operator, on a device."""
    torch.manual_seed(0)
    u, weight = torch.randn(2, 24, 96, device=device), torch.randn(96, 4, device=device)
    return {"short_conv": (u, weight, torch.randn(2, 3, 96, device=device))}
