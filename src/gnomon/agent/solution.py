"""How a task is done: the oracle, which proves that a task can be solved and that its verifier notices. No agent ever sees it.

It is data, like the task that carries it: files, a script that runs in the machine, and what would be said. Read next: `validate.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from gnomon.agent.fields import Fields, bytes_from_json, bytes_to_json
from gnomon.agent.message_json import message_from_json, message_to_json
from gnomon.data.messages import Message, Text
from gnomon.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """What is done, in this order: `files` are written by absolute path, `script` is run by `/bin/sh` with `env` in the task's folder and
    as its user, `messages` are what the agent has said at the end. `seconds` is the time for the script."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    script: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    seconds: float = 600.0

    def __post_init__(self) -> None:
        for path in self.files:
            if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
                raise DataError(f"'solution.files': {path!r}; write an absolute path without '..'")
        if self.seconds <= 0:
            raise DataError(f"'solution.seconds': {self.seconds!r}; write a number above 0")
        if not (self.files or self.script or self.messages):
            raise DataError("'solution': does and says nothing; leave it out where it is not known")

    @classmethod
    def says(cls, text: str) -> Self:
        """A solution that is an answer."""
        return cls(messages=(Message(role="assistant", content=(Text(text=text),)),))

    def to_json(self) -> dict[str, Any]:
        """What there is."""
        record: dict[str, Any] = {"files": {path: bytes_to_json(data) for path, data in self.files.items()}, "script": self.script,
                                  "env": dict(self.env), "messages": [message_to_json(message) for message in self.messages],
                                  "seconds": None if self.seconds == 600.0 else self.seconds}
        return {name: value for name, value in record.items() if value not in (None, {}, [])}

    @classmethod
    def from_json(cls, fields: Fields) -> Self:
        """What `to_json` wrote."""
        files = Fields(fields.table("files"), "solution", "files")
        env = Fields(fields.table("env"), "solution", "env")
        solution = cls(files={path: bytes_from_json(files, path) for path in fields.table("files")},
                       script=fields.maybe("script", fields.text), env={name: env.text(name) for name in fields.table("env")},
                       messages=tuple(message_from_json(each) for each in fields.each("messages")),
                       seconds=fields.number("seconds", 600.0))
        fields.done()
        return solution
