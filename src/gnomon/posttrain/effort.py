"""Effort: how many tokens an answer may take before its reward is overridden (report §4.1.2).

b0 of a class of problems is the mean of T that the cold-start model takes. A rollout with T > tau b0 gets the reward -1, right or not;
nothing is cut, and the model never sees a number, only the effort's name in its context. `max` is trained first with a tau that does not
bind; `high` and `low` start from an early checkpoint of it while tau comes down to their own. b0 belongs to the checkpoint it was
measured on and is kept with it. Read next: `rl.py`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from gnomon import whole
from gnomon.config import setting
from gnomon.errors import ConfigError, DataError
from gnomon.posttrain.rollout import Rollout

OVER_BUDGET = -1.0
"""The reward of an answer that took too many tokens, whatever it was worth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TauConfig:
    """tau over a run: from `start` to `target` in a straight line over the first `anneal` share of the steps, then held."""

    target: float | None = setting(None, "budget as a multiple of b0; none: no budget")
    start: float | None = setting(None, "tau at the first step; none: the target from the first step on")
    anneal: float = setting(0.65, "share of the steps over which tau goes from start to target")

    def __post_init__(self) -> None:
        for name in ("target", "start"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"'{name}' is {value}; a budget must be positive")
        if self.start is not None and self.target is None:
            raise ConfigError(f"'start' is {self.start} without a 'target' to go to")
        if not 0 <= self.anneal <= 1:
            raise ConfigError(f"'anneal' is {self.anneal}; it is a share between 0 and 1")

    def at(self, step: int, total: int) -> float:
        """tau of 0-based `step` of `total`; infinity where there is no budget."""
        if self.target is None:
            return math.inf
        if self.start is None or self.anneal == 0:
            return self.target
        progress = min(1.0, step / max(1.0, self.anneal * total))
        return self.start + (self.target - self.start) * progress


@dataclass(frozen=True, kw_only=True, slots=True)
class CellTau:
    """tau of one cell, for a run over several."""

    domain: str = setting(doc="domain of the cell")
    effort: str = setting(doc="effort of the cell")
    tau: TauConfig = setting(doc="its tau over the run")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tau:
    """tau at one step: `default`, and what cells have of their own."""

    default: float
    cells: Mapping[tuple[str, str], float]

    def of(self, rollout: Rollout) -> float:
        """tau of a rollout's cell."""
        return self.cells.get(rollout.problem.cell, self.default)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """b0 by (domain, kind), and the fingerprint of the weights that it was measured on."""

    tokens: Mapping[tuple[str, str], float]
    measured_on: str = ""

    def of(self, rollout: Rollout) -> float:
        """b0 of a rollout's problem. Raises `ConfigError` for a class that was not measured."""
        key = rollout.problem.domain, rollout.problem.kind
        if key not in self.tokens:
            raise ConfigError(f"no budget was measured for domain '{key[0]}', kind '{key[1]}'; measure it on the cold-start checkpoint "
                              f"(known: {', '.join('/'.join(k) for k in sorted(self.tokens)) or 'none'})")
        return self.tokens[key]

    def over(self, rollout: Rollout, tau: float) -> bool:
        """Whether the answer took more than tau b0."""
        return math.isfinite(tau) and rollout.spent > tau * self.of(rollout)

    def save(self, path: Path) -> None:
        """As JSON, in a folder that is made if need be."""
        rows = [{"domain": d, "kind": k, "tokens": value} for (d, k), value in sorted(self.tokens.items())]
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.write(path, json.dumps({"measured_on": self.measured_on, "budgets": rows}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """What `save` wrote. Raises `DataError` for a file that is none."""
        try:
            record: Any = json.loads(path.read_text())
            tokens = {(row["domain"], row["kind"]): float(row["tokens"]) for row in record["budgets"]}
            return cls(tokens=tokens, measured_on=record["measured_on"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: no table of budgets ({error})") from None


def measure(rollouts: Sequence[Rollout], measured_on: str = "", size: Callable[[Rollout], int] = attrgetter("spent")) -> Budgets:
    """b0 of each class: the mean of T, or of another size, over the cold-start model's rollouts."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for each in rollouts:
        found[each.problem.domain, each.problem.kind].append(size(each))
    return Budgets(tokens={key: sum(values) / len(values) for key, values in found.items()}, measured_on=measured_on)


def reward(rollout: Rollout, budgets: Budgets | None, tau: float) -> float:
    """What training sees: NaN where the machine failed, -1 beyond the budget, else the score."""
    if rollout.score is None or rollout.score.reward is None:
        return math.nan
    if budgets is not None and budgets.over(rollout, tau):
        return OVER_BUDGET
    return rollout.score.reward
