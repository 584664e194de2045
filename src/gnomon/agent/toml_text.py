"""Tables as TOML, whatever they hold: free keys, dates, control characters; `tomllib` reads back what was written."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from gnomon.config import toml_key, toml_string
from gnomon.errors import DataError


def to_toml(table: Mapping[str, Any]) -> str:
    """A table as TOML text: plain values first, then one section for each table inside."""
    lines: list[str] = []
    _table(table, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    inner = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    lists = {name: value for name, value in table.items()
             if isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value)}
    lines += [f"{toml_key(name)} = {_value(value)}" for name, value in table.items() if name not in inner and name not in lists]
    for name, items in lists.items():
        for item in items:
            lines += ["", f"[[{'.'.join(map(toml_key, (*path, name)))}]]"]
            _table(item, (*path, name), lines)
    for name, value in inner.items():
        lines += ["", f"[{'.'.join(map(toml_key, (*path, name)))}]"]
        _table(value, (*path, name), lines)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return toml_string(value)
    if isinstance(value, (datetime.date, datetime.time)):  # a date-time is a date
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(name)} = {_value(item)}" for name, item in value.items()) + "}"
    raise DataError(f"TOML cannot hold {value!r}, a {type(value).__name__}")
