"""Tasks with several steps: one machine, each step judged when it ends, and what its reward means for the next."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pretend_backend
import pytest
from sandbox_backends import namespaces

from gnomon.agent import evaluate_reading, steps, trajectory_file
from gnomon.agent.evaluate_results import Column, row
from gnomon.agent.policies.scripted import ScriptedPolicy
from gnomon.agent.rollout import Deadlines, Rollout, attempt
from gnomon.agent.solution import Solution
from gnomon.agent.task import Budget, Check, Health, Step, Task
from gnomon.agent.trajectory import Score, StepEnd, Trajectory, Turn
from gnomon.agent.validate import validate
from gnomon.agent.verifier import judge
from gnomon.data.messages import Conversation, Message, Text
from gnomon.errors import DataError, SandboxError
from gnomon.sandbox.images import Image
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import Limits, Network

AMPLE = Deadlines(machine=60.0, agent=60.0, judge=60.0, grace=5.0)
SMALL = Limits(memory_bytes=256 << 20, disk_bytes=64 << 20)


def wants(path: str, text: str) -> Check:
    """A check of what a file says."""
    return Check(kind="files", settings={"files": {path: {"equals": text}}})


def step(name: str, **more: Any) -> Step:
    """A step that wants a file of its name."""
    return Step(**{"name": name, "prompt": f"Make {name}.", "check": wants(f"/app/{name}", "1"),
                   "solution": Solution(script=f"mkdir -p /app; printf 1 > /app/{name}"), **more})


def task(*several: Step, strategy: str = "mean", **more: Any) -> Task:
    return Task(id="t", prompt="", image="base", check=Check(kind="steps", settings={"strategy": strategy}), steps=several, **more)


class Works:
    """A harness that writes the files of the steps that it was told of, and says what it was asked each time."""

    name = "works"

    def __init__(self, does: dict[str, str]) -> None:
        self.does = does
        self.seen: list[tuple[Task, Any, str]] = []

    async def run(self, task: Task, model: Any, box: Any, *, effort: str | None = None) -> Any:
        self.seen.append((task, box, model.session))
        await model.complete(Conversation(messages=(Message(role="user", content=(Text(text=task.prompt),)),)))
        name = task.prompt.split()[1].rstrip(".")
        if self.does.get(name) == "crash":
            raise RuntimeError("no more")
        if name in self.does:
            await box.write(f"/app/{name}", self.does[name].encode())
        return "finished"


@pytest.fixture
def backend(tmp_path: Path) -> pretend_backend.Backend:
    made = pretend_backend.Backend(LayerStore(tmp_path / "store"))
    made.store.keep(Image(name="base", layers=()))
    return made


def attempted(what: Task, harness: Works, backend: Any, path: Path) -> Trajectory:
    rollout = Rollout(id="r", task=what, harness=harness, policy=ScriptedPolicy(lambda conversation: "Done."))
    return asyncio.run(attempt(rollout, path / "t.jsonl", backend, AMPLE))


def test_each_step_has_its_request_and_is_judged_in_the_same_machine(tmp_path: Path, backend: pretend_backend.Backend) -> None:
    harness = Works({"one": "1", "two": "2"})
    trajectory = attempted(task(step("one"), step("two"), budget=Budget(seconds=60.0)), harness, backend, tmp_path)
    assert [seen.prompt for seen, _, _ in harness.seen] == ["Make one.", "Make two."]
    assert harness.seen[0][1] is harness.seen[1][1] and harness.seen[0][2] != harness.seen[1][2]  # one machine, each a session of its own
    assert all(seen.steps == () and seen.check.kind == "hidden" and seen.solution is None for seen, _, _ in harness.seen)
    assert [(each.name, each.turns, each.score.reward) for each in trajectory.steps] == [("one", 1, 1.0), ("two", 2, 0.0)]
    assert trajectory.score is not None and trajectory.score.reward == 0.5 and trajectory.stop_reason == "finished"
    assert trajectory.score.metrics["step one"] == 1.0 and trajectory.score.evidence[0].startswith("step 'one' (finished): 1")
    assert [turn.parent for turn in trajectory.turns] == [None, None] and not backend.living
    assert trajectory_file.read(tmp_path / "t.jsonl") == trajectory
    trajectory_file.write(trajectory, tmp_path / "again.jsonl")
    assert trajectory_file.read(tmp_path / "again.jsonl") == trajectory
    shown = row(trajectory, Column(policy="p", harness="h"), 1, "t.jsonl")
    page = evaluate_reading.page(shown, trajectory, task(step("one"), step("two")), "")
    places = [page.index(text) for text in ("Step 1: one", "Step &#x27;one&#x27; ends: finished; reward 1", 'id="t2"', "two&#x27; ends")]
    assert places == sorted(places)


@pytest.mark.parametrize(("strategy", "least", "does", "reward", "reached"), [
    ("mean", {}, {"one": "0", "two": "1"}, 0.5, 2),
    ("final", {}, {"one": "0", "two": "1"}, 1.0, 2),
    ("mean", {"reward": 1.0}, {"one": "0", "two": "1"}, 0.0, 1),
    ("final", {"reward": 0.5}, {"one": "1", "two": "1"}, 1.0, 2),
    ("mean", {"tidy": 0.0}, {"one": "1", "two": "1"}, 1.0, 1),  # a reward that there is not is too low
])
def test_rewards_are_put_together_and_bar_the_way(tmp_path: Path, backend: pretend_backend.Backend, strategy: str, least: dict[str, float],
                                                  does: dict[str, str], reward: float, reached: int) -> None:
    trajectory = attempted(task(step("one", least=least), step("two"), strategy=strategy), Works(does), backend, tmp_path)
    assert trajectory.score is not None and (trajectory.score.reward, len(trajectory.steps)) == (reward, reached)
    assert ("not reached: two" in trajectory.score.evidence) == (reached == 1)


@pytest.mark.parametrize(("change", "said"), [
    ({"files": {"setup.sh": b"echo oh; exit 3"}, "setup": "setup.sh"}, "step 'two': SandboxError: its setup ended with status 3: oh"),
    ({"health": Health(command="echo ill; false", interval=0.0, retries=2)}, "did not become healthy in 2 tries"),
    ({"check": Check(kind="tests", settings={"files": {"test.sh": "exit 1"}, "machine": "fork"})}, "step 'two': VerifierError"),
    ({}, "step 'two': RuntimeError: no more"),
])
def test_a_step_that_fails_by_no_fault_of_the_policy_leaves_the_attempt_without_score(
        tmp_path: Path, backend: pretend_backend.Backend, change: dict[str, Any], said: str) -> None:
    does = {"one": "1", "two": "crash" if not change else "1"}
    trajectory = attempted(task(step("one"), step("two", **change), workdir="/app"), Works(does), backend, tmp_path)
    assert trajectory.score is not None and trajectory.score.reward is None and said in (trajectory.score.error or "")
    assert not backend.living


def test_files_setup_and_network_come_before_the_agent(tmp_path: Path, backend: pretend_backend.Backend) -> None:
    found: list[tuple[bytes, Network]] = []

    class Looks(Works):
        async def run(self, task: Task, model: Any, box: Any, *, effort: str | None = None) -> Any:
            found.append((await box.read("/srv/made"), box.network))
            return await super().run(task, model, box, effort=effort)

    near = Network(allow=("example.com:443",))
    first = step("one", files={"a": b"x", "setup.sh": b"cp a made"}, setup="setup.sh", network=near)
    second = step("two", files={"setup.sh": b"printf y >> made"}, setup="setup.sh")
    trajectory = attempted(task(first, second, workdir="/srv"), Looks({"one": "1", "two": "1"}), backend, tmp_path)
    assert trajectory.score is not None and trajectory.score.reward == 1.0, trajectory.score
    assert found == [(b"x", near), (b"xy", Network())]


def test_a_health_that_comes_late_is_waited_for() -> None:
    class Box:
        tries = 0

        async def exec(self, command: Any) -> Any:
            self.tries += 1
            return pretend_backend.Result(code=0 if self.tries >= 4 else 1, stdout=b"", stderr=b"")

    box = Box()
    asyncio.run(steps.healthy(task(step("one"), health=Health(command="x", interval=0.0, grace=60.0, retries=1)), box))  # type: ignore[arg-type]
    assert box.tries == 4
    with pytest.raises(SandboxError, match="healthy in 3 tries"):
        asyncio.run(steps.healthy(task(step("one"), health=Health(command="x", interval=0.0)), Box()))  # type: ignore[arg-type]


def test_the_verifier_of_steps_reads_what_they_came_to() -> None:
    what = task(step("one"), step("two"))
    ends = [StepEnd(name=name, turns=1, stop_reason="finished", score=score) for name, score in (
        ("one", Score(reward=1.0, metrics={"tidy": 1.0})), ("two", Score(reward=0.0)))]

    def judged(*steps: StepEnd, strategy: str = "mean") -> Score:
        return asyncio.run(judge(replace(what, check=Check(kind="steps", settings={"strategy": strategy})),
                                 Trajectory(id="a", task_id="t", turns=(Turn(messages=()),), steps=steps)))

    assert judged(*ends).metrics == {"tidy": 0.5, "step one": 1.0, "step two": 0.0}
    assert judged(*ends, strategy="final").reward == 0.0
    assert judged().error is not None and "no step was judged" in (judged().error or "")
    lost = replace(ends[1], score=Score(reward=None, error="it crashed"))
    assert judged(ends[0], lost).reward is None and "step 'two' has no score: it crashed" in (judged(ends[0], lost).error or "")
    with pytest.raises(DataError, match="'strategy'"):
        judged(strategy="best")


def test_steps_hold_in_real_machines(tmp_path: Path) -> None:
    script = "[ \"$(cat /app/one /srv/made)\" = 1x ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    seen = Step(
        name="two", prompt="Add.", check=Check(kind="tests", settings={"files": {"test.sh": script}, "machine": "fork"}),
        files={"setup.sh": b"id -un > who; printf x > made; chmod 644 made"}, setup="setup.sh", solution=Solution(script="true"),
        health=Health(command="test -s who"))
    what = replace(task(step("one"), seen, workdir="/srv", limits=SMALL, health=Health(command="true")), image="host")

    async def main() -> None:
        async with namespaces() as backend:
            found = await validate(what, backend)
            assert found.holds, found
            assert not backend.machines

    asyncio.run(asyncio.wait_for(main(), 300))
