"""Messages as JSON for trajectories: every part, what was thought, calls with their arguments to the character."""

from __future__ import annotations

import base64
from typing import Any, get_args

from gnomon.agent.fields import Fields, bytes_from_json
from gnomon.data.messages import Image, Message, Part, Role, Text, Tool, ToolCall


def message_to_json(message: Message) -> dict[str, Any]:
    """A message; what is empty is left out."""
    record: dict[str, Any] = {
        "role": message.role, "content": [part_to_json(part) for part in message.content], "name": message.name,
        "reasoning": message.reasoning, "tool_call_id": message.tool_call_id, "tools": [tool_to_json(tool) for tool in message.tools],
        "tool_calls": [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls],
    }
    return {name: value for name, value in record.items() if value is not None and value != []}


def message_from_json(fields: Fields) -> Message:
    """What `message_to_json` wrote. Raises `DataError` naming the place."""
    role: Role = fields.text("role")  # type: ignore[assignment]
    if role not in get_args(Role):
        raise fields.wrong("role", role, f"one of {', '.join(get_args(Role))}")
    message = Message(
        role=role, content=tuple(part_from_json(each) for each in fields.each("content")), name=fields.maybe("name", fields.text),
        reasoning=fields.maybe("reasoning", fields.text), tool_call_id=fields.maybe("tool_call_id", fields.text),
        tools=tuple(tool_from_json(each) for each in fields.each("tools")),
        tool_calls=tuple(_call(each) for each in fields.each("tool_calls")))
    fields.done()
    return message


def tool_to_json(tool: Tool) -> dict[str, Any]:
    """A tool, with its declaration as the client sent it."""
    record = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return record if tool.declaration is None else {**record, "declaration": dict(tool.declaration)}


def tool_from_json(fields: Fields) -> Tool:
    """What `tool_to_json` wrote."""
    tool = Tool(name=fields.text("name"), description=fields.text("description", ""), parameters=fields.table("parameters"),
                declaration=fields.maybe("declaration", fields.table))
    fields.done()
    return tool


def part_to_json(part: Part) -> dict[str, Any]:
    """Text, or an image with its bytes."""
    if isinstance(part, Text):
        return {"text": part.text}
    return {"image": {"base64": base64.b64encode(part.data).decode("ascii")}, "media_type": part.media_type}


def part_from_json(fields: Fields) -> Part:
    """What `part_to_json` wrote. Raises `DataError` naming the place."""
    part: Part
    if fields.has("image"):
        part = Image(data=bytes_from_json(fields, "image"), media_type=fields.text("media_type"))
    else:
        part = Text(text=fields.text("text"))
    fields.done()
    return part


def _call(fields: Fields) -> ToolCall:
    call = ToolCall(id=fields.text("id"), name=fields.text("name"), arguments=fields.text("arguments"))
    fields.done()
    return call
