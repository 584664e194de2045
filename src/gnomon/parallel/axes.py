"""How ranks are laid out over the axes of a mesh: integers only, so that recipes can be read without torch.

The ranks of a run are the cells of a box with one side per axis. *Data* ranks hold copies and read rows of their own; *expert* ranks also
read rows of their own, and share the experts of one copy; *context* ranks share the tokens of the same rows; *pipeline* ranks have some
layers each, of the same tokens. The axis that talks most is counted fastest, so that it stays inside a machine: expert, context, data,
pipeline. Read next: `mesh.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from gnomon.config import setting
from gnomon.errors import ConfigError

NAMES = ("pipeline", "data", "context", "expert")
"""The axes, slowest first."""

ROWS = ("data", "expert")
"""Axes whose ranks read different rows."""

TOKENS = ("data", "context", "expert")
"""Axes whose ranks have different tokens: what is not cut over ranks gets its gradients from all of them."""

COPIES = ("data", "context")
"""Axes over which a piece of the experts is held more than once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """Ranks along each axis. Raises `ConfigError` for a side that is no positive number."""

    data: int | None = setting(None, "copies of the model, each with rows of its own; none: as many as the ranks allow")
    expert: int = setting(1, "ranks that share the experts of a copy; each reads rows of its own")
    context: int = setting(1, "ranks that share the tokens of the same rows")
    pipeline: int = setting(1, "ranks that hold some of the layers each; a step then needs at least as many micro-batches as stages")
    virtual: int = setting(1, "stages per pipeline rank: more of them leave shorter bubbles and send more")
    zero: int = setting(0, "1: each rank keeps the optimiser's state of its share of the parameters; 3: layers' weights and gradients too; "
                           "0: of all that it holds")
    gradients_on_host: bool = setting(False, "zero = 3: gradients of micro-batches add up in host memory")

    patience: float = setting(1800.0, "seconds that ranks wait for each other before they give up and name who is missing")

    def __post_init__(self) -> None:
        if self.patience <= 0:
            raise ConfigError(f"'mesh.patience' is {self.patience}; it is a number of seconds above 0")
        for name in (*NAMES, "virtual"):
            side = getattr(self, name)
            if side is not None and side < 1:
                raise ConfigError(f"'mesh.{name}' is {side}; it must be at least 1")
        if self.virtual > 1 and self.pipeline == 1:
            raise ConfigError(f"'mesh.virtual' is {self.virtual}, but there is no pipeline; set mesh.pipeline to 2 or more")
        if self.zero not in (0, 1, 3):
            raise ConfigError(f"'mesh.zero' is {self.zero}; use 0 (each copy keeps all states), 1 (states are shared out) "
                              "or 3 (weights and gradients of layers as well)")
        if self.gradients_on_host and self.zero != 3:
            raise ConfigError("'mesh.gradients_on_host' is for gradients that are cut over ranks, "
                              f"but 'mesh.zero' is {self.zero}; set it to 3")

    def over(self, world: int) -> Axes:
        """The same with `data` filled in for `world` ranks. Raises `ConfigError` when they do not make up a box."""
        rest = self.size(name for name in NAMES if name != "data")
        if self.data is None and world % rest == 0:
            return replace(self, data=world // rest)
        if rest * (self.data or 1) == world:
            return self
        asked = " x ".join(f"{name} {getattr(self, name)}" for name in NAMES if getattr(self, name) != 1 and getattr(self, name))
        need = f"a multiple of {rest}" if self.data is None else str(rest * self.data)
        raise ConfigError(f"'mesh' asks for {asked or 'data 1'}, which {world} rank{'s' * (world > 1)} cannot form; start {need} "
                          "(torchrun --nproc-per-node), or change the mesh")

    @property
    def stages(self) -> int:
        """Stages of the pipeline; 1 without one."""
        return self.pipeline * self.virtual

    def size(self, names: Iterable[str]) -> int:
        """Ranks along these axes together; an open `data` counts as one."""
        ranks = 1
        for name in names:
            ranks *= getattr(self, name) or 1
        return ranks

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        at = {}
        for name in reversed(NAMES):
            rank, at[name] = divmod(rank, getattr(self, name) or 1)
        return at

    def index(self, rank: int, names: Iterable[str]) -> int:
        """The number of a rank among those that differ from it on these axes only, slowest axis first."""
        at, names, number = self.place(rank), set(names), 0
        for name in NAMES:
            if name in names:
                number = number * (getattr(self, name) or 1) + at[name]
        return number

    def groups(self, names: Iterable[str]) -> list[list[int]]:
        """All sets of ranks that differ on these axes only; each ascending, which is the order of `index`."""
        inside = set(names)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, cell in enumerate(product(*(range(getattr(self, name) or 1) for name in NAMES))):
            outside = tuple(at for name, at in zip(NAMES, cell, strict=True) if name not in inside)
            found.setdefault(outside, []).append(rank)
        return list(found.values())
