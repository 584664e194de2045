"""Matrices whose rows lie on several ranks, made whole on one of them for as long as it works on them (report §5.2.3).

An optimiser that orthogonalises needs a matrix whole: one head's map, one expert, one projection. Each has one owner, among the ranks that
hold most of its rows the one with least to do. Owners fetch the rows that they lack from those who have them, work, and return each
rank its rows of the result. This goes on batch by batch, and the rows of the next batch travel while one is worked on; nobody ever
holds all matrices. Read next: `weights.py`; `gnomon/train/muon.py`, which does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.parallel.weights import Cut, start_of


@dataclass(frozen=True, slots=True)
class Task:
    """Rows `start` to `stop` of a parameter are one matrix, which rank `owner` of the group works on."""

    name: str
    start: int
    stop: int
    owner: int


def deal(shapes: Mapping[str, tuple[int, ...]], matrices: Mapping[str, Sequence[tuple[int, int]]], ranks: int) -> list[Task]:
    """An owner for each matrix, the largest first: of the ranks that hold most of its rows the one with least elements so far."""
    load = [0] * ranks
    units = [(name, start, stop) for name, spans in matrices.items() for start, stop in spans]
    width = {name: int(np.prod(shape[1:])) for name, shape in shapes.items()}
    units.sort(key=lambda unit: (-(unit[2] - unit[1]) * width[unit[0]], shapes[unit[0]][1:], unit))
    tasks = []
    for name, start, stop in units:
        held = [_overlap(shapes[name][0], start, stop, rank, ranks) for rank in range(ranks)]
        sizes = [high - low for low, high in held]
        owner = min((rank for rank in range(ranks) if sizes[rank] == max(sizes)), key=lambda rank: load[rank])
        load[owner] += (stop - start) * width[name]
        tasks.append(Task(name, start, stop, owner))
    return tasks


class Owners:
    """One rank's side of the exchange over the ranks of a group; `sent` counts the bytes that it gave to others.

    `matrices` are the row ranges of each parameter that are one matrix each.
    """

    def __init__(self, cuts: Mapping[str, Cut], matrices: Mapping[str, Sequence[tuple[int, int]]], group: dist.ProcessGroup | None):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.shapes = {name: cuts[name].whole for name in matrices}
        self.tasks = deal(self.shapes, matrices, self.ranks)
        self.sent = 0

    def apply(self, rows: Mapping[str, Tensor], work: Callable[[list[Tensor]], list[Tensor]], most: int) -> dict[str, Tensor]:
        """What `work` makes of each matrix, as this rank's rows of it; `rows` are its rows of what goes in. All ranks must call.

        `work` gets matrices [A, B] of about `most` elements together, and returns as many of the same shapes.
        """
        found = {name: torch.zeros_like(local) for name, local in rows.items()}
        batches = list(self._batches(rows, most))
        ahead = self._fetch(batches[0], rows) if batches else None
        for number, batch in enumerate(batches):
            assert ahead is not None  # as many as batches
            waiting, arrived, sizes = ahead
            waiting.wait()
            ahead = self._fetch(batches[number + 1], rows) if number + 1 < len(batches) else None
            done = work(self._whole(batch, arrived, sizes))
            self._give_back(batch, done, found)
        return found

    def _batches(self, rows: Mapping[str, Tensor], most: int) -> Iterator[list[Task]]:
        """Matrices of the parameters that are there, so many that the busiest owner has about `most` elements."""
        batch: list[Task] = []
        load = [0] * self.ranks
        for task in self.tasks:
            if task.name not in rows:
                continue
            size = (task.stop - task.start) * self._width(task.name)
            if batch and load[task.owner] + size > most:
                yield batch
                batch, load = [], [0] * self.ranks
            batch.append(task)
            load[task.owner] += size
        if batch:
            yield batch

    def _width(self, name: str) -> int:
        return int(np.prod(self.shapes[name][1:]))

    def _part(self, task: Task, rank: int) -> tuple[int, int]:
        """Which rows of a matrix a rank holds, counted in the whole parameter."""
        return _overlap(self.shapes[task.name][0], task.start, task.stop, rank, self.ranks)

    def _mine(self, task: Task, local: Tensor) -> Tensor:
        """This rank's rows of a matrix, as a view."""
        low, high = self._part(task, self.rank)
        first = start_of(self.shapes[task.name][0], self.rank, self.ranks)
        return local[low - first : high - first]

    def _elements(self, task: Task, rank: int) -> int:
        low, high = self._part(task, rank)
        return (high - low) * self._width(task.name)

    def _fetch(self, batch: list[Task], rows: Mapping[str, Tensor]) -> tuple[dist.Work, Tensor, list[int]]:
        """Rows go to the owners; returns what to wait for, where they arrive, and how many from each rank."""
        out = [self._mine(task, rows[task.name]).flatten() for task in sorted(batch, key=lambda task: task.owner)]
        sends = [sum(self._elements(task, self.rank) for task in batch if task.owner == rank) for rank in range(self.ranks)]
        receives = [sum(self._elements(task, rank) for task in batch if task.owner == self.rank) for rank in range(self.ranks)]
        return *self._exchange(torch.cat(out), sends, receives), receives

    def _whole(self, batch: list[Task], arrived: Tensor, sizes: list[int]) -> list[Tensor]:
        """The matrices that this rank owns, put together from the rows of all."""
        from_rank = arrived.split(sizes)
        at, found = [0] * self.ranks, []
        for task in (task for task in batch if task.owner == self.rank):
            pieces = []
            for rank in range(self.ranks):
                size = self._elements(task, rank)
                pieces.append(from_rank[rank][at[rank] : at[rank] + size])
                at[rank] += size
            found.append(torch.cat(pieces).view(-1, self.shapes[task.name][-1]))
        return found

    def _give_back(self, batch: list[Task], done: list[Tensor], found: Mapping[str, Tensor]) -> None:
        """Each rank gets its rows of the results."""
        own = [task for task in batch if task.owner == self.rank]
        out = []
        for rank in range(self.ranks):
            for task, result in zip(own, done, strict=True):
                low, high = self._part(task, rank)
                out.append(result.reshape(task.stop - task.start, -1)[low - task.start : high - task.start].flatten())
        sends = [sum(self._elements(task, rank) for task in own) for rank in range(self.ranks)]
        receives = [sum(self._elements(task, self.rank) for task in batch if task.owner == rank) for rank in range(self.ranks)]
        like = next(iter(found.values()))
        waiting, arrived = self._exchange(torch.cat(out) if out else like.new_empty(0), sends, receives)
        waiting.wait()
        at = 0
        for task in sorted(batch, key=lambda task: task.owner):
            view = self._mine(task, found[task.name])
            view.copy_(arrived[at : at + view.numel()].view_as(view))
            at += view.numel()

    def _exchange(self, flat: Tensor, sends: list[int], receives: list[int]) -> tuple[dist.Work, Tensor]:
        arrived = flat.new_empty(sum(receives))
        self.sent += (sum(sends) - sends[self.rank]) * flat.element_size()
        return dist.all_to_all_single(arrived, flat, receives, sends, group=self.group, async_op=True), arrived


def _overlap(rows: int, start: int, stop: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows from `start` to `stop` that a rank holds of a parameter of so many rows; empty ranges lie inside."""
    low, high = max(start, start_of(rows, rank, ranks)), min(stop, start_of(rows, rank + 1, ranks))
    return (low, high) if low < high else (start, start)
