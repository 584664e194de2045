"""Ranks that act as one process: joining under torchrun, their groups by axis, and the few collectives that training uses.

Without torchrun there is one rank and every collective does nothing, so the loop is written once. gloo on CPU, nccl on GPU.
Read next: `axes.py` for how ranks lie, `gradients.py`.
"""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.errors import ConfigError
from gnomon.parallel.axes import COPIES, NAMES, ROWS, TOKENS, Axes
from gnomon.parallel.roll import Roll

T = TypeVar("T")
GROUPS = (*((name,) for name in NAMES), ROWS, COPIES, TOKENS)
"""The sets of axes that have a group of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """This process among `world` equal ones, where it stands on each axis, and the device it computes on.

    Collectives are over all ranks, or over those that differ on the named axes only.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")
    axes: Axes = Axes(data=1)
    groups: Mapping[frozenset[str], dist.ProcessGroup] = field(default_factory=dict)
    roll: Roll | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and draws progress."""
        return self.rank == 0

    def size(self, *axes: str) -> int:
        """Ranks along these axes; all without any."""
        return self.axes.size(axes) if axes else self.world

    def index(self, *axes: str) -> int:
        """This rank's number along these axes; among all without any."""
        return self.axes.index(self.rank, axes) if axes else self.rank

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one on these axes only; `None` where that is all of them."""
        return self.groups.get(frozenset(axes))

    def sum(self, tensor: Tensor, *axes: str) -> None:
        """Add over ranks, in place."""
        if self.size(*axes) > 1:
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.group(*axes))

    def max(self, tensor: Tensor, *axes: str) -> None:
        """Largest over ranks, in place."""
        if self.size(*axes) > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group(*axes))

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values everywhere, in place."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)

    def gather(self, own: T) -> list[T]:
        """What each rank brings, in the order of ranks, on all of them; anything that can be pickled."""
        found: list[Any] = [own] * self.world
        if self.world > 1:
            dist.all_gather_object(found, own)
        return found

    def agree(self, decision: bool) -> bool:
        """What rank 0 decided."""
        told = torch.tensor([decision], device=self.device, dtype=torch.int32)
        self.broadcast(told)
        return bool(told)

    def wait(self) -> None:
        """Return when every rank is here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def join(device: str | None = None, axes: Axes | None = None) -> Iterator[Mesh]:
    """The mesh that the environment describes (RANK, WORLD_SIZE, LOCAL_RANK, as torchrun sets them), for the length of a block.

    `device` is "cpu" or "cuda"; by default the GPU where there is one. `axes` lays the ranks out; by default all are data ranks. Raises
    `ConfigError` for a device that is not there, and for axes that these ranks cannot form.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"'device' is '{kind}', but torch sees no GPU here; use device=cpu")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    axes = (axes or Axes()).over(world)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if world == 1:
        yield Mesh(device=place, axes=axes)
        return
    foreign, patience = dist.is_initialized(), timedelta(seconds=axes.patience)
    roll = None
    if not foreign:
        store = _store(patience)
        roll = Roll(dist.PrefixStore("roll", store), rank, world)
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo", store=dist.PrefixStore("ranks", store), rank=rank,
                                world_size=world, timeout=patience)
    try:
        yield Mesh(rank=rank, world=world, device=place, axes=axes, groups=_groups(axes, world, patience), roll=roll)
    finally:
        # What refers to the group may refer to itself. The group's threads end with its last owner; one that still runs when the
        # interpreter goes away aborts the process.
        gc.collect()
        if not foreign:
            dist.destroy_process_group()


_joined = count()


def _store(patience: timedelta) -> dist.Store:
    """Where ranks find each other, with keys of its own for each time that torchrun starts them and that this process joins.

    torchrun may keep one store over all restarts, in which the addresses of ranks that are gone still stand.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    restart, world = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("WORLD_SIZE", "1")
    return dist.PrefixStore(f"gnomon {restart} {world} {next(_joined)}", store)


def _groups(axes: Axes, world: int, patience: timedelta) -> dict[frozenset[str], dist.ProcessGroup]:
    """One group per set of axes; every rank makes all of them, in the same order.

    Gradients have groups to themselves even where all ranks take part, since they travel while other exchanges do.
    """
    return {frozenset(names): dist.new_subgroups_by_enumeration(axes.groups(names), timeout=patience)[0] for names in GROUPS
            if 1 < axes.size(names) < world or (names in (COPIES, TOKENS) and axes.size(names) > 1)}
