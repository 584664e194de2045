"""Small typical inputs of the depth operators, for the survey and the contract test. Read next: `reference.py`."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator of this folder: four sources of two rows of seven tokens."""
    draw = torch.Generator().manual_seed(0)
    sources = [torch.randn(2, 7, 24, generator=draw).to(device) for _ in range(4)]
    query = torch.randn(24, generator=draw).to(device)
    partials = tuple(torch.rand(*shape, generator=draw).to(device) + 1.0 for shape in ((2, 7), (2, 7), (2, 7, 24)))
    return {
        "depth_read": (sources, query, 1e-5),
        "read_norm": (sources, query, 1e-5, query.abs() + 0.5),
        "depth_weights": (sources, query, 1e-5),
        "bank_partials": (sources, torch.stack((query, -query)), 1e-5),
        "merge": (partials, sources[0], query, 1e-5),
    }
