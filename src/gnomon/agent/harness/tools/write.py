"""A whole file, new or replaced. No settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument


class Kind:
    """Writes a file, and the folders above it."""

    about = "Write a text file, in place of what is there."
    main = None
    machine = True
    arguments: Mapping[str, Argument] = {
        "path": Argument(doc="The file", required=True),
        "content": Argument(doc="All that it will hold", required=True),
        "mode": Argument(doc="Replace the file, or add to its end", choices=("overwrite", "append")),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        Fields(settings, "write").done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """How much was written."""
        data, path = given["content"].encode(), desk.path(given["path"])
        if given.get("mode") == "append":
            try:
                data = await desk.read(path) + data
            except Fault as fault:
                if await _there(desk, path):
                    raise Fault(f"{path} is there and cannot be read: {fault}") from None
        await desk.write(path, data)
        desk.state.setdefault("read", set()).add(path)
        return Seen(text=f"Wrote {len(data)} bytes to {path}.")


async def _there(desk: Desk, path: str) -> bool:
    return (await desk.run(("test", "-e", path))).code == 0
