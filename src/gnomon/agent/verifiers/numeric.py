"""Is the answer this number? Settings: `answer`; `absolute` and `relative`, how far off it may be, 0 and 1e-6 by default.

The number is what stands after the last `marker` of the message (`Answer:` by default), else the message as a whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.sandbox.sandbox import Sandbox

_NUMBER = re.compile(r"\s*[$€£]?\s*([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][+-]?\d{1,4})?)\s*(?:%|\.)?\s*")


class Verifier:
    """Compares one number: an answer with several is none."""

    machine: Machine = "none"

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.answer = fields.number("answer")
        self.absolute, self.relative = fields.number("absolute", 0.0), fields.number("relative", 1e-6)
        self.marker = fields.text("marker", "Answer:")
        fields.done()

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """1 or 0."""
        said = trajectory.answer().rpartition(self.marker)[2]
        value = number(said)
        right = value is not None and math.isclose(value, self.answer, rel_tol=self.relative, abs_tol=self.absolute)
        return Score(reward=float(right), evidence=(f"read {value!r} in {said[:100]!r}, wanted {self.answer!r}",))


def number(text: str) -> float | None:
    """The number that a text is, thousands and a unit of money allowed; None where it is anything else, or not finite."""
    match = _NUMBER.fullmatch(text[:400])
    try:
        value = float(match[1].replace(",", "")) if match else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None
