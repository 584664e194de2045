"""A text file, by lines. Settings: `lines` (2000) shown by default, `columns` (2000) of one line, `numbers` (true) before lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument


class Kind:
    """Shows lines of a file, and remembers that it did: `edit` may ask for that."""

    about = "Read a text file."
    main = "path"
    machine = True
    arguments: Mapping[str, Argument] = {
        "path": Argument(doc="The file", required=True),
        "offset": Argument(type="integer", doc="The first line, from 1; a number below 0 counts from the end"),
        "limit": Argument(type="integer", doc="How many lines"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "read")
        self.lines, self.columns = fields.whole("lines", 2000, least=1), fields.whole("columns", 2000, least=1)
        self.numbers = fields.flag("numbers", True)
        fields.done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """The lines, and what is not shown of the file."""
        text = await desk.text(given["path"])
        desk.state.setdefault("read", set()).add(desk.path(given["path"]))
        lines = text.split("\n")
        if lines[-1] == "":
            lines.pop()
        if not lines:
            return Seen(text="The file is empty.")
        first = int(given.get("offset") or 1)
        first = max(1, len(lines) + 1 + first) if first < 0 else first
        count = max(1, int(given.get("limit") or self.lines))
        if first > len(lines):
            return Seen(text=f"The file has {len(lines)} lines; there is no line {first}.", error=True)
        part = lines[first - 1 : first - 1 + count]
        shown = "\n".join((f"{first + i:6d}\t" if self.numbers else "") + self._line(line) for i, line in enumerate(part))
        last = first - 1 + len(part)
        rest = f"\n[lines {first} to {last} of {len(lines)}]" if first > 1 or last < len(lines) else ""
        return Seen(text=shown + rest)

    def _line(self, line: str) -> str:
        return line if len(line) <= self.columns else f"{line[: self.columns]} [… {len(line) - self.columns} characters more]"
