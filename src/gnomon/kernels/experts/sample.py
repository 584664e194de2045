"""Small typical inputs of the operators here, for `gnomon kernels` and the contract tests."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Positional arguments of each operator, on a device."""
    torch.manual_seed(0)
    tokens, width, inner, count, k = 48, 32, 64, 6, 2
    z = torch.randn(tokens, width, device=device)
    gate, up = (0.3 * torch.randn(count, inner, width, device=device) for _ in range(2))
    down = 0.3 * torch.randn(count, width, inner, device=device)
    scores = torch.rand(tokens, count - 1, device=device)  # the last expert gets no token
    weights, ids = scores.topk(k, dim=-1)
    return {"experts": (z, gate, up, down, ids, weights, 4.0, 25.0)}
