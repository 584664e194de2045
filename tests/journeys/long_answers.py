"""Problems that any longer answer solves: thinking helps from the first token on, so that every stage can be walked through in seconds."""

import random
from dataclasses import replace
from typing import Any

from gnomon.agent.trajectory import Score
from gnomon.posttrain.lab.domain import Line
from gnomon.posttrain.problem import Problem

STOP = 2


class Tasks:
    """Two domains; an answer of six tokens or more is right."""

    domains = ("walks", "runs")

    def demonstration(self, index: int, seed: int, dense: float, shares: Any) -> Line:
        rng = random.Random(f"{index} {seed} {dense}")
        answer = [rng.randrange(10, 20) for _ in range(rng.randrange(1, 8))]
        return Line(token_ids=(1, 5, *answer, STOP), weights=(0.0, 0.0, *[1.0] * (len(answer) + 1)))

    def problems(self, cells: Any, seed: int, split: str) -> Any:
        return Source(cells, f"{seed} {split}")

    def close(self) -> None:
        """Holds nothing."""


class Source:
    def __init__(self, cells: Any, name: str) -> None:
        self.cells, self.name = cells, name

    def problem(self, index: int) -> Problem:
        domain, effort = self.cells[index % len(self.cells)]
        number = index // len(self.cells)
        tags = {"walks": 5, "runs": 6, "low": 7, "high": 8, "max": 9}
        first = random.Random(f"{self.name} {number}").randrange(10, 20)

        def grade(sampled: tuple[int, ...], world: object) -> Score:
            return Score(reward=float(len(sampled) >= 6))

        return Problem(id=f"{domain}/{effort}/{self.name}/{number}", prompt=(1, tags[domain], tags[effort], first), domain=domain,
                       effort=effort, grade=grade, max_tokens=12, stop_ids=frozenset(range(2, 5)) | frozenset(range(20, 26)))


class OneCell(Source):
    """A source of one cell, as `gnomon rl` takes it."""

    def __init__(self) -> None:
        super().__init__((("walks", "max"),), "one")


class Hopeless(OneCell):
    """As before, and nothing is ever right."""

    def problem(self, index: int) -> Problem:
        return replace(super().problem(index), grade=lambda sampled, world: Score(reward=0.0))
