"""Small typical inputs of the cross-entropy, for the survey and the contract test. Read next: `reference.py`."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of the operator: 57 rows of width 20 against 130 words."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(57, 20, generator=draw), torch.randn(130, 20, generator=draw)
    targets = torch.randint(0, 130, (57,), generator=draw)
    return {"cross_entropy_sum": tuple(t.to(device) for t in (hidden, weight, targets))}
