"""Puzzles of the package `reasoning-gym`: arithmetic, logic, games, algorithms, as many as wanted.

Settings: `families`, names of its data sets; `count` of each; `seed`; `config`, for each family a table of its own parameters; `partial`,
whether half-right answers earn what the package gives them, false by default. Families whose scorer evaluates the answer as a program are
refused: an answer is somebody else's text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from gnomon.agent.solution import Solution
from gnomon.agent.task import Check, Task
from gnomon.agent.task_source import settings
from gnomon.agent.verifiers.reasoning_gym import package
from gnomon.errors import ConfigError, DataError
from gnomon.extend import suggestion

ASKED = "Think as long as you like, then write your final answer between <answer> and </answer>."
DEFAULT = ("chain_sum", "leg_counting", "simple_equations", "spell_backward", "word_sorting")
_RUNS_TEXT = re.compile(r"\b(?:eval|exec|sympify|parse_expr)\(")


class Source:
    """The families in turn: one puzzle of each, then the next of each."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.families = [*fields.rows("families")] or [*DEFAULT]
        self.count, self.seed, self.partial = fields.whole("count", 10, 1), fields.whole("seed", 0), fields.flag("partial", False)
        self.config = {name: dict(each) for name, each in fields.table("config").items() if isinstance(each, Mapping)}
        fields.done()
        if not all(isinstance(name, str) for name in self.families) or len(set(self.families)) < len(self.families):
            raise DataError(f"'families': {self.families!r}; write names, each once")
        for name in fields.table("config"):
            if name not in self.families or name not in self.config:
                raise DataError(f"'config.{name}': write a table for one of the 'families'")

    def tasks(self) -> Iterator[Task]:
        """The puzzles. Raises `ConfigError` for a family that is not there or whose scorer is not safe."""
        version = package().__version__
        sets = {name: opened(name, self.seed, self.count, self.config.get(name, {})) for name in self.families}
        for index in range(self.count):
            for name, puzzles in sets.items():
                entry = puzzles[index]
                given = {"family": name, "seed": self.seed, "size": self.count, "index": index, "version": version,
                         "config": self.config.get(name, {}), "partial": self.partial}
                known = entry.get("answer")
                yield Task(id=f"reasoning-gym/{name}/{self.seed}-{index}", prompt=f"{entry['question']}\n\n{ASKED}",
                           check=Check(kind="reasoning_gym", settings={key: value for key, value in given.items() if value != {}}),
                           solution=Solution.says(f"<answer>{known}</answer>") if isinstance(known, str) and known else None,
                           metadata={"source": "reasoning-gym", "family": name})


def opened(name: str, seed: int, size: int, config: Mapping[str, Any]) -> Any:
    """A family's data set; `[index]` is a puzzle, `score_answer` its scorer."""
    known = package().factory.DATASETS
    if name not in known:
        raise ConfigError(f"'families': reasoning-gym has no '{name}'{suggestion(name, sorted(known))}")
    if why := unsafe(name):
        raise ConfigError(f"'families': {name}: {why}")
    try:
        return package().create_dataset(name, seed=seed, size=size, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"'config.{name}': reasoning-gym refuses it: {error}") from None


@cache
def unsafe(name: str) -> str | None:
    """Why a family's scorer must not see an answer from outside, else None."""
    scorer = package().factory.DATASETS[name][0].score_answer
    if _RUNS_TEXT.search(inspect.getsource(scorer)):
        return "its scorer evaluates the answer as a program, which an agent's answer must never be; choose another family"
    return None
