"""What a tool is, and how a call becomes one: the policy's words are read as JSON, checked against the schema, and renamed.

A kind of tool speaks its own words (`path`, `old`, `seconds`); a harness gives each of them the name, the type and the unit that the policy
knows. Whatever a call holds, the outcome is arguments of the right types or a `Fault` that says what is wrong. Read next: `desk.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

from gnomon import extend
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen, shown
from gnomon.agent.harness.spec import JSON_TYPES, Argument, ToolUse
from gnomon.data.messages import Tool
from gnomon.errors import ConfigError, DataError

KINDS = "gnomon.agent.harness.tools"
DEEPEST = 32


class Kind(Protocol):
    """One thing that an agent can do. Built from settings: `Kind(settings)` raises `DataError` naming a wrong one.

    `arguments` are the kind's own; `main` is the one that free text stands for, None where there is none. `machine` says that it needs one.
    """

    about: str
    arguments: Mapping[str, Argument]
    main: str | None
    machine: bool

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """Do it. `given` are arguments of the kind, checked. Raises `Fault` for what the policy should read as a failure."""
        ...


class Bound:
    """A kind of tool under a name, with the arguments that the policy knows. Raises `ConfigError` for what does not fit together."""

    def __init__(self, name: str, use: ToolUse) -> None:
        self.name = name
        try:
            self.kind = cast(Kind, extend.find(KINDS, use.kind, "Kind")(use.settings))
        except DataError as error:
            raise ConfigError(f"'tools.{name}.settings': {error}") from None
        self.about = use.about or self.kind.about
        own = self.kind.arguments
        self.arguments = use.arguments or {key: replace(each, to=key) for key, each in own.items() if key not in use.fixed}
        self.fixed = use.fixed
        for key, argument in self.arguments.items():
            if argument.to is not None and argument.to not in own:
                raise ConfigError(f"'tools.{name}.arguments.{key}.to': '{use.kind}' has no '{argument.to}'"
                                  f"{extend.suggestion(argument.to, [*own])} (it has: {', '.join(own)})")
        given = {argument.to for argument in self.arguments.values()} | set(self.fixed)
        if unknown := sorted(set(self.fixed) - set(own)):
            raise ConfigError(f"'tools.{name}.fixed.{unknown[0]}': '{use.kind}' has no such argument (it has: {', '.join(own)})")
        if missing := [key for key, argument in own.items() if argument.required and key not in given]:
            raise ConfigError(f"'tools.{name}.arguments': none stands for '{missing[0]}', which '{use.kind}' needs")

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of its arguments."""
        required = [name for name, argument in self.arguments.items() if argument.required]
        return {"type": "object", "properties": {name: argument.json_schema for name, argument in self.arguments.items()},
                **({"required": required} if required else {}), "additionalProperties": False}

    @property
    def declared(self) -> Tool:
        """What the policy reads."""
        return Tool(name=self.name, description=self.about, parameters=self.schema)

    @property
    def main(self) -> str | None:
        """The argument that free text stands for, by the policy's name."""
        return next((name for name, argument in self.arguments.items() if argument.to == self.kind.main and argument.to), None)

    def read(self, text: str, whole: bool = True) -> dict[str, Any]:
        """The kind's arguments from the JSON text of a call. Raises `Fault`; `whole` False is a message that was cut at its end."""
        if not text.strip() and whole:
            return self.named({})
        try:
            value = json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise Fault(f"the arguments of {self.name} are no JSON ({str(error)[:200]}); nothing was done") from None
        return self.named(value)

    def named(self, value: Any) -> dict[str, Any]:
        """The kind's arguments from those of a call. Raises `Fault` naming the argument that is missing, unknown or of a wrong type."""
        if not isinstance(value, dict):
            raise Fault(f"the arguments of {self.name} are {shown(value)}; they must be one JSON object")
        for name in value:
            if name not in self.arguments:
                raise Fault(f"{self.name} has no argument {shown(name)}{extend.suggestion(name[:100], [*self.arguments])} "
                            f"(it has: {', '.join(self.arguments) or 'none'})")
        given = dict(self.fixed)
        for name, argument in self.arguments.items():
            if value.get(name) is None:
                if argument.required:
                    raise Fault(f"{self.name} needs the argument '{name}'")
                continue
            fits(argument.json_schema, value[name], f"{self.name}: '{name}'")
            if argument.to is not None:
                given[argument.to] = _meant(argument, value[name], f"{self.name}: '{name}'")
        return given


def _meant(argument: Argument, value: Any, where: str) -> Any:
    if argument.scale != 1.0:
        try:
            value = value * argument.scale
        except OverflowError:
            raise Fault(f"{where}: {shown(value)} is out of range") from None
    return argument.meanings.get(value, value) if isinstance(value, str) else value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def fits(schema: Mapping[str, Any], value: Any, where: str, depth: int = 0) -> None:
    """Check types, choices, ranges, and what lists and objects hold. Raises `Fault` naming the place."""
    kind = schema.get("type")
    if depth > DEEPEST:
        raise Fault(f"{where} is nested too deep")
    if isinstance(kind, str) and kind in JSON_TYPES:
        whole = kind == "integer" and isinstance(value, float) and value.is_integer()
        if not (isinstance(value, JSON_TYPES[kind]) or whole) or (isinstance(value, bool) and kind != "boolean"):
            raise Fault(f"{where} is {shown(value)}; it must be {'an' if kind[0] in 'aio' else 'a'} {kind}")
    if "enum" in schema and value not in schema["enum"]:
        raise Fault(f"{where} is {shown(value)}; it must be one of {', '.join(map(str, schema['enum']))}")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise Fault(f"{where} is no Unicode text") from None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if (isinstance(value, float) and not math.isfinite(value)) or abs(value) > 1e15:
            raise Fault(f"{where} is {shown(value)}, which is out of range")
        if value < schema.get("minimum", value) or value > schema.get("maximum", value):
            raise Fault(f"{where} is {shown(value)}; from {schema.get('minimum', 'any')} to {schema.get('maximum', 'any')} is allowed")
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for number, item in enumerate(value):
            fits(schema["items"], item, f"{where}[{number}]", depth + 1)
    if isinstance(value, dict):
        inner = schema.get("properties", {})
        for name in schema.get("required", ()):
            if value.get(name) is None:
                raise Fault(f"{where} needs '{name}'")
        for name, item in value.items():
            if name in inner and item is not None:
                fits(inner[name], item, f"{where}.{name}", depth + 1)
