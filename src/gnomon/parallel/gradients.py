"""Gradients added over ranks while the last backward pass of a step still runs.

Parameters stand in buckets, last ones first, since their gradients come first. A bucket leaves as soon as all its gradients are there and
the buckets before it have left, so that all ranks send in one order. A parameter may have no gradient here and one elsewhere (an expert or
an eye that no token of this rank used): zeros are sent for it; where nobody has one, there is none afterwards. Read next: `mesh.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25_000_000  # large enough for a link to run at its speed, small enough to leave early


@dataclass(slots=True)
class _Bucket:
    """Parameters of one type that are added over one group."""

    parameters: list[Tensor]
    group: dist.ProcessGroup | None
    missing: int = 0
    work: dist.Work | None = None
    flat: Tensor | None = None


@dataclass(slots=True, weakref_slot=True)
class Gradients:
    """The exchange of one rank's gradients; `sent` counts the bytes that were handed to the collective since the start."""

    buckets: list[_Bucket]
    sent: int = 0
    armed: bool = False
    _next: int = 0
    _home: dict[int, _Bucket] = field(default_factory=dict)

    def arm(self) -> None:
        """The backward pass that follows is the last one of the step."""
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        self.armed, self._next = True, 0

    @torch.no_grad()
    def finish(self) -> None:
        """After that pass: send what is left, wait, and put the sums in place of the gradients."""
        self._leave(all_of_them=True)
        self.armed = False
        present = self._present()
        for bucket in self.buckets:
            assert bucket.work is not None and bucket.flat is not None  # sent above
            bucket.work.wait()
            for parameter, total in zip(bucket.parameters, bucket.flat.split([p.numel() for p in bucket.parameters]), strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(total.view_as(parameter))
                elif present[id(parameter)]:
                    parameter.grad = total.view_as(parameter).clone()
            bucket.work = bucket.flat = None

    def _present(self) -> dict[int, bool]:
        """Which parameters have a gradient on some rank of their group; one small exchange per group."""
        found: dict[int, bool] = {}
        for group in {id(bucket.group): bucket.group for bucket in self.buckets}.values():
            parameters = [p for bucket in self.buckets if bucket.group is group for p in bucket.parameters]
            has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
            dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
            found |= {id(p): bool(there) for p, there in zip(parameters, has.tolist(), strict=True)}
        return found

    def _arrived(self, parameter: Tensor) -> None:
        if self.armed:
            self._home[id(parameter)].missing -= 1
            self._leave(all_of_them=False)

    @torch.no_grad()
    def _leave(self, all_of_them: bool) -> None:
        while self._next < len(self.buckets) and (all_of_them or self.buckets[self._next].missing == 0):
            bucket = self.buckets[self._next]
            parts = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in bucket.parameters]
            bucket.flat = torch.cat(parts)
            bucket.work = dist.all_reduce(bucket.flat, dist.ReduceOp.SUM, group=bucket.group, async_op=True)
            self.sent += bucket.flat.nbytes
            self._next += 1


def gradients(parameters: Iterable[tuple[Tensor, dist.ProcessGroup | None]], most_bytes: int = BUCKET_BYTES) -> Gradients:
    """The exchange for parameters in the order of the forward pass, each with the group that it is added over."""
    buckets: list[_Bucket] = []
    open_ones: dict[tuple[int, torch.dtype], tuple[_Bucket, int]] = {}
    for parameter, group in reversed(list(parameters)):
        key = id(group), parameter.dtype
        bucket, size = open_ones.get(key, (None, 0))
        if bucket is None or size + parameter.nbytes > most_bytes:
            bucket, size = _Bucket([], group), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        open_ones[key] = bucket, size + parameter.nbytes
    found = Gradients(buckets)
    for bucket in buckets:
        for parameter in bucket.parameters:
            found._home[id(parameter)] = bucket
            parameter.register_post_accumulate_grad_hook(_telling(weakref.ref(found)))
    return found


def _telling(exchange: weakref.ref[Gradients]) -> Callable[[Tensor], None]:
    """A hook that does not keep the exchange alive."""
    def hook(parameter: Tensor) -> None:
        if (found := exchange()) is not None:
            found._arrived(parameter)
    return hook
