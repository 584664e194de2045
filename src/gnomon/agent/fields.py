"""Reading JSON that somebody else wrote: each value with its type, a complaint that names the file and the place, nothing left over.

Read next: `task.py`, which is read with it.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from gnomon.errors import DataError
from gnomon.extend import suggestion

T = TypeVar("T")
SHOWN = 80  # of a wrong value, in messages


def parsed(text: str | bytes, where: str) -> Any:
    """JSON as the standard has it: no NaN, no infinity, no number that becomes one. Raises `DataError` naming `where`."""
    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"the number {digits[:SHOWN]} is not finite")
        return value

    try:
        return json.loads(text, parse_constant=number, parse_float=number)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no JSON ({error})") from None


class Fields:
    """An object of JSON while it is read. `done` complains of what nobody took."""

    __slots__ = ("_path", "_table", "_taken", "_where")

    def __init__(self, table: Any, where: str, path: str = "") -> None:
        self._where, self._path = where, path
        if not isinstance(table, Mapping):
            raise self.wrong("", table, "an object")
        self._table = table
        self._taken: set[str] = set()

    def place(self, name: str) -> str:
        """The path of a field, such as `turns[2].spans`."""
        return ".".join(part for part in (self._path, name) if part)

    def wrong(self, name: str, value: Any, wanted: str) -> DataError:
        """The complaint about a value."""
        shown = repr(value)
        place = self.place(name)
        return DataError(f"{self._where}: {f'{place!r}: ' if place else ''}expected {wanted}, got "
                         f"{shown if len(shown) <= SHOWN else shown[:SHOWN] + ' …'}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._table.get(name) is not None

    def get(self, name: str) -> Any:
        """The value as it stands. Raises `DataError` where there is none."""
        self._taken.add(name)
        if not self.has(name):
            raise DataError(f"{self._where}: {self.place(name)!r} is required")
        return self._table[name]

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        return self._typed(name, default, str, "a string")

    def flag(self, name: str, default: bool | None = None) -> bool:
        """true or false."""
        return self._typed(name, default, bool, "true or false")

    def whole(self, name: str, default: int | None = None, least: int = 0) -> int:
        """A whole number, `least` or more."""
        value: int = self._typed(name, default, int, f"a whole number, {least} or more")
        if value < least:
            raise self.wrong(name, value, f"a whole number, {least} or more")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value: float = self._typed(name, default, (int, float), "a number")
        if not math.isfinite(value):
            raise self.wrong(name, value, "a finite number")
        return value

    def maybe(self, name: str, read: Callable[[str], T]) -> T | None:
        """`read(name)`, or None where the field is absent or null: `fields.maybe("user", fields.text)`."""
        self._taken.add(name)
        return read(name) if self.has(name) else None

    def table(self, name: str) -> Mapping[str, Any]:
        """An object, empty where absent."""
        self._taken.add(name)
        value = self._table.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, value, "an object")
        return value or {}

    def rows(self, name: str) -> Sequence[Any]:
        """A list, empty where absent."""
        self._taken.add(name)
        value = self._table.get(name)
        if value is not None and not isinstance(value, (list, tuple)):
            raise self.wrong(name, value, "a list")
        return value or ()

    def inner(self, name: str) -> Fields:
        """An object to be read in turn."""
        return Fields(self.get(name), self._where, self.place(name))

    def within(self, name: str) -> Fields:
        """An object to be read in turn, empty where absent."""
        return Fields(self.table(name), self._where, self.place(name))

    def each(self, name: str) -> list[Fields]:
        """A list of objects to be read in turn, empty where absent."""
        return [Fields(item, self._where, f"{self.place(name)}[{i}]") for i, item in enumerate(self.rows(name))]

    def done(self) -> None:
        """Raises `DataError` for the first field that was not taken."""
        for name in self._table:
            if name not in self._taken:
                known = ", ".join(sorted(self._taken))
                raise DataError(f"{self._where}: {self.place(str(name))!r}: unknown field"
                                f"{suggestion(str(name), sorted(self._taken))} (known: {known})")

    def _typed(self, name: str, default: Any, kind: Any, wanted: str) -> Any:
        self._taken.add(name)
        if not self.has(name) and default is not None:
            return default
        value = self.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, value, wanted)
        return value


def bytes_to_json(data: bytes) -> str | dict[str, str]:
    """Text as text, other bytes as `{"base64": …}`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def bytes_from_json(fields: Fields, name: str) -> bytes:
    """What `bytes_to_json` wrote in a field."""
    value = fields.get(name)
    try:
        if isinstance(value, str):
            return value.encode("utf-8")
        if isinstance(value, Mapping) and isinstance(value.get("base64"), str) and len(value) == 1:
            return base64.b64decode(value["base64"], validate=True)
    except (binascii.Error, UnicodeEncodeError):
        pass
    raise fields.wrong(name, value, 'text, or {"base64": "…"}')
