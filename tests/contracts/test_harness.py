"""Harnesses: whatever a policy answers, each call gets one result, and the attempt ends in order."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from sandbox_backends import namespaces

from gnomon.agent.harness import harness
from gnomon.agent.harness.composed import Composed
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.observation import bounded
from gnomon.agent.harness.wires.fenced import blocks
from gnomon.agent.policy import Completion, Sampling
from gnomon.agent.task import Check, Task
from gnomon.data.messages import Conversation, Message, Text, ToolCall
from gnomon.errors import ConfigError, SandboxLost
from gnomon.sandbox.sandbox import Command, Result, Sandbox, Spec

TASK = Task(id="t", prompt="Do it.", image="host", workdir="/home/user", check=Check(kind="exact", settings={"answer": "x"}))
Reply = str | Message | tuple[Message, str]


def say(text: str = "", *calls: tuple[str, Any]) -> Message:
    """A reply with calls; arguments that are no text are written as JSON."""
    made = tuple(ToolCall(id=f"call_{i}", name=name, arguments=given if isinstance(given, str) else json.dumps(given))
                 for i, (name, given) in enumerate(calls))
    return Message(role="assistant", content=(Text(text=text),) if text else (), tool_calls=made)


class Model:
    """Answers from a list, and keeps what it was asked."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self.replies, self.asked = list(replies), list[Conversation]()
        self.purposes: list[str | None] = []

    diagnosis = None

    async def complete(self, conversation: Conversation, sampling: Sampling | None = None, *, purpose: Any = None) -> Completion:
        self.asked.append(conversation)
        self.purposes.append(purpose)
        reply = self.replies.pop(0)
        message, stop = reply if isinstance(reply, tuple) else (reply, "stop")
        message = say(message) if isinstance(message, str) else message
        return Completion(message=message, stop=stop)  # type: ignore[arg-type]


class Box:
    """A machine whose programs are a function of the test."""

    def __init__(self, program: Callable[[Command], Result] | None = None) -> None:
        self.spec, self.id, self.commands = Spec(), "box", list[Command]()
        self.program = program or (lambda command: Result(code=0, stdout=b"ok\n", stderr=b""))

    async def exec(self, command: Command) -> Result:
        self.commands.append(command)
        return self.program(command)


def attempted(name: str, replies: Sequence[Reply], box: Any = None, overrides: Sequence[str] = (), task: Task = TASK) -> tuple[str, Model]:
    """Why an attempt ended, and the model with what it was asked."""
    model = Model(replies)
    reason = asyncio.run(harness.opened(name, overrides).run(task, model, box))
    return reason, model


def results(conversation: Conversation) -> list[str]:
    """What the tools said, in a conversation."""
    return [message.text for message in conversation.messages if message.role == "tool"]


def test_a_call_is_carried_out_and_its_result_shown() -> None:
    box = Box()
    reason, model = attempted("bash", [say("Looking.", ("bash", {"command": "ls"})), "All is well."], box)
    assert reason == "finished"
    assert box.commands[0].argv[-1].endswith("\nls") and box.commands[0].cwd == "/home/user"
    assert json.loads(results(model.asked[1])[0]) == {"returncode": 0, "output": "ok\n"}
    first, second = model.asked
    assert second.messages[: len(first.messages)] == first.messages, "a history only grows"


@pytest.mark.parametrize(("name", "arguments", "complaint"), [
    ("bash", "{", "no JSON"), ("bash", "[1]", "one JSON object"), ("bash", '{"command": 3}', "must be a string"), ("bash", "{}", "needs"),
    ("bash", "", "needs the argument 'command'"), ("bash", '{"command": null}', "needs"),
    ("bash", '{"comand": "ls"}', "did you mean 'command'"),
    ("bahs", '{"command": "ls"}', "did you mean 'bash'"), ("", "{}", "there is no tool"), ("bash", '{"command": NaN}', "no JSON"),
    ("bash", '{"command": "\\ud800"}', "no Unicode"), ("bash", "[" * 100_000, "no JSON"),
])
def test_a_call_that_cannot_be_carried_out_gets_the_reason(name: str, arguments: str, complaint: str) -> None:
    box = Box()
    reason, model = attempted("bash", [say("", (name, arguments)), "Then not."], box)
    assert reason == "finished" and not box.commands
    assert complaint in results(model.asked[1])[0]


