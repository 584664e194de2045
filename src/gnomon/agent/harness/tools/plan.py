"""A list of what is to do, for the policy itself. Settings: `text` and `state`, the words of an item for what it says and how it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument


class Kind:
    """Keeps the list; without items it shows it."""

    about = "Keep a list of what is to do. Without items, the list is shown."
    main = None
    machine = False
    arguments: Mapping[str, Argument] = {
        "items": Argument(type="array", doc="The whole list"),
        "merge": Argument(type="boolean", doc="Change items of the same id, and add others, in place of replacing the list"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "plan")
        self.text, self.state = fields.text("text", "text"), fields.text("state", "status")
        fields.done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """The list as it stands."""
        if "items" in given:
            items = [item for item in given["items"] if isinstance(item, dict)]
            if given.get("merge"):
                fresh = {str(item.get("id")): item for item in items}
                items = [{**item, **fresh.pop(str(item.get("id")), {})} for item in desk.plan] + [*fresh.values()]
            desk.plan = items[:200]
        lines = [f"{number}. [{item.get(self.state, '')}] {str(item.get(self.text, ''))[:500]}" for number, item in enumerate(desk.plan, 1)]
        return Seen(text="\n".join(lines) or "The list is empty.")
