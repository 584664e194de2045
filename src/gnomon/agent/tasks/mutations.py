"""Faults put into installed packages that ship their tests, to be found and mended.

Settings: `packages`, names; `count`, faults for each; `seed`; `image`, `host` by default; `says`, what the agent is told: the `module` with
the fault, or only the `package`. A fault that no test notices is refused by validation, so ask for more than are needed.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gnomon.agent import installed
from gnomon.agent.solution import Solution
from gnomon.agent.task import Budget, Check, Task
from gnomon.agent.task_source import settings
from gnomon.errors import DataError

SECONDS = 60.0
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is",
            ast.In: "not in", ast.NotIn: "in"}
COUNTED = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"),
           ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&")}
SPELLED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: r"is\s+not",
           ast.In: "in", ast.NotIn: r"not\s+in"}


@dataclass(frozen=True, slots=True)
class Fault:
    """Bytes `start` to `end` of a module become `text`."""

    start: int
    end: int
    text: str

    def put(self, module: str) -> str:
        """The module with the fault."""
        data = module.encode()
        return (data[:self.start] + self.text.encode() + data[self.end:]).decode()


class Source:
    """The packages one after another, faults drawn by the seed, no place twice."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.packages = [*fields.rows("packages")]
        self.count, self.seed = fields.whole("count", 10, 1), fields.whole("seed", 0)
        self.image, self.says = fields.text("image", "host"), fields.text("says", "module")
        fields.done()
        if not self.packages or not all(isinstance(name, str) for name in self.packages):
            raise DataError(f"'packages': {self.packages!r}; name at least one installed package that ships its tests")
        if self.says not in ("module", "package"):
            raise DataError(f"'says': {self.says!r}; write module or package")

    def tasks(self) -> Iterator[Task]:
        """The tasks. Raises `DataError` for a package without a module that has a test file of its name."""
        for name in self.packages:
            package = installed.read(name, self.image)
            tested = {path: tests for path in package.modules if (tests := covering(package, path))}
            if not tested:
                raise DataError(f"'packages': '{name}' ships no test file test_X.py beside a module X.py, so no fault would be noticed")
            places = [(path, fault) for path in sorted(tested) for fault in faults(package.modules[path])]
            random.Random(f"mutations {self.seed} {name}").shuffle(places)
            for number, (path, fault) in enumerate(places[:self.count]):
                yield self._task(package, path, fault, tested[path], number)

    def _task(self, package: installed.Package, path: str, fault: Fault, tests: list[str], number: int) -> Task:
        text, target = package.modules[path], f"{installed.ROOT}/{path}"
        folders = {f"{place.rpartition('/')[0]}/__init__.py" for place in tests} & set(package.tests)
        job = {"kind": "tests", "root": installed.ROOT, "modules": [installed.dotted(each) for each in tests], "seconds": SECONDS,
               "tests": {each: package.tests[each] for each in (*tests, *sorted(folders))}, "true": {path: text}}
        if self.says == "package":  # the agent's whole package is carried, of which nothing may run beside the true module
            job |= {"true": dict(package.modules), "folder": package.name}
        files = {"test.sh": installed.SCRIPT, "judge.py": installed.judging(), "job.json": json.dumps(job)}
        where = target if self.says == "module" else f"{installed.ROOT}/{package.name}"
        return Task(
            id=f"mutations/{installed.dotted(path)}/{self.seed}-{number}", domain="coding", image=self.image, workdir=installed.ROOT,
            prompt=f"A change broke the package {package.name} in {installed.ROOT}: tests of it that passed before fail now. The fault is "
                   f"in {where}, in one place. Find it and mend it; leave the rest as it is. The tests are not here.",
            files={**package.files, target: fault.put(text).encode()}, artifacts=(where,), budget=Budget(turns=60, seconds=1200.0),
            check=Check(kind="tests", settings={"files": files, "timeout_seconds": 4 * SECONDS}),
            solution=Solution(files={target: text.encode()}), metadata={"source": "mutations", "package": package.name})


def covering(package: installed.Package, path: str) -> list[str]:
    """The test files that have a module's name: `test_part.py` for `part.py`."""
    stem = path.rsplit("/", 1)[-1].removesuffix(".py")
    return sorted(each for each in package.tests if each.rsplit("/", 1)[-1] in (f"test_{stem}.py", f"{stem}_test.py"))


def faults(text: str) -> list[Fault]:
    """What could be changed inside the functions of a module, in the order of the text."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    found = [fault for function in ast.walk(tree) if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
             for part in function.body for node in ast.walk(part) if (fault := _fault(node, data, span)) is not None]
    return sorted({fault.start: fault for fault in found}.values(), key=lambda fault: fault.start)


def _fault(node: ast.AST, data: bytes, span: Any) -> Fault | None:
    """How one place may be changed, if it may."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        kind = type(node.ops[0])
        return _between(data, span(node.left)[1], span(node.comparators[0])[0], SPELLED[kind], COMPARED[kind])
    if isinstance(node, ast.BinOp) and type(node.op) in COUNTED:
        old, new = COUNTED[type(node.op)]
        return _between(data, span(node.left)[1], span(node.right)[0], re.escape(old), new)
    if isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        return _between(data, span(node.values[0])[1], span(node.values[1])[0], old, new)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return Fault(span(node)[0], span(node.operand)[0], "") if data[span(node)[0]:span(node.operand)[0]].strip() == b"not" else None
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return Fault(start=span(node)[0], end=span(node)[1], text=str(not node.value))
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 1 << 31:
        return Fault(start=span(node)[0], end=span(node)[1], text=str(node.value + 1))
    return None


def _between(data: bytes, start: int, end: int, pattern: str, new: str) -> Fault | None:
    """The operator between two operands, where nothing but it, spaces and brackets stand there."""
    match = re.fullmatch(rf"([\s)]*)({pattern})([\s(]*)", data[start:end].decode())
    return Fault(start + len(match[1].encode()), start + len((match[1] + match[2]).encode()), new) if match else None
