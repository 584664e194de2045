"""Problems of the lab by number: the same number is the same puzzle at every effort, and training never sees what is tested on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Literal

from gnomon.posttrain.lab import agents, coding, general
from gnomon.posttrain.lab.bench import Bench
from gnomon.posttrain.lab.domain import Domain, Line
from gnomon.posttrain.lab.words import EFFORTS, Effort
from gnomon.posttrain.problem import Problem

DOMAIN: dict[str, Domain] = {"general": general.Domain(), "agents": agents.Domain(), "coding": coding.Domain()}
CELLS: tuple[tuple[str, Effort], ...] = tuple((domain, effort) for domain in DOMAIN for effort in EFFORTS)
"""All nine (domain, effort), in the order of reports."""

EVEN = dict.fromkeys(DOMAIN, 1.0)
"""Shares of the domains in a text."""


class Source:
    """The problems of one or several cells, in turn. `split` keeps training, the gate and the evaluation apart."""

    def __init__(self, cells: tuple[tuple[str, Effort], ...], *, seed: int, split: Literal["train", "gate", "test"], bench: Bench) -> None:
        self.cells, self.seed, self.split, self.bench = cells, seed, split, bench

    def problem(self, index: int) -> Problem:
        """Problem `index`, of the cell whose turn it is."""
        domain, effort = self.cells[index % len(self.cells)]
        number = index // len(self.cells)
        name = f"{domain}/{effort}/{self.split}/{self.seed}/{number}"
        puzzle = DOMAIN[domain].puzzle(random.Random(f"{domain}/{self.split}/{self.seed}/{number}"))
        return DOMAIN[domain].problem(puzzle, effort, name, self.bench)


def demonstration(index: int, *, seed: int, dense: float, shares: Mapping[str, float] = EVEN) -> Line:
    """Text `index` of the cold start: with chance `dense` a line of small facts, else a demonstration at an effort from chance; of the
    domains by their `shares`."""
    rng = random.Random(f"demonstration/{seed}/{index}")
    (name,) = rng.choices(list(shares), list(shares.values()))
    domain = DOMAIN[name]
    if rng.random() < dense:
        return domain.dense(rng)
    return domain.demonstrated(domain.puzzle(rng), rng.choice(EFFORTS), rng)
