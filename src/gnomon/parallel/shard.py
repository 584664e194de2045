"""Each piece of the parameters has one owner among the ranks that hold it: the others give it their gradients and get its new values.

This is ZeRO's first stage cut along what an optimiser treats as one: a *granule* is some rows of a parameter that must stay together, such
as one head's map. A rank so keeps the optimiser's state of its own pieces only, and a matrix that is orthogonalised is whole on its owner,
which needs nothing from others for it. Owners are consecutive stretches of the parameters, equal in size up to one granule.
Read next: `gradients.py`, which carries the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of a parameter, and the number of the rank in its group that owns them."""

    name: str
    start: int
    stop: int
    owner: int


def deal(shapes: Sequence[tuple[str, tuple[int, ...]]], granules: Mapping[str, int], ranks: int) -> list[Piece]:
    """Pieces in the order of `shapes`, which `ranks` ranks own in equal parts up to one granule.

    Raises `ConfigError` for a granule that does not divide its parameter.
    """
    total = sum(int(np.prod(shape)) for _, shape in shapes)
    pieces, before = [], 0
    for name, shape in shapes:
        rows, granule = shape[0], granules[name]
        if rows % granule:
            raise ConfigError(f"'{name}' has {rows} rows, which granules of {granule} do not divide")
        size = granule * int(np.prod(shape[1:]))
        middles = before + (np.arange(rows // granule) + 0.5) * size
        owners = np.minimum((middles * ranks / max(1, total)).astype(np.int64), ranks - 1)
        bounds = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
        pieces += [Piece(name, a * granule, b * granule, int(owners[a])) for a, b in zip(bounds, bounds[1:], strict=False)]
        before += rows // granule * size
    return pieces


class Shards:
    """The pieces of one group's parameters, on one of its ranks. `held` has views of the own pieces, which an optimiser works on."""

    def __init__(self, parameters: Sequence[tuple[str, Tensor]], granules: Mapping[str, int], group: dist.ProcessGroup | None):
        self.group, self.rank = group, dist.get_rank(group)
        self.parameters = dict(parameters)
        self.pieces = deal([(name, tuple(p.shape)) for name, p in parameters], granules, dist.get_world_size(group))
        self.mine = {piece.name: piece for piece in self.pieces if piece.owner == self.rank}
        self.held = {name: self.parameters[name].detach()[piece.start : piece.stop] for name, piece in self.mine.items()}
        self.sent = 0

    def root(self, owner: int) -> int:
        """The number of a rank of the group among all ranks."""
        return owner if self.group is None else dist.get_global_rank(self.group, owner)

    @torch.no_grad()
    def publish(self) -> None:
        """Owners give all ranks of the group the present values of their pieces."""
        for owner in range(dist.get_world_size(self.group)):
            views = [self.parameters[p.name].detach()[p.start : p.stop] for p in self.pieces if p.owner == owner]
            if not views:
                continue
            flat = torch.cat([view.flatten() for view in views])
            dist.broadcast(flat, src=self.root(owner), group=self.group)
            if owner == self.rank:
                self.sent += flat.nbytes * (dist.get_world_size(self.group) - 1)
                continue
            for view, values in zip(views, flat.split([view.numel() for view in views]), strict=True):
                view.copy_(values.view_as(view))
