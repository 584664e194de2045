"""Is a puzzle of `reasoning-gym` solved? Settings: which puzzle it is, as `tasks/reasoning_gym.py` writes them.

The puzzle is made again from its seed, and the package's own scorer decides about what stands in the last `<answer>…</answer>`.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping
from typing import Any

from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.errors import ConfigError, VerifierError
from gnomon.sandbox.sandbox import Sandbox

LONGEST = 20_000
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Verifier:
    """1 for what the scorer calls right, else 0; with `partial`, what the scorer says."""

    machine: Machine = "none"

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.family, self.version = fields.text("family"), fields.text("version")
        self.seed, self.size, self.index = fields.whole("seed"), fields.whole("size"), fields.whole("index")
        self.config, self.partial = dict(fields.table("config")), fields.flag("partial", False)
        fields.done()

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """What the scorer says. Raises `VerifierError` where the package is another version, whose puzzles may be others."""
        found = package()
        if found.__version__ != self.version:
            raise VerifierError(f"the puzzle is of reasoning-gym {self.version} and {found.__version__} is installed: make the tasks again")
        puzzles = found.create_dataset(self.family, seed=self.seed, size=self.size, **self.config)
        matches = _ANSWER.findall(trajectory.answer()[-LONGEST:])
        said = matches[-1].strip() if matches else None
        value = float(puzzles.score_answer(said, puzzles[self.index])) if said else 0.0
        if not math.isfinite(value):
            raise VerifierError(f"the scorer of {self.family} said {value!r}")
        reward = min(max(value, 0.0), 1.0) if self.partial else float(value >= 1.0)
        return Score(reward=reward, metrics={"scorer": value}, evidence=(f"the answer was {(said or '')[:200]!r}",))


def package() -> Any:
    """The package. Raises `ConfigError` with the remedy where it is not installed."""
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(f"puzzles need the package reasoning-gym ({error}): pip install 'gnomon[tasks]'") from None
