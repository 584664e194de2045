"""Functions of installed packages, to be written again from their docstrings.

Settings: `packages`, names; `count`, how many functions of each at most; `seed`, which; `image`, `host` by default; `shown`, the share of
a docstring's examples that the agent sees, a half by default. All examples decide. The agent's function runs without rights in a
process that does not know what is expected.
"""

from __future__ import annotations

import ast
import doctest
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from gnomon.agent import installed
from gnomon.agent.solution import Solution
from gnomon.agent.task import Budget, Check, Task
from gnomon.agent.task_source import settings
from gnomon.errors import DataError

SECONDS = 30.0
MIN_EXAMPLES, MIN_LINES = 2, 3
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """The packages one after another, their functions in an order that the seed decides."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.packages = [*fields.rows("packages")]
        self.count, self.seed = fields.whole("count", 10, 1), fields.whole("seed", 0)
        self.image, self.shown = fields.text("image", "host"), fields.number("shown", 0.5)
        fields.done()
        if not self.packages or not all(isinstance(name, str) for name in self.packages):
            raise DataError(f"'packages': {self.packages!r}; name at least one installed package")
        if not 0 <= self.shown <= 1:
            raise DataError(f"'shown': {self.shown!r}; write a share from 0 to 1")

    def tasks(self) -> Iterator[Task]:
        """The tasks. Those whose examples do not hold in the machine are refused by validation."""
        for name in self.packages:
            package = installed.read(name, self.image)
            found = [(path, function) for path, text in package.modules.items() for function in functions(text)]
            random.Random(f"doctests {self.seed} {name}").shuffle(found)
            for path, function in found[:self.count]:
                yield self._task(package, path, function)

    def _task(self, package: installed.Package, path: str, function: Function) -> Task:
        text = package.modules[path]
        examples = doctest.DocTestParser().get_examples(ast.get_docstring(function) or "")
        target = f"{installed.ROOT}/{path}"
        module = installed.dotted(path)
        job = {"kind": "examples", "root": installed.ROOT, "module": module, "seconds": SECONDS, "examples": [
            {"source": each.source, "want": each.want, "raises": each.exc_msg} for each in examples]}
        files = {"test.sh": installed.SCRIPT, "judge.py": installed.judging(), "job.json": json.dumps(job)}
        hollow = emptied(text, function, round(len(examples) * self.shown))
        return Task(
            id=f"doctests/{module}.{function.name}", domain="coding", image=self.image, workdir=installed.ROOT,
            prompt=f"In the package {package.name} in {installed.ROOT}, the function `{function.name}` of {target} has lost its body. "
                   "Write it again, so that it does what its docstring says. It is checked with examples, of which the docstring shows "
                   "some. Change nothing else.",
            files={**package.files, target: hollow.encode()}, artifacts=(target,), budget=Budget(turns=40, seconds=900.0),
            check=Check(kind="tests", settings={"files": files, "timeout_seconds": 120.0}),
            solution=Solution(files={target: text.encode()}), metadata={"source": "doctests", "package": package.name})


def functions(text: str) -> list[Function]:
    """The functions at the top of a module whose docstring has examples enough, and whose body is more than a line or two."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    found = []
    for node in tree.body:
        if not isinstance(node, Function) or node.decorator_list or node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node) or ""
        rest = node.body[1:]
        if not rest or (rest[-1].end_lineno or 0) - rest[0].lineno + 1 < MIN_LINES:
            continue
        try:
            examples = doctest.DocTestParser().get_examples(docstring)
        except ValueError:
            continue
        if len(examples) >= MIN_EXAMPLES and sum(bool(each.want) for each in examples) >= MIN_EXAMPLES \
                and not any(option for each in examples for option in each.options):
            found.append(node)
    return found


def emptied(text: str, function: Function, keep: int) -> str:
    """The module with a function's body gone, and of its examples the first `keep`."""
    lines = text.splitlines(keepends=True)
    docstring, last = function.body[0], function.body[-1]
    indent = " " * docstring.col_offset
    first, end = docstring.lineno - 1, docstring.end_lineno or docstring.lineno
    shown = _without("".join(lines[first:end]), keep)
    body = f"{indent}raise NotImplementedError\n"
    return "".join(lines[:first]) + shown + body + "".join(lines[last.end_lineno or end:])


def _without(docstring: str, keep: int) -> str:
    """A docstring's source without its examples after the first `keep`."""
    kept, seen, inside = [], 0, False
    lines = docstring.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.lstrip(" rRuUbB\"'").startswith(">>>"):
            seen, inside = seen + 1, True
        elif not line.strip():
            inside = False
        if inside and seen > keep and number != len(lines) - 1:
            continue
        kept.append(line)
    return "".join(kept)
