"""Reading a client's JSON: each value is taken with its type and range, and a complaint names the place, the value and the remedy.

What a reader never took is an error too (`refuse_rest`), with the name that was probably meant. Read next: `openai_chat.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.data.dialects.asked import Refused
from gnomon.extend import suggestion

LARGEST = 1e300  # a whole number in JSON may be larger than any float


class Fields:
    """A JSON object while it is read. `null` is the same as absent, as in the APIs that this reads."""

    __slots__ = ("_taken", "path", "table")

    def __init__(self, table: Any, path: str = "") -> None:
        if not isinstance(table, Mapping):
            raise wrong(path or "body", table, "an object")
        self.table = table
        self.path = path
        self._taken: set[str] = set()

    def place(self, name: str) -> str:
        """The path of a field, such as `messages[2].content`."""
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        """The value as it stands, None where it is absent."""
        self._taken.add(name)
        return self.table.get(name)

    def require(self, name: str) -> Any:
        """The value, which must be there."""
        value = self.get(name)
        if value is None:
            raise Refused(f"'{self.place(name)}' is required", self.place(name), "missing_required_parameter")
        return value

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong(self.place(name), value, "a string")
        return value

    def flag(self, name: str) -> bool | None:
        """true or false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(self.place(name), value, "true or false")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number in [low, high]."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(self.place(name), value, "a number")
        if not low <= value <= high:
            raise Refused(f"'{self.place(name)}' is {shown(value)}; it must be {between(low, high)}", self.place(name))
        return float(min(value, LARGEST))

    def integer(self, name: str, low: float, high: float) -> int | None:
        """A whole number in [low, high]."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(self.place(name), value, "a whole number")
        if not low <= value <= high:
            raise Refused(f"'{self.place(name)}' is {shown(value)}; it must be {between(low, high)}", self.place(name))
        return value

    def choice(self, name: str, options: Sequence[str]) -> str | None:
        """One of some words."""
        value = self.get(name)
        if value is not None and value not in options:
            close = suggestion(value, list(options)) if isinstance(value, str) else ""
            raise Refused(f"'{self.place(name)}' is {shown(value)}{close}; choose {', '.join(options)}", self.place(name))
        return value

    def object(self, name: str) -> Fields | None:
        """An object, to be read in turn."""
        value = self.get(name)
        return None if value is None else Fields(value, self.place(name))

    def objects(self, name: str) -> list[Fields]:
        """A list of objects; absent is empty."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise wrong(self.place(name), value, "a list")
        return [Fields(item, f"{self.place(name)}[{i}]") for i, item in enumerate(value)]

    def texts(self, name: str, limit: int) -> tuple[str, ...]:
        """A string or a list of at most `limit` strings, none of them empty."""
        value = self.get(name)
        values = () if value is None else (value,) if isinstance(value, str) else value
        if not isinstance(values, (list, tuple)) or not all(isinstance(item, str) for item in values):
            raise wrong(self.place(name), value, "a string or a list of strings")
        if len(values) > limit or "" in values:
            raise Refused(f"'{self.place(name)}' has {len(values)} strings; give at most {limit}, none of them empty", self.place(name))
        return tuple(values)

    def without_effect(self, *names: str) -> None:
        """Fields that are known and change nothing here."""
        self._taken.update(names)

    def refuse(self, name: str, why: str) -> None:
        """A field that cannot be honoured: null, false and empty are fine, anything else is an error."""
        value = self.get(name)
        if value not in (None, False, "", [], {}):
            raise Refused(f"'{self.place(name)}' {why}", self.place(name), "unsupported_value")

    def refuse_rest(self) -> None:
        """Complain about the first field that nothing asked for."""
        for name in self.table:
            if name not in self._taken:
                close = suggestion(name, sorted(self._taken))
                raise Refused(f"unknown field '{self.place(name)[:200]}'{close}; leave it out", self.place(name)[:200], "unknown_parameter")


def wrong(place: str, value: Any, expected: str) -> Refused:
    """The complaint about a value of another type."""
    return Refused(f"'{place}' must be {expected}, not {shown(value)}", place, "invalid_type")


def shown(value: Any) -> str:
    """A value in a message, short."""
    kinds = {dict: "an object", list: "a list", type(None): "null"}
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    text = kinds.get(type(value)) or repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def between(low: float, high: float) -> str:
    """A range in a message."""
    return f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
