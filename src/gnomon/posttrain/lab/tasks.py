"""What the lab is run on: demonstrations for the cold start, and problems of every cell. Your own tasks take this place.

A recipe names a class by a dotted path, `tasks = "your_pkg.tasks:Tasks"`; it is called without arguments, once in each process. All that
it gives is a function of numbers, so that a run which was killed finds the same again. Read next: `recipe.py`, `plan.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from gnomon import extend
from gnomon.errors import ConfigError
from gnomon.posttrain.lab.bench import Bench
from gnomon.posttrain.lab.domain import Line
from gnomon.posttrain.lab.source import DOMAIN, EVEN, Source, demonstration
from gnomon.posttrain.lab.words import Effort
from gnomon.posttrain.problem import ProblemSource

Split = Literal["train", "gate", "test"]
Cells = tuple[tuple[str, Effort], ...]


class Tasks(Protocol):
    """Demonstrations and problems."""

    domains: tuple[str, ...]

    def demonstration(self, index: int, seed: int, dense: float, shares: Mapping[str, float]) -> Line:
        """Text `index` of the cold start; `dense` is the share of texts that show small facts rather than whole solutions, `shares` that
        of each domain, empty for all alike."""
        ...

    def problems(self, cells: Cells, seed: int, split: Split) -> ProblemSource:
        """Problems of some cells in turn: problem `i` is of cell `i % len(cells)`. No problem is in two splits."""
        ...

    def close(self) -> None:
        """Give back what it holds: sandboxes, files."""
        ...


class Lab:
    """The lab's own three domains; programs run in one sandbox."""

    domains = tuple(DOMAIN)

    def __init__(self) -> None:
        self.bench = Bench()

    def demonstration(self, index: int, seed: int, dense: float, shares: Mapping[str, float]) -> Line:
        """See `source.demonstration`."""
        return demonstration(index, seed=seed, dense=dense, shares=shares or EVEN)

    def problems(self, cells: Cells, seed: int, split: Split) -> ProblemSource:
        """See `source.Source`."""
        return Source(cells, seed=seed, split=split, bench=self.bench)

    def close(self) -> None:
        """End the sandbox."""
        self.bench.close()


def opened(name: str) -> Tasks:
    """The tasks that a dotted path stands for. Raises `ConfigError` for one that lacks a part."""
    made: Any = extend.find("gnomon.posttrain.lab", name, "Lab")()
    missing = [part for part in ("domains", "demonstration", "problems", "close") if not hasattr(made, part)]
    if missing:
        raise ConfigError(f"'tasks' is '{name}', which has no {', '.join(missing)}; see gnomon/posttrain/lab/tasks.py for what it needs")
    return made
