"""Tasks that somebody wrote down: files of JSON Lines, a task in each line. Settings: `path`, a file or a list of files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gnomon.agent.task import Task
from gnomon.agent.task_source import settings
from gnomon.errors import ConfigError, DataError


class Source:
    """Reads a line at a time; empty lines are passed over."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.paths = paths(fields.get("path"))
        fields.done()

    def tasks(self) -> Iterator[Task]:
        """The tasks in the order of the files. Raises `DataError` naming the file, the line and the field."""
        for path in self.paths:
            if not path.is_file():
                raise ConfigError(f"'path': {path}: no such file; name a file of JSON Lines, a task in each line")
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield Task.parse(line, f"{path}:{number}")


def paths(value: Any) -> list[Path]:
    """A setting that is a path or a list of paths."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(each, str) and each for each in given):
        raise DataError(f"'path': {value!r}; write a path, or a list of paths")
    return [Path(each) for each in given]
