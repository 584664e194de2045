"""Does a program print what it should? Settings: `argv`, `cases` of `{"stdin": …, "stdout": …}`, `seconds` for each, 10 by default.

What it should print never enters the machine. A program that crashes, hangs or floods fails its case; a lost machine is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.errors import DataError, VerifierError
from gnomon.sandbox.sandbox import Command, Result, Sandbox


class Verifier:
    """Runs the agent's program on inputs that it has not seen; all must be right."""

    machine: Machine = "fork"

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.argv = tuple(fields.rows("argv"))
        self.seconds = fields.number("seconds", 10.0)
        self.cases = []
        for case in fields.each("cases"):
            self.cases.append((case.text("stdin", ""), case.text("stdout")))
            case.done()
        fields.done()
        if not self.argv or not all(isinstance(word, str) and word for word in self.argv):
            raise DataError(f"'argv': {self.argv!r}; write the program and its arguments as texts")
        if not self.cases or self.seconds <= 0:
            raise DataError("'cases' needs at least one, 'seconds' more than 0")

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """1 when each case is right; `share` says how many were."""
        if sandbox is None:
            raise VerifierError("the program runs in a machine, and there is none")
        wrong = []
        for number, (given, wanted) in enumerate(self.cases):
            result = await sandbox.exec(Command(argv=self.argv, stdin=given.encode(), timeout_seconds=self.seconds, cwd=task.workdir,
                                                user=task.user))
            if why := _why(result, wanted):
                wrong.append(f"case {number}: {why}")
        share = 1 - len(wrong) / len(self.cases)
        return Score(reward=float(not wrong), metrics={"share": share}, evidence=(*wrong,) or ("all cases are right",))


def _why(result: Result, wanted: str) -> str:
    if result.timed_out:
        return "ran past its time"
    if result.code:
        return f"ended with status {result.code}"
    lines = [line.rstrip() for line in result.text.rstrip().split("\n")]
    right = not result.truncated and lines == [line.rstrip() for line in wanted.rstrip().split("\n")]
    return "" if right else f"printed {result.text[:80]!r}"
