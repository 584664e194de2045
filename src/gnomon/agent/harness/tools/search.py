"""One tool for both ways of searching: what stands in files, or how they are called. Settings: those of `grep`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument
from gnomon.agent.harness.tools import glob, grep


class Kind:
    """`target` says which."""

    about = "Search for a regular expression in files, or for files by a pattern of their name."
    main = "pattern"
    machine = True
    arguments: Mapping[str, Argument] = {
        **grep.Kind.arguments, "target": Argument(doc="What stands in files, or their names", choices=("content", "files"))}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.grep, self.glob = grep.Kind(settings), glob.Kind({})

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """What was found."""
        if given.get("target") != "files":
            return await self.grep.call(desk, given)
        pattern = given["pattern"] if "/" in given["pattern"] else f"**/{given['pattern']}"
        return await self.glob.call(desk, {**given, "pattern": pattern})
