"""Sources of tasks: named by a table, strict about it, the same tasks each time, lazily; and each task is tried before it is used."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from sandbox_backends import namespaces

from gnomon import extend
from gnomon.agent import harbor, harbor_tasks, task_source
from gnomon.agent.solution import Solution
from gnomon.agent.task import Check, Task
from gnomon.agent.validate import validate, validated
from gnomon.errors import ConfigError, DataError
from gnomon.sandbox.sandbox import Limits

SMALL = Limits(memory_bytes=128 << 20, disk_bytes=32 << 20)


def sums(count: int) -> list[Task]:
    return [Task(id=f"sum-{n}", prompt=f"What is {n} + {n}?", check=Check(kind="numeric", settings={"answer": 2 * n}),
                 solution=Solution.says(f"Answer: {2 * n}")) for n in range(1, count + 1)]


def lines(path: Path, tasks: list[Task]) -> Path:
    path.write_text("\n".join(task.text for task in tasks) + "\n\n")
    return path


def test_a_table_names_a_source(tmp_path):
    path = lines(tmp_path / "sums.jsonl", sums(12))
    everything = task_source.opened({"kind": "jsonl", "path": str(path)})
    assert [*everything.tasks()] == [*everything.tasks()] == sums(12)
    some = task_source.opened({"kind": "jsonl", "path": [str(path)], "match": "sum-1*", "limit": 2})
    assert [task.id for task in some.tasks()] == ["sum-1", "sum-10"]
    assert [*task_source.every([some])] == [*some.tasks()]
    with pytest.raises(DataError, match=r"'sum-1' comes from source 'jsonl' and from 'jsonl'"):
        [*task_source.every([some, everything])]
    with pytest.raises(ConfigError, match="no source gave a task"):
        [*task_source.every([task_source.opened({"kind": "jsonl", "path": str(path), "match": "none"})])]


@pytest.mark.parametrize(("table", "error", "says"), [
    ({}, DataError, "'kind' is required"), ({"kind": "jsnl", "path": "x"}, ConfigError, "did you mean 'jsonl'"),
    ({"kind": "jsonl"}, DataError, "tasks: source 'jsonl': settings: 'path' is required"),
    ({"kind": "jsonl", "path": 3}, DataError, "'path': 3"),
    ({"kind": "jsonl", "path": []}, DataError, "'path'"), ({"kind": "jsonl", "path": "x", "limit": 0}, DataError, "'limit'"),
    ({"kind": "jsonl", "path": "x", "limitt": 1}, DataError, "'limitt': unknown field"),
    ({"kind": "harbor"}, DataError, "'path' is required"),
    ({"kind": "json:NoSuchThing"}, ConfigError, "defines no 'NoSuchThing'"),
])
def test_a_wrong_table_is_one_clear_error(table, error, says):
    with pytest.raises(error, match=says):
        task_source.opened(table)


def test_missing_files_and_bad_lines_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.jsonl: no such file"):
        [*task_source.opened({"kind": "jsonl", "path": str(tmp_path / "missing.jsonl")}).tasks()]
    path = tmp_path / "t.jsonl"
    path.write_text(sums(1)[0].text + "\n" + json.dumps({**sums(1)[0].to_json(), "promt": ""}) + "\n")
    coming = task_source.opened({"kind": "jsonl", "path": str(path)}).tasks()
    assert next(coming).id == "sum-1"  # the first is there before the second is read
    with pytest.raises(DataError, match=r"t\.jsonl:2: 'promt'"):
        next(coming)


def test_a_solution_is_data_and_hidden():
    task = Task(id="t", prompt="p", image="host", check=Check(kind="exact", settings={"answer": "secret"}),
                solution=Solution(files={"/app/x": b"\xff secret"}, script="echo secret", env={"A": "secret"}, seconds=5.0,
                                  messages=Solution.says("secret").messages))
    assert Task.parse(task.text) == task
    assert "secret" not in task.shown().text and task.shown().prompt == "p"
    with pytest.raises(DataError, match="no 'image'"):
        Task(id="t", prompt="p", check=Check(kind="exact"), solution=Solution(script="true"))
    for wrong, says in (({}, "does and says nothing"), ({"script": "x", "seconds": 0}, "seconds"), ({"files": {"a": "x"}}, "absolute path"),
                        ({"scrpt": "x"}, "does and says nothing|unknown")):
        with pytest.raises(DataError, match=says):
            Task.parse(json.dumps({**task.to_json(), "solution": wrong}))


def tried(task: Task, backend: Any = None) -> Any:
    return asyncio.run(validate(task, backend))


def test_validation_wants_1_for_the_solution_and_0_for_nothing():
    [right] = sums(1)
    found = tried(right)
    assert found.holds and found.solved.reward == 1.0 and found.nothing.reward == 0.0
    for task, says in [
        (Task(id="t", prompt="", check=right.check), "has no solution"),
        (Task(id="t", prompt="", check=right.check, solution=Solution.says("5")), "its solution scores 0 and must score 1"),
        (Task(id="t", prompt="", check=Check(kind="no_such_module:Verifier"), solution=Solution.says("5")), "cannot import module"),
        (Task(id="t", prompt="", check=Check(kind="numeric"), solution=Solution.says("5")), "'answer' is required"),
        (Task(id="t", prompt="", image="host", check=right.check, solution=Solution.says("2")), "no backend"),
    ]:
        found = tried(task)
        assert says in str(found.reason) and not found.holds, found


def test_several_are_tried_in_order_and_no_more_are_made_than_needed():
    made = []

    def coming():
        for task in sums(20):
            made.append(task.id)
            yield task

    async def main() -> list[str]:
        found = []
        async for task, validation in validated(coming(), concurrency=3):
            assert validation.holds
            found.append(task.id)
            if len(found) == 5:
                break
        return found

    assert asyncio.run(main()) == [f"sum-{n}" for n in range(1, 6)] and len(made) <= 8


SOLVE = "#!/bin/sh\nmkdir -p /app && echo \"$A\" > /app/answer\n"
TEST = "if [ \"$(cat /app/answer 2>/dev/null)\" = 42 ]; then r=1; else r=0; fi\necho $r > /logs/verifier/reward.txt\n"


def written(task: Task, place: Path) -> Path:
    return harbor.write(harbor_tasks.directory(task), place)


def test_directories_of_harbor_carry_their_solution_both_ways(tmp_path):
    task = Task(id="answer", prompt="Write 42 into /app/answer.", image="host", artifacts=("/app",), limits=SMALL,
                check=Check(kind="tests", settings={"files": {"test.sh": TEST}}),
                solution=Solution(files={"/app/hint": b"42"}, script="mkdir -p /app; cp /app/hint /app/answer", env={"A": "42"}))
    place = written(task, tmp_path / "tasks" / "answer")
    [read] = task_source.opened({"kind": "harbor", "path": str(tmp_path / "tasks")}).tasks()
    assert read.solution is not None and read.solution.env == {"A": "42"} and read.solution.files["/solution/files/0"] == b"42"
    assert "42" in read.text and "answer" in read.shown().prompt and "/solution" not in read.shown().text
    again = written(read, tmp_path / "again" / "answer")
    assert (again / "solution" / "solve.sh").read_bytes() == (place / "solution" / "solve.sh").read_bytes()


def test_in_real_machines(tmp_path):
    async def main() -> None:
        async with namespaces() as backend:
            check = Check(kind="tests", settings={"files": {"test.sh": TEST}})
            right = Task(id="right", prompt="", image="host", artifacts=("/app",), limits=SMALL, check=check,
                         solution=Solution(files={"/solution/solve.sh": SOLVE.encode()}, script="/solution/solve.sh", env={"A": "42"}))
            free = Task(id="free", prompt="", image="host", limits=SMALL, solution=Solution(script="true"),
                        check=Check(kind="tests", settings={"files": {"test.sh": "echo 1 > /logs/verifier/reward.txt"}}))
            broken = Task(id="broken", prompt="", image="host", limits=SMALL, solution=Solution(script="exit 3"), check=check)
            nowhere = Task(id="nowhere", prompt="", image="no-such-image", solution=Solution(script="true"), check=check)
            found = {task.id: result async for task, result in validated([right, free, broken, nowhere], backend)}
            assert found["right"].holds, found
            assert "doing nothing scores 1 and must score 0" in found["free"].reason
            assert "status 3" in found["broken"].reason and "no-such-image" in found["nowhere"].reason
            assert not backend.machines

    asyncio.run(asyncio.wait_for(main(), 300))


def test_every_kind_reads_its_settings_strictly():
    for kind in extend.kinds(task_source.KINDS):
        with pytest.raises(DataError, match=r"no_such_setting|required"):
            task_source.opened({"kind": kind, "no_such_setting": 1})


def test_hidden_is_no_verifier():
    assert "hidden" not in extend.kinds("gnomon.agent.verifiers")
