"""Small typical inputs of the router, for the survey and the contract test. Read next: `reference.py`."""

from typing import Any

import torch

from gnomon.kernels.router.reference import Choice


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator: 70 tokens, 3 of 12 experts, in the best 2 of 3 groups; a fifth of the tokens is padding."""
    draw = torch.Generator().manual_seed(0)
    scores, bias = torch.rand(70, 12, generator=draw).to(device), (0.2 * torch.randn(12, generator=draw)).to(device)
    cutoff, mask = torch.rand(70, generator=draw).to(device), (torch.rand(70, generator=draw) > 0.2).to(device)
    return {"route": (scores, bias, Choice(3, 3, 2, True, 2.5)), "required_bias_histogram": (scores, cutoff, mask, -1.2, 0.002, 1000)}
