"""Calls as the chat format has them: declared with the conversation, answered by one message each. No settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.tool import Bound
from gnomon.agent.harness.wire import Wish
from gnomon.data.messages import Message, Text, Tool


class Way:
    """The chat format's own calls; a message without one is the last."""

    always = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        Fields(settings, "native").done()

    def declared(self, tools: Sequence[Bound]) -> tuple[Tool, ...]:
        """All of them."""
        return tuple(tool.declared for tool in tools)

    def instructions(self, tools: Sequence[Bound]) -> str:
        """None: the chat format says it."""
        return ""

    def wishes(self, message: Message, tools: Sequence[Bound]) -> Sequence[Wish]:
        """The calls of the message."""
        return [Wish(name=call.name, text=call.arguments, id=call.id) for call in message.tool_calls]

    def answers(self, wishes: Sequence[Wish], seen: Sequence[Seen]) -> tuple[Message, ...]:
        """One message for each call, by its id."""
        return tuple(Message(role="tool", name=wish.name, tool_call_id=wish.id, content=(Text(text=each.text),))
                     for wish, each in zip(wishes, seen, strict=True))
