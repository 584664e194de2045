"""Small typical inputs of the linear maps, for the survey and the contract test. Read next: `reference.py`."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of the operator: 5 x 25 tokens of width 37 through maps to 70, 3 and 130."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 25, 37, generator=draw).to(device)
    return {"linears": (x, tuple((torch.randn(out, 37, generator=draw) * 37**-0.5).to(device) for out in (70, 3, 130)))}
