"""What a reply in K3's format is that must call tools, as a grammar in Lark's notation: the calls alone, arguments typed as declared.

The answer itself stays empty: after the thinking its channel is closed and the calls begin, so that a model that was told to call cannot
talk around it. Declared arguments stand in the order of their declaration, those that are not required may be left out; text between the
tags holds no marker. Strings are as free as text is, unless the schema lists them; every other value is JSON that its schema allows.
Read next: `formats/xtml.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gnomon.data.messages import Tool
from gnomon.data.xtml_parser import XtmlMarkers

MOST_CALLS = 16
"""Calls of one reply at most."""
TYPES = ("string", "number", "boolean", "null", "object", "array")
DEEPEST = 8
"""Steps of references and alternatives that are followed to find the types of a value; beyond that any type may come."""
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
TEXT = r"TEXT: /(.|\n)*/"


def grammar(tools: Sequence[Tool], markers: XtmlMarkers, *, parallel: bool) -> str:
    """The grammar of one call of one of `tools` or, with `parallel`, of up to `MOST_CALLS`, in tags that `markers` enclose.

    It begins inside the response, which it closes at once, and ends after the closing tag of the calls.
    """
    page = _Page(markers)
    lines = [f"start: {page.close('response')} {page.open('tools')} from1 {page.close('tools')}"]
    most = MOST_CALLS if parallel else 1
    for index in range(1, most + 1):
        heads = (f"{page.open('call', tool=tool.name, index=index)} body{number}" for number, tool in enumerate(tools))
        lines.append(f"from{index}: ({' | '.join(heads)}) {page.close('call')}" + (f" from{index + 1}?" if index < most else ""))
    for number, tool in enumerate(tools):
        lines.append(f"body{number}: {' '.join(_arguments(tool, page))}")
    return "\n".join([*lines, TEXT])


class _Page:
    """Tags in the notation of the grammar."""

    def __init__(self, markers: XtmlMarkers) -> None:
        self._open, self._close, self._sep = (f"<[{marker}]>" for marker in (markers.open, markers.close, markers.sep))

    def open(self, tag: str, **attributes: str | int) -> str:
        """An opening tag."""
        text = tag + "".join(f' {key}="{escaped(str(value))}"' for key, value in attributes.items())
        return f"{self._open} {quoted(text)} {self._sep}"

    def close(self, tag: str) -> str:
        """A closing tag."""
        return f"{self._close} {quoted(tag)} {self._sep}"

    def argument(self, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """One argument, with each type that its schema allows."""
        kinds = [kind for kind in TYPES if kind in types(schema, root)]
        forms = (f"{self.open('argument', key=key, type=kind)} {value(kind, schema, root)} {self.close('argument')}" for kind in kinds)
        return f"({' | '.join(forms)})"

    def free(self, schema: Any, root: Mapping[str, Any]) -> str:
        """Any number of arguments whose names nobody declared."""
        names = f'{self._open} "argument key=\\"" /[^"&]+/ "\\" type=\\"'
        kinds = [kind for kind in TYPES if kind in types(schema, root)]
        forms = (f'{names}{kind}\\"" {self._sep} {value(kind, schema, root)} {self.close("argument")}' for kind in kinds)
        return f"({' | '.join(forms)})*"


def _arguments(tool: Tool, page: _Page) -> Iterator[str]:
    properties = tool.parameters.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        more = tool.parameters.get("additionalProperties", "properties" not in tool.parameters)
        yield '""' if more is False else page.free(more, tool.parameters)
        return
    needed = tool.parameters.get("required", ())
    for key, schema in properties.items():
        yield page.argument(key, schema, tool.parameters) + ("" if key in needed else "?")


def value(kind: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The text of an argument of one type."""
    own = dict(schema) if isinstance(schema, Mapping) else {}
    if kind == "string":
        listed = _listed(own)
        return "TEXT" if listed is None else f"({' | '.join(quoted(text) for text in listed if isinstance(text, str))})"
    if "type" in own or not own:
        own["type"] = "integer" if kind == "number" and "number" not in _named(own) and own else kind
    else:
        own = {"allOf": [own, {"type": kind}]}
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return "%json " + json.dumps({**shared, **own, "x-guidance": JSON_FORM})


def types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types that a value of a schema may have, in the words of the format: an integer is a number."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return set(TYPES)
    found = set(TYPES)
    if "type" in schema:
        found &= {"number" if name == "integer" else name for name in _named(schema)}
    if (listed := _listed(schema)) is not None:
        found &= {_type(entry) for entry in listed}
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list | tuple):
            found &= _any(types(entry, root, depth + 1) for entry in schema[word])
    for entry in schema.get("allOf", ()):
        found &= types(entry, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found &= types(_target(reference, root), root, depth + 1)
    return found


def _any(parts: Iterable[set[str]]) -> set[str]:
    return set().union(*parts)


def _named(schema: Mapping[str, Any]) -> Sequence[Any]:
    """The types that a schema names itself."""
    named = schema.get("type", ())
    return named if isinstance(named, list | tuple) else [named]


def _listed(schema: Any) -> list[Any] | None:
    """The values that a schema lists, if it lists any."""
    if not isinstance(schema, Mapping):
        return None
    return [schema["const"]] if "const" in schema else list(schema["enum"]) if isinstance(schema.get("enum"), list | tuple) else None


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    place: Any = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        place = place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) and name else place
    return place


def _type(entry: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
    return kinds.get(type(entry)) or ("object" if isinstance(entry, Mapping) else "array")


def quoted(text: str) -> str:
    """A text as a literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """An attribute's value as it is written between quotes: only & and the quote are replaced."""
    return text.replace("&", "&amp;").replace('"', "&quot;")
