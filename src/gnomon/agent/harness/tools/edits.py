"""Several replacements in one file at once, each found in the file as it was. Settings: `old` and `new`, the words for the two texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument
from gnomon.agent.harness.tools.edit import found


class Kind:
    """All of them, or none."""

    about = "Replace texts in a file. Each old text must stand there exactly once; they must not overlap."
    main = None
    machine = True
    arguments: Mapping[str, Argument] = {
        "path": Argument(doc="The file", required=True),
        "edits": Argument(type="array", doc="The replacements", required=True),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "edits")
        self.old, self.new = fields.text("old", "old"), fields.text("new", "new")
        fields.done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """How many."""
        path = desk.path(given["path"])
        text = await desk.text(path)
        places = []
        for number, edit in enumerate(given["edits"], 1):
            if not isinstance(edit, dict) or not isinstance(edit.get(self.old), str) or not isinstance(edit.get(self.new), str):
                raise Fault(f"edit {number} must be an object with the texts '{self.old}' and '{self.new}'; nothing was changed")
            try:
                found(text, edit[self.old], edit[self.new], False, path)
                edit[self.new].encode()
            except (Fault, UnicodeEncodeError) as fault:
                raise Fault(f"edit {number}: {fault}; nothing was changed") from None
            start = text.index(edit[self.old])
            places.append((start, start + len(edit[self.old]), edit[self.new]))
        places.sort()
        if not places or any(one[1] > two[0] for one, two in zip(places, places[1:], strict=False)):
            raise Fault("the edits overlap; nothing was changed" if places else "there are no edits")
        for start, stop, new in reversed(places):
            text = text[:start] + new + text[stop:]
        await desk.write(path, text.encode())
        return Seen(text=f"Replaced {len(places)} place{'s' if len(places) > 1 else ''} in {path}.")
