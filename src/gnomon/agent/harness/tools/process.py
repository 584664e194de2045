"""The sessions that commands became: list them, read what is new, write to one, wait for its end, end it.

Settings: `seconds` (0), how long a look at one, or a line written to one, waits for its end where a call does not say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen, bounded
from gnomon.agent.harness.spec import Argument
from gnomon.agent.harness.terminals import Terminal, terminals

LONGEST_WAIT = 600.0


class Kind:
    """One tool for all of it; a harness that has a tool for each gives `action` as fixed."""

    about = "Look after commands that go on as sessions."
    main = None
    machine = True
    arguments: Mapping[str, Argument] = {
        "action": Argument(doc="What to do", required=True, choices=("list", "poll", "log", "wait", "write", "submit", "close", "kill")),
        "session": Argument(doc="Which session"),
        "data": Argument(doc="What is written to it; `submit` adds the end of a line"),
        "seconds": Argument(type="number", doc="How long to wait for its end, or for an answer"),
        "block": Argument(type="boolean", doc="Whether to wait at all"),
        "most_characters": Argument(type="number", doc="At most so much of what it printed"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "process")
        self.seconds = fields.number("seconds", 0.0)
        fields.done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """How it stands, and what it printed."""
        known, action = terminals(desk), given["action"]
        if action == "list":
            rows = [f"{each.id}  {each.state}  {each.command[:100]!r}" for each in known.all.values()]
            return Seen(text="\n".join(rows) or "There are no sessions.")
        seconds = LONGEST_WAIT if action == "wait" and "seconds" not in given else given.get("seconds", self.seconds)
        seconds = 0.0 if given.get("block") is False else min(max(seconds, 0.0), LONGEST_WAIT)
        if given.get("session") is None and action == "wait":
            return Seen(text="\n".join(map(_told, await known.any(seconds))) or "No session is running.")
        if given.get("session") is None:
            raise Fault(f"'{action}' needs a session")
        one = known.find(given["session"])
        if action in ("write", "submit") and (given.get("data") or action == "submit"):
            await one.write(given.get("data", "").encode() + (b"\n" if action == "submit" else b""))
        elif action == "close":
            await one.process.close_stdin()
        elif action == "kill":
            await one.kill()
            seconds = 10.0
        elif action == "log":
            one.seen = one.total - len(one.kept)
        await one.ended(seconds)
        return Seen(text=bounded(_told(one), max(100, int(given.get("most_characters") or 1 << 20))))


def _told(one: Terminal) -> str:
    text = one.news().rstrip("\n")
    return f"[session {one.id}: {one.state}]" + (f"\n{text}" if text else "")
