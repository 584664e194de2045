"""Ask the task's public verifier how things stand. An attempt that has one gives its agent this tool, under the name `submit`.

How often, and at what price, the task says (`diagnosis.py`). It judges a copy of the machine, so the agent sees nothing of it, and it is
not the verifier that decides. No settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument
from gnomon.agent.trajectory import Trajectory


class Kind:
    """What the public verifier says: how good it is by its measure, and why."""

    about = "Submit the present state for a diagnosis. The number of times is limited, and each may cost; the final judgement is another."
    main = "note"
    machine = False
    arguments: Mapping[str, Argument] = {"note": Argument(doc="What you expect")}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        Fields(settings, "submit").done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """The diagnosis."""
        diagnosis = desk.model.diagnosis
        if diagnosis is None:
            raise Fault("this task has no diagnosis")
        record = getattr(desk.model, "trajectory", None)
        known = record if isinstance(record, Trajectory) else Trajectory(id="submission", task_id=desk.task.id)
        return Seen(text=await diagnosis.submit(known, desk.box))
