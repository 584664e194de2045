"""A hidden test's program: runs the agent's code in a process apart, without rights, and judges what that process says.

It lies in `/tests` beside `job.json` and writes `/logs/verifier/reward.json`. Two kinds of job. `examples`: a docstring's examples are run,
and what they print is compared here, where alone it is known. `tests`: test files are run once with the true module and once with the
agent's; the agent's must pass each test that the true one passes. The process apart cannot read `/tests` nor write the reward. What it says
counts only with a word at its end that code which ends the process early does not get to say; code that searches its own interpreter for
that word could, which only the examples, whose results it would have to know, do not mind.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import unittest
from types import ModuleType
from typing import Any

TESTS, REWARD = "/tests", "/logs/verifier/reward.json"
NOBODY = 65534
MOST_OUTPUT = 4 << 20


def main() -> None:
    """Judge the job, write the reward. Raises `SystemExit` in a machine with one user: code with the judge's rights would judge itself."""
    if not _can_step_down():
        raise SystemExit("this machine has one user, so the agent's code cannot be run without rights; use sandboxes of root's")
    with open(os.path.join(TESTS, "job.json"), encoding="utf-8") as file:
        job = json.load(file)
    with open(__file__, encoding="utf-8") as file:
        program = file.read()
    os.chmod(TESTS, 0o700)
    os.chmod(os.path.dirname(REWARD), 0o700)
    table = {"examples": by_examples, "tests": by_tests}[job["kind"]](job, program)
    with open(REWARD, "w", encoding="utf-8") as file:
        json.dump(table, file)


def by_examples(job: dict[str, Any], program: str) -> dict[str, float]:
    """1 when each example prints what it should."""
    sources = [example["source"] for example in job["examples"]]
    said = apart(program, {**job, "kind": "examples", "examples": sources}, job["seconds"])
    said = said if isinstance(said, list) and len(said) == len(sources) else [None] * len(sources)
    right = [_right(example, got) for example, got in zip(job["examples"], said)]
    return {"reward": float(all(right)), "share": sum(right) / len(right)}


def _right(example: dict[str, Any], got: Any) -> bool:
    if not isinstance(got, list) or len(got) != 2 or not all(isinstance(part, str) for part in got):
        return False
    how, text = got
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    if example["raises"] is not None:
        return how == "raised" and doctest.OutputChecker().check_output(example["raises"], text, flags)
    return how == "printed" and doctest.OutputChecker().check_output(example["want"], text, flags)


def by_tests(job: dict[str, Any], program: str) -> dict[str, float]:
    """1 when the agent's module passes all that the true one passes. Raises `SystemExit` where the true one passes nothing.

    `folder`, where a job has it, is the agent's: the true modules are all of it, and nothing of what lies there runs beside them.
    """
    found = {}
    for which in ("true", "given"):
        place = tempfile.mkdtemp(prefix="judge-")
        os.chmod(place, 0o755)
        code = os.path.join(place, "code")
        left_out = job.get("folder") if which == "true" else None
        shutil.copytree(job["root"], code, ignore_dangling_symlinks=True, ignore=_at(job["root"], left_out))
        for path, text in {**job["tests"], **(job["true"] if which == "true" else {})}.items():
            _write(os.path.join(code, path), text)
        said = apart(program, {"kind": "tests", "root": code, "modules": job["modules"]}, job["seconds"])
        shutil.rmtree(place)  # the true module is gone before the agent's runs
        found[which] = set(said) if isinstance(said, list) and all(isinstance(name, str) for name in said) else set()
    if not found["true"]:
        raise SystemExit("the true module passes no test here, so the tests say nothing")
    passed = found["true"] & found["given"]
    return {"reward": float(passed == found["true"]), "share": len(passed) / len(found["true"])}