def test_every_call_gets_one_result_in_order_even_where_there_are_many() -> None:
    calls = [("bash", {"command": f"echo {i}"}) if i % 2 else ("nothing", "") for i in range(100)]
    reason, model = attempted("bash", [say("", *calls), "done"], Box())
    assert reason == "finished"
    answers = [message for message in model.asked[1].messages if message.role == "tool"]
    assert [message.tool_call_id for message in answers] == [f"call_{i}" for i in range(100)]
    assert "one message may hold 32 calls" in answers[-1].text


@pytest.mark.parametrize("reply", ["", say("", ("nothing", "{}")), say("", ("bash", "{")), (say("I thi"), "length")])
def test_patience_ends(reply: Reply) -> None:
    reason, model = attempted("bash", [reply] * 3, Box())
    assert reason == "refused" and len(model.asked) == 3


def test_a_usable_call_renews_patience() -> None:
    bad, good = say("", ("bash", "{")), say("", ("bash", {"command": "true"}))
    reason, _ = attempted("bash", [bad, bad, good, bad, bad, "done"], Box())
    assert reason == "finished"


def test_a_command_that_fails_is_work() -> None:
    box = Box(lambda command: Result(code=1, stdout=b"", stderr=b"no"))
    reason, _ = attempted("bash", [say("", ("bash", {"command": "false"}))] * 5 + ["done"], box)
    assert reason == "finished"


def test_summaries_are_drawn_as_answers_are() -> None:
    drawn: list[Any] = []

    class Draws(Model):
        async def complete(self, conversation: Conversation, sampling: Sampling | None = None, *, purpose: Any = None) -> Completion:
            drawn.append(sampling)
            return await super().complete(conversation, sampling, purpose=purpose)

    call = say("", ("bash", {"command": "x" * 2000}))
    model = Draws([call, call, "summed up", "done"])
    over = ["context.kind='compact'", "context.settings.tokens=600", "sampling.temperature=0.5", "sampling.max_tokens=77"]
    asyncio.run(harness.opened("bash", over).run(TASK, model, Box()))  # type: ignore[arg-type]
    assert len(drawn) == 4 and set(drawn) == {Sampling(temperature=0.5, max_tokens=77)}
    assert any(conversation.tool_choice == "none" for conversation in model.asked)


def test_turns_are_bounded() -> None:
    reason, model = attempted("bash", [say("", ("bash", {"command": "true"}))] * 4, Box(), ["turns=4"])
    assert reason == "budget" and len(model.asked) == 4


def test_what_was_cut_is_not_carried_out() -> None:
    box = Box()
    reason, model = attempted("bash", [(say("", ("bash", '{"command": "rm -r /ho')), "length"), (say("and so"), "length"), "done"], box)
    assert reason == "finished" and not box.commands
    assert "limit of its length" in model.asked[2].messages[-1].text


def test_blocks_of_the_minimal_harness() -> None:
    box = Box(lambda command: Result(code=0, stdout=command.argv[-1].removeprefix("exec 2>&1\necho ").encode() + b"\n", stderr=b""))
    block = "```mswea_bash_command\necho {}\n```"
    reason, model = attempted("minimal", ["No block.", f"Two.\n{block}\n{block}", f"One.\n{block.format('hello')}",
                                          block.format("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")], box)
    assert reason == "finished" and len(box.commands) == 2
    assert not model.asked[0].tools and "mswea_bash_command" in model.asked[0].messages[0].text
    said = [conversation.messages[-1].text for conversation in model.asked[1:]]
    assert "no block" in said[0] and "holds 2 blocks" in said[1] and "<returncode>0</returncode>" in said[2] and "hello" in said[2]


def test_calls_where_none_are_declared_are_answered_too() -> None:
    call = say("```mswea_bash_command\ntrue\n```", ("bash", {"command": "true"}))
    box = Box()
    reason, model = attempted("minimal", [call] * 3, box)
    assert reason == "refused" and not box.commands
    assert [message.role for message in model.asked[1].messages[-2:]] == ["tool", "user"]


def test_a_fence_that_is_not_closed_is_no_block() -> None:
    assert blocks("```x\na\n", {"x"}) == []
    assert blocks("```x\na\n```\n```y\nb\n```\n```x \nc\n\n```", {"x"}) == [("x", "a"), ("x", "c\n")]


