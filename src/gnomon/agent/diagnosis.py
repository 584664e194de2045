"""What an agent may ask while it works: a public verifier, a few times, at a price (report §4.2, autonomous execution).

`Task.diagnosis` names it: a verifier's kind and settings, or `{"kind": "limited", "settings": {"check": …, "submissions": 3, "free": 1,
"penalty": 0.1}}`. It says what it found and never decides: the hidden check does, and each submission beyond the free ones lowers what that
gives. An attempt makes one `Diagnosis`, which harnesses find on its record (`model.diagnosis`); it judges, then calls `penalised`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.task import Check, Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import judge, opened
from gnomon.errors import DataError
from gnomon.sandbox.sandbox import Backend, Sandbox

SUBMISSIONS, FREE, PENALTY = 3, 1, 0.1
LONGEST = 2_000


class Diagnosis:
    """The public verifier of one attempt, and how often it was asked; `backend` makes a fresh machine where the verifier wants one.

    Raises `DataError` for a task without one, or a malformed one.
    """

    def __init__(self, task: Task, backend: Backend | None = None) -> None:
        if task.diagnosis is None:
            raise DataError(f"task {task.id}: has no 'diagnosis', so there is nothing to ask")
        self.check, self.submissions, self.free, self.penalty = _limits(task.diagnosis, f"task {task.id}: diagnosis")
        opened(self.check, f"task {task.id}: diagnosis")
        self._task, self._backend = replace(task.shown(), check=self.check), backend
        self.used = 0

    @property
    def left(self) -> int:
        """How often it may still be asked."""
        return max(0, self.submissions - self.used)

    async def submit(self, trajectory: Trajectory, sandbox: Sandbox | None) -> str:
        """Ask; what the agent reads. A verifier that fails costs no submission. Judging happens in a copy: nothing of it is left behind."""
        if not self.left:
            return f"All {self.submissions} submissions are used. The work is judged as it stands when you end."
        self.used += 1  # counted from the start, so that submissions beside each other are no more than allowed
        score = None
        try:
            score = await judge(self._task, trajectory, sandbox, self._backend)
        finally:
            if score is None or score.reward is None:
                self.used -= 1
        if score.reward is None:
            return "The public check failed by itself; this did not count as a submission."
        found = "\n".join(score.evidence)
        found = found if len(found) <= LONGEST else f"{found[:LONGEST]} … (cut)"
        price = f"each lowers the reward by {self.penalty:g}" if self.used >= self.free and self.penalty else "the next costs nothing"
        return f"Public check: {score.reward:g}\n{found}\n({self.left} of {self.submissions} submissions left; {price}.)"

    def penalised(self, score: Score) -> Score:
        """The hidden score with the price of the submissions; what was not scored, or is no success, stays as it is."""
        cost = self.penalty * max(0, self.used - self.free)
        if score.reward is None or not self.used:
            return score
        reward = max(0.0, score.reward - cost) if score.reward > 0 else score.reward
        said = f"The public check was asked {self.used} of {self.submissions} times, {self.free} without a price"
        said += f": reward {score.reward:g}, less {cost:g}, is {reward:g}" if reward != score.reward else ""
        return replace(score, reward=reward, evidence=(*score.evidence, f"{said}."),
                       metrics={**score.metrics, "submissions": float(self.used), "before_penalty": score.reward})


def _limits(check: Check, where: str) -> tuple[Check, int, int, float]:
    if check.kind != "limited":
        return check, SUBMISSIONS, FREE, PENALTY
    table: Mapping[str, Any] = check.settings
    fields = Fields(table, where)
    inner = Check.from_json(fields.inner("check"))
    submissions, free = fields.whole("submissions", SUBMISSIONS, 1), fields.whole("free", FREE)
    penalty = fields.number("penalty", PENALTY)
    fields.done()
    if not 0 <= penalty <= 1:
        raise fields.wrong("penalty", penalty, "a number from 0 to 1")
    return inner, submissions, free, penalty
