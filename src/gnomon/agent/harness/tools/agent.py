"""Another agent for a part of the task: it works in the same machine, with a context of its own, and its last message comes back.

No settings; the harness says how such agents work (`agents`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument


class Kind:
    """Calls it and waits for its end."""

    about = "Give a part of the task to another agent, which knows nothing but what you tell it. Its answer comes back."
    main = "prompt"
    machine = False
    arguments: Mapping[str, Argument] = {
        "prompt": Argument(doc="What it should do, and all that it must know for that", required=True),
        "context": Argument(doc="What it should know"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        Fields(settings, "agent").done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """Its answer."""
        if desk.ask is None:
            raise Fault("an agent that was called cannot call others")
        if not given["prompt"].strip():
            raise Fault("the prompt is empty")
        return Seen(text=await desk.ask(given["prompt"], given.get("context", "")))
