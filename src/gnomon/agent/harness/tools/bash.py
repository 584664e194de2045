"""A command line. Settings: `seconds` (60) and `most_seconds` (600) that one may take; `keeps` is `nothing` or `directory`: whether a `cd`
lasts; `form` of the result, `plain`, `tags` or `json`; `ends`, a line that ends the attempt when a command that succeeds prints it first;
`wait`, after how many seconds a command that has not ended goes on as a session, where a call does not say it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen, bounded
from gnomon.agent.harness.spec import Argument
from gnomon.agent.harness.terminals import terminals
from gnomon.errors import DataError

WHERE = "\x1e gnomon-directory "
SHELL = ("sh", "-c", 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi', "sh")
FORMS = ("plain", "tags", "json")
LONGEST = 100_000  # characters of a command: what the kernel takes as one argument, with room


class Kind:
    """Runs a command in a shell of its own."""

    about = "Run a command in a shell. Each command runs in a new shell."
    main = "command"
    machine = True
    arguments: Mapping[str, Argument] = {
        "command": Argument(doc="The command, as a shell reads it", required=True),
        "seconds": Argument(type="number", doc="End it after this many seconds"),
        "directory": Argument(doc="Where it runs"),
        "background": Argument(type="boolean", doc="Start it and go on; it becomes a session"),
        "wait": Argument(type="number", doc="After this many seconds it goes on as a session"),
        "most_characters": Argument(type="number", doc="At most so much of what it prints"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "bash")
        self.seconds, self.most_seconds = fields.number("seconds", 60.0), fields.number("most_seconds", 600.0)
        self.keeps, self.form = fields.text("keeps", "nothing"), fields.text("form", "plain")
        self.ends, self.wait = fields.maybe("ends", fields.text), fields.maybe("wait", fields.number)
        fields.done()
        if not 0 < self.seconds <= self.most_seconds:
            raise DataError(f"'seconds': {self.seconds:g}; write more than 0, and not more than 'most_seconds', {self.most_seconds:g}")
        if self.keeps not in ("nothing", "directory"):
            raise DataError(f"'keeps': {self.keeps!r}; it is nothing or directory")
        if self.form not in FORMS:
            raise DataError(f"'form': {self.form!r}; it is one of {', '.join(FORMS)}")

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """Its output, both streams in the order in which they came, and its status."""
        if len(given["command"]) > LONGEST:
            raise Fault(f"the command has {len(given['command'])} characters, and {LONGEST} are possible; write a file and run it")
        if given.get("seconds", 1) < 0 or given.get("wait", 0) < 0:
            raise Fault("a command needs more than 0 seconds")
        if given.get("background") or given.get("wait", self.wait) is not None:
            return await self._session(desk, given)
        seconds = min(given.get("seconds") or self.seconds, self.most_seconds)
        kept = self.keeps == "directory"
        script = "exec 2>&1\n" + (f"trap 'printf \"{WHERE}%s\" \"$PWD\"' EXIT\n" if kept else "") + given["command"]
        result = await desk.run((*SHELL, script), seconds=seconds, cwd=_directory(desk, given))
        text = result.text + result.stderr.decode("utf-8", "replace")
        if kept and WHERE in text:
            text, _, place = text.rpartition(WHERE)
            if place.startswith("/"):
                desk.workdir = desk.path(place)
        done = self.ends is not None and result.code == 0 and text.lstrip().split("\n", 1)[0].strip() == self.ends
        late = f"it was ended after {seconds:g} seconds" if result.timed_out else ""
        lost = "more output than is kept was dropped" if result.truncated else ""
        return Seen(text=_shown(self.form, _part(text, given), result.code, [note for note in (late, lost) if note]), done=done)

    async def _session(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """A program that may go on after this call."""
        limit = min(given["seconds"], self.most_seconds) if given.get("seconds") else None
        terminal = await terminals(desk).start(desk, given["command"], (*SHELL, "exec 2>&1\n" + given["command"]), limit,
                                               _directory(desk, given))
        wait = 0.0 if given.get("background") else min(given.get("wait", self.wait or 0.0), self.most_seconds)
        if not await terminal.ended(wait):
            text = _part(terminal.news(), given)
            return Seen(text=(f"{text.rstrip()}\n" if text.strip() else "") + f"[it goes on as session {terminal.id}]")
        code = terminal.result.code if terminal.result is not None else -1
        return Seen(text=_shown(self.form, _part(terminal.news(), given), code, [terminal.state] if terminal.failure is not None else []))


def _part(text: str, given: Mapping[str, Any]) -> str:
    return bounded(text, max(100, int(given["most_characters"]))) if given.get("most_characters") else text


def _directory(desk: Desk, given: Mapping[str, Any]) -> str | None:
    return desk.path(given["directory"]) if given.get("directory") else None


def _shown(form: str, text: str, code: int, notes: list[str]) -> str:
    if form == "json":
        return json.dumps({"returncode": code, "output": text} | ({"note": "; ".join(notes)} if notes else {}), ensure_ascii=False)
    if form == "tags":
        return "\n".join([f"<returncode>{code}</returncode>", *(f"<note>{note}</note>" for note in notes), "<output>", text, "</output>"])
    said = [*(["The command printed nothing."] if not text.strip() else [text.rstrip("\n")]), *(f"[{note}]" for note in notes)]
    return "\n".join(said + ([f"[exit status {code}]"] if code else []))
