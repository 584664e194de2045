"""Replace text in a file. Settings: `after_reading` (false): whether a file must have been read before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument


class Kind:
    """Replaces one text by another; the old one must stand there once, unless all are meant."""

    about = "Replace a text in a file. The old text must stand there exactly once, unless all of them are to be replaced."
    main = None
    machine = True
    arguments: Mapping[str, Argument] = {
        "path": Argument(doc="The file", required=True),
        "old": Argument(doc="The text as it stands, with its spaces and line ends", required=True),
        "new": Argument(doc="What stands there afterwards", required=True),
        "all": Argument(type="boolean", doc="Replace every place where it stands"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "edit")
        self.after_reading = fields.flag("after_reading", False)
        fields.done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """In how many places."""
        path = desk.path(given["path"])
        if self.after_reading and path not in desk.state.get("read", ()):
            raise Fault(f"read {path} before you change it")
        text = await desk.text(path)
        count = found(text, given["old"], given["new"], bool(given.get("all")), path)
        await desk.write(path, text.replace(given["old"], given["new"]).encode())
        return Seen(text=f"Replaced {count} place{'s' if count > 1 else ''} in {path}.")


def found(text: str, old: str, new: str, every: bool, path: str) -> int:
    """How often the old text stands there. Raises `Fault` where an edit would be none, or would be ambiguous."""
    if not old:
        raise Fault("the old text is empty; write a file as a whole, or name a text in it")
    if old == new:
        raise Fault("the old text and the new one are the same")
    count = text.count(old)
    if count == 0:
        raise Fault(f"the old text does not stand in {path}; it must be exactly as in the file, with its spaces and line ends")
    if count > 1 and not every:
        raise Fault(f"the old text stands in {path} {count} times; give more of what is around it, or replace all")
    return count
