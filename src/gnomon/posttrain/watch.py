"""What goes wrong in a run without an error: a trainer that disagrees with its sampler, and budgets that end the learning.

`collapse`: almost no group has answers of different worth, so nothing is learnt. `panic`: most answers are over their budget. Both are said
when they last for a few steps, and again when they come back; the remedy is another checkpoint to start from, or a gentler tau.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

LASTS = 3
"""Steps after which a state is no accident."""
MOST_OVER = 0.5
LEAST_SIGNAL = 0.1


class Watch:
    """Looks at each step's metrics."""

    def __init__(self, largest_gap: float) -> None:
        self.largest_gap = largest_gap
        self.lasted = {"panic": 0, "collapse": 0, "gap": 0}

    def look(self, row: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
        """The alarms of a step, as `{"alarm": "panic"}` or nothing; what has just begun is also said."""
        now = {"panic": row["over_budget"] > MOST_OVER, "collapse": row["signal"] < LEAST_SIGNAL, "gap": row["gap"] > self.largest_gap}
        alarms = []
        for name, holds in now.items():
            self.lasted[name] = self.lasted[name] + 1 if holds else 0
            needed = 1 if name == "gap" else LASTS
            if self.lasted[name] >= needed:
                alarms.append(name)
            if self.lasted[name] == needed:
                say(f"step {row['step']}: {WORDS[name].format(**row)}")
        return {"alarm": ", ".join(alarms)} if alarms else {}

    def state(self) -> dict[str, int]:
        """How long each has lasted."""
        return dict(self.lasted)

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from `state`."""
        self.lasted.update(state)


WORDS = {
    "panic": "{over_budget:.0%} of the answers are over their budget; raise tau, or start from a checkpoint whose answers differ in length",
    "collapse": "only {signal:.0%} of the groups have answers of different worth; nothing is learnt from the others",
    "gap": "trainer and sampler differ by {gap:.2g} per token on average; they must run the same weights with the same rounding",
}
