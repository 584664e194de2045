"""Real agent programs, unchanged: each is installed from its index and solves a task in a sandbox whose only network is the gateway."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sandbox_backends import namespaces

from gnomon.agent import machine, program
from gnomon.agent.harness import harness
from gnomon.agent.policies.scripted import ScriptedPolicy, say
from gnomon.agent.program import Program, ProgramHarness
from gnomon.agent.record import BudgetSpent, Recorder
from gnomon.agent.rollout import Rollout, attempt
from gnomon.agent.task import Budget, Check, Task
from gnomon.agent.trajectory import Trajectory
from gnomon.agent.verifier import judge
from gnomon.data.chat import chat_format
from gnomon.data.messages import Conversation, Message
from gnomon.data.tokenizer import train_tokenizer
from gnomon.errors import ConfigError, DataError, GnomonError, PolicyError, SandboxError
from gnomon.sandbox.sandbox import Network

pytest.importorskip("uvicorn", reason="the gateway needs the extra 'serve'")
TASK = Task(id="four", prompt="Write the sum of 2 and 2 into /home/user/n.", image="host", artifacts=("/home/user",),
            budget=Budget(turns=8, seconds=240.0), check=Check(kind="files", settings={"files": {"/home/user/n": {"number": 4}}}))
COMMANDS = {"Bash": "command", "bash": "command", "exec_command": "cmd"}
OURS = Program(name="ours", argv=("sh", "-c", """
body='{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
curl -sS --noproxy '*' -H 'authorization: Bearer {key}' -d "$body" {url}/v1/chat/completions > /home/user/n && %s
"""))


def works(conversation: Conversation) -> Message:
    """What a policy would do: run a command with whatever tool there is, see that it worked, and say so."""
    said = sum(message.role == "assistant" for message in conversation.messages)
    tool = next((tool.name for tool in conversation.tools if tool.name in COMMANDS), None)
    if tool is None:
        return say("nothing to do")
    if said == 0:
        return say("I write it.", (tool, {COMMANDS[tool]: "echo 4 > /home/user/n; cat /home/user/n"}), reasoning="2 + 2 is 4.")
    if tool == "bash":
        return say("Done.", (tool, {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}))
    return say("Done: it is 4.")


def attempted(chosen: ProgramHarness, policy: Any, task: Task = TASK,
              look: Callable[[Any], Any] | None = None) -> tuple[Any, Recorder, Any]:
    """How it ended (or what was raised), the recorder, and the score."""

    async def run() -> tuple[Any, Recorder, Any]:
        async with namespaces() as backend:
            try:
                spec = await chosen.fitted(machine.spec(task, "agent"))
            except ConfigError as error:
                pytest.skip(f"cannot be installed here: {error}")
            box = await machine.made(task, backend, spec)
            recorder = Recorder(policy, Trajectory(id="t-1", task_id=task.id), task.budget)  # its seconds begin once all is installed
            try:
                try:
                    ended: Any = await chosen.run(task, recorder, box)
                except GnomonError as error:
                    ended = error
                score = await judge(task, recorder.trajectory, box, backend)
                return ended, recorder, (await look(box), score) if look else score
            finally:
                await recorder.close()
                await box.kill()

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("name", program.names())
def test_a_real_program_solves_a_task(name: str) -> None:
    chat = chat_format(train_tokenizer([Path(program.__file__).read_text(encoding="utf-8")], 600))
    ended, recorder, score = attempted(ProgramHarness(program.program(name)), ScriptedPolicy(works, chat))
    turns = recorder.trajectory.turns
    assert ended == "finished" and score.reward == 1.0, (ended, score)
    assert len(turns) == 2 and turns[1].parent == 0 and any(tool["name"] in COMMANDS for tool in turns[0].notes["tools"])
    assert [[span.sampled for span in turn.spans] for turn in turns] == [[False, True], [False, True]]  # to the id, one context
    assert any("2 and 2" in message.text for message in turns[0].messages) and turns[1].messages[0].role == "tool"


CLOSED = "! curl -fsS -m 5 http://1.1.1.1/ && ! curl -fsS -m 5 -x '' http://1.1.1.1/"
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the stand-in for a program is written with curl")


@needs_curl
def test_a_program_of_ours_reaches_the_gateway_and_nothing_else() -> None:
    async def look(box: Any) -> Any:
        return box.network if hasattr(box, "network") else Network()

    chosen = Program(name="ours", argv=(*OURS.argv[:2], OURS.argv[2] % CLOSED))
    ended, recorder, (network, _) = attempted(ProgramHarness(chosen), ScriptedPolicy(["hello {url}"]), look=look)
    assert ended == "finished" and recorder.turns == 1 and recorder.trajectory.answer() == "hello {url}"
    assert network == Network()  # nothing is reached once it has ended


@needs_curl
def test_a_request_without_sense_after_one_with_it_dodges_no_score() -> None:
    def reply(conversation: Conversation) -> Message:
        if "nonsense" in conversation.messages[-1].text:
            raise DataError("this cannot be encoded")
        return say("hello")

    again = OURS.argv[2] % "true" + "body='{\"model\": \"m\", \"messages\": [{\"role\": \"user\", \"content\": \"nonsense\"}]}'\n" + \
        OURS.argv[2].strip().splitlines()[1] % "false"
    ended, recorder, score = attempted(ProgramHarness(Program(name="ours", argv=("sh", "-c", again))), ScriptedPolicy(reply))
    assert ended == "refused" and recorder.turns == 1 and score.reward == 0.0
    only = OURS.argv[2].replace('"hi"', '"nonsense"') % "true"
    ended, recorder, _ = attempted(ProgramHarness(Program(name="ours", argv=("sh", "-c", only))), ScriptedPolicy(reply))
    assert isinstance(ended, DataError) and recorder.turns == 0


@needs_curl
def test_how_a_program_ends_decides() -> None:
    asks = OURS.argv[2]
    one_turn = Task.from_json(TASK.to_json() | {"budget": {"turns": 1}})
    cases: list[tuple[str, Any, Task, Any]] = [
        (asks % "exit 3", ScriptedPolicy(["a"]), TASK, "refused"),
        ("echo no such thing; exit 127", ScriptedPolicy(["a"]), TASK, SandboxError),
        (asks % "true" + (asks % "sleep 3600"), ScriptedPolicy(["a", "b"]), one_turn, BudgetSpent),
        (asks % "true", ScriptedPolicy(lambda _: 1 / 0), TASK, PolicyError),  # type: ignore[arg-type, return-value]
    ]
    for script, policy, task, expected in cases:
        ended, _, _ = attempted(ProgramHarness(Program(name="ours", argv=("sh", "-c", script)), grace_seconds=0.1), policy, task)
        assert ended == expected if isinstance(expected, str) else isinstance(ended, expected), (script, ended)


@needs_curl
def test_a_program_is_attempted_and_judged_like_any_harness(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    script = OURS.argv[2] % "echo 4 > $FOLDER/n"
    mine.write_text(f"argv = ['sh', '-c', '''{script}''']\nenv = {{FOLDER = '/home/user'}}\n")

    async def run() -> Trajectory:
        async with namespaces() as backend:
            entry = Rollout(id="a", task=TASK, harness=harness.opened(str(mine)), policy=ScriptedPolicy(["a"]), effort="high")
            return await attempt(entry, tmp_path / "a.jsonl", backend)

    trajectory = asyncio.run(run())
    assert trajectory.score is not None and trajectory.score.reward == 1.0, trajectory.score
    assert trajectory.stop_reason == "finished" and trajectory.harness == "programs/mine" and len(trajectory.turns) == 1


def test_programs_in_other_sandboxes_are_refused_by_name() -> None:
    program.check_backend("programs/codex", "namespaces")
    program.check_backend("bash", "microvm")
    with pytest.raises(ConfigError, match=r"'programs/codex' is a program.*not 'microvm'.*set backend"):
        program.check_backend("programs/codex", "microvm")


def test_programs_are_named_and_checked(tmp_path: Path) -> None:
    assert program.names() == ["programs/claude-code", "programs/codex", "programs/kimi-code", "programs/mini-swe-agent"]
    assert all(program.program(name).argv for name in program.names())
    with pytest.raises(ConfigError, match="did you mean 'programs/codex'"):
        harness.opened("programs/codx")
    mine = tmp_path / "mine.toml"
    mine.write_text('argv = ["true"]\nenvv = {}\n')
    with pytest.raises(ConfigError, match="envv"):
        program.program(str(mine))
    mine.write_text('argv = ["true"]\n')
    assert program.program(str(mine)).name == "programs/mine"

    async def run(task: Task, box: Any) -> None:
        await ProgramHarness(OURS).run(task, Recorder(ScriptedPolicy(["a"]), Trajectory(id="t", task_id="t")), box)

    with pytest.raises(ConfigError, match="needs a machine"):
        asyncio.run(run(TASK, None))
    with pytest.raises(ConfigError, match="only way out"):
        asyncio.run(run(Task.from_json(TASK.to_json() | {"network": ["example.org:443"]}), object()))
