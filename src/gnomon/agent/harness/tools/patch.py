"""One tool for both ways of changing files: replacing a text in one, or a patch over several. No settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument
from gnomon.agent.harness.tools import edit
from gnomon.agent.harness.tools.apply_patch import applied


class Kind:
    """`mode` says which."""

    about = "Change files: replace a text in one, or apply a patch over several."
    main = None
    machine = True
    arguments: Mapping[str, Argument] = {
        "mode": Argument(doc="Replace a text, or apply a patch", required=True, choices=("replace", "patch")),
        "path": Argument(doc="The file, to replace a text"),
        "old": Argument(doc="The text as it stands"),
        "new": Argument(doc="What stands there afterwards"),
        "all": Argument(type="boolean", doc="Replace every place where it stands"),
        "patch": Argument(doc="The whole patch"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        Fields(settings, "patch").done()
        self.edit = edit.Kind({})

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """What changed."""
        needed = ("patch",) if given["mode"] == "patch" else ("path", "old", "new")
        if missing := [name for name in needed if given.get(name) is None]:
            raise Fault(f"the mode '{given['mode']}' needs {', '.join(needed)}; {missing[0]} is missing")
        if given["mode"] == "patch":
            return Seen(text=await applied(desk, given["patch"]))
        return await self.edit.call(desk, given)
