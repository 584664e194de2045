"""What a model says, once its tokens are read: pieces as they come, and the whole of it at the end.

A chat format's parser turns tokens into these; the API dialects turn these into their JSON. Read next: `chat.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.data.messages import ToolCall


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStarted:
    """The call of a tool begins; `index` counts the calls of this reply from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallArguments:
    """More of a call's arguments: the pieces of a call, joined, are the JSON text of an object."""

    index: int
    json: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallEnded:
    """The call has all its arguments."""

    index: int


Delta = ReasoningDelta | TextDelta | CallStarted | CallArguments | CallEnded


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """All that was said. `reasoning` is None where the format has no thinking; `complete` says that the message was closed by the model
    and not cut."""

    reasoning: str | None = None
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    complete: bool = True
