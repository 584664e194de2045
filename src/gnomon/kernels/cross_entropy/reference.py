"""Cross-entropy from all logits at once. Read next: `chunked.py`."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional


def cross_entropy_sum(hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, "N"]) -> Float[Tensor, ""]:
    """Sum of -log softmax(h Wᵀ)[target] over rows, in nats; the product in the type of `hidden`, the rest in fp32 (fp64 for fp64)."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    logits = functional.linear(hidden, weight.to(hidden.dtype)).to(exact)
    total = functional.cross_entropy(logits, targets, reduction="none").double().sum()
    return total.to(torch.promote_types(hidden.dtype, torch.float32))
