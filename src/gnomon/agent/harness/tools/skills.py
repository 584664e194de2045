"""Which skills there are. No settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument


class Kind:
    """Names, and what each is for."""

    about = "List the skills that there are."
    main = None
    machine = False
    arguments: Mapping[str, Argument] = {"word": Argument(doc="Only those that speak of it")}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        Fields(settings, "skills").done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """One line for each."""
        word = str(given.get("word", "")).lower()
        lines = [f"{skill.name}: {skill.about}" for skill in desk.skills.values() if word in f"{skill.name} {skill.about}".lower()]
        return Seen(text="\n".join(lines) or "There are none.")
