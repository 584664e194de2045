"""One attempt: what the policy did is judged, what failed by no fault of its own has no score, and the machine is always ended."""

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnomon.agent import rollout as rollout_module
from gnomon.agent import trajectory_file, verifier
from gnomon.agent.harness import harness as harnesses
from gnomon.agent.policies.scripted import ScriptedPolicy, say
from gnomon.agent.policy import ContextFull, Sampling
from gnomon.agent.record import Recorder
from gnomon.agent.rollout import Deadlines, Rollout, attempt, kept
from gnomon.agent.task import Budget, Check, Task
from gnomon.agent.trajectory import Score, StopReason, Trajectory
from gnomon.data.messages import Conversation, Message, Text
from gnomon.errors import CapacityError, DataError, PolicyError, SandboxError, SandboxLost
from gnomon.sandbox.sandbox import Sandbox, Spec

TASK = Task(id="sum", prompt="What is 2 and 2?", check=Check(kind="exact", settings={"answer": "4"}))
WITH_MACHINE = replace(TASK, image="host", files={"/home/user/a": b"1"})
SOON = Deadlines(machine=60.0, agent=0.3, judge=60.0, grace=0.2)
"""For an agent that hangs at once: nothing else has to be done in so little time."""
AMPLE = Deadlines(machine=60.0, agent=60.0, judge=60.0, grace=5.0)


async def ask(model: Recorder, text: str = "What is 2 and 2?") -> None:
    await model.complete(Conversation(messages=(Message(role="user", content=(Text(text=text),)),)), Sampling())


class Asks:
    """A harness that asks so many times, then does what it was given to do."""

    name = "asks"

    def __init__(self, times: int = 1, then: Callable[[Recorder, Any], Awaitable[Any]] | None = None) -> None:
        self.times, self.then = times, then
        self.began = asyncio.Event()
        self.seen: Task | None = None

    async def run(self, task: Task, model: Any, box: Sandbox | None, *, effort: str | None = None) -> StopReason:
        self.seen = task
        self.began.set()
        for _ in range(self.times):
            await ask(model)
        return "finished" if self.then is None else await self.then(model, box)


class Box:
    """A machine that remembers what was done to it."""

    def __init__(self, spec: Spec, kills: Sequence[Exception | None] = ()) -> None:
        self.spec, self.id = spec, "box"
        self.written: dict[str, bytes] = {}
        self.killed = 0
        self.kills = list(kills)

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        self.written[path] = data

    async def kill(self) -> None:
        self.killed += 1
        error = self.kills.pop(0) if self.kills else None
        if error is not None:
            raise error


class Machines:
    """A backend that makes such boxes, after as many errors as it was told."""

    name = "test"

    def __init__(self, *errors: Exception, kills: Sequence[Exception | None] = ()) -> None:
        self.errors, self.kills, self.boxes = list(errors), kills, []

    async def create(self, spec: Spec) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        self.boxes.append(Box(spec, self.kills))
        return self.boxes[-1]


class Fresh:
    """A verifier that wants a fresh machine."""

    machine = "fresh"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        pass

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Any) -> Score:
        return Score(reward=0.5 if sandbox.spec.metadata["purpose"] == "verifier" else 0.0)


class Broken:
    """A verifier that does what the test says: `crash`, `hang`, `none`."""

    machine = "none"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.how = settings["how"]

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Any) -> Any:
        if self.how == "hang":
            await asyncio.Event().wait()
        if self.how == "crash":
            raise ZeroDivisionError("oh")
        if self.how == "lost":
            raise SandboxLost("the machine is gone")
        return None if self.how == "nothing" else Score(reward=float("nan"))


def broken(how: str) -> Task:
    return replace(TASK, check=Check(kind=f"{__name__}:Broken", settings={"how": how}))


def rollout(harness: Any, task: Task = TASK, policy: Any = None, **more: Any) -> Rollout:
    return Rollout(id="r", task=task, harness=harness, policy=policy or ScriptedPolicy(["4"] * 50), **more)


def attempted(path: Path, harness: Any, task: Task = TASK, policy: Any = None, backend: Any = None,
              deadlines: Deadlines = AMPLE) -> Trajectory:
    return asyncio.run(attempt(rollout(harness, task, policy), path / "t.jsonl", backend, deadlines))


