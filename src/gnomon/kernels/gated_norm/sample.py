"""Small typical inputs of the operators here, for `gnomon kernels` and the contract tests."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Positional arguments of each operator, on a device."""
    torch.manual_seed(0)
    o, gate = (torch.randn(2, 24, 4, 32, device=device) for _ in range(2))
    weight = torch.rand(32, device=device)
    return {"gated_norm": (o, weight, gate, 1e-5), "rms_norm": (o, weight, 1e-5)}
