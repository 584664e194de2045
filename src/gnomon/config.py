"""Strict TOML ⇄ frozen dataclasses: `extends`, `a.b=c` overrides, "did you mean", and a line of documentation per field.

Precedence: field default → what `extends` names → the recipe → the override. An unknown key is an error that gives its path.
`to_toml` writes a resolved configuration that can be read again, which is what a run folder keeps.
"""

import dataclasses
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gnomon.errors import ConfigError
from gnomon.extend import suggestion

T = TypeVar("T")
_MISSING = dataclasses.MISSING
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPED = re.compile(r'[\x00-\x1f\x7f"\\]')
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def setting(default: Any = _MISSING, doc: str = "", *, factory: Any = _MISSING, table: Any = None) -> Any:
    """A dataclass field with one line of documentation.

    `table` is for a field that holds a table of parts by kind: a function from the kind's name to its dataclass.
    """
    metadata = {"doc": doc, "table": table}
    if factory is not _MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def load(cls: type[T], path: Path, overrides: Sequence[str] = (), presets: Path | None = None) -> T:
    """Read a recipe file, follow its `extends`, apply the overrides, and check it against `cls`.

    `extends = "other.toml"` is relative to the file; a bare name in any table (`extends = "tiny"`) is `presets/tiny.toml`.
    Raises `ConfigError` for a missing file, broken TOML, an unknown key or a value of the wrong type.
    """
    return from_dict(cls, apply_overrides(read_toml(path, presets), overrides, presets), str(path))


def read_toml(path: Path, presets: Path | None = None) -> dict[str, Any]:
    """The table of a TOML file with every `extends` resolved."""
    return _read(Path(path), presets, ())


def _read(path: Path, presets: Path | None, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: 'extends' goes round in a circle")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"recipe '{path}' does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"recipe '{path}' cannot be read: {error}") from None
    return _resolve(table, path.parent, presets, (*seen, path.resolve()))


def _resolve(table: dict[str, Any], folder: Path, presets: Path | None, seen: tuple[Path, ...]) -> dict[str, Any]:
    own = {key: _resolve(value, folder, presets, seen) if isinstance(value, dict) else value
           for key, value in table.items() if key != "extends"}
    if "extends" not in table:
        return own
    name = table["extends"]
    if not isinstance(name, str):
        raise ConfigError(f"'extends' must be a file or a preset name, not {name!r}")
    if name.endswith(".toml"):
        return merge(_read(folder / name, presets, seen), own)
    choices = sorted(p.stem for p in presets.glob("*.toml")) if presets else []
    if presets is None or name not in choices:
        hint = suggestion(name, choices)
        raise ConfigError(f"extends = '{name}': no such preset{hint} (choices: {', '.join(choices)}; or a file ending in .toml)")
    return merge(_read(presets / f"{name}.toml", presets, seen), own)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables into one; where both have a table they merge, elsewhere `above` wins."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result


def apply_overrides(table: dict[str, Any], overrides: Sequence[str], presets: Path | None = None) -> dict[str, Any]:
    """Apply `a.b=c`; the value is read as TOML, and as a plain string when it is not TOML.

    `model.extends=small` replaces what the recipe's own `extends` gave and keeps the recipe's other keys.
    """
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override '{text}': write it as a.b=c")
        nested = _parsed(f"{key} = {value}") or _parsed(f"{key} = {_toml(value.strip())}")
        if nested is None:
            raise ConfigError(f"override '{text}': '{key}' is not a key; write it as a.b=c")
        table = merge(table, _resolve(nested, Path.cwd(), presets, ()))
    return table


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return None


def from_dict(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """Build a dataclass from a table, strictly; `where` names the source in messages."""
    return _build(cls, table, where, ())


def _build(cls: Any, table: Any, where: str, path: tuple[str, ...]) -> Any:
    if not isinstance(table, Mapping):
        raise _error(where, path, f"expected a table of {cls.__name__}, got {table!r}")
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}
    values = {}
    for key, value in table.items():
        if key not in known:
            raise _error(where, (*path, key), f"unknown key{suggestion(key, list(known))} (known: {', '.join(known)})")
        kind_of = known[key].metadata.get("table")
        here = (*path, key)
        if kind_of is not None:
            if not isinstance(value, Mapping):
                raise _error(where, here, f"expected a table of parts by kind, got {value!r}")
            values[key] = {name: _build(kind_of(name), part, where, (*here, name)) for name, part in value.items()}
        else:
            values[key] = _convert(hints[key], value, where, here)
    missing = [n for n, f in known.items() if n not in values and f.default is _MISSING and f.default_factory is _MISSING]
    if missing:
        raise _error(where, (*path, missing[0]), "is required and has no default")
    try:
        return cls(**values)
    except ConfigError as error:
        raise _error(where, path, str(error)) from None


