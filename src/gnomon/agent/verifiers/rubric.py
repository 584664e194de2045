"""Is it better than another? A model judges, by a rubric. Settings: `policy`, a table `{"kind": …, …}`; `baseline`, the artefact to beat;
`artefact`, a file in the agent's machine, by default its last message; `longest`, in characters: what is longer loses unread.

Both orders are judged: better in both is 1, in one 0.5. How it is judged stands in `rubric_judge.py`. An empty artefact is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent import policy as policies
from gnomon.agent.rubric_judge import compare
from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.agent.verifiers.files import read
from gnomon.errors import DataError, VerifierError
from gnomon.sandbox.sandbox import Sandbox


class Verifier:
    """Compares with the baseline, twice."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        given = dict(fields.table("policy"))
        self.baseline, self.artefact = fields.text("baseline"), fields.maybe("artefact", fields.text)
        self.longest = fields.maybe("longest", lambda name: fields.whole(name, least=1))
        fields.done()
        if not isinstance(given.get("kind"), str):
            raise DataError("'policy': write a table with 'kind' and the settings of that policy")
        self.policy = policies.opened(given.pop("kind"), given)
        self.machine: Machine = "fork" if self.artefact else "none"

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """1, 0.5 or 0; the metrics are the points of the score pads."""
        text = trajectory.answer()
        if self.artefact is not None:
            if sandbox is None:
                raise VerifierError("the artefact lies in a machine, and there is none")
            text = (await read(sandbox, self.artefact) or b"").decode("utf-8", "replace")
        if not text.strip():
            return Score(reward=0.0, evidence=("there is no artefact",))
        one = await compare(self.policy, task.prompt, (text, self.baseline), longest=self.longest)
        other = await compare(self.policy, task.prompt, (self.baseline, text), longest=self.longest)
        wins = [0.5 if found.winner is None else float(found.winner == place) for place, found in enumerate((one, other))]
        pads = [f"{name}: weight {weight:g}, {a:g} against {b:g}" for name, (weight, a, b) in one.pad.items()]
        return Score(reward=sum(wins) / 2, metrics={"points": (one.first + other.second) / 2, "baseline": (one.second + other.first) / 2},
                     evidence=(one.reading, *pads))
