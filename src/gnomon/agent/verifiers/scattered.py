"""Was all of the scattered evidence found? Settings: `answer`, its `parts` in order, their `distances`, and the `length` of the text.

The reward is 1 for the whole answer and 0 for any other. Where single pieces of evidence decide parts of the answer, metrics say which
share of the near and of the far half of them was found, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.errors import DataError
from gnomon.sandbox.sandbox import Sandbox


class Verifier:
    """Compares the last message with the answer, and its words with the parts."""

    machine: Machine = "none"

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.answer, self.length = fields.text("answer"), fields.whole("length", least=1)
        self.parts, self.distances = [*fields.rows("parts")], [*fields.rows("distances")]
        fields.done()
        if self.parts and len(self.parts) != len(self.distances):
            raise DataError(f"'parts' and 'distances': {len(self.parts)} and {len(self.distances)}; write one distance for each part")

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """1 or 0, with the shares that were found."""
        said = " ".join(trajectory.answer().split())
        metrics = {"length": float(self.length)}
        found = self._found(said)
        for name, near in (("found_near", True), ("found_far", False)):
            half = [ok for ok, distance in zip(found, self.distances, strict=False) if (2 * distance <= self.length) is near]
            if half:
                metrics[name] = sum(half) / len(half)
        return Score(reward=float(said == self.answer), metrics=metrics, evidence=(f"said {said[:200]!r}, wanted {self.answer!r}",))

    def _found(self, said: str) -> list[bool]:
        """Which parts stand in the answer, each after the one before."""
        found, at = [], 0
        for part in self.parts:
            place = said.find(str(part), at)
            found.append(place >= 0)
            at = place + len(str(part)) if place >= 0 else at
        return found
