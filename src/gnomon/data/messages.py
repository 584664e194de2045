"""What a conversation is: messages, calls of tools and options, before any format writes them as tokens.

The world speaks messages, the model speaks tokens; only `chat.py` converts, and the API dialects translate their JSON into this and back.
Read next: `chat.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["low", "medium", "high", "max"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Text of a message."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An image of a message, as bytes of a file; or, with no bytes yet, the `address` of one that whoever may has still to read."""

    data: bytes
    media_type: str
    address: str | None = None


Part = Text | Image


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that an assistant made. `arguments` is the JSON text of an object, exactly as it was sampled or received."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A tool that may be called. `parameters` is a JSON Schema; `declaration` is the whole JSON object as the client sent it, which is what
    the model reads."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    declaration: Mapping[str, Any] | None = None

    @property
    def declared(self) -> Mapping[str, Any]:
        """What the model reads: `declaration`, or the same in the shape that OpenAI's API gave to declarations."""
        if self.declaration is not None:
            return self.declaration
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in function.items() if key == "name" or value}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message. `reasoning` is what an assistant thought; `tools` on a system message extends the tools from there on."""

    role: Role
    content: tuple[Part, ...] = ()
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tools: tuple[Tool, ...] = ()

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def images(self) -> tuple[Image, ...]:
        """The images, in their order."""
        return tuple(part for part in self.content if isinstance(part, Image))


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseFormat:
    """What the answer must be: any JSON object, or JSON that a schema describes."""

    kind: Literal["json_object", "json_schema"]
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages and what holds for all of them. `tool_choice` is `auto`, `none`, `required`, or the name of one tool."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool = True
    effort: Effort | None = None
    tool_choice: str = "auto"
    response_format: ResponseFormat | None = None

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of all messages, in their order."""
        return tuple(image for message in self.messages for image in message.images)