def test_a_context_that_is_full_ends_an_attempt_that_is_judged(tmp_path: Path) -> None:
    replies = iter(["4"])

    def reply(conversation: Any) -> Any:
        for text in replies:
            return say(text)
        raise ContextFull("no room for more")

    done = attempted(tmp_path, Asks(2), policy=ScriptedPolicy(reply))
    assert done.score is not None and (done.stop_reason, done.score.reward, len(done.turns)) == ("budget", 1.0, 1)


def test_an_attempt(tmp_path: Path) -> None:
    machines, harness = Machines(), Asks()
    done = attempted(tmp_path, harness, WITH_MACHINE, backend=machines)
    assert done.score is not None
    assert (done.stop_reason, done.score.reward, len(done.turns)) == ("finished", 1.0, 1)
    assert set(done.seconds) == {"machine", "agent", "judge"}
    assert trajectory_file.read(tmp_path / "t.jsonl") == done
    [box] = machines.boxes
    assert (box.written, box.killed) == ({"/home/user/a": b"1"}, 1)
    assert box.spec.metadata["task"] == "sum"
    assert harness.seen is not None
    assert harness.seen.check.settings == {}  # who attempts does not see who judges


def test_a_wrong_answer_scores(tmp_path: Path) -> None:
    done = attempted(tmp_path, Asks(), policy=ScriptedPolicy(["5"]))
    assert done.score is not None
    assert (done.score.reward, done.score.error) == (0.0, None)


def test_public_checks_cost_what_the_agent_was_told(tmp_path: Path) -> None:
    exact = {"kind": "exact", "settings": {"answer": "4"}}
    public = Check(kind="limited", settings={"check": exact, "submissions": 3, "free": 1, "penalty": 0.25})

    async def submits(model: Recorder, box: Any) -> StopReason:
        for _ in range(2):
            assert model.diagnosis is not None and "Public check: 1" in await model.diagnosis.submit(model.trajectory, box)
        return "finished"

    done = attempted(tmp_path, Asks(then=submits), replace(TASK, diagnosis=public))
    assert done.score is not None and done.score.reward == 0.75
    assert done.score.metrics == {"submissions": 2.0, "before_penalty": 1.0}
    assert trajectory_file.read(tmp_path / "t.jsonl").score == done.score


async def hangs(model: Recorder, box: Any) -> None:
    await asyncio.Event().wait()


def test_one_that_hangs_ends_at_its_deadline_and_counts(tmp_path: Path) -> None:
    done = attempted(tmp_path, Asks(0, hangs), deadlines=SOON)
    assert done.score is not None
    assert (done.stop_reason, done.score.reward, done.score.error) == ("deadline", 0.0, None)


def test_one_that_hangs_delays_nobody(tmp_path: Path) -> None:
    """Another attempt comes to its end while it still hangs."""
    async def both() -> Trajectory:
        hung = asyncio.create_task(attempt(rollout(Asks(0, hangs)), tmp_path / "hangs", None, AMPLE))
        try:
            works = await asyncio.wait_for(attempt(rollout(Asks()), tmp_path / "works", None, AMPLE), 55)
            assert not hung.done()
        finally:
            hung.cancel()
            await asyncio.gather(hung, return_exceptions=True)
        return works

    assert asyncio.run(both()).stop_reason == "finished"


def test_one_that_will_not_stop_is_left_behind(tmp_path: Path) -> None:
    late = []

    async def stubborn(model: Recorder, box: Any) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                late.append(1)

    machines = Machines()
    done = attempted(tmp_path, Asks(0, stubborn), WITH_MACHINE, backend=machines, deadlines=SOON)
    assert done.stop_reason == "deadline"
    assert late
    assert machines.boxes[0].killed == 1


