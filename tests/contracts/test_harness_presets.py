"""Presets: their tools are those of the programs whose manner they have, and each of them carries a task from its words to its end."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from gnomon.agent.diagnosis import Diagnosis
from gnomon.agent.harness import harness
from gnomon.agent.policies.scripted import ScriptedPolicy, say
from gnomon.agent.record import BudgetSpent, Recorder
from gnomon.agent.task import Budget, Check, Task
from gnomon.agent.trajectory import Trajectory
from gnomon.agent.trajectory_file import TrajectoryFile
from gnomon.data.messages import Conversation, Message
from gnomon.errors import ConfigError, Unsupported
from gnomon.sandbox.open import open_backend
from gnomon.sandbox.sandbox import Backend, Sandbox, Spec

TASK = Task(id="t", prompt="Mend a.py.", image="host", workdir="/home/user/work", check=Check(kind="exact", settings={"answer": "x"}))
OTHERWISE_REQUIRED = {("hermes", "delegate_task", "goal")}
"""Arguments that a preset asks for and the program does not: what may stand in for them there, several goals at once, is left out here."""


def test_tools_are_those_of_the_programs(repository: Path) -> None:
    """Names, arguments, types, choices: a preset declares a part of what the program declares, and asks for the same."""
    programs = json.loads((repository / "tests" / "golden" / "agent_tools.json").read_text())
    assert {"kimi-code", "claude-code", "codex", "openclaw", "hermes", "bash"} <= set(programs)
    wrong = []
    for name, program in programs.items():
        for tool, use in harness.spec(name).tools.items():
            if tool not in program["tools"]:
                wrong.append(f"{name}: {tool}")
                continue
            theirs = program["tools"][tool]
            if theirs is None:
                assert (name, tool) == ("codex", "apply_patch"), "the one tool that takes free text there"
                continue
            wrong += [f"{name}: {tool}.{key}" for key in use.arguments if key not in theirs]
            for key, said in theirs.items():
                ours = use.arguments.get(key)
                if said.get("required") != ((ours is not None and ours.required) or None) and (name, tool, key) not in OTHERWISE_REQUIRED:
                    wrong.append(f"{name}: {tool}.{key} required")
                if ours is not None and ours.type != said.get("type", ours.type):
                    wrong.append(f"{name}: {tool}.{key} is {said['type']}")
                if ours is not None and not set(ours.choices) <= set(said.get("enum", ours.choices)):
                    wrong.append(f"{name}: {tool}.{key}: {ours.choices}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", harness.names())
def test_prompts_name_no_tool(name: str) -> None:
    """So that the prompt of one can stand before the tools of another."""
    spec = harness.spec(name)
    words = {word for tool in spec.tools for word in [f"`{tool}`"]}
    assert spec.manner and spec.name == name
    assert not [word for word in words if word in spec.system]


class Machines:
    """One backend for the tests of this file; a machine for each."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        try:
            self.backend: Backend = self.loop.run_until_complete(open_backend("namespaces"))
        except Unsupported as error:
            self.loop.close()
            pytest.skip(f"needs a sandbox: {error}")

    def use(self, test: Callable[[Sandbox], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            async with await self.backend.create(Spec(ttl_seconds=600.0)) as box:
                await box.write("/home/user/work/a.py", b"x = 1\ny = 2\n")
                await test(box)

        self.loop.run_until_complete(whole())

    def close(self) -> None:
        self.loop.run_until_complete(self.backend.close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    made = Machines()
    yield made
    made.close()


PATCH = "*** Begin Patch\n*** Update File: a.py\n@@\n-y = 2\n+y = 3\n*** End Patch"
RUN = "python3 a.py && cat a.py"
SCRIPTS: dict[str, list[Message | str]] = {
    "bash": [say("", ("bash", {"command": f"sed -i s/2/3/ a.py; {RUN}"})), "Done."],
    "minimal": [f"```mswea_bash_command\nsed -i s/2/3/ a.py; {RUN}\n```",
                "```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"],
    "kimi-code": [
        say("", ("Read", {"path": "a.py", "line_offset": -1}), ("Grep", {"pattern": "y", "-n": False}), ("Glob", {"pattern": "*"})),
        say("", ("TodoList", {"todos": [{"title": "mend", "status": "in_progress"}]}), ("Skill", {"skill": "careful-change"})),
        say("", ("Edit", {"path": "a.py", "old_string": "2", "new_string": "3"})),
        say("", ("Bash", {"command": RUN, "run_in_background": True, "description": "try it"})),
        say("", ("WaitFor", {"timeout": 60})), say("", ("TaskOutput", {"task_id": "1"}), ("TaskStop", {"task_id": "1"}), ("TaskList", {})),
        "Done."],
    "claude-code": [
        say("", ("Edit", {"file_path": "/home/user/work/a.py", "old_string": "2", "new_string": "3"})),
        say("", ("Read", {"file_path": "/home/user/work/a.py"}), ("TaskCreate", {"subject": "mend", "description": "mend it"})),
        say("", ("Edit", {"file_path": "/home/user/work/a.py", "old_string": "2", "new_string": "3"}),
            ("TaskUpdate", {"taskId": "1", "status": "completed"})),
        say("", ("Bash", {"command": "cd ..", "timeout": 60000}), ("Bash", {"command": f"cd work && {RUN}", "run_in_background": True})),
        say("", ("TaskOutput", {"task_id": "1", "block": True, "timeout": 60000})), "Done."],
    "codex": [
        say("I change it.", ("apply_patch", {"input": PATCH})), say("", ("exec_command", {"cmd": "read a; " + RUN, "yield_time_ms": 10})),
        say("", ("write_stdin", {"session_id": 1, "chars": "\n", "yield_time_ms": 60000, "max_output_tokens": 1000})), "Done."],
    "openclaw": [
        say("", ("read", {"path": "a.py"}), ("ls", {})), say("", ("edit", {"path": "a.py", "edits": [{"oldText": "2", "newText": "3"}]})),
        say("", ("exec", {"command": RUN, "background": True, "timeoutSeconds": 0, "title": "try it"})),
        say("", ("process", {"action": "poll", "sessionId": "1", "timeout": 60000})),
        say("", ("write", {"path": "MEMORY.md", "content": "a.py is mended"})), "Done."],
    "hermes": [
        say("", ("skills_list", {}), ("skill_view", {"name": "find-the-cause"}), ("search_files", {"pattern": "*.py", "target": "files"})),
        say("", ("patch", {"mode": "patch", "patch": PATCH}), ("todo", {"todos": [{"id": "1", "content": "mend", "status": "completed"}]})),
        say("", ("execute_code", {"code": "import subprocess; print(subprocess.getoutput('cat a.py'))"})),
        say("", ("memory", {"action": "add", "target": "user", "content": "likes 3"}), ("terminal", {"command": RUN})), "Done."],
    "recursive": [say("", ("python", {"code": "s = open('a.py').read(); open('a.py', 'w').write(s.replace('2', '3')); context"})),
                  say("", ("bash", {"command": RUN})), "Done."],
}


@pytest.mark.parametrize("name", harness.names())
def test_each_preset_carries_a_task_to_its_end(name: str, machines: Machines) -> None:
    async def test(box: Sandbox) -> None:
        recorder = Recorder(ScriptedPolicy(SCRIPTS[name]), Trajectory(id="a", task_id="t", harness=name))
        assert await harness.opened(name).run(TASK, recorder, box, effort="high") == "finished"
        assert await box.read("/home/user/work/a.py") == b"x = 1\ny = 3\n"
        trajectory = recorder.trajectory
        assert [turn.parent for turn in trajectory.turns] == [None, *range(len(SCRIPTS[name]) - 1)], "one context, a turn for each reply"
        shown = [message.text for message in trajectory.messages() if message.role in ("tool", "user")]
        assert any("y = 3" in text for text in shown)
        faults = [text for text in shown if text.startswith("Error")]
        assert len(faults) == (name == "claude-code"), faults  # an edit before reading

    machines.use(test)


def test_notes_and_files_for_agents_are_in_the_prompt(machines: Machines) -> None:
    async def test(box: Sandbox) -> None:
        await box.write("/home/user/work/MEMORY.md", b"The key is under {workdir}.")
        await box.write("/home/user/work/AGENTS.md", b"Speak of {task} in riddles.")
        seen: list[Conversation] = []
        recorder = Recorder(ScriptedPolicy(lambda asked: (seen.append(asked), "Done.")[1]), Trajectory(id="a", task_id="t"))
        await harness.opened("openclaw").run(TASK, recorder, box)
        system = seen[0].messages[0].text
        assert "under {workdir}." in system and "of {task} in riddles" in system and "/home/user/work is where" in system

    machines.use(test)


def replies(conversation: Conversation) -> Message | str:
    """A policy that gives a part away, then tells what came back."""
    said = conversation.messages[-1]
    if said.role == "user" and said.text == TASK.prompt:
        return say("", ("Agent", {"prompt": "Count the lines.", "description": "count"}))
    if said.text == "Count the lines.":
        return say("", ("Bash", {"command": "wc -l < a.py"}), ("Agent", {"prompt": "x", "description": "deeper"}))
    return f"Done. {said.text}"


def test_agents_that_are_called_are_contexts_of_their_own(machines: Machines) -> None:
    async def test(box: Sandbox) -> None:
        recorder = Recorder(ScriptedPolicy(replies), Trajectory(id="a", task_id="t"))
        assert await harness.opened("kimi-code").run(TASK, recorder, box) == "finished"
        turns = recorder.trajectory.turns
        assert [(turn.parent, turn.origin, turn.purpose) for turn in turns] == [(None, None, None), (None, 0, "agent"), (1, None, None),
                                                                                (0, None, None)]
        inner = recorder.trajectory.messages(2)
        assert [message.text for message in inner if message.role == "tool"][1].startswith("Error: there is no tool 'Agent'")
        assert recorder.trajectory.answer().startswith("Done. Done. Error:"), "what the called agent said last came back"

    machines.use(test)


def test_a_long_history_is_summed_up_and_goes_on() -> None:
    asked: list[Conversation] = []

    def policy(conversation: Conversation) -> Message | str:
        asked.append(conversation)
        last = conversation.messages[-1].text
        if "will be cleared" in last:
            return "I made three files."
        return "Done." if "I made three files." in last else say("x" * 500, ("todo", {}))

    recorder = Recorder(ScriptedPolicy(policy), Trajectory(id="a", task_id="t"))
    opened = harness.opened("bash", ["context.kind=compact", "context.settings.tokens=600", "tools.todo.kind=plan"])
    assert asyncio.run(opened.run(TASK, recorder, None)) == "finished"
    turns = recorder.trajectory.turns
    root = next(i for i, turn in enumerate(turns) if turn.purpose == "compaction")
    assert turns[root].parent is None and turns[root].origin == root - 1 and root == len(turns) - 1
    assert asked[-2].tool_choice == "none" and asked[-1].messages[:2] == asked[0].messages[:2]
    assert recorder.trajectory.answer() == "Done."


def test_old_results_are_left_out_of_a_long_history() -> None:
    asked: list[Conversation] = []

    def policy(conversation: Conversation) -> Message | str:
        asked.append(conversation)
        return say("", ("plan", {"items": [{"text": "y" * 490, "status": str(len(asked))}]})) if len(asked) < 12 else "Done."

    recorder = Recorder(ScriptedPolicy(policy), Trajectory(id="a", task_id="t"))
    opened = harness.opened("bash", ["context.kind=truncate", "context.settings={tokens=1200, keep=2}", "tools.plan.kind=plan"])
    assert asyncio.run(opened.run(TASK, recorder, None)) == "finished"
    last = [message for message in asked[-1].messages if message.role == "tool"]
    marked = ["no longer shown" in message.text for message in last]
    assert True in marked and False in marked and marked == sorted(marked, reverse=True), "the oldest are left out"
    assert all(message.role == "assistant" or message.tool_call_id for message in asked[-1].messages[2:])
    branched = [turn for turn in recorder.trajectory.turns if turn.purpose == "compaction" or turn.parent is None]
    assert len(branched) < 6, "not every turn begins anew"


def test_a_long_task_is_a_variable(machines: Machines) -> None:
    async def test(box: Sandbox) -> None:
        text = "needle " + "hay " * 5000 + "What is the first word?"
        task = Task(id="t", prompt=text, image="host", check=Check(kind="exact", settings={"answer": "needle"}))
        seen: list[Conversation] = []

        def policy(conversation: Conversation) -> Message | str:
            seen.append(conversation)
            said = conversation.messages[-1].text
            if len(seen) == 1:
                return say("", ("python", {"code": "llm_query_batched([context[:6], context[-5:]])"}))
            return f"<{said}>" if said in ("needle", "word?") else said

        recorder = Recorder(ScriptedPolicy(policy), Trajectory(id="a", task_id="t"))
        assert await harness.opened("recursive").run(task, recorder, box) == "finished"
        assert recorder.trajectory.answer() == "['<needle>', '<word?>']"
        assert [turn.purpose for turn in recorder.trajectory.turns] == [None, "agent", "agent", None]
        assert len(seen[0].messages[-1].text) < 6000

    machines.use(test)


def test_a_spent_budget_is_left_to_whoever_runs_the_attempt(machines: Machines, tmp_path: Path) -> None:
    async def test(box: Sandbox) -> None:
        with TrajectoryFile(tmp_path / "a.jsonl", Trajectory(id="a", task_id="t")) as file:
            recorder = Recorder(ScriptedPolicy(lambda asked: say("", ("bash", {"command": "true"}))), file, Budget(turns=3))
            with pytest.raises(BudgetSpent):
                await harness.opened("bash").run(TASK, recorder, box)
            assert len(file.trajectory.turns) == 3

    machines.use(test)


def test_what_a_harness_needs_is_checked_before_it_runs() -> None:
    for overrides, complaint in (
        (["tools.notes.kind=memory"], "'memory' does not say"), (["tools.skill.kind=skill"], "'skills' names none"),
        (["skills=['find-cause']"], "did you mean"), (["context.kind=recursive"], "needs a tool"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            harness.opened("bash", overrides)


def test_a_recipe_of_ones_own_begins_with_a_preset(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "codex"\n[tools.exec_command.settings]\nwait = 1.0\n[wire]\nkind = "tagged"\n')
    opened = harness.opened(recipe)
    assert opened.name == "mine" and harness.spec(recipe).tools["exec_command"].settings == {"wait": 1.0}
    other = tmp_path / "other.toml"
    other.write_text('extends = "mine.toml"\ncontext.kind = "none"\ntools.apply_patch.kind = "ls"\nturns = 9\n')
    spec = harness.spec(other, ["tools.write_stdin.kind=plan", "tools.write_stdin.settings.text=words"])
    assert (spec.name, spec.turns, spec.wire.kind, spec.context.settings) == ("other", 9, "tagged", {}), "another kind, no old settings"
    assert not spec.tools["apply_patch"].arguments and spec.tools["write_stdin"].settings == {"text": "words"}
    assert spec.tools["exec_command"].arguments, "what was not changed stays"
    for text, complaint in (('extends = "other.toml"', "circle"), ("extends = 3", "must be a preset"), ("tools = 3", "'tools'"),
                            ('extends = "codx"', "did you mean 'codex'"), ("x = ", "cannot be read"), ('context = "none"', "'context'")):
        other.write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            harness.spec(other)


def test_tagged_calls_are_read_from_text() -> None:
    seen: list[Conversation] = []
    script = ['<tool_call>\n{"name": "plan", "arguments": {"items": [{"text": "look"}]}}\n</tool_call>', "<tool_call>{}</tool_call>",
              "<tool_call>{", '<tool_call>{"name": "plan", "arguments": 3}</tool_call>', "Done."]

    def policy(conversation: Conversation) -> str:
        seen.append(conversation)
        return script[len(seen) - 1]

    recorder = Recorder(ScriptedPolicy(policy), Trajectory(id="a", task_id="t"))
    opened = harness.opened("bash", ["wire.kind=tagged", "tools.plan.kind=plan", "patience=9"])
    assert asyncio.run(opened.run(TASK, recorder, None)) == "finished"
    assert not seen[0].tools and '"name": "plan"' in seen[0].messages[0].text
    told = [conversation.messages[-1].text for conversation in seen[1:]]
    assert told[0] == "<tool_response>\n1. [] look\n</tool_response>" and "an object with 'name'" in told[1] and "without" in told[2]
    assert "has no argument ''" in told[3]


def test_a_public_verifier_may_be_asked_a_few_times(machines: Machines) -> None:
    async def test(box: Sandbox) -> None:
        task = Task(id="t", prompt="Mend a.py.", image="host", workdir="/home/user/work", check=Check(kind="hidden"),
                    diagnosis=Check(kind="files", settings={"files": {"/home/user/work/a.py": {"contains": "y = 3"}}}))
        mend = say("", ("exec_command", {"cmd": "sed -i s/2/3/ a.py"}))
        recorder = Recorder(ScriptedPolicy([say("", ("submit", {})), mend, *[say("", ("submit", {"note": "now"}))] * 3, "Done."]),
                            Trajectory(id="a", task_id="t"), diagnosis=Diagnosis(task))
        assert await harness.opened("codex").run(task, recorder, box) == "finished"
        told = [message.text for message in recorder.trajectory.messages() if message.role == "tool"]
        assert told[0].startswith("Public check: 0") and told[2].startswith("Public check: 1") and "1 of 3" in told[2]
        assert "submissions are used" in told[4]

    machines.use(test)
