"""A command line. Settings: `seconds` (60) and `most_seconds` (600) that one may take; `keeps` is `nothing` or `directory`: whether a `cd`
lasts; `form` of the result, `plain`, `tags` or `json`; `ends`, a line that ends the attempt when a command that succeeds prints it first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument
from gnomon.errors import DataError

WHERE = "\x1e gnomon-directory "
SHELL = ("sh", "-c", 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi', "sh")
FORMS = ("plain", "tags", "json")


class Kind:
    """Runs a command in a shell of its own."""

    about = "Run a command in a shell. Each command runs in a new shell, from the same directory."
    main = "command"
    machine = True
    arguments: Mapping[str, Argument] = {
        "command": Argument(doc="The command, as a shell reads it", required=True),
        "seconds": Argument(type="number", doc="End it after this many seconds"),
        "directory": Argument(doc="Where it runs"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "bash")
        self.seconds, self.most_seconds = fields.number("seconds", 60.0), fields.number("most_seconds", 600.0)
        self.keeps, self.form = fields.text("keeps", "nothing"), fields.text("form", "plain")
        self.ends = fields.maybe("ends", fields.text)
        fields.done()
        if not 0 < self.seconds <= self.most_seconds:
            raise DataError(f"'seconds': {self.seconds:g}; write more than 0, and not more than 'most_seconds', {self.most_seconds:g}")
        if self.keeps not in ("nothing", "directory"):
            raise DataError(f"'keeps': {self.keeps!r}; it is nothing or directory")
        if self.form not in FORMS:
            raise DataError(f"'form': {self.form!r}; it is one of {', '.join(FORMS)}")

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """Its output, both streams in the order in which they came, and its status."""
        seconds = given.get("seconds", self.seconds)
        if seconds <= 0:
            raise Fault(f"{seconds:g} seconds is no time")
        command = given["command"]
        kept = self.keeps == "directory"
        script = "exec 2>&1\n" + (f"trap 'printf \"{WHERE}%s\" \"$PWD\"' EXIT\n" if kept else "") + command
        result = await desk.run((*SHELL, script), seconds=min(seconds, self.most_seconds),
                                cwd=desk.path(given["directory"]) if given.get("directory") else None)
        text = result.text + result.stderr.decode("utf-8", "replace")
        if kept:
            text, found, place = text.rpartition(WHERE) if WHERE in text else (text, "", "")
            if found and place.startswith("/"):
                desk.workdir = desk.path(place)
        done = self.ends is not None and result.code == 0 and text.lstrip().split("\n", 1)[0].strip() == self.ends
        late = f"it was ended after {min(seconds, self.most_seconds):g} seconds" if result.timed_out else ""
        lost = "more output than is kept was dropped" if result.truncated else ""
        return Seen(text=_shown(self.form, text, result.code, [note for note in (late, lost) if note]), done=done)


def _shown(form: str, text: str, code: int, notes: list[str]) -> str:
    if form == "json":
        return json.dumps({"returncode": code, "output": text} | ({"note": "; ".join(notes)} if notes else {}), ensure_ascii=False)
    if form == "tags":
        return "\n".join([f"<returncode>{code}</returncode>", *(f"<note>{note}</note>" for note in notes), "<output>", text, "</output>"])
    said = [*(["The command printed nothing."] if not text.strip() else [text.rstrip("\n")]), *(f"[{note}]" for note in notes)]
    return "\n".join(said + ([f"[exit status {code}]"] if code else []))
