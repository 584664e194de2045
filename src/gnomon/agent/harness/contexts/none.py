"""Nothing is done: the policy reads its whole history until its own limit ends the attempt. No settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.context import Talk
from gnomon.agent.harness.desk import Desk


class Way:
    """The history as it is."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        Fields(settings, "none").done()

    def begin(self, desk: Desk, task: str) -> str:
        """The task itself."""
        return task

    async def before(self, talk: Talk, desk: Desk) -> None:
        """Nothing."""
