"""Old results are left out when the history is long. Settings: `tokens` (100000) from which on, `keep` (6) messages at the end stay whole.

What an old tool message said is replaced by a mark, the longest history first made shorter at its beginning; calls and their order stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.context import CHARACTERS_PER_TOKEN, Talk, characters
from gnomon.agent.harness.desk import Desk
from gnomon.data.messages import Message, Text

MARK = "[this result is no longer shown; ask again if it is needed]"
FREED = 0.5  # of the limit: how short the history becomes, so that not every turn begins a new context


class Way:
    """Marks in place of old results."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "truncate")
        self.tokens, self.keep = fields.whole("tokens", 100_000, least=100), fields.whole("keep", 6, least=1)
        fields.done()

    def begin(self, desk: Desk, task: str) -> str:
        """The task itself."""
        return task

    async def before(self, talk: Talk, desk: Desk) -> None:
        """Leave results out, the oldest first, until half of the limit is free."""
        length = talk.length
        if length <= self.tokens:
            return
        messages = [*talk.messages]
        opening = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
        changed = False
        for place in range(opening, len(messages) - self.keep):
            message = messages[place]
            if length <= self.tokens * FREED:
                break
            if message.role in ("tool", "user") and len(message.text) > 2 * len(MARK):
                messages[place] = _marked(message)
                length -= (characters(message) - len(MARK)) // CHARACTERS_PER_TOKEN
                changed = True
        if changed:
            talk.replace(messages)


def _marked(message: Message) -> Message:
    return replace(message, content=(Text(text=MARK),))
