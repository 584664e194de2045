"""A list of what is to do, one item a call: made, changed, looked at. Settings: none; a harness gives `action` as fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument

MOST = 500


class Kind:
    """Items have a number, a subject, a description and a state; one may wait for others."""

    about = "Keep track of what is to do."
    main = None
    machine = False
    arguments: Mapping[str, Argument] = {
        "action": Argument(doc="What to do", required=True, choices=("create", "update", "get", "list")),
        "id": Argument(doc="Which item"),
        "subject": Argument(doc="What it is about, in a line"),
        "description": Argument(doc="What is to do"),
        "state": Argument(doc="How it stands"),
        "waits_for": Argument(type="array", doc="Items that come first"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        Fields(settings, "tracker").done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """The item, or all of them."""
        items, action = desk.plan, given["action"]
        if action == "list":
            return Seen(text="\n".join(map(_line, items)) or "There are no items.")
        if action == "create":
            if len(items) >= MOST:
                raise Fault(f"there are {MOST} items; finish some first")
            desk.state["items"] = number = desk.state.get("items", 0) + 1
            items.append({"id": str(number), "state": "pending"} | _said(given))
            return Seen(text=f"Made {_line(items[-1])}")
        item = next((item for item in items if item["id"] == given.get("id")), None)
        if item is None:
            raise Fault(f"there is no item {str(given.get('id'))[:40]!r} (there are: {', '.join(item['id'] for item in items) or 'none'})")
        if action == "get":
            return Seen(text=f"{_line(item)}\n{item.get('description', '')}")
        item |= _said(given)
        if item["state"] == "deleted":
            items.remove(item)
        return Seen(text=_line(item))


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("subject", "description", "state", "waits_for") if name in given}


def _line(item: Mapping[str, Any]) -> str:
    waits = f" (after {', '.join(map(str, item['waits_for']))})" if item.get("waits_for") else ""
    return f"{item['id']}. [{item['state']}] {str(item.get('subject', ''))[:500]}{waits}"
