"""How a policy writes its calls and reads what came of them: as calls of the chat format, or as text for policies that know no tools.

Read next: `wires/native.py`, then `wires/fenced.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Part
from gnomon.agent.harness.tool import Bound
from gnomon.data.messages import Message, Text, Tool

KINDS = "gnomon.agent.harness.wires"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """A call as the policy wrote it: a JSON text, or an object that is already one."""

    name: str
    text: str = ""
    value: Mapping[str, Any] | None = None
    id: str | None = None


class Wire(Protocol):
    """One way. Built from settings: `Way(settings)` raises `DataError` naming a wrong one.

    `always` says that each message must hold a call, so that one without is an error and not the end.
    """

    always: bool

    def declared(self, tools: Sequence[Bound]) -> tuple[Tool, ...]:
        """The tools that the conversation states."""
        ...

    def instructions(self, tools: Sequence[Bound]) -> str:
        """What the system prompt must say about calls; empty where the chat format says it."""
        ...

    def wishes(self, message: Message, tools: Sequence[Bound]) -> Sequence[Wish]:
        """The calls of a message; none where it has none. Raises `Fault` where they cannot be read."""
        ...

    def answers(self, wishes: Sequence[Wish], seen: Sequence[Seen]) -> tuple[Message, ...]:
        """The messages that show what came of each call."""
        ...


def opened(part: Part) -> Wire:
    """The way of a part. Raises `ConfigError` for an unknown kind, listing the choices, or a wrong setting."""
    return cast(Wire, part.opened(KINDS, "wire"))


def said(text: str) -> Message:
    """A message of the user's side."""
    return Message(role="user", content=(Text(text=text),))
