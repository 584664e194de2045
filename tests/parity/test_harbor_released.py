"""Task directories that we write, read by Harbor itself, where it is installed (it needs Python 3.12 or later)."""

import pytest

from gnomon.agent import harbor, harbor_tasks
from gnomon.agent.solution import Solution
from gnomon.agent.task import Budget, Check, Task
from gnomon.sandbox.sandbox import Limits, Network

released = pytest.importorskip("harbor.models.task.task", reason="harbor is not installed (pip install harbor, Python 3.12 or later)")
TEST = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"


@pytest.mark.parametrize("task", [
    Task(id="plain", prompt="Do it.", image="host", check=Check(kind="tests", settings={"files": {"test.sh": TEST}, "machine": "fork"})),
    Task(id="full", prompt="Write 4 into /app/n.\n", image="debian:12", files={"/app/a b": b"\xff"}, workdir="/app", artifacts=("/app",),
         env={"A": "1"}, limits=Limits(cpus=2.0, memory_bytes=1 << 30, disk_bytes=1 << 30), network=Network(allow=("example.com:443",)),
         budget=Budget(seconds=30.0), solution=Solution(script="echo 4 > /app/n", env={"B": "2"}),
         check=Check(kind="tests", settings={"files": {"test.sh": TEST, "data": "x"}, "timeout_seconds": 60.0})),
], ids=lambda task: task.id)
def test_harbor_reads_what_we_write(tmp_path, task):
    folder = harbor.write(harbor_tasks.directory(task), tmp_path / task.id)
    theirs = released.Task(folder)
    [ours] = harbor_tasks.tasks(harbor.read(folder))
    assert theirs.instruction.strip() == ours.prompt.strip()
    assert theirs.config.agent.timeout_sec == ours.budget.seconds
    assert theirs.config.verifier.timeout_sec == ours.check.settings["timeout_seconds"]
    assert theirs.config.environment.workdir == ours.workdir and dict(theirs.config.environment.env) == dict(ours.env)
    if task.solution is not None:
        assert dict(theirs.config.solution.env) == {"B": "2"} and (theirs.paths.solution_dir / "solve.sh").is_file()
    assert (theirs.paths.tests_dir / "test.sh").read_text() == TEST
