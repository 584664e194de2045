"""Is the answer this text? Settings: `answer`, or `answers` any of which will do; `strip` and `fold_case`, both true by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.errors import DataError
from gnomon.sandbox.sandbox import Sandbox


class Verifier:
    """Compares the last message of the agent as a whole: naming many answers matches none."""

    machine: Machine = "none"

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        single = fields.maybe("answer", fields.text)
        self.answers = [single] if single is not None else [*fields.rows("answers")]
        self.strip, self.fold = fields.flag("strip", True), fields.flag("fold_case", True)
        fields.done()
        if not self.answers or not all(isinstance(answer, str) and answer.strip() for answer in self.answers):
            raise DataError("'answer' or 'answers': give at least one text, none of them empty")

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """1 or 0."""
        said = trajectory.answer()
        right = self._plain(said) in [self._plain(answer) for answer in self.answers]
        return Score(reward=float(right), evidence=(f"the answer was {said[:200]!r}",))

    def _plain(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.fold else text
