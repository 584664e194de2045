"""The Harbor task directory: `task.toml`, `instruction.md`, `environment/`, `solution/`, `tests/`, `steps/`, read and written.

Reading checks everything that is written down and builds nothing; `harbor_tasks.py` makes tasks of it and builds its machine. Taken from
Harbor 0.26's own reader: the fields, their types and defaults (`harbor_schema.py`), the places of files, the older spellings.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnomon.agent.harbor_schema import HarborConfig, Step
from gnomon.agent.toml_text import to_toml
from gnomon.config import from_dict
from gnomon.errors import ConfigError, DataError

FOLDERS = ("environment", "solution", "tests", "steps")
FILES = ("instruction.md", "trajectory.json", "README.md")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([GMKgmk])\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file of a task: where it lies, or its bytes; `executable` is all of its rights that matters."""

    path: Path | None = None
    data: bytes = b""
    executable: bool = False

    @property
    def content(self) -> bytes:
        """Its bytes."""
        return self.path.read_bytes() if self.path is not None else self.data


@dataclass(frozen=True, kw_only=True, slots=True)
class HarborTask:
    """A task directory. `files` are its files but `task.toml`, by relative path; `unknown` lists keys of `task.toml` that nobody reads.

    `folder` is where it was read from, None for one that is about to be written.
    """

    name: str
    config: HarborConfig
    files: Mapping[str, Entry] = field(default_factory=dict)
    folder: Path | None = None
    unknown: tuple[str, ...] = ()

    def text(self, path: str) -> str:
        """A file as text. Raises `DataError` naming it."""
        where = f"{self.folder or self.name}/{path}"
        if path not in self.files:
            raise DataError(f"{where}: there is no such file")
        try:
            return self.files[path].content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: no UTF-8 text ({error.reason} at byte {error.start})") from None

    def below(self, folder: str) -> dict[str, Entry]:
        """The files below a folder, by the path from there."""
        return {path.removeprefix(f"{folder}/"): entry for path, entry in self.files.items() if path.startswith(f"{folder}/")}

    def tests(self, step: Step | None = None) -> str:
        """The folder with the test script: the step's own, else the task's."""
        own = f"steps/{step.name}/tests" if step else "tests"
        return own if f"{own}/test.sh" in self.files else "tests"

    def instruction(self, step: Step | None = None) -> str:
        """What the agent is asked to do."""
        return self.text(f"steps/{step.name}/instruction.md" if step else "instruction.md")


def read(folder: Path) -> HarborTask:
    """A task directory. Raises `DataError` naming the file and the field for what is malformed, missing, or of a wrong type."""
    folder = Path(folder)
    place = folder / "task.toml"
    try:
        table = tomllib.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder}: no task.toml; a Harbor task is a folder with that, instruction.md, environment/ and tests/") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{place}: cannot be read: {error}") from None
    unknown: list[str] = []
    try:
        config = from_dict(HarborConfig, _known(HarborConfig, _current(table, str(place)), "", unknown), str(place))
    except ConfigError as error:
        raise DataError(str(error)) from None
    if config.schema_version.split(".")[0] != "1":
        raise DataError(f"{place}: 'schema_version': {config.schema_version!r}; this reads 1.0 to 1.4")
    task = HarborTask(name=folder.resolve().name, config=config, files=dict(_files(folder)), folder=folder, unknown=tuple(unknown))
    check(task)
    return task


def check(task: HarborTask) -> None:
    """Raises `DataError` for files that must be there and are not."""
    where = task.folder or task.name
    for step in task.config.steps or (None,):
        task.instruction(step)
        if f"{task.tests(step)}/test.sh" in task.files:
            continue
        verifier = step.verifier if step else task.config.verifier
        own = f"steps/{step.name}/tests/test.sh or " if step else ""
        if (verifier.separate or task.config.verifier.separate) and f"{task.tests(step)}/Dockerfile" in task.files:
            continue  # the image of the verifier brings them
        if task.config.environment.os == "windows":
            raise DataError(f"{where}/task.toml: 'environment.os' is \"windows\"; sandboxes here are Linux")
        raise DataError(f"{where}: {own}tests/test.sh is missing; without tests nothing decides whether the task was done")


def write(task: HarborTask, folder: Path) -> Path:
    """Write a task directory; `read` gives the same back. Raises `DataError` where it would be unreadable, or the folder is not empty."""
    check(task)
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder}: is not empty; name a new folder")
    for path in task.files:
        parts = path.split("/")
        if path.startswith("/") or ".." in parts or "" in parts or (parts[0] not in FOLDERS and path not in FILES):
            raise DataError(f"{task.name}: file {path!r} has no place in a task; it lies in {', '.join(FOLDERS)}, or is {', '.join(FILES)}")
    for path, entry in task.files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(entry.content)
        target.chmod(0o755 if entry.executable else 0o644)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment").mkdir(exist_ok=True)
    (folder / "task.toml").write_text(to_toml(_table(task.config)), encoding="utf-8")
    return folder