def test_what_comes_after_the_end_is_not_recorded(tmp_path: Path) -> None:
    """A harness that goes on asking while it is told to stop finds the attempt closed."""
    async def goes_on(model: Recorder, box: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await ask(model)

    done = attempted(tmp_path, Asks(0, goes_on), deadlines=SOON)
    assert done.stop_reason == "deadline"
    assert trajectory_file.read(tmp_path / "t.jsonl").stop_reason == "deadline"


def test_spent_budgets_are_judged(tmp_path: Path) -> None:
    done = attempted(tmp_path, Asks(times=5), replace(TASK, budget=Budget(turns=2)))
    assert done.score is not None
    assert (done.stop_reason, done.score.reward, len(done.turns)) == ("budget", 1.0, 2)


def test_time_of_the_task_is_a_deadline(tmp_path: Path) -> None:
    done = attempted(tmp_path, Asks(0, hangs), replace(TASK, budget=Budget(seconds=0.2)))
    assert done.stop_reason == "deadline"


async def bug(model: Recorder, box: Any) -> None:
    raise KeyError("tool")


async def lost(model: Recorder, box: Any) -> None:
    raise SandboxLost("the machine is gone")


async def inner(model: Recorder, box: Any) -> None:
    raise TimeoutError("of somebody else")


async def itself(model: Recorder, box: Any) -> None:
    raise asyncio.CancelledError


async def nonsense(model: Recorder, box: Any) -> str:
    return "done"


async def gave_up(model: Recorder, box: Any) -> str:
    return "failed"


@pytest.mark.parametrize(("then", "said"), [
    (bug, "KeyError: 'tool'"), (lost, "SandboxLost: the machine is gone"), (inner, "TimeoutError: of somebody else"),
    (itself, "cancelled itself"), (nonsense, "ended with 'done'"), (gave_up, "could not go on")])
def test_failures_of_a_harness_have_no_score(tmp_path: Path, then: Any, said: str) -> None:
    done = attempted(tmp_path, Asks(then=then))
    assert done.score is not None
    assert (done.stop_reason, done.score.reward) == ("failed", None)
    assert said in (done.score.error or "")


class Dead:
    """A policy that cannot be reached."""

    name = "dead"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or PolicyError("nobody answers")

    async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Any:
        raise self.error

    async def close(self, session: str) -> None:
        raise self.error


def test_a_dead_endpoint_has_no_score(tmp_path: Path) -> None:
    done = attempted(tmp_path, Asks(), policy=Dead())
    assert done.score is not None
    assert (done.stop_reason, done.score.error, done.turns) == ("failed", "PolicyError: nobody answers", ())


@pytest.mark.parametrize(("how", "said"), [("crash", "ZeroDivisionError: oh"), ("lost", "SandboxLost"), ("nothing", "gave no score"),
                                           ("nan", "no finite number"), ("hang", "did not end within")])
def test_failures_of_a_verifier_have_no_score(tmp_path: Path, how: str, said: str) -> None:
    deadlines = replace(AMPLE, judge=0.2, grace=0.2) if how == "hang" else AMPLE
    done = attempted(tmp_path, Asks(), broken(how), deadlines=deadlines)
    assert done.score is not None
    assert (done.stop_reason, done.score.reward) == ("finished", None)
    assert said in (done.score.error or "")


def test_no_machine_no_score(tmp_path: Path) -> None:
    for name, backend in (("none", None), ("refuses", Machines(SandboxError("no")))):
        done = asyncio.run(attempt(rollout(Asks(), WITH_MACHINE), tmp_path / name, backend, AMPLE))  # type: ignore[arg-type]
        assert done.score is not None
        assert (done.stop_reason, done.score.reward, done.turns) == ("failed", None, ())


def limited(**more: Any) -> Check:
    check = {"kind": "exact", "settings": {"answer": "4"}}
    return Check(kind="limited", settings={"check": check, "submissions": 2, "free": 1, "penalty": 0.25, **more})


@pytest.mark.parametrize(("asked", "answer", "reward", "paid"), [
    (0, "4", 1.0, None), (1, "4", 1.0, "asked 1 of 2 times, 1 without a price."), (2, "4", 0.75, "reward 1, less 0.25, is 0.75"),
    (5, "4", 0.75, "asked 2 of 2 times"), (2, "5", 0.0, "asked 2 of 2 times, 1 without a price.")])
def test_the_score_pays_for_asking_the_public_verifier(tmp_path: Path, asked: int, answer: str, reward: float, paid: str | None) -> None:
    policy = ScriptedPolicy([*[say("4", ("submit", {}))] * asked, answer])
    done = attempted(tmp_path, harnesses.opened("bash"), replace(TASK, diagnosis=limited()), policy)
    assert done.score is not None
    assert (done.stop_reason, done.score.reward) == ("finished", reward)
    if paid is None:
        assert "submissions" not in done.score.metrics
    else:
        assert done.score.metrics["submissions"] == min(asked, 2)
        assert done.score.metrics["before_penalty"] == (answer == "4")
        assert paid in done.score.evidence[-1]
    assert trajectory_file.read(tmp_path / "t.jsonl").score == done.score


def test_agents_below_share_the_submissions_of_the_attempt(tmp_path: Path) -> None:
    """A harness that gives the tool to the agents that it calls too gives them no submissions of their own."""
    script = [say("", ("ask", {"prompt": "look"})), say("4", ("check", {})), say("4", ("check", {})), "seen", say("", ("check", {})), "4"]
    opened = harnesses.opened("bash", ["tools.ask.kind=agent", "tools.check.kind=submit", "agents.depth=1"])
    done = attempted(tmp_path, opened, replace(TASK, diagnosis=limited()), ScriptedPolicy(script))
    assert done.score is not None
    assert (done.score.reward, done.score.metrics["submissions"]) == (0.75, 2.0)
    assert "All 2 submissions are used" in [message.text for message in done.messages() if message.role == "tool"][-1]


def test_a_public_verifier_gets_a_fresh_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "graded", contextlib.nullcontext)  # such boxes have no copies, and nothing is carried over
    told: list[str] = []

    async def asks(model: Recorder, box: Any) -> str:
        assert model.diagnosis is not None
        told.append(await model.diagnosis.submit(model.trajectory, box))
        return "finished"

    machines = Machines()
    task = replace(WITH_MACHINE, diagnosis=limited(check={"kind": f"{__name__}:Fresh", "settings": {}}))
    done = attempted(tmp_path, Asks(1, asks), task, backend=machines)
    assert done.score is not None
    assert told[0].startswith("Public check: 0.5") and done.score.metrics["submissions"] == 1.0
    own, fresh = machines.boxes
    assert (own.spec.metadata["purpose"], fresh.spec.metadata["purpose"], fresh.killed) == ("agent", "verifier", 1)


