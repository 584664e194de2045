"""What is done about a history that grows: nothing, dropping old results, a summary and a fresh start, or never showing the long text.

A history that was edited is a new context for the record, with the purpose `compaction`. Read next: `contexts/compact.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, cast

from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.spec import Part
from gnomon.agent.policy import Completion
from gnomon.data.messages import Conversation, Effort, Message, Tool

KINDS = "gnomon.agent.harness.contexts"
CHARACTERS_PER_TOKEN = 4  # a guess, only until a policy says how many tokens it read


@dataclass(kw_only=True, slots=True)
class Talk:
    """A conversation while it grows. `tokens` is its length when the policy last answered; `purpose` is why its context is a new one."""

    messages: list[Message]
    tools: tuple[Tool, ...] = ()
    effort: Effort | None = None
    thinking: bool = True
    purpose: Literal["compaction", "agent"] | None = None
    tokens: int = 0
    counted: int = 0

    def conversation(self, *more: Message, tool_choice: str = "auto") -> Conversation:
        """As a policy is asked it."""
        return Conversation(messages=(*self.messages, *more), tools=self.tools, effort=self.effort, thinking=self.thinking,
                            tool_choice=tool_choice if self.tools else "auto")

    def took(self, completion: Completion) -> None:
        """Add an answer, and note how long the context is."""
        self.messages.append(completion.message)
        self.purpose = None
        spent = completion.spent
        known = spent.prompt_tokens > 0
        self.tokens, self.counted = (spent.prompt_tokens + spent.output_tokens, len(self.messages)) if known else (0, 0)

    @property
    def length(self) -> int:
        """How many tokens the policy would read now: what it counted, and a guess for what is new."""
        return self.tokens + sum(map(characters, self.messages[self.counted :])) // CHARACTERS_PER_TOKEN

    def replace(self, messages: list[Message]) -> None:
        """Another history in place of this one."""
        self.messages, self.purpose, self.tokens, self.counted = messages, "compaction", 0, 0


def characters(message: Message) -> int:
    """How much text a message holds."""
    return len(message.text) + len(message.reasoning or "") + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)


class Context(Protocol):
    """One way. Built from settings: `Way(settings)` raises `DataError` naming a wrong one."""

    def begin(self, desk: Desk, task: str) -> str:
        """What the first message says of the task; called once for each context that begins."""
        ...

    async def before(self, talk: Talk, desk: Desk) -> None:
        """Called before the policy is asked: may shorten the talk, and may ask the policy for that."""
        ...


def opened(part: Part) -> Context:
    """The way of a part. Raises `ConfigError` for an unknown kind, listing the choices, or a wrong setting."""
    return cast(Context, part.opened(KINDS, "context"))
