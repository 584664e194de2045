"""A long history is summed up by the policy, and goes on from the summary. Settings: `tokens` (100000) from which on; `prompt`, what it is
asked; `keep` (0) messages at the end that follow the summary as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.context import CHARACTERS_PER_TOKEN, Talk, characters
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.observation import bounded
from gnomon.agent.harness.wire import said
from gnomon.data.messages import Message

PROMPT = """Your context is nearly full. It will be cleared, and you will go on with the task and with what you write now, and nothing else.
Write down, without calling a tool: what was asked for, word for word where words matter; what you found out; which files you made or
changed and how they stand; what you tried that did not work; what is left to do, and the very next step."""
SUMMARY = "Your context was cleared to make room. This is what you wrote down before:\n\n{}\n\nGo on from there."
LOST = "Your context was cleared to make room, and you wrote nothing down. Look at how things stand, and go on."


class Way:
    """A summary in place of the history."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "compact")
        self.tokens, self.prompt = fields.whole("tokens", 100_000, least=100), fields.text("prompt", PROMPT)
        self.keep = fields.whole("keep", 0)
        fields.done()

    def begin(self, desk: Desk, task: str) -> str:
        """The task itself."""
        return task

    async def before(self, talk: Talk, desk: Desk) -> None:
        """Ask for a summary and begin again, where the history is too long and there is something to sum up."""
        opening = next((i for i, message in enumerate(talk.messages) if message.role == "assistant"), None)
        if opening is None or talk.length <= self.tokens:
            return
        start = talk.messages[:opening]
        if sum(map(characters, talk.messages[opening:])) < sum(map(characters, start)) and len(talk.messages) - opening < 4:
            return  # nearly all of it is the task itself: a summary would free nothing
        asked = talk.conversation(said(self.prompt), tool_choice="none")
        completion = await desk.model.complete(asked, desk.sampling, purpose=talk.purpose)
        text = completion.message.text.strip()
        written = bounded(SUMMARY.format(text) if text else LOST, self.tokens * CHARACTERS_PER_TOKEN // 4)
        talk.replace([*start, said(written), *_tail(talk.messages[opening:], self.keep)])


def _tail(messages: list[Message], keep: int) -> list[Message]:
    """The last messages, from an assistant's on, so that no result stands there without its call."""
    tail = messages[len(messages) - keep :] if keep else []
    first = next((i for i, message in enumerate(tail) if message.role == "assistant"), len(tail))
    return tail[first:]
