"""The router in C++ (csrc/router.cpp): choice, weights and cutoff in one pass over a row of scores; counts without temporaries.

Of equal biased scores the lowest index is chosen. Read next: `csrc/router.h`, the same for inference.
"""

from dataclasses import astuple
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.router.reference import Choice


def refuse_route(scores: Tensor, bias: Tensor, choice: Choice) -> str | None:
    """Needs the library and fp32 on the CPU."""
    return native.refuse(scores=scores, bias=bias)


def route(
    scores: Float[Tensor, "N E"], bias: Float[Tensor, "E"], choice: Choice
) -> tuple[Int[Tensor, "N k"], Float[Tensor, "N k"], Float[Tensor, "N"]]:
    """As the reference."""
    return _Route.apply(scores, bias, choice)


def refuse_required_bias_histogram(
    scores: Tensor, cutoff: Tensor, mask: Tensor | None, lowest: float, width: float, bins: int
) -> str | None:
    """Needs the library and fp32 on the CPU."""
    return native.refuse(scores=scores, cutoff=cutoff)


def required_bias_histogram(
    scores: Float[Tensor, "N E"], cutoff: Float[Tensor, "N"], mask: Bool[Tensor, "N"] | None, lowest: float, width: float, bins: int
) -> Int[Tensor, "E bins"]:
    """As the reference."""
    if cutoff.shape != scores.shape[:1] or (mask is not None and (mask.dtype != torch.bool or mask.shape != cutoff.shape)):
        given = "none" if mask is None else f"{mask.dtype} {tuple(mask.shape)}"
        raise KernelError(f"required_bias_histogram: scores {tuple(scores.shape)}, cutoff {tuple(cutoff.shape)} and mask {given} "
                          "do not fit together")
    scores, cutoff, mask = scores.detach().contiguous(), cutoff.contiguous(), None if mask is None else mask.contiguous()
    (rows, experts), histogram = scores.shape, torch.empty(scores.shape[1], bins, dtype=torch.int64)
    inputs = [native.address(t) for t in (scores, cutoff, mask)]
    native.library().gnomon_required_bias_histogram(
        *inputs, rows, experts, bins, lowest, width, histogram.data_ptr(), native.threads()
    )
    return histogram


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor, choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
        scores, bias, (rows, experts) = scores.contiguous(), bias.contiguous(), scores.shape
        k, groups, kept, renormalise, scaling = astuple(choice)
        if not 1 <= k <= experts or bias.shape != (experts,) or experts % groups or not 1 <= kept <= groups:
            raise KernelError(f"route: {k} of {experts} experts in {kept} of {groups} groups with a bias of shape {tuple(bias.shape)}")
        ids = torch.empty(rows, k, dtype=torch.int64)
        weights, cutoff = scores.new_empty(rows, k), scores.new_empty(rows)
        native.library().gnomon_route_forward(
            scores.data_ptr(), bias.data_ptr(), rows, experts, k, groups, kept, renormalise, scaling,
            *(t.data_ptr() for t in (ids, weights, cutoff)), native.threads(),
        )  # fmt: skip
        ctx.mark_non_differentiable(ids, cutoff)
        ctx.save_for_backward(scores, ids)
        ctx.renormalise, ctx.scaling = renormalise, scaling
        return ids, weights, cutoff

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _ids: None, d_weights: Tensor, _cutoff: None) -> tuple[Tensor, None, None]:
        scores, ids = ctx.saved_tensors
        d_weights, d_scores = d_weights.contiguous(), torch.empty_like(scores)
        native.library().gnomon_route_backward(
            *(t.data_ptr() for t in (scores, ids, d_weights)), *scores.shape, ids.shape[1], ctx.renormalise, ctx.scaling,
            d_scores.data_ptr(), native.threads(),
        )  # fmt: skip
        return d_scores, None, None
