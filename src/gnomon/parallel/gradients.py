"""Gradients added over ranks while the last backward pass of a step still runs.

Parameters stand in buckets, last ones first, since their gradients come first. A bucket leaves as soon as all its gradients are there and
the buckets before it have left, so that all ranks send in one order. Its sum goes to everyone, or to the one rank that owns its pieces
(`shard.py`). A parameter may have no gradient here and one elsewhere (an expert or an eye that no token of this rank used): zeros are sent
for it; where nobody has one, there is none afterwards. Read next: `mesh.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.parallel.shard import Shards

BUCKET_BYTES = 25_000_000  # large enough for a link to run at its speed, small enough to leave early


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a parameter; `held` is where the sum becomes a gradient: the parameter itself, the owner's view, or nowhere."""

    parameter: Tensor
    rows: slice
    held: Tensor | None

    def gradient(self) -> Tensor | None:
        """This rank's gradient of these rows."""
        return None if self.parameter.grad is None else self.parameter.grad[self.rows]

    def flat(self) -> Tensor:
        """The same, or zeros, end to end."""
        own = self.gradient()
        return torch.zeros_like(self.parameter[self.rows]).flatten() if own is None else own.flatten()


@dataclass(slots=True)
class _Bucket:
    """Rows of one type that are added over one group, at one rank of it or at all."""

    group: dist.ProcessGroup | None
    owner: int | None
    parts: list[_Part] = field(default_factory=list)
    missing: int = 0
    work: dist.Work | None = None
    flat: Tensor | None = None

    def leave(self) -> int:
        """Hand it to the collective; returns its bytes."""
        self.flat = torch.cat([part.flat() for part in self.parts])
        if self.owner is None:
            self.work = dist.all_reduce(self.flat, dist.ReduceOp.SUM, group=self.group, async_op=True)
        else:
            self.work = dist.reduce(self.flat, self.owner, dist.ReduceOp.SUM, group=self.group, async_op=True)
        return self.flat.nbytes


@dataclass(slots=True, weakref_slot=True)
class Gradients:
    """The exchange of one rank's gradients; `sent` counts the bytes that were handed to the collectives since the start."""

    buckets: list[_Bucket] = field(default_factory=list)
    sent: int = 0
    armed: bool = False
    _next: int = 0
    _homes: dict[int, list[_Bucket]] = field(default_factory=dict)

    def arm(self) -> None:
        """The backward pass that follows is the last one of the step."""
        for bucket in self.buckets:
            bucket.missing = len(bucket.parts)
        self.armed, self._next = True, 0

    @torch.no_grad()
    def finish(self) -> None:
        """After that pass: send what is left, wait, and put the sums where they are held."""
        self._leave(all_of_them=True)
        self.armed = False
        present = self._present()
        for bucket in self.buckets:
            assert bucket.work is not None and bucket.flat is not None  # sent above
            bucket.work.wait()
            for part, total in zip(bucket.parts, bucket.flat.split([p.parameter[p.rows].numel() for p in bucket.parts]), strict=True):
                _put(part, total, present[id(part.parameter)])
            bucket.work = bucket.flat = None
        for bucket in self.buckets:
            for part in bucket.parts:
                if part.held is not part.parameter:
                    part.parameter.grad = None

    def _present(self) -> dict[int, bool]:
        """Which parameters have a gradient on some rank of their group; one small exchange per group."""
        found: dict[int, bool] = {}
        for group in {id(bucket.group): bucket.group for bucket in self.buckets}.values():
            parameters = [part.parameter for bucket in self.buckets if bucket.group is group for part in bucket.parts]
            has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
            dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
            found |= {id(p): bool(there) for p, there in zip(parameters, has.tolist(), strict=True)}
        return found

    def _arrived(self, parameter: Tensor) -> None:
        if self.armed:
            for bucket in self._homes[id(parameter)]:
                bucket.missing -= 1
            self._leave(all_of_them=False)

    @torch.no_grad()
    def _leave(self, all_of_them: bool) -> None:
        while self._next < len(self.buckets) and (all_of_them or self.buckets[self._next].missing == 0):
            self.sent += self.buckets[self._next].leave()
            self._next += 1


def _put(part: _Part, total: Tensor, present: bool) -> None:
    if part.held is None or not present:
        return
    if part.held is part.parameter and part.parameter.grad is not None:
        part.parameter.grad.copy_(total.view_as(part.parameter))
    else:
        part.held.grad = total.view_as(part.held).clone()


def added(parameters: Iterable[tuple[Tensor, dist.ProcessGroup | None]], most_bytes: int = BUCKET_BYTES) -> Gradients:
    """The exchange for parameters in the order of the forward pass, each added over its group, for all ranks of it."""
    found = Gradients()
    for parameter, group in reversed(list(parameters)):
        _append(found, (group, None), _Part(parameter, slice(None), parameter), most_bytes)
    _listen(found)
    return found


def owned(shards: Iterable[Shards], order: Sequence[str], most_bytes: int = BUCKET_BYTES) -> Gradients:
    """The exchange that gives each owner the gradients of its pieces; `order` names the parameters as the forward pass uses them."""
    found, place = Gradients(), {name: number for number, name in enumerate(order)}
    pairs = [(piece, group) for group in shards for piece in group.pieces]
    for piece, group in sorted(pairs, key=lambda pair: (place[pair[0].name], pair[0].start), reverse=True):
        held = group.held[piece.name] if piece.owner == group.rank else None
        part = _Part(group.parameters[piece.name], slice(piece.start, piece.stop), held)
        _append(found, (group.group, group.root(piece.owner)), part, most_bytes)
    _listen(found)
    return found


def _append(found: Gradients, where: tuple[dist.ProcessGroup | None, int | None], part: _Part, most_bytes: int) -> None:
    """Into the last bucket for the same ranks while it has room."""
    rows = part.parameter[part.rows]
    fitting = (b for b in reversed(found.buckets) if (b.group is where[0] and b.owner == where[1]
                                                      and b.parts[0].parameter.dtype == rows.dtype))
    bucket = next(fitting, None)
    if bucket is None or sum(p.parameter[p.rows].nbytes for p in bucket.parts) + rows.nbytes > most_bytes:
        bucket = _Bucket(*where)
        found.buckets.append(bucket)
    bucket.parts.append(part)


def _listen(found: Gradients) -> None:
    for bucket in found.buckets:
        for part in bucket.parts:
            homes = found._homes.setdefault(id(part.parameter), [])
            if not homes:
                part.parameter.register_post_accumulate_grad_hook(_telling(weakref.ref(found)))
            homes.append(bucket)


def _telling(exchange: weakref.ref[Gradients]) -> Callable[[Tensor], None]:
    """A hook that does not keep the exchange alive."""
    def hook(parameter: Tensor) -> None:
        if (found := exchange()) is not None:
            found._arrived(parameter)
    return hook
