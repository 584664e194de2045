"""Ranks that act as one process: joining under torchrun, and the few collectives that training uses.

Without torchrun there is one rank and every collective does nothing, so the loop is written once. gloo on CPU, nccl on GPU.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """This process among `world` equal ones, and the device it computes on."""

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and draws progress."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> None:
        """Add over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> None:
        """Largest over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values everywhere, in place."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)

    def wait(self) -> None:
        """Return when every rank is here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def join(device: str | None = None) -> Iterator[Mesh]:
    """The mesh that the environment describes (RANK, WORLD_SIZE, LOCAL_RANK, as torchrun sets them), for the length of a block.

    `device` is "cpu" or "cuda"; by default the GPU where there is one. Raises `ConfigError` for a device that is not there.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"'device' is '{kind}', but torch sees no GPU here; use device=cpu")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    mesh = Mesh(rank=rank, world=world, device=place)
    if world == 1 or dist.is_initialized():
        yield mesh
        return
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo", rank=rank, world_size=world)
    try:
        yield mesh
    finally:
        # What wraps a model for several ranks refers to itself and to the group. The group's threads end with its last owner; one that
        # still runs when the interpreter goes away aborts the process.
        gc.collect()
        dist.destroy_process_group()
