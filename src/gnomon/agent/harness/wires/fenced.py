"""Calls as fenced blocks of text: a word after the fence names the tool, and what stands in the block is its one text argument.

Made for a policy that knows no tools. Settings: `words`, a table from a tool's name to the word after the fence, by default the name
itself; `most`, how many blocks a message may hold, 1 by default. A message without a block is an error, so a tool must be able to end the
attempt (`bash` with `ends`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.tool import Bound
from gnomon.agent.harness.wire import Wish, said
from gnomon.data.messages import Message, Tool
from gnomon.errors import DataError

WORD = re.compile(r"[A-Za-z0-9_.-]+")


class Way:
    """Blocks between fences; one is carried out, and its result is a message of the user."""

    always = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "fenced")
        words = fields.table("words")
        self.most = fields.whole("most", 1, least=1)
        fields.done()
        for name, word in words.items():
            if not isinstance(word, str) or not WORD.fullmatch(word):
                raise DataError(f"'words.{name}': {word!r}; write one word of letters, digits and _.-")
        self.words = dict(words)

    def _word(self, tool: Bound) -> str:
        return self.words.get(tool.name, tool.name)

    def declared(self, tools: Sequence[Bound]) -> tuple[Tool, ...]:
        """None: they are described in words."""
        return ()

    def instructions(self, tools: Sequence[Bound]) -> str:
        """How a block looks, once for each tool."""
        usable = [tool for tool in tools if tool.main]
        parts = [f"{tool.about}\n\n```{self._word(tool)}\n<{tool.main}>\n```" for tool in usable]
        count = "exactly one block" if self.most == 1 else f"one to {self.most} blocks"
        return (f"You act by writing a fenced block. Every message of yours holds {count} of this form, after a line or two that say why:"
                "\n\n" + "\n\n".join(parts) + "\n\nWhat came of it is the next message.")

    def wishes(self, message: Message, tools: Sequence[Bound]) -> Sequence[Wish]:
        """The blocks. Raises `Fault` for none, for too many, and for calls in another form."""
        usable = {self._word(tool): tool for tool in tools if tool.main}
        found = [Wish(name=usable[word].name, value={usable[word].main or "": body}) for word, body in blocks(message.text, usable)]
        if not found:
            raise Fault("your message holds no block that can be carried out; write one: "
                        + " or ".join(f"```{word} … ```" for word in usable))
        if len(found) > self.most:
            raise Fault(f"your message holds {len(found)} blocks, and at most {self.most} may be in one; nothing was done")
        return found

    def answers(self, wishes: Sequence[Wish], seen: Sequence[Seen]) -> tuple[Message, ...]:
        """One message with all results."""
        return (said("\n\n".join(each.text for each in seen)),)


def blocks(text: str, words: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The fenced blocks that begin with one of `words`, as word and body; one that is never closed is none."""
    found: list[tuple[str, str]] = []
    word, lines = None, list[str]()
    for line in text.split("\n"):
        if word is None:
            if line.startswith("```") and line[3:].strip() in words:
                word, lines = line[3:].strip(), []
        elif line.rstrip() == "```":
            found.append((word, "\n".join(lines)))
            word = None
        else:
            lines.append(line)
    return found