def _at(root: str, name: str | None) -> Any:
    """For `copytree`: leaves one entry of the topmost folder out."""
    return lambda place, names: [name] if place == root else []


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def apart(program: str, order: dict[str, Any], seconds: float) -> Any:
    """What a process without rights says to an order; None where it says nothing in time, or not to the end."""
    word = secrets.token_hex(16)
    as_nobody: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if _can_step_down() else {}
    process = subprocess.Popen([sys.executable, "-I", "-c", program, "apart"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
                               env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}, **as_nobody)
    try:
        out, _ = process.communicate(json.dumps({**order, "word": word}).encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    try:
        said = json.loads(out[:MOST_OUTPUT].decode("utf-8", "replace").strip().rpartition("\n")[2])
    except (ValueError, RecursionError):
        return None
    return said.get("result") if isinstance(said, dict) and said.get("word") == word else None


def _can_step_down() -> bool:
    """Whether a process may become nobody: not where a sandbox has one user only."""
    if os.geteuid() != 0:
        return False
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return sum(int(line.split()[2]) for line in file if int(line.split()[0]) <= NOBODY) > NOBODY
    except (OSError, ValueError):
        return False


def child() -> None:
    """The process apart: read the order, do it, say the result."""
    order = json.loads(sys.stdin.buffer.read())
    word = order.pop("word")
    end = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the code prints by itself goes nowhere
    sys.path.insert(0, order["root"])
    result = _examples(order) if order["kind"] == "examples" else _tests(order)
    print(json.dumps({"result": result, "word": word}), file=end, flush=True)


class _Recorder(doctest.DocTestRunner):
    """Keeps what each example printed or raised."""

    def __init__(self) -> None:
        super().__init__(verbose=False)
        self.said: list[tuple[str, str]] = []

    def report_start(self, out: Any, test: Any, example: Any) -> None:
        """Nothing."""

    def report_success(self, out: Any, test: Any, example: Any, got: str) -> None:
        """It printed nothing."""
        self.said.append(("printed", got))

    def report_failure(self, out: Any, test: Any, example: Any, got: str) -> None:
        """It printed something."""
        self.said.append(("printed", got))

    def report_unexpected_exception(self, out: Any, test: Any, example: Any, exc_info: Any) -> None:
        """It raised."""
        self.said.append(("raised", traceback.format_exception_only(*exc_info[:2])[-1]))


def _examples(order: dict[str, Any]) -> list[tuple[str, str]]:
    module = importlib.import_module(order["module"])
    examples = [doctest.Example(source, "") for source in order["examples"]]
    runner = _Recorder()
    runner.run(doctest.DocTest(examples, {**vars(module), "__name__": "__main__"}, "examples", None, None, None), out=lambda text: None)
    return runner.said


def _tests(order: dict[str, Any]) -> list[str]:
    sys.modules["pytest"] = _pytest()
    passed = []
    for name in order["modules"]:
        module = importlib.import_module(name)
        for label, case in _cases(module):
            result = unittest.TestResult()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                case.run(result)
            if result.wasSuccessful() and not result.skipped and result.testsRun:
                passed.append(f"{name}:{label}")
    return passed


def _cases(module: ModuleType) -> list[tuple[str, unittest.TestCase]]:
    """The tests of a module: functions, methods of `Test…` classes, cases of `unittest`; those with fixtures are left out."""
    found: list[tuple[str, unittest.TestCase]] = []
    for name, thing in vars(module).items():
        if isinstance(thing, type) and issubclass(thing, unittest.TestCase):
            found += [(f"{name}.{case._testMethodName}", case) for case in unittest.defaultTestLoader.loadTestsFromTestCase(thing)]  # type: ignore[union-attr, misc]
        elif isinstance(thing, type) and name.startswith("Test") and thing.__init__ is object.__init__:  # type: ignore[misc]
            found += [(f"{name}.{each}", unittest.FunctionTestCase(getattr(thing(), each))) for each in dir(thing)
                      if each.startswith("test") and _plain(getattr(thing, each), 1)]
        elif callable(thing) and name.startswith("test") and _plain(thing, 0):
            found.append((name, unittest.FunctionTestCase(thing)))
    return found


def _plain(function: Any, own: int) -> bool:
    """Whether a function can be called with no argument but itself."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_argcount - len(function.__defaults__ or ()) <= own and not code.co_kwonlyargcount


def _pytest() -> ModuleType:
    """As much of pytest as plain tests use; what it lacks fails the test for the true module too, and then does not count."""
    module: Any = ModuleType("pytest")

    @contextlib.contextmanager
    def raising(kind: Any, match: str | None) -> Any:
        try:
            yield
        except kind as error:
            if match is not None and not re.search(match, str(error)):
                raise AssertionError(f"{match!r} is not in {error}") from error
        else:
            raise AssertionError(f"{kind} was not raised")

    def raises(kind: Any, function: Any = None, *rest: Any, match: str | None = None) -> Any:
        if function is None:
            return raising(kind, match)
        with raising(kind, match):
            return function(*rest)

    def skip(reason: str = "", **_: Any) -> None:
        raise unittest.SkipTest(reason)

    class Mark:
        def __getattr__(self, name: str) -> Any:
            def decorate(*arguments: Any, **_: Any) -> Any:
                return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else lambda function: function
            return decorate

        def parametrize(self, names: Any, values: Any, **_: Any) -> Any:
            """All values in one test."""
            several = not isinstance(names, str) or "," in names
            keys = [key.strip() for key in (names.split(",") if isinstance(names, str) else names)]

            def decorate(function: Any) -> Any:
                def every() -> None:
                    for value in values:
                        function(**dict(zip(keys, value if several else [value])))
                return every
            return decorate

    module.raises, module.skip, module.mark = raises, skip, Mark()
    return module


if __name__ == "__main__":
    child() if sys.argv[1:] == ["apart"] else main()