def test_long_results_are_cut_and_say_so() -> None:
    box = Box(lambda command: Result(code=0, stdout=b"a" * 50_000 + b"END", stderr=b""))
    _, model = attempted("bash", [say("", ("bash", {"command": "yes"})), "done"], box)
    text = results(model.asked[1])[0]
    assert len(text) < 10_100 and "characters are cut here" in text and "END" in text
    assert bounded("x" * 300, 100, "start").startswith("x" * 100 + "\n[… 200 characters")


def test_a_lost_machine_is_not_the_policys_to_read() -> None:
    def gone(command: Command) -> Result:
        raise SandboxLost("gone")

    with pytest.raises(SandboxLost):
        attempted("bash", [say("", ("bash", {"command": "ls"}))], Box(gone))


def test_without_a_machine_its_tools_are_not_declared() -> None:
    task = Task(id="sum", prompt="2 + 2?", check=Check(kind="exact", settings={"answer": "4"}))
    reason, model = attempted("bash", ["4"], task=task)
    assert reason == "finished" and not model.asked[0].tools
    with pytest.raises(ConfigError, match="needs a machine"):
        attempted("minimal", ["4"], task=task)


def test_an_effort_is_stated_and_a_typo_refused() -> None:
    model = Model(["4"])
    assert asyncio.run(harness.opened("bash").run(TASK, model, None, effort="high")) == "finished"
    assert model.asked[0].effort == "high"
    with pytest.raises(ConfigError, match="did you mean 'high'"):
        asyncio.run(harness.opened("bash").run(TASK, model, None, effort="hihg"))


@pytest.mark.parametrize(("overrides", "complaint"), [
    (["wire.kind=fencd"], "did you mean 'fenced'"), (["tools.bash.kind=bsh"], "did you mean 'bash'"),
    (["tolls.x.kind=bash"], "did you mean 'tools'"),
    (["tools.bash.settings.secs=3"], "unknown field"), (["tools.bash.arguments.command.to=comand"], "did you mean 'command'"),
    (["tools.bash.arguments.command.to=seconds"], "none stands for 'command'"), (["system=\"{wokdir}\""], "prompts know"),
    (["context.kind=compress"], "choices"), (["turns=0"], "1 or more"), (["tools.bash.fixed.x=1"], "no such argument"),
    (["observations.characters=5"], "less than 100"),
])
def test_parts_that_do_not_fit_are_named(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        harness.opened("bash", overrides)


def test_a_harness_that_lost_its_tools_is_refused_where_it_cannot_do_without(tmp_path: Path) -> None:
    assert isinstance(harness.opened("minimal"), Composed)
    recipe = tmp_path / "bare.toml"
    recipe.write_text('[wire]\nkind = "fenced"\n')
    with pytest.raises(ConfigError, match="needs a tool that takes text"):
        harness.opened(recipe)


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(ConfigError, match="did you mean 'minimal'"):
        harness.opened("minimum")


def test_paths_are_those_of_the_machine() -> None:
    desk = Desk(spec=harness.spec("bash"), task=TASK, model=Model([]), box=None, workdir="/task")
    assert (desk.path("a/../b"), desk.path("/x"), desk.path("~/y")) == ("/task/b", "/x", "/home/user/y")


def in_a_machine(use: Callable[[Sandbox], Coroutine[Any, Any, None]]) -> None:
    """Run a test in a real sandbox, or skip it where there can be none."""
    async def whole() -> None:
        async with namespaces() as backend, await backend.create(Spec(ttl_seconds=600.0)) as box:
            await use(box)

    asyncio.run(whole())


@pytest.mark.parametrize("name", ["bash", "minimal"])
def test_a_real_machine(name: str) -> None:
    async def use(box: Sandbox) -> None:
        commands = ["echo hello > note; echo error >&2; exit 3", "cat note", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
        replies: list[Reply] = [say("", ("bash", {"command": command})) if name == "bash" else f"```mswea_bash_command\n{command}\n```"
                                for command in commands]
        model = Model([*replies, "done"])
        assert await harness.opened(name).run(TASK, model, box) == "finished"
        said = [conversation.messages[-1].text for conversation in model.asked[1:]]
        assert "error" in said[0] and "3" in said[0] and "hello" in said[1]
        assert await box.read("/home/user/note") == b"hello\n"

    in_a_machine(use)
