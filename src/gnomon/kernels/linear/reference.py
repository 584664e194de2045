"""Several linear maps of the same input. Read next: `cpu.py`."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def linears(x: Float[Tensor, "*N D"], weights: Sequence[Float[Tensor, "_ D"]]) -> tuple[Float[Tensor, "*N _"], ...]:
    """`x Wᵀ` for each weight `[out, in]`, in the type of `x`."""
    return tuple(functional.linear(x, weight.to(x.dtype)) for weight in weights)
