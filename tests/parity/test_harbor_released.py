"""Task directories that we write, read by Harbor itself, where it is installed (it needs Python 3.12 or later)."""

from dataclasses import replace

import pytest

from gnomon.agent import harbor, harbor_tasks
from gnomon.agent.solution import Solution
from gnomon.agent.task import Budget, Check, Health, Step, Task
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
    ours = harbor_tasks.task(harbor.read(folder))
    assert theirs.instruction.strip() == ours.prompt.strip()
    assert theirs.config.agent.timeout_sec == ours.budget.seconds
    assert theirs.config.verifier.timeout_sec == ours.check.settings["timeout_seconds"]
    assert theirs.config.environment.workdir == ours.workdir and dict(theirs.config.environment.env) == dict(ours.env)
    if task.solution is not None:
        assert dict(theirs.config.solution.env) == {"B": "2"} and (theirs.paths.solution_dir / "solve.sh").is_file()
    assert (theirs.paths.tests_dir / "test.sh").read_text() == TEST


def test_harbor_reads_the_steps_that_we_write(tmp_path):
    settings = {"files": {"test.sh": TEST}, "machine": "fork", "timeout_seconds": 30.0, "env": {}, "user": "root"}
    check = Check(kind="tests", settings=settings)
    one = Step(name="first one", prompt="Begin.", check=check, files={"setup.sh": b"true\n", "data/x": b"\xff"}, setup="setup.sh",
               user="me", seconds=20.0, artifacts=("/app/out",), least={"reward": 0.5}, health=Health(command="true", retries=2),
               network=Network(allow=("example.com:*",)), solution=Solution(script="true"))
    two = Step(name="second", prompt="Go on.", check=check, network=Network())
    task = Task(id="parts", prompt="", image="host", workdir="/app", check=Check(kind="steps", settings={"strategy": "final"}),
                steps=(one, two))
    folder = harbor.write(harbor_tasks.directory(task), tmp_path / task.id)
    theirs, ours = released.Task(folder), harbor_tasks.task(harbor.read(folder))
    assert [replace(step, solution=None) for step in ours.steps] == [replace(step, solution=None) for step in task.steps]
    assert ours.steps[0].solution is not None
    assert theirs.has_steps and theirs.config.multi_step_reward_strategy.value == "final"
    for mine, step in zip(ours.steps, theirs.config.steps, strict=True):
        assert (step.name, theirs.step_instruction(step.name).strip(), step.agent.timeout_sec, step.agent.user) == (
            mine.name, mine.prompt, mine.seconds, mine.user)
        assert step.verifier.timeout_sec == 30.0 and step.verifier.environment_mode.value == "shared"
        assert {path.name for path in theirs.paths.step_workdir_dir(step.name).glob("*")} == {path.split("/")[0] for path in mine.files}
    first, second = theirs.config.steps
    assert first.min_reward == {"reward": 0.5} and first.artifacts == ["/app/out"] and first.healthcheck.retries == 2
    assert first.agent.network_mode.value == "allowlist" and first.agent.allowed_hosts == ["example.com"]
    assert second.agent.network_mode.value == "no-network" and second.min_reward is None
    assert theirs.paths.discovered_step_solve_path_for(first.name, theirs.config.environment.os) is not None
    assert theirs.paths.step_setup_path(first.name).is_file()
