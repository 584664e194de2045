"""Files by the form of their path: `*` and `?` within a name, `**` for any folders, `{a,b}` for either. Settings: `most` (200) shown."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument

BRACES = re.compile(r"\{([^{}]*)\}")
MOST_PATTERNS, LONGEST = 64, 300
FIND = 'cd -- "$1" && find . -name .git -prune -o -type f -print'
LISTED_BYTES = 8 << 20


class Kind:
    """Paths of files, sorted. What lies in `.git` is left out."""

    about = "Find files by a pattern of their path, **/*.py for instance."
    main = "pattern"
    machine = True
    arguments: Mapping[str, Argument] = {
        "pattern": Argument(doc="The pattern, from the folder on", required=True),
        "path": Argument(doc="The folder to look in; by default where you are"),
        "limit": Argument(type="integer", doc="At most so many files"),
        "offset": Argument(type="integer", doc="Leave out so many files first"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "glob")
        self.most = fields.whole("most", 200, least=1)
        fields.done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """The files."""
        folder, pattern = desk.path(given.get("path") or "."), given["pattern"]
        if pattern.startswith("/"):
            folder, pattern = "/", pattern.lstrip("/")
            while "/" in pattern and not set(pattern.split("/")[0]) & set("*?[{"):
                first, _, pattern = pattern.partition("/")
                folder = posixpath.join(folder, first)
        patterns = [one.split("/") for one in expanded(pattern)]
        result = await desk.run(("sh", "-c", FIND, "sh", folder), max_bytes=LISTED_BYTES)
        if result.code and not result.stdout:
            raise Fault(result.stderr.decode("utf-8", "replace").strip()[:300] or f"{folder} cannot be searched")
        names = sorted(line[2:] for line in result.text.split("\n") if line.startswith("./"))
        names = [name for name in names if any(matches(name.split("/"), one) for one in patterns)]
        start = max(0, int(given.get("offset") or 0))
        shown = names[start : start + min(self.most, max(1, int(given.get("limit") or self.most)))]
        left = len(names) - start - len(shown)
        more = f"\n[{left} files more]" if left > 0 else ""
        more += "\n[the folder holds more files than could be looked through]" if result.truncated or result.timed_out else ""
        return Seen(text="\n".join(posixpath.join(folder, name) for name in shown) + more if shown else f"No file fits.{more}")


def expanded(pattern: str) -> list[str]:
    """A pattern without braces for each choice in them. Raises `Fault` for one that is too long."""
    if not pattern or len(pattern) > LONGEST:
        raise Fault(f"a pattern has 1 to {LONGEST} characters")
    found, whole = [pattern], False
    while not whole:
        whole, wider = True, []
        for one in found:
            hit = BRACES.search(one)
            whole = whole and hit is None
            wider += [one[: hit.start()] + choice + one[hit.end() :] for choice in hit[1].split(",")] if hit else [one]
        found = wider
        if len(found) > MOST_PATTERNS:
            raise Fault("the pattern has too many choices in braces")
    return found


def matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path fits, part by part; `**` stands for any number of parts. The work grows with the product of both lengths."""
    fits = [True] + [False] * len(names)  # whether the pattern so far fits the first n parts
    for part in pattern:
        if part == "**":
            first = fits.index(True) if True in fits else len(fits)
            fits = [n >= first for n in range(len(fits))]
        else:
            fits = [False] + [fits[n] and fnmatchcase(name, part) for n, name in enumerate(names)]
    return fits[-1]
