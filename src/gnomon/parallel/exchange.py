"""Collectives that gradients go back through: rows to other ranks, and the same rows from everyone.

Read next: `expert.py` and `context.py`, which are made of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(torch.autograd.Function):
    """Rows to other ranks, so many to each, and as many back as they send; gradients travel the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup | None) -> Tensor:
        """`rows` [Σ sends, …] → [Σ receives, …], both rank by rank."""
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _all_to_all(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """The same exchange with the roles of sending and receiving changed."""
        return _all_to_all(gradients[0], ctx.receives, ctx.sends, ctx.group), None, None, None


class Gather(torch.autograd.Function):
    """Every rank's tensor of one shape, stacked in the order of ranks; each gets back the sum of all gradients of its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """`own` […] → [R, …]."""
        ctx.group = group
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, own.contiguous(), group=group)
        return torch.stack(every)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Each rank's share to that rank, and their sum."""
        ones = [1] * len(gradients[0])
        return _all_to_all(gradients[0], ones, ones, ctx.group).sum(0), None


def _all_to_all(rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup | None) -> Tensor:
    found = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), receives, sends, group=group)
    return found
