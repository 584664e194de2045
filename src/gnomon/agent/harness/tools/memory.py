"""Notes that last: add one, replace one, remove one. A harness with this tool says where they lie (`memory`). No settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.memory import BETWEEN, entries, noted
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument


class Kind:
    """An entry is named by any part of its text that only it has."""

    about = "Keep notes that outlive this conversation: add one, replace one, remove one."
    main = None
    machine = False
    arguments: Mapping[str, Argument] = {
        "action": Argument(doc="What to do", choices=("add", "replace", "remove", "read")),
        "target": Argument(doc="Which notes", required=True),
        "content": Argument(doc="The text of the entry"),
        "old": Argument(doc="A part of the entry that is meant"),
        "operations": Argument(type="array", doc="Several at once: objects with action, content and old_text"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        Fields(settings, "memory").done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """The notes as they stand."""
        target = given["target"]
        kept = entries(desk, target)
        if given.get("operations"):
            for step in given["operations"]:
                if not isinstance(step, dict):
                    raise Fault("each of the operations must be an object")
                kept = _after(kept, str(step.get("action")), step.get("content"), step.get("old_text"))
        elif given.get("action") != "read":
            kept = _after(kept, str(given.get("action")), given.get("content"), given.get("old"))
        if kept != entries(desk, target):
            await noted(desk, target, kept)
        return Seen(text="\n".join(f"- {entry}" for entry in kept) or "There are no notes.")


def _after(kept: list[str], action: str, content: Any, old: Any) -> list[str]:
    if action in ("add", "replace") and not (isinstance(content, str) and content.strip()):
        raise Fault(f"'{action}' needs 'content'")
    fresh = str(content).strip().replace(BETWEEN, "\n")
    if action == "add":
        return kept if fresh in kept else [*kept, fresh]
    if action not in ("replace", "remove"):
        raise Fault(f"{action[:40]!r} is no action; it is one of add, replace, remove")
    if not isinstance(old, str) or not old:
        raise Fault(f"'{action}' needs a part of the entry that is meant")
    places = [i for i, entry in enumerate(kept) if old in entry]
    if len(places) != 1:
        raise Fault(f"{len(places)} entries hold {old[:60]!r}; name one")
    return [*kept[: places[0]], *([fresh] if action == "replace" else []), *kept[places[0] + 1 :]]
