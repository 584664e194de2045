"""Lines that fit a regular expression, found by the machine's own `grep -E`. Settings: `most` (250) lines that are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument
from gnomon.agent.harness.tools.glob import expanded

SEARCH = 'where=$1; shift; {find} | LC_ALL=C sort -z | xargs -0 -r grep -I -E "$@" --'
FLAGS = {"content": (), "files": ("-l",), "count": ("-c",)}


class Kind:
    """Looks through the files below a folder, or through one file."""

    about = "Search files for a regular expression (POSIX extended)."
    main = "pattern"
    machine = True
    arguments: Mapping[str, Argument] = {
        "pattern": Argument(doc="The regular expression", required=True),
        "path": Argument(doc="A file, or a folder to look in; by default where you are"),
        "glob": Argument(doc="Only files whose name fits, *.py for instance"),
        "output": Argument(doc="Lines, names of files, or how many lines in each", choices=("content", "files", "count")),
        "ignore_case": Argument(type="boolean", doc="Whether A and a are the same"),
        "numbers": Argument(type="boolean", doc="Put the line's number before it"),
        "before": Argument(type="integer", doc="So many lines before each"),
        "after": Argument(type="integer", doc="So many lines after each"),
        "around": Argument(type="integer", doc="So many lines before and after each"),
        "limit": Argument(type="integer", doc="At most so many lines"),
        "offset": Argument(type="integer", doc="Leave out so many lines first"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "grep")
        self.most, self.output = fields.whole("most", 250, least=1), fields.text("output", "content")
        fields.done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """What was found."""
        output = given.get("output", self.output)
        flags = ["-H", *FLAGS.get(output, ())]
        if output == "content":
            flags += ["-n"] * bool(given.get("numbers", True))
            for name, flag in (("before", "-B"), ("after", "-A"), ("around", "-C")):
                flags += [f"{flag}{min(int(given[name]), 100)}"] if given.get(name, 0) > 0 else []
        flags += ["-i"] * bool(given.get("ignore_case"))
        globs = expanded(given["glob"]) if given.get("glob") else []
        named = [word for one in globs for word in _named(one)]
        argv = ("sh", "-c", SEARCH.format(find=_find(named)), "sh", desk.path(given.get("path") or "."), *flags, "-e", given["pattern"])
        result = await desk.run(argv, max_bytes=4 << 20)
        lines = [line for line in result.text.split("\n") if line and not (output == "count" and line.endswith(":0"))]
        if not lines and result.stderr:
            raise Fault(result.stderr.decode("utf-8", "replace").strip()[:500])
        start = max(0, int(given.get("offset") or 0))
        shown = lines[start : start + min(self.most, max(1, int(given.get("limit") or self.most)))]
        left = len(lines) - start - len(shown)
        more = f"\n[{left} lines more]" if left > 0 else ""
        more += "\n[the search was ended early]" if result.truncated or result.timed_out else ""
        return Seen(text="\n".join(shown) + more if shown else f"Nothing fits.{more}")


def _named(pattern: str) -> tuple[str, str]:
    """The test of `find` for one pattern: by name, or by path where it names folders."""
    plain = pattern.removeprefix("**/")
    return ("-path", f"*/{plain.replace('**', '*')}") if "/" in plain else ("-name", plain)


def _find(named: list[str]) -> str:
    """The command that lists files; patterns are quoted for the shell."""
    tests = [f"{named[i]} {_quoted(named[i + 1])}" for i in range(0, len(named), 2)]
    either = f" \\( {' -o '.join(tests)} \\)" if tests else ""
    return f'find "$where" -name .git -prune -o -type f{either} -print0'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
