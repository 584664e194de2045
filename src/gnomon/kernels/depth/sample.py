"""Small typical inputs of the operators here, for `gnomon kernels` and the contract tests."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Positional arguments of each operator, on a device."""
    torch.manual_seed(0)
    sources = [torch.randn(2, 24, 64, device=device) for _ in range(4)]
    queries, eps = torch.randn(3, 64, device=device), 1e-5
    partials = (torch.randn(2, 24, device=device), 1.0 + torch.rand(2, 24, device=device), torch.randn(2, 24, 64, device=device))
    return {
        "depth_read": (sources, queries[0], eps),
        "depth_weights": (sources, queries[0], eps),
        "bank_partials": (sources[:-1], queries, eps),
        "merge": (partials, sources[-1], queries[0], eps),
    }
