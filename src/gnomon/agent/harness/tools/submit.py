"""Ask the task's public verifier how things stand. A task with a `diagnosis` gives every agent this tool, under the name `submit`.

It judges a copy of the machine, so nothing that it does is seen by the agent, and it is not the verifier that decides. Settings: `most` (3)
times in an attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument
from gnomon.agent.trajectory import Trajectory
from gnomon.agent.verifier import judge


class Kind:
    """What the public verifier says: how good it is by its measure, and why."""

    about = "Submit the present state for a diagnosis. The number of times is limited, and each may cost; the final judgement is another."
    main = "note"
    machine = False
    arguments: Mapping[str, Argument] = {"note": Argument(doc="What you expect")}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "submit")
        self.most = fields.whole("most", 3, least=1)
        fields.done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """The diagnosis."""
        if desk.task.diagnosis is None:
            raise Fault("this task has no diagnosis")
        count = desk.state.get("submitted", 0)
        if count >= self.most:
            raise Fault(f"{self.most} submissions are allowed, and all were made")
        desk.state["submitted"] = count + 1
        record = getattr(desk.model, "trajectory", None)
        known = record if isinstance(record, Trajectory) else Trajectory(id="submission", task_id=desk.task.id)
        score = await judge(replace(desk.task, check=desk.task.diagnosis), known, desk.box)
        left = f"[{self.most - count - 1} of {self.most} submissions are left]"
        if score.error is not None:
            return Seen(text=f"It could not be judged: {score.error}\n{left}", error=True)
        metrics = ", ".join(f"{name} {value:g}" for name, value in score.metrics.items())
        return Seen(text="\n".join([f"Diagnosis: {score.reward:g}" + (f" ({metrics})" if metrics else ""), *score.evidence, left]))
