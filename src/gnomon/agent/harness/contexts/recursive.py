"""The task is a variable of an interpreter, and the policy reads of it what it prints; code may ask the policy about parts of it.

A text of any length is worked on in this way. Needs a tool of the kind `python`. Settings: `shown` (2000) characters of the task's
beginning and end that the first message shows; a task that is no longer than both is shown whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.context import Talk
from gnomon.agent.harness.desk import Desk

TOLD = """The task is a text of {characters} characters, in the variable `context` of the Python interpreter. It begins:

{start}

[…]

and ends:

{end}

Read it by code, in parts. `llm_query(prompt)` asks a model that sees the prompt alone, and gives its answer as a text;
`llm_query_batched(prompts)` asks several."""


class Way:
    """What is long stays outside of the context."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "recursive")
        self.shown = fields.whole("shown", 2000, least=1)
        fields.done()

    def begin(self, desk: Desk, task: str) -> str:
        """What the policy is told of it."""
        desk.state["context"] = task
        if len(task) <= 2 * self.shown:
            return task + "\n\n(This text is also the variable `context` of the Python interpreter.)"
        return TOLD.format(characters=len(task), start=task[: self.shown], end=task[-self.shown :])

    async def before(self, talk: Talk, desk: Desk) -> None:
        """Nothing: results are bounded, and the rest is outside."""