def test_a_harness_of_ones_own_need_not_ask_and_cannot_when_it_is_over(tmp_path: Path) -> None:
    kept_models: list[Recorder] = []

    async def keeps(model: Recorder, box: Any) -> str:
        kept_models.append(model)
        return "finished"

    done = attempted(tmp_path, Asks(1, keeps), replace(TASK, diagnosis=limited()))
    assert done.score is not None
    assert (done.score.reward, done.score.metrics) == (1.0, Score(reward=1.0).metrics)
    assert kept_models[0].diagnosis is None


def test_a_malformed_diagnosis_is_said_before_anything_is_made(tmp_path: Path) -> None:
    machines = Machines()
    with pytest.raises(DataError, match="diagnosis"):
        attempted(tmp_path, Asks(), replace(WITH_MACHINE, diagnosis=limited(penalty=2)), backend=machines)
    assert not machines.boxes
    assert not (tmp_path / "t.jsonl").exists()


class Installs(Asks):
    """A harness that installs something first: at once, or never to an end."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__()
        self.ends = ends
        self.parts: list[str] = []

    async def fitted(self, spec: Spec) -> Spec:
        self.parts.append("install")
        if not self.ends:
            await asyncio.Event().wait()
        return replace(spec, image="with a program")


def test_what_a_harness_installs_has_a_deadline_of_its_own_and_is_in_no_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, machines = Installs(ends=True), Machines()

    def began(_: Any, part: str) -> Any:
        harness.parts.append(part)
        return contextlib.nullcontext()

    with monkeypatch.context() as patched:
        patched.setattr(rollout_module._Attempt, "_timed", began)
        assert attempted(tmp_path, harness, WITH_MACHINE, backend=machines).stop_reason == "finished"
    assert machines.boxes[0].spec.image == "with a program"
    assert harness.parts == ["install", "machine", "agent", "judge"], "nothing is timed yet when it installs"
    machines = Machines()
    done = attempted(tmp_path, Installs(ends=False), WITH_MACHINE, backend=machines, deadlines=replace(AMPLE, install=0.05))
    assert done.score is not None
    assert (done.stop_reason, done.score.reward, dict(done.seconds)) == ("failed", None, {})
    assert "'asks' needs was not installed within 0.05 s" in (done.score.error or "")
    assert not machines.boxes


def test_a_full_host_is_waited_for(tmp_path: Path) -> None:
    machines = Machines(CapacityError("full"), CapacityError("full"))
    assert attempted(tmp_path, Asks(), WITH_MACHINE, backend=machines).stop_reason == "finished"
    full = Machines(*[CapacityError("no room")] * 1000)
    done = attempted(tmp_path, Asks(), WITH_MACHINE, backend=full, deadlines=replace(AMPLE, machine=0.05))
    assert done.score is not None
    assert done.score.error == "CapacityError: no room"


def test_a_machine_that_comes_too_late_is_ended(tmp_path: Path) -> None:
    class Late(Machines):
        async def create(self, spec: Spec) -> Any:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return await super().create(spec)

    late = Late()
    done = attempted(tmp_path, Asks(), WITH_MACHINE, backend=late, deadlines=replace(AMPLE, machine=0.05, grace=60.0))
    assert done.score is not None and (done.stop_reason, done.score.reward) == ("failed", None)
    assert "was not ready" in (done.score.error or "") and [box.killed for box in late.boxes] == [1]


def test_a_machine_that_will_not_end_is_said(tmp_path: Path) -> None:
    once = Machines(kills=[SandboxError("busy")])
    done = attempted(tmp_path, Asks(), WITH_MACHINE, backend=once)
    assert done.score is not None
    assert once.boxes[0].killed == 2
    assert not any("could not be ended" in line for line in done.score.evidence)
    never = Machines(kills=[SandboxError("busy")] * 2)
    done = attempted(tmp_path, Asks(), WITH_MACHINE, backend=never)
    assert done.score is not None
    assert done.score.reward == 1.0
    assert "could not be ended: SandboxError: busy" in done.score.evidence[-1]


def test_a_full_disk_stops_everything(tmp_path: Path) -> None:
    machines = Machines()
    with pytest.raises(OSError, match="No space"):
        attempted(tmp_path, Asks(), WITH_MACHINE, Dead(OSError(errno.ENOSPC, "No space left on device")), machines)
    assert machines.boxes[0].killed == 1
    assert kept(rollout(Asks(), WITH_MACHINE), tmp_path / "t.jsonl") is None


def test_cancelled_it_ends_the_machine_and_begins_anew_the_next_time(tmp_path: Path) -> None:
    machines, path = Machines(), tmp_path / "t.jsonl"

    async def stopped() -> None:
        harness = Asks(0, hangs)
        running = asyncio.create_task(attempt(rollout(harness, WITH_MACHINE), path, machines, AMPLE))  # type: ignore[arg-type]
        await asyncio.wait_for(harness.began.wait(), 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(stopped())
    assert machines.boxes[0].killed == 1
    assert kept(rollout(Asks(), WITH_MACHINE), path) is None
    done = attempted(tmp_path, Asks(), WITH_MACHINE, backend=machines)
    assert done.stop_reason == "finished"
    assert trajectory_file.read(path.with_name("t.jsonl.1")).stop_reason is None  # nothing is lost
    assert kept(rollout(Asks(), WITH_MACHINE), path) == done


def test_only_the_same_attempt_is_kept(tmp_path: Path) -> None:
    done = attempted(tmp_path, Asks())
    path = tmp_path / "t.jsonl"
    assert kept(rollout(Asks()), path) == done
    assert kept(rollout(Asks(), replace(TASK, prompt="What is 3 and 1?")), path) is None
    assert kept(rollout(Asks(), made_of={"harness": "another"}), path) is None
    assert kept(rollout(Asks()), tmp_path / "nothing") is None
    path.write_bytes(path.read_bytes()[:-20])
    assert kept(rollout(Asks()), path) is None
    path.write_bytes(b"no trajectory\n")
    assert kept(rollout(Asks()), path) is None
