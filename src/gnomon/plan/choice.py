"""`Choice`: one complete way of doing a piece of work: model, machines, layout, formats, work. What a knob turns and a plan settles.

Read next: `knobs.py`.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from gnomon.model.config import ModelConfig
from gnomon.plan.hardware import Cluster
from gnomon.plan.workload import RL, Layout, Precision, Serving, Training

Phase = Literal["serve", "train", "rl"]
Work = Serving | Training | RL


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Everything that a cost depends on. `name` is how the model is called when it is printed."""

    name: str
    model: ModelConfig
    cluster: Cluster
    layout: Layout
    precision: Precision
    work: Work

    @property
    def phase(self) -> Phase:
        """Which kind of work this is."""
        return "serve" if isinstance(self.work, Serving) else "train" if isinstance(self.work, Training) else "rl"

    def changed(self, part: str, **fields: Any) -> "Choice":
        """The same choice with fields of one part changed: `part` is `work`, `layout`, `precision` or `cluster`."""
        return replace(self, **{part: replace(getattr(self, part), **fields)})