def _files(folder: Path) -> Iterator[tuple[str, Entry]]:
    """The files of a task by relative path. A link must stay in the task, or tests could be swapped for files of the host."""
    root = folder.resolve()
    names = [folder / name for name in FILES if (folder / name).is_file()]
    for part in FOLDERS:
        for place, folders, files in os.walk(folder / part, followlinks=False):
            for name in folders:
                if (Path(place) / name).is_symlink():
                    raise DataError(f"{Path(place) / name}: a link to a folder; copy the folder there")
            names += [Path(place) / name for name in files]
    for path in sorted(names):
        if not path.resolve().is_relative_to(root):
            raise DataError(f"{path}: a link that leads out of the task; copy the file there")
        if not path.is_file():
            raise DataError(f"{path}: is no file, or a link to nothing")
        yield path.relative_to(folder).as_posix(), Entry(path=path, executable=bool(path.stat().st_mode & 0o100))


def _current(table: dict[str, Any], where: str) -> dict[str, Any]:
    """The table in the words of schema 1.4: what earlier schemas called otherwise is renamed, as Harbor does."""
    table = dict(table)
    if "version" in table:
        table.setdefault("schema_version", table.pop("version"))
        table.pop("version", None)
    table.pop("multi_step_reward_mode", None)  # dropped by Harbor too
    if isinstance(table.get("environment"), dict):
        table["environment"] = _environment(table["environment"], f"{where}: 'environment")
    verifiers = [table, *(step for step in table.get("steps", ()) if isinstance(step, dict))]
    for owner in verifiers:
        verifier = owner.get("verifier")
        if isinstance(verifier, dict) and isinstance(verifier.get("environment"), dict):
            owner["verifier"] = {**verifier, "environment": _environment(verifier["environment"], f"{where}: 'verifier.environment")}
        if isinstance(owner.get("artifacts"), list):
            owner["artifacts"] = [{"source": item} if isinstance(item, str) else item for item in owner["artifacts"]]
    return table


def _environment(table: dict[str, Any], where: str) -> dict[str, Any]:
    table = dict(table)
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if old not in table:
            continue
        text = table.pop(old)
        match = _SIZE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise DataError(f"{where}.{old}': {text!r}; write a size such as \"2G\", or {new} = 2048")
        size = int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2].upper()])
        if table.setdefault(new, size) != size:
            raise DataError(f"{where}.{old}': {text!r} contradicts {new} = {table[new]!r}; leave the older one out")
    allowed = table.pop("allow_internet", None)
    if allowed is not None and not isinstance(allowed, bool):
        raise DataError(f"{where}.allow_internet': {allowed!r}; write network_mode = \"public\" or \"no-network\"")
    if allowed is not None and "network_mode" not in table and "allowed_hosts" not in table:
        table["network_mode"] = "public" if allowed else "no-network"
    if isinstance(table.get("os"), str):
        table["os"] = table["os"].lower()
    return table


def _known(cls: type, table: Any, path: str, unknown: list[str]) -> Any:
    """The table without the keys that no field of `cls` reads; their paths go into `unknown`."""
    if not isinstance(table, Mapping):
        return table
    hints = typing.get_type_hints(cls)
    kept = {}
    for name, value in table.items():
        if name not in hints:
            unknown.append(f"{path}{name}")
            continue
        part = _part(hints[name])
        if part is None:
            kept[name] = value
        elif isinstance(value, list):
            kept[name] = [_known(part, item, f"{path}{name}[{i}].", unknown) for i, item in enumerate(value)]
        else:
            kept[name] = _known(part, value, f"{path}{name}.", unknown)
    return kept


def _part(hint: Any) -> type | None:
    """The dataclass that a field holds, alone, optional or in a list."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    if typing.get_origin(hint) in (tuple, typing.Union, types.UnionType):
        return next((part for part in map(_part, typing.get_args(hint)) if part), None)
    return None


def _table(value: Any, name: str = "") -> Any:
    """A dataclass as a table without what has its default; `schema_version` is always there."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        table = {}
        for each in dataclasses.fields(value):
            item = getattr(value, each.name)
            default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
            if item != default or each.name == "schema_version":
                table[each.name] = _table(item, each.name)
        return table["source"] if name == "artifacts" and [*table] == ["source"] else table
    if isinstance(value, tuple):
        return [_table(item, name) for item in value]
    return value
