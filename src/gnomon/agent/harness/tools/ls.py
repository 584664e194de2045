"""What a folder holds. Settings: `most` (500) entries that are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument


class Kind:
    """Names, sorted; folders end with a slash."""

    about = "List a folder."
    main = "path"
    machine = True
    arguments: Mapping[str, Argument] = {
        "path": Argument(doc="The folder; by default where you are"),
        "limit": Argument(type="integer", doc="At most so many entries"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "ls")
        self.most = fields.whole("most", 500, least=1)
        fields.done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """The entries."""
        path = desk.path(given.get("path") or ".")
        result = await desk.run(("sh", "-c", 'LC_ALL=C ls -1Ap -- "$1"', "sh", path))
        if result.code:
            raise Fault(result.stderr.decode("utf-8", "replace").strip() or f"{path} cannot be listed")
        names = result.text.splitlines()
        limit = min(self.most, max(1, int(given.get("limit") or self.most)))
        more = f"\n[{len(names) - limit} entries more]" if len(names) > limit else ""
        return Seen(text="\n".join(names[:limit]) + more if names else "The folder is empty.")
