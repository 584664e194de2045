"""Tables as TOML, whatever they hold: free keys, dates, control characters; `tomllib` reads back what was written."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

from gnomon.errors import DataError

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPED = re.compile(r'[\x00-\x1f\x7f"\\]')


def to_toml(table: Mapping[str, Any]) -> str:
    """A table as TOML text: plain values first, then one section for each table inside."""
    lines: list[str] = []
    _table(table, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    inner = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    lists = {name: value for name, value in table.items()
             if isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value)}
    lines += [f"{_key(name)} = {_value(value)}" for name, value in table.items() if name not in inner and name not in lists]
    for name, items in lists.items():
        for item in items:
            lines += ["", f"[[{'.'.join(map(_key, (*path, name)))}]]"]
            _table(item, (*path, name), lines)
    for name, value in inner.items():
        lines += ["", f"[{'.'.join(map(_key, (*path, name)))}]"]
        _table(value, (*path, name), lines)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    return '"' + _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}" if match[0] not in '"\\' else "\\" + match[0], text) + '"'


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (datetime.date, datetime.time)):  # a date-time is a date
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items()) + "}"
    raise DataError(f"TOML cannot hold {value!r}, a {type(value).__name__}")
