"""Rows of the Berkeley function calling leaderboard: functions, a request, and which calls fulfil it.

Settings: `categories`, by default those whose rows have one turn and Python's types; `path`, a folder with the data, by default that of the
installed package `bfcl-eval`. Only its files are read, nothing of the package runs, so it may be installed without what it depends on.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gnomon.agent.fields import Fields, parsed
from gnomon.agent.solution import Solution
from gnomon.agent.task import Check, Task
from gnomon.agent.task_source import settings
from gnomon.errors import ConfigError, DataError
from gnomon.extend import suggestion

CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance", "live_simple", "live_multiple", "live_parallel",
              "live_parallel_multiple", "live_irrelevance")
PREFIX = "BFCL_v4_"
ASKED = ("You have these functions. Answer with the calls that fulfil the request, as a JSON list of "
         '{"name": …, "arguments": {…}} and nothing else; an empty list where none of the functions can. Nothing is executed.')


class Source:
    """The categories one after another, in the order of their files."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.categories = [*fields.rows("categories")] or [*CATEGORIES]
        place = fields.maybe("path", fields.text)
        self.path = Path(place) if place else None
        fields.done()
        for name in self.categories:
            if name not in CATEGORIES:
                raise DataError(f"'categories': {name!r}{suggestion(str(name), CATEGORIES)}; there are {', '.join(CATEGORIES)}. Rows of "
                                "several turns, or of other languages' types, are not read")

    def tasks(self) -> Iterator[Task]:
        """The rows as tasks. Raises `ConfigError` where the data is not there."""
        folder = self.path or installed()
        for category in self.categories:
            answers = {row.text("id"): row.rows("ground_truth") for row in _rows(folder / "possible_answer" / f"{PREFIX}{category}.json")} \
                if "irrelevance" not in category else {}
            for row in _rows(folder / f"{PREFIX}{category}.json"):
                yield _task(category, row, answers)


def _task(category: str, row: Fields, answers: Mapping[str, Any]) -> Task:
    identity = row.text("id")
    if answers and identity not in answers:
        raise DataError(f"bfcl row {identity}: has no answer in possible_answer/{PREFIX}{category}.json")
    functions, expected = [*row.rows("function")], [*answers.get(identity, ())]
    turns = [message for turn in row.rows("question") for message in turn]
    request = "\n\n".join(message["content"] for message in turns if message["role"] == "user")
    system = "\n\n".join(message["content"] for message in turns if message["role"] == "system") or None
    calls = [{"name": name, "arguments": simplest(wanted)} for call in expected for name, wanted in call.items()]
    return Task(id=f"bfcl/{identity}", system=system, prompt=f"{ASKED}\n\n{json.dumps(functions)}\n\n{request}",
                check=Check(kind="calls", settings={"expected": expected, "functions": functions}),
                solution=Solution.says(json.dumps(calls)), metadata={"source": "bfcl", "category": category})


def simplest(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are right: of each the first that is accepted, those that may be left out left out where that stands first."""
    firsts = {name: accepted[0] if isinstance(accepted, list) and accepted else accepted for name, accepted in wanted.items()}
    return {name: _literal(first) for name, first in firsts.items() if first != ""}


def _literal(value: Any) -> Any:
    """A value that a pattern accepts: tables list what they accept for each key."""
    if isinstance(value, Mapping):
        return simplest(value)
    if isinstance(value, list):
        return [_literal(item) if isinstance(item, Mapping) else item for item in value]
    return value


def _rows(path: Path) -> Iterator[Fields]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; 'path' names the folder with the leaderboard's data")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Fields(parsed(line, f"{path}:{number}"), f"{path}:{number}")


def installed() -> Path:
    """The data folder of the installed package. Raises `ConfigError` with the remedy where it is not."""
    found = importlib.util.find_spec("bfcl_eval")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("rows of the function calling leaderboard need the package bfcl-eval: pip install --no-deps bfcl-eval "
                          "(only its data is read), or 'path' to a folder with the data")
    return Path(found.submodule_search_locations[0]) / "data"
