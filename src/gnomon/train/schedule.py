"""Learning rate over a run: cosine with 1 % linear warm-up, or warm-up, stable, decay (report §2.5).

The report tuned both at their own optimum and found cosine lower each time. Read next: `loop.py`.
"""

import math
from dataclasses import dataclass
from typing import Literal

from gnomon.config import setting
from gnomon.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The shape of the learning rate; its peak belongs to the optimiser."""

    kind: Literal["cosine", "wsd"] = setting("cosine", "cosine, or wsd: warm-up, stable, linear decay")
    warmup: float = setting(0.01, "share of all steps with a linear warm-up")
    decay: float = setting(0.2, "wsd only: share of all steps in the decay at the end")
    final: float = setting(0.1, "last learning rate as a share of the peak")

    def __post_init__(self) -> None:
        for name in ("warmup", "decay", "final"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"'{name}' is {value}; it is a share between 0 and 1")
        if self.kind == "wsd" and self.warmup + self.decay > 1.0:
            raise ConfigError(f"'warmup' {self.warmup} and 'decay' {self.decay} overlap; their sum must not exceed 1")

    def factor(self, step: int, total: int) -> float:
        """The learning rate of 0-based `step` of `total`, as a share of the peak; the last step has `final`."""
        warmup = math.ceil(self.warmup * total)
        if step < warmup:
            return (step + 1) / warmup
        if self.kind == "cosine":
            progress = (step - warmup) / max(1, total - 1 - warmup)
            return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        start = total - math.ceil(self.decay * total)
        progress = (step - start + 1) / max(1, total - start)
        return 1.0 - (1.0 - self.final) * min(1.0, max(0.0, progress))
