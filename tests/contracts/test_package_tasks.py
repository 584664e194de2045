"""Tasks made of installed packages, of puzzles and of function calls: the same each time, valid, and cheats earn nothing."""

import ast
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from sandbox_backends import namespaces

from gnomon.agent import installed, task_source
from gnomon.agent.inside import apart
from gnomon.agent.solution import Solution
from gnomon.agent.task import Check, Task
from gnomon.agent.tasks import doctests, mutations
from gnomon.agent.validate import validate, validated
from gnomon.agent.verifiers.calls import matched
from gnomon.errors import ConfigError, DataError
from gnomon.sandbox.sandbox import Limits

SUMS = '''"""Sums."""


def total(values, start=0):
    """The sum of the even values.

    >>> total([2, 4, 5])
    6
    >>> total([8])
    8
    >>> total([10, 12], start=1)
    23
    >>> total(["x"])
    Traceback (most recent call last):
        ...
    TypeError: not all arguments converted during string formatting
    """
    for value in values:
        if value % 2 == 0:
            start = start + value
    return start


def plain(a, b):
    return a - b
'''
CHECKS = '''import pytest

from tinysums.sums import plain, total


def test_total():
    assert total([1, 2, 3, 4]) == 6 and total([], 3) == 3


@pytest.mark.parametrize("a, b", [(1, 2), (5, 3)])
def test_plain(a, b):
    assert plain(a, b) == a - b


def test_raises():
    with pytest.raises(TypeError):
        total(["x"])


class TestMore:
    def test_more(self):
        assert plain(2, 1) == 1


def test_with_a_fixture(tmp_path):
    assert False


def test_that_fails_anyway():
    assert False
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package of our own, where Python finds it."""
    for name, text in {"__init__.py": "", "sums.py": SUMS, "tests/__init__.py": "", "tests/test_sums.py": CHECKS}.items():
        path = tmp_path / "site" / "tinysums" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return "tinysums"


def made(**table: Any) -> list[Task]:
    return [*task_source.opened(table).tasks()]


def test_a_function_loses_its_body_and_some_examples(package):
    [task] = made(kind="doctests", packages=[package])
    assert task == made(kind="doctests", packages=[package])[0] and Task.parse(task.text) == task
    hollow = task.files["/app/tinysums/sums.py"].decode()
    ast.parse(hollow)
    assert "raise NotImplementedError" in hollow and "total([8])" in hollow and "23" not in hollow and "value % 2" not in hollow
    assert "def plain" in hollow and task.solution.files["/app/tinysums/sums.py"].decode() == SUMS
    assert not any("tests" in path for path in task.files) and "23" not in task.shown().text
    assert "23" in json.loads(task.check.settings["files"]["job.json"])["examples"][2]["want"]


def test_faults_change_one_place_each():
    found = mutations.faults(SUMS)
    texts = {fault.put(SUMS) for fault in found}
    assert len(texts) == len(found) >= 6 and SUMS not in texts
    for text in texts:
        ast.parse(text)
    assert any("value * 2 == 0" in text for text in texts) and any("value % 2 != 0" in text for text in texts)
    assert any("a + b" in text for text in texts)
    unusual = "def f(a, b):\n    é = (a) < (b)  # <\n    return not a and (b\n        or 1) and (a is  not b) and a not in b\n"
    for fault in mutations.faults(unusual):
        ast.parse(fault.put(unusual))


def test_faults_are_drawn_by_the_seed(package):
    first = made(kind="mutations", packages=[package], count=4)
    assert first == made(kind="mutations", packages=[package], count=4)
    assert len({task.files["/app/tinysums/sums.py"] for task in first}) == 4
    assert made(kind="mutations", packages=[package], count=4, seed=1) != first
    assert first[0].artifacts == ("/app/tinysums/sums.py",) and "test_more" not in first[0].shown().text
    assert made(kind="mutations", packages=[package], count=1, says="package")[0].artifacts == ("/app/tinysums",)


@pytest.mark.parametrize(("table", "error", "says"), [
    ({"kind": "doctests"}, DataError, "'packages'"), ({"kind": "doctests", "packages": ["no_such_pkg"]}, ConfigError, "is not installed"),
    ({"kind": "doctests", "packages": ["numpy"]}, ConfigError, "compiled parts"),
    ({"kind": "doctests", "packages": [1]}, DataError, "'packages'"),
    ({"kind": "doctests", "packages": ["json"], "shown": 2}, DataError, "'shown'"),
    ({"kind": "mutations", "packages": ["rich"]}, DataError, "ships no test file"),
    ({"kind": "mutations", "packages": ["rich"], "says": "all"}, DataError, "'says'"),
    ({"kind": "reasoning_gym", "families": ["a", "a"]}, DataError, "'families'"),
    ({"kind": "reasoning_gym", "families": ["a"], "config": {"b": {}}}, DataError, "'config.b'"),
    ({"kind": "bfcl", "categories": ["multi_turn"]}, DataError, "'categories': 'multi_turn'"),
    ({"kind": "bfcl", "path": "/nowhere"}, ConfigError, "no such file"),
])
def test_what_cannot_be_made_is_said(table, error, says):
    with pytest.raises(error, match=says):
        made(**table)


SMALL = Limits(memory_bytes=256 << 20, disk_bytes=64 << 20)
CHEATS = {
    "ends the process with success": "import os\nos._exit(0)\n",
    "says it passed": "import sys\nprint('{\"result\": [[\"printed\", \"6\\\\n\"]] * 4, \"word\": \"\"}')\nsys.exit(0)\n",
    "writes the reward": "try:\n    open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')\nexcept OSError:\n    pass\n"
                         "def total(values, start=0):\n    return 0\n",
    "reads the examples": "import json\ntry:\n    known = json.load(open('/tests/job.json'))['examples']\nexcept OSError:\n    known = []\n"
                          "answers = {each['source']: each['want'] for each in known}\n"
                          "def total(values, start=0):\n    return int(answers.get('total([10, 12], start=1)\\n', '0'))\n",
    "patches doctest and unittest": "import doctest, unittest\ndoctest.OutputChecker.check_output = lambda *a: True\n"
                                    "unittest.TestResult.wasSuccessful = lambda self: True\n"
                                    "def total(values, start=0):\n    return 6\n",
    "knows only what is shown": "def total(values, start=0):\n    return {2: 6, 8: 8}.get(values[0])\n",
    "runs for ever": "while True:\n    pass\n",
    "leaves a daemon that writes the reward":
        "import subprocess\nsubprocess.Popen(['/bin/sh', '-c', 'for i in 1 2 3 4 5 6 7 8 9; do echo 1 > /logs/verifier/reward.txt; "
        "echo 1 > /logs/verifier/reward.json; sleep 0.1; done'], start_new_session=True)\ndef total(values, start=0):\n    return 0\n",
}


def in_machines(work: Any) -> None:
    """Run a coroutine function with a backend that shares the host's kernel, or skip."""
    async def main() -> None:
        async with namespaces() as backend:
            await work(backend)

    if not Path("/usr/bin/python3").exists() and not Path("/usr/local/bin/python3").exists():
        pytest.skip("the machine `host` has no python3")
    asyncio.run(asyncio.wait_for(main(), 500))


def limited(task: Task, seconds: float = 5.0, **changes: Any) -> Task:
    """With less memory, and less time for what runs for ever."""
    record = task.to_json()
    job = json.loads(record["check"]["settings"]["files"]["job.json"])
    record["check"]["settings"]["files"]["job.json"] = json.dumps({**job, "seconds": seconds})
    record["limits"] = {"memory_bytes": SMALL.memory_bytes, "disk_bytes": SMALL.disk_bytes}
    record.update(changes)
    return Task.from_json(record)


@pytest.mark.parametrize("cheats", [
    pytest.param([*CHEATS], marks=pytest.mark.slow), ["writes the reward", "reads the examples", "ends the process with success"]])
def test_true_functions_score_1_and_cheats_0(package, cheats):
    [task] = made(kind="doctests", packages=[package])

    async def work(backend: Any) -> None:
        found = await validate(limited(task, 60.0), backend)
        assert found.holds, found
        target = task.artifacts[0]
        tries = [limited(task, 3.0 if "ever" in name else 60.0, id=f"cheat/{number}",
                         solution=Solution(files={target: text.encode()}).to_json())
                 for number, (name, text) in enumerate(CHEATS.items()) if name in cheats]
        results = {name: result async for name, (_, result) in _named(CHEATS, cheats, validated(tries, backend))}
        for name, result in results.items():
            assert result.solved is not None and result.solved.reward == 0.0, (name, result)

    in_machines(work)


async def _named(names: Any, chosen: Any, coming: Any) -> Any:
    for name in names:
        if name in chosen:
            yield name, await anext(coming)


def test_faults_that_tests_notice_are_tasks(package):
    tasks = [limited(task, 60.0) for task in made(kind="mutations", packages=[package], count=50)]
    wanted = [task for task in tasks if b"value % 2 != 0" in task.files["/app/tinysums/sums.py"]]
    unbroken = {"/app/tinysums/__init__.py": "", "/app/tinysums/sums.py": SUMS}
    unnoticed = Task.from_json({**wanted[0].to_json(), "id": "none", "files": unbroken})
    lies = "import os, sys\nclass total: pass\nplain = total\nos._exit(0)\n"
    lying = Task.from_json({**wanted[0].to_json(), "id": "lies", "solution": {"files": {"/app/tinysums/sums.py": lies}}})
    thief = ("import glob\nfound = [p for p in glob.glob('/tmp/judge-*/code/tinysums/sums.py') if p != __file__ and p not in __file__]\n"
             "exec(open(found[0]).read()) if found else None\n")
    stealing = Task.from_json({**wanted[0].to_json(), "id": "steals", "solution": {"files": {"/app/tinysums/sums.py": thief}}})

    async def work(backend: Any) -> None:
        found = {task.id: result async for task, result in validated([wanted[0], unnoticed, lying, stealing], backend)}
        assert found[wanted[0].id].holds, found[wanted[0].id]
        assert "doing nothing scores 1" in found["none"].reason
        assert "scores 0" in found["lies"].reason and "scores 0" in found["steals"].reason

    in_machines(work)


def test_nothing_of_the_agents_package_runs_beside_the_true_module(package, tmp_path, monkeypatch):
    [task] = [task for task in made(kind="mutations", packages=[package], count=50, says="package")
              if b"value % 2 != 0" in task.files["/app/tinysums/sums.py"]][:1]
    job = json.loads(task.check.settings["files"]["job.json"])
    breaks = {"__init__.py": "raise SystemExit(1)\n", "sums.py": SUMS}
    steals = {"__init__.py": f"import shutil, os\nhere = os.path.dirname(__file__)\nkept = {str(tmp_path / 'kept.py')!r}\n"
              "if not os.path.exists(kept):\n    shutil.copy(here + '/sums.py', kept)\n", "sums.py": "total = plain = None\n"}
    for name, files in {"breaks": breaks, "steals": steals, "right": {"__init__.py": "", "sums.py": SUMS}}.items():
        root = tmp_path / name
        for path, text in files.items():
            (root / "tinysums" / path).parent.mkdir(parents=True, exist_ok=True)
            (root / "tinysums" / path).write_text(text)
        true_ran: list[str] = []
        real = apart.apart

        def run(program: str, order: Any, seconds: float, ran: list[str] = true_ran, real: Any = real) -> Any:
            ran.append((Path(order["root"]) / "tinysums" / "__init__.py").read_text())
            return real(program, order, seconds)

        with monkeypatch.context() as patched:
            patched.setattr(apart, "apart", run)
            patched.setattr(apart, "_can_step_down", lambda: False)
            reward = apart.by_tests({**job, "root": str(root), "seconds": 120.0}, installed.judging())["reward"]
        assert reward == float(name == "right") and true_ran == ["", files["__init__.py"]]


def test_where_nobody_can_be_stepped_down_to_there_is_no_reward(monkeypatch, tmp_path):
    (tmp_path / "job.json").write_text('{"kind": "examples"}')
    monkeypatch.setattr(apart, "_can_step_down", lambda: False)
    monkeypatch.setattr(apart, "TESTS", str(tmp_path))
    with pytest.raises(SystemExit, match="one user"):
        apart.main()


def test_shown_examples_are_cut_at_the_end_of_one():
    text = 'def f():\n    """Say.\n\n    >>> 1\n    1\n\n    Then:\n\n    >>> 2\n    2\n    """\n    a = 1\n    b = 2\n    return a + b\n'
    [function] = doctests.functions(text)
    hollow = doctests.emptied(text, function, 1)
    assert ">>> 1" in hollow and ">>> 2" not in hollow and "Then:" in hollow
    ast.parse(hollow)


def test_puzzles():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (extra `tasks`)")
    table = {"kind": "reasoning_gym", "families": ["chain_sum", "spell_backward"], "count": 3, "seed": 5,
             "config": {"chain_sum": {"max_terms": 3}}}
    tasks = made(**table)
    assert tasks == made(**table) != made(**{**table, "seed": 6}) and len(tasks) == 6

    async def main() -> list[Any]:
        return [result async for _, result in validated(tasks)]

    assert all(result.holds for result in asyncio.run(main()))
    wrong = Task.from_json({**tasks[0].to_json(), "solution": Solution.says("<answer>many numbers: 1 2 3 4 5</answer>").to_json()})
    assert asyncio.run(validate(wrong)).solved.reward == 0.0
    with pytest.raises(ConfigError, match="evaluates the answer as a program"):
        made(kind="reasoning_gym", families=["countdown"])
    with pytest.raises(ConfigError, match=r"no 'chain_sums'; did you mean 'chain_sum"):
        made(kind="reasoning_gym", families=["chain_sums"])
    settings = {**tasks[0].check.settings, "version": "0"}
    other = Task.from_json({**tasks[0].to_json(), "check": {"kind": "reasoning_gym", "settings": settings}})
    assert "make the tasks again" in str(asyncio.run(validate(other)).reason)


ROW = {"id": "parallel_0", "question": [[{"role": "user", "content": "Both."}]],
       "function": [{"name": "play", "parameters": {"properties": {"artist": {"type": "string"}, "minutes": {"type": "integer"}}}}]}
TRUTH = {"id": "parallel_0", "ground_truth": [
    {"play": {"artist": ["A. B", "AB"], "minutes": [20]}}, {"play": {"artist": ["C"], "minutes": ["", 15]}}]}


def test_function_calls(tmp_path):
    (tmp_path / "possible_answer").mkdir()
    (tmp_path / "BFCL_v4_parallel.json").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "possible_answer" / "BFCL_v4_parallel.json").write_text(json.dumps(TRUTH) + "\n")
    (tmp_path / "BFCL_v4_irrelevance.json").write_text(json.dumps({**ROW, "id": "irrelevance_0"}) + "\n")
    tasks = made(kind="bfcl", path=str(tmp_path), categories=["parallel", "irrelevance"])
    assert [task.id for task in tasks] == ["bfcl/parallel_0", "bfcl/irrelevance_0"]
    assert all(asyncio.run(validate(task)).holds for task in tasks)

    def reward(task: Task, answer: str) -> float | None:
        return asyncio.run(validate(Task.from_json({**task.to_json(), "solution": Solution.says(answer).to_json()}))).solved.reward

    one, other = {"name": "play", "arguments": {"artist": "a b", "minutes": 20}}, {"name": "play", "arguments": {"artist": "C"}}
    for calls, wanted in [([other, one], 1.0), ([one], 0.0), ([one, one], 0.0), ([one, other, other], 0.0), ([], 0.0),
                          ([one, {"name": "play", "arguments": {"artist": "C", "minutes": True}}], 0.0),
                          ([one, {"name": "play", "arguments": {"artist": "C", "more": 1}}], 0.0),
                          ([one, {"name": "stop", "arguments": {}}], 0.0)]:
        assert reward(tasks[0], json.dumps(calls)) == wanted, calls
        assert reward(tasks[0], f"Well:\n```json\n{json.dumps(calls)}\n```") == wanted
    for answer, wanted in [("[]", 1.0), ("I cannot.", 0.0), (json.dumps([one]), 0.0), ("[3]", 0.0), ("{}", 0.0)]:
        assert reward(tasks[1], answer) == wanted
    with pytest.raises(ConfigError, match=r"possible_answer/BFCL_v4_simple_python\.json: no such file"):
        made(kind="bfcl", path=str(tmp_path), categories=["simple_python"])


def test_calls_are_matched_one_to_one():
    assert matched([[True, True], [True, False]]) and not matched([[True, False], [True, False]]) and matched([])


def test_the_leaderboards_own_rows_hold():
    pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed (pip install --no-deps bfcl-eval)")

    async def main() -> list[Any]:
        tasks = task_source.opened({"kind": "bfcl", "limit": 150, "categories": ["parallel_multiple"]}).tasks()
        return [result async for _, result in validated(tasks)]

    results = asyncio.run(main())
    assert len(results) == 150 and all(result.holds for result in results)


def test_a_check_of_calls_is_read_strictly():
    for expected in ([{"a": {}, "b": {}}], ["x"], [{"a": 1}]):
        task = Task(id="t", prompt="", check=Check(kind="calls", settings={"expected": expected}), solution=Solution.says("[]"))
        assert "expected[0]" in str(asyncio.run(validate(task)).reason)
