"""Tools and schemas that clients send, checked before a model reads them.

A schema that is not JSON Schema is refused here, with the place inside it, and not when a call fails later. Checks are remembered: agents
send the same tools with every turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from gnomon.data.dialects.asked import Refused
from gnomon.data.dialects.fields import Fields, shown, wrong
from gnomon.data.messages import Tool

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
DEEPEST = 64


def declared(entry: Fields, parameters: str, declaration: Mapping[str, Any] | None = None) -> Tool:
    """The tool of an object with `name`, `description` and, in the field `parameters`, a JSON Schema.

    `declaration` is what the model reads: by default the shape of OpenAI's chat completions, which K3 was shown.
    """
    name = tool_name(entry.require("name"), entry.place("name"))
    description = entry.text("description") or ""
    schema = entry.get(parameters)
    schema = {} if schema is None else schema
    check_schema(schema, entry.place(parameters))
    if schema and schema.get("type", "object") != "object":
        raise Refused(f"'{entry.place(parameters)}.type' is {shown(schema['type'])}; a tool's arguments are an object",
                      entry.place(parameters), "invalid_function_parameters")
    if declaration is None:
        function = {"name": name} | ({"description": description} if description else {}) | ({"parameters": schema} if schema else {})
        declaration = {"type": "function", "function": function}
    return Tool(name=name, description=description, parameters=schema, declaration=declaration)


def tool_name(value: Any, place: str) -> str:
    """The name of a tool: letters, digits, `_`, `-`, `.` and `:`, at most 128."""
    if not isinstance(value, str):
        raise wrong(place, value, "a string")
    if not NAME.fullmatch(value):
        raise Refused(f"'{place}' is {shown(value)}; use at most 128 letters, digits, '_', '-', '.' or ':'", place)
    return value


def check_names(tools: Sequence[Tool], place: str) -> None:
    """Refuse two tools of one name."""
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise Refused(f"'{place}' declares '{name}' twice; a name stands for one tool", place)


def check_schema(schema: Any, place: str) -> None:
    """Refuse what is not a JSON Schema. Raises `Refused` naming the place inside the schema."""
    if not isinstance(schema, Mapping):
        raise Refused(f"'{place}' must be a JSON Schema (an object), not {shown(schema)}", place, "invalid_json_schema")
    if depth(schema) > DEEPEST:
        raise Refused(f"'{place}' is nested more than {DEEPEST} deep; make it flatter", place, "invalid_json_schema")
    fault = _fault(json.dumps(schema, sort_keys=True))
    if fault:
        raise Refused(f"'{place}' is not a JSON Schema: {fault}", place, "invalid_json_schema")


def depth(value: Any) -> int:
    """How deep lists and objects stand inside each other; stops counting a little above `DEEPEST`."""
    level, deep = [value], 0
    while level and deep <= DEEPEST + 1:
        deep += 1
        level = [item for part in level if isinstance(part, (Mapping, list))
                 for item in (part.values() if isinstance(part, Mapping) else part)]
    return deep


@lru_cache(maxsize=4096)
def _fault(text: str) -> str | None:
    """What is wrong with a schema, given as JSON text."""
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    schema = json.loads(text)
    if not isinstance(schema.get("$schema", ""), str):
        return "'$schema' must be a string"
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        path = ".".join(map(str, error.absolute_path))
        message = error.message if len(error.message) <= 200 else error.message[:197] + "..."
        return f"at {path}: {message}" if path else message
    return None
