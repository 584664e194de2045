"""Whatever a policy answers, and whatever a machine does, a harness ends in order: no reply breaks it, and no turn is lost."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.agent.harness import harness
from gnomon.agent.harness.composed import Composed
from gnomon.agent.harness.observation import bounded
from gnomon.agent.harness.patches import Change, Hunk, parsed, updated
from gnomon.agent.harness.tools.glob import expanded, matches
from gnomon.agent.policy import Completion, Sampling
from gnomon.agent.record import Recorder
from gnomon.agent.task import Check, Task
from gnomon.agent.trajectory import StopReason, Trajectory, turn_to_json
from gnomon.data.messages import Conversation, Message, Text, ToolCall
from gnomon.errors import GnomonError, SandboxError
from gnomon.sandbox.sandbox import Command, Result, Spec

HARNESSES = {name: harness.opened(name, ["context.kind=compact", "context.settings={tokens=2000}"] if name == "codex" else [])
             for name in harness.names()} | {"tagged": harness.opened("hermes", ["wire.kind=tagged"])}
TASK = Task(id="t", prompt="Do it.", image="host", workdir="/w", check=Check(kind="exact", settings={"answer": "x"}))
ENDS = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
HUGE = "x" * 300_000

texts = st.one_of(
    st.text(max_size=40), st.sampled_from([
        "", " ", HUGE, "```mswea_bash_command\nls\n```", "```mswea_bash_command\nls", "<tool_call>", "<tool_call>{}</tool_call>", "\ud800",
        '<tool_call>{"name": "todo", "arguments": {}}</tool_call>', "<|open|>message<|sep|>", "\0", "{task}{0}%s",
        "*** Begin Patch\n*** Add File: ../../../etc/x\n+\n*** End Patch", "/", "..", "a/" * 3000, "-rf", "[" * 50, "**/" * 90]))
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.sampled_from([10**400, -1, 0, 1e308, "1", "replace"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)), max_leaves=5)


@st.composite
def calls(draw: st.DrawFn, composed: Composed) -> ToolCall:
    """A call: of a tool that there is or not, with arguments that fit, that nearly fit, or that are no JSON."""
    tool = draw(st.sampled_from(composed.tools)) if composed.tools else None
    name = tool.name if tool is not None and draw(st.integers(0, 9)) else draw(texts)
    id = draw(st.sampled_from(["", "call_0", "call_1", "x" * 500]))
    kind = draw(st.integers(0, 9))
    if kind == 0 or tool is None:
        return ToolCall(id=id, name=name, arguments=draw(texts))
    given = {}
    for key, argument in tool.arguments.items():
        if argument.required or draw(st.booleans()):
            fitting = {"string": st.sampled_from([*argument.choices]) if argument.choices else texts, "boolean": st.booleans(),
                       "integer": st.integers(-5, 50), "number": st.floats(-5, 50), "array": st.lists(values, max_size=3)}
            given[key] = draw(values if kind == 1 else fitting.get(argument.type, values))
    if kind == 2:
        given[draw(st.text(max_size=5))] = draw(values)
    text = json.dumps(given)
    return ToolCall(id=id, name=name, arguments=text[: draw(st.integers(0, len(text)))] if kind == 3 else text)


@st.composite
def completions(draw: st.DrawFn, composed: Composed) -> Completion:
    """Any answer of a policy."""
    made = tuple(draw(st.lists(calls(composed), max_size=draw(st.sampled_from([0, 1, 1, 2, 40])))))
    said = draw(texts)
    message = Message(role="assistant", content=(Text(text=said),) if said else (), reasoning=draw(st.none() | texts), tool_calls=made)
    return Completion(message=message, stop=draw(st.sampled_from(["stop", "stop", "stop", "length"])))


class Answers:
    """A policy that gives these answers, and then says that it is done; it keeps what it was asked."""

    name = "answers"

    def __init__(self, answers: Sequence[Completion]) -> None:
        self.answers, self.asked = list(answers), list[Conversation]()

    async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Completion:
        self.asked.append(conversation)
        ending = f"```mswea_bash_command\necho {ENDS}\n```"
        return self.answers.pop(0) if self.answers else Completion(message=Message(role="assistant", content=(Text(text=ending),)))

    async def close(self, session: str) -> None:
        pass


class Box:
    """A machine that answers as it likes: it fails, floods, is empty, or says what no text is."""

    def __init__(self, moods: Sequence[int]) -> None:
        self.spec, self.id, self.moods, self.count = Spec(), "box", moods, 0

    def mood(self) -> int:
        self.count += 1
        mood = self.moods[self.count % len(self.moods)]
        if mood == 0:
            raise SandboxError("it does not want to")
        return mood

    async def exec(self, command: Command) -> Result:
        out = {1: b"", 2: b"\xff\xfe" * 10, 3: b"a" * 200_000, 4: b"./a\n./b/c\n"}[self.mood()]
        if command.argv[-1].endswith(f"echo {ENDS}"):
            return Result(code=0, stdout=f"{ENDS}\n".encode(), stderr=b"")
        return Result(code=self.count % 3 - 1, stdout=out, stderr=b"e",
                      timed_out=self.count % 5 == 0, truncated=self.count % 7 == 0)

    async def start(self, command: Command, *, stdin: bool = False) -> Any:
        raise SandboxError("nothing can be started")

    async def read(self, path: str, max_bytes: int = 0) -> bytes:
        return {1: b"", 2: b"\xff", 3: b"line\n" * 5000, 4: b"a\r\nb"}[self.mood()]

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        self.mood()


def checked(conversation: Conversation, limit: int) -> None:
    """Each call of a message is answered once, in order, before anybody speaks again; what was said is bounded and can be encoded."""
    open_calls: list[str] = []
    for message in conversation.messages:
        if message.role == "tool":
            assert message.tool_call_id == open_calls.pop(0)
        else:
            assert not open_calls
            open_calls = [call.id for call in message.tool_calls]
        if message.role != "assistant":
            message.text.encode()
            assert len(message.text) <= 50 * (limit + 500)
    assert not open_calls


@settings(max_examples=80)
@given(data=st.data())
def test_no_reply_breaks_a_harness_and_no_turn_is_lost(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(HARNESSES)))
    composed = HARNESSES[name]
    assert isinstance(composed, Composed)
    answers = data.draw(st.lists(completions(composed), max_size=5))
    box = Box(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5)))
    policy = Answers(answers)
    recorder = Recorder(policy, Trajectory(id="a", task_id="t"))
    machine: Any = box if composed.spec.machine == "required" or data.draw(st.booleans()) else None
    reason = asyncio.run(composed.run(TASK, recorder, machine))
    assert reason in get_args(StopReason) and reason != "failed"
    assert len(recorder.trajectory.turns) == len(policy.asked), "each answer is one turn"
    for turn, conversation in zip(recorder.trajectory.turns, policy.asked, strict=True):
        assert turn.messages[-1].role == "assistant"
        json.dumps(turn_to_json(turn))
        if conversation.tool_choice != "none":
            checked(conversation, composed.spec.observations.characters)


@settings(max_examples=150)
@given(text=st.text(max_size=300) | texts, characters=st.integers(100, 400), keep=st.sampled_from(["ends", "start"]))
def test_what_is_shown_is_bounded_and_keeps_its_ends(text: str, characters: int, keep: Any) -> None:
    shown = bounded(text, characters, keep)
    shown.encode()
    assert len(shown) <= max(characters + 60, len(text)) and shown[:50] == text[:50].encode("utf-8", "replace").decode()
    assert len(text) > characters or "are cut here" not in shown


@settings(max_examples=150)
@given(lines=st.lists(st.text("ab \t", max_size=4), max_size=12), data=st.data())
def test_a_patch_made_from_two_texts_makes_the_one_of_the_other(lines: list[str], data: st.DataObject) -> None:
    """The oracle is the edit itself: lines are taken out and put in at known places, all in one hunk that begins with the first line."""
    kept = [data.draw(st.sampled_from(["stay", "go", "add"])) for _ in lines]
    body, after = [], []
    for line, fate in zip(lines, kept, strict=True):
        body += [f"-{line}"] if fate == "go" else [f" {line}"]
        after += [] if fate == "go" else [line]
        if fate == "add":
            body.append("+new")
            after.append("new")
    if not any(fate != "stay" for fate in kept):
        return
    change, = parsed("\n".join(["*** Begin Patch", "*** Update File: f", "@@", *body, "*** End Patch"]))
    assert updated(change, "".join(f"{line}\n" for line in lines)) == "".join(f"{line}\n" for line in after)


@settings(max_examples=150)
@given(text=st.text("*+- @\nabBeginPtchEdUFil:", max_size=80))
def test_any_text_is_a_patch_or_a_complaint(text: str) -> None:
    for patch in (text, f"*** Begin Patch\n*** Update File: f\n{text}\n*** End Patch"):
        try:
            for change in parsed(patch):
                assert isinstance(change, Change) and all(isinstance(hunk, Hunk) for hunk in change.hunks)
                updated(change, "a\nb\n")
        except GnomonError:
            pass


@settings(max_examples=150)
@given(parts=st.lists(st.sampled_from(["a", "b", "ab", "*", "**", "?", "a*", "[ab]"]), min_size=1, max_size=5),
       names=st.lists(st.sampled_from(["a", "b", "ab", "ba"]), min_size=1, max_size=5))
def test_patterns_of_paths(parts: list[str], names: list[str]) -> None:
    """Compared with trying every way of dividing the path."""
    def fits(pattern: list[str], path: list[str]) -> bool:
        if not pattern:
            return not path
        if pattern[0] == "**":
            return any(fits(pattern[1:], path[i:]) for i in range(len(path) + 1))
        one = {"a": ["a"], "b": ["b"], "ab": ["ab"], "*": ["a", "b", "ab", "ba"], "?": ["a", "b"], "a*": ["a", "ab"], "[ab]": ["a", "b"]}
        return bool(path) and path[0] in one[pattern[0]] and fits(pattern[1:], path[1:])

    assert matches(names, parts) == fits(parts, names)
    assert expanded("/".join(parts)) == ["/".join(parts)]