def _convert(hint: Any, value: Any, where: str, path: tuple[str, ...]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None or (value == "none" and type(None) in args):
            return None
        return _first_that_fits([a for a in args if a is not type(None)], value, where, path)
    if origin is typing.Literal:
        if value not in args:
            close = suggestion(str(value), [str(a) for a in args])
            raise _error(where, path, f"{value!r} is not one of {', '.join(map(repr, args))}{close}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _error(where, path, f"expected a list, got {value!r}")
        return tuple(_convert(args[0], item, where, (*path, str(i))) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _error(where, path, f"expected a table, got {value!r}")
        return {key: _convert(args[1], item, where, (*path, key)) for key, item in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else _build(hint, value, where, path)
    return _scalar(hint, value, where, path)


def _scalar(hint: Any, value: Any, where: str, path: tuple[str, ...]) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise _error(where, path, f"expected a finite number, got {value!r}")
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is Any or (isinstance(value, hint) and (hint is bool or not isinstance(value, bool))):
        return value
    raise _error(where, path, f"expected {hint.__name__}, got {value!r}")


def _first_that_fits(hints: list[Any], value: Any, where: str, path: tuple[str, ...]) -> Any:
    errors = []
    for hint in hints:
        try:
            return _convert(hint, value, where, path)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _error(where: str, path: tuple[str, ...], message: str) -> ConfigError:
    place = ".".join(path)
    return ConfigError(": ".join(part for part in (where, f"'{place}'" if place else "", message) if part))


def to_dict(value: Any) -> Any:
    """The table that `from_dict` reads back to an equal object; `None` is left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
        return {name: to_dict(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {key: to_dict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_dict(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def to_toml(value: Any, docs: bool = False) -> str:
    """A dataclass as TOML, each field with its line of documentation when `docs` is set."""
    lines: list[str] = []
    _write_table(value, (), lines, docs)
    return "\n".join(lines).strip() + "\n"


def _write_table(value: Any, path: tuple[str, ...], lines: list[str], docs: bool) -> None:
    if dataclasses.is_dataclass(value):
        items = [(f.name, getattr(value, f.name), f.metadata.get("doc", "")) for f in dataclasses.fields(value) if f.init]
    else:
        items = [(name, item, "") for name, item in value.items()]
    tables = []
    for name, item, doc in items:
        if dataclasses.is_dataclass(item) or isinstance(item, Mapping):
            tables.append((name, item, doc))
        elif item is not None or _may_be_none(value, name):
            comment = f"  # {doc}" if docs and doc else ""
            lines.append(f"{toml_key(name)} = {_toml(item)}{comment}")
    for name, item, doc in tables:
        lines += ["", *([f"# {doc}"] if docs and doc else []), f"[{'.'.join(map(toml_key, (*path, name)))}]"]
        _write_table(item, (*path, name), lines, docs)


def _may_be_none(owner: Any, name: str) -> bool:
    """A `None` must be written when the field's default is something else, or reading back would change it."""
    if not dataclasses.is_dataclass(owner):
        return False
    found = next(f for f in dataclasses.fields(owner) if f.name == name)
    return found.default is not None and found.default is not _MISSING


def toml_key(name: str) -> str:
    """A key as TOML: bare where its letters allow it."""
    return name if _BARE_KEY.fullmatch(name) else toml_string(name)


def toml_string(text: str) -> str:
    """A text as TOML, in quotes, whatever it holds."""
    return '"' + _ESCAPED.sub(lambda found: _ESCAPES.get(found[0]) or f"\\u{ord(found[0]):04x}", text) + '"'


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if dataclasses.is_dataclass(value):
        value = {f.name: item for f in dataclasses.fields(value) if f.init
                 if (item := getattr(value, f.name)) is not None or _may_be_none(value, f.name)}
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return toml_string(str(value))
