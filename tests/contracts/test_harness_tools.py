"""Tools of harnesses in a real machine, and what they say when they cannot do what was asked."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gnomon import extend
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.patches import parsed, updated
from gnomon.agent.harness.skills import loaded
from gnomon.agent.harness.spec import HarnessSpec, Memory, ToolUse
from gnomon.agent.harness.tool import KINDS, Bound
from gnomon.agent.harness.tools.glob import expanded, matches
from gnomon.agent.policies.scripted import ScriptedPolicy
from gnomon.agent.record import Recorder
from gnomon.agent.task import Check, Task
from gnomon.agent.trajectory import Trajectory
from gnomon.errors import ConfigError, Unsupported
from gnomon.sandbox.open import open_backend
from gnomon.sandbox.sandbox import Sandbox, Spec

SOURCE = "def double(x):\n    return x + x\n\n\ndef triple(x):\n    return x + x + x\n"


class Bench:
    """One machine and one desk for all tests of this file; each test works in a folder of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        try:
            self.backend = self.loop.run_until_complete(open_backend("namespaces"))
        except Unsupported as error:
            self.loop.close()
            pytest.skip(f"needs a sandbox: {error}")
        self.box: Sandbox = self.loop.run_until_complete(self.backend.create(Spec(ttl_seconds=600.0)))
        self.count = 0

    def desk(self, user: str | None = None, **parts: Any) -> Desk:
        self.count += 1
        task = Task(id="t", prompt="", image="host", user=user, check=Check(kind="exact", settings={"answer": ""}))
        model = Recorder(ScriptedPolicy(lambda asked: f"I read: {asked.messages[-1].text[:20]}"), Trajectory(id="a", task_id="t"))
        place = f"/home/user/{self.count}"
        desk = Desk(spec=HarnessSpec(memory=Memory()), task=task, model=model, box=self.box, workdir=place,
                    skills=loaded(["find-the-cause"]), **parts)
        self.loop.run_until_complete(self.box.write(f"{place}/a.py", SOURCE.encode()))
        self.loop.run_until_complete(self.box.write(f"{place}/sub/b.txt", b"one\ntwo\nTwo\n"))
        return desk

    def call(self, desk: Desk, tool: str, settings: dict[str, Any] | None = None, **given: Any) -> str:
        """What a call says; a fault is `Error: …`."""
        bound = Bound(tool, ToolUse(kind=tool, settings=settings or {}))

        async def called() -> str:
            try:
                return (await bound.kind.call(desk, bound.read(json.dumps(given)))).text
            except Fault as fault:
                return f"Error: {fault}"

        return self.loop.run_until_complete(called())

    def file(self, desk: Desk, path: str) -> str:
        return self.loop.run_until_complete(self.box.read(desk.path(path))).decode()

    def close(self) -> None:
        self.loop.run_until_complete(self.backend.close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.mark.parametrize("kind", extend.kinds(KINDS))
def test_every_kind_is_declared(kind: str) -> None:
    bound = Bound(kind, ToolUse(kind=kind))
    assert bound.declared.description and bound.schema["type"] == "object"
    assert bound.kind.main is None or bound.kind.main in bound.kind.arguments
    with pytest.raises(ConfigError, match="'nonsense'"):
        Bound(kind, ToolUse(kind=kind, settings={"nonsense": 1}))


def test_files_are_read_written_and_edited(bench: Bench) -> None:
    desk = bench.desk()
    assert bench.call(desk, "read", path="a.py", offset=2, limit=1) == "     2\t    return x + x\n[lines 2 to 2 of 6]"
    assert bench.call(desk, "read", path="a.py", offset=-1).startswith("     6\t    return x + x + x")
    assert "no line 9" in bench.call(desk, "read", path="a.py", offset=9)
    assert bench.call(desk, "read", path="nothing").startswith("Error: ")
    bench.call(desk, "write", path="deep/er/c", content="x\ny\n")
    bench.call(desk, "write", path="deep/er/c", content="z", mode="append")
    assert bench.file(desk, "deep/er/c") == "x\ny\nz"
    assert "stands in" in bench.call(desk, "edit", path="a.py", old="return", new="give")
    assert bench.call(desk, "edit", path="a.py", old="return", new="give", all=True).startswith("Replaced 2 places")
    assert "does not stand" in bench.call(desk, "edit", path="a.py", old="return", new="give")
    assert "are the same" in bench.call(desk, "edit", path="a.py", old="a", new="a")
    assert "read" in bench.call(bench.desk(), "edit", {"after_reading": True}, path="a.py", old="def double", new="def twice")
    edits = [{"old": "def double", "new": "def twice"}, {"old": "def triple", "new": "def thrice"}]
    assert bench.call(desk, "edits", path="a.py", edits=edits) == f"Replaced 2 places in {desk.workdir}/a.py."
    assert bench.file(desk, "a.py").startswith("def twice(x):\n    give x + x")
    overlapping = [{"old": "def twice", "new": ""}, {"old": "twice(x)", "new": ""}]
    assert "overlap" in bench.call(desk, "edits", path="a.py", edits=overlapping)
    assert bench.call(desk, "patch", mode="replace", path="a.py", old="thrice", new="triple").startswith("Replaced 1 place ")
    assert "is missing" in bench.call(desk, "patch", mode="patch")


def test_files_are_found(bench: Bench) -> None:
    desk = bench.desk()
    assert bench.call(desk, "ls") == "a.py\nsub/"
    assert bench.call(desk, "glob", pattern="**/*.{py,txt}") == f"{desk.workdir}/a.py\n{desk.workdir}/sub/b.txt"
    assert bench.call(desk, "glob", pattern=f"{desk.workdir}/*.py") == f"{desk.workdir}/a.py"
    assert bench.call(desk, "glob", pattern="*.txt") == "No file fits."
    assert bench.call(desk, "grep", pattern="tw[o]") == f"{desk.workdir}/sub/b.txt:2:two"
    assert bench.call(desk, "grep", pattern="TWO", ignore_case=True, output="count") == f"{desk.workdir}/sub/b.txt:2"
    assert bench.call(desk, "grep", pattern="x", glob="*.py", output="files") == f"{desk.workdir}/a.py"
    assert bench.call(desk, "grep", pattern="x", glob="sub/*.py") == "Nothing fits."
    assert bench.call(desk, "grep", pattern="triple", after=1, numbers=False, path="a.py").count("\n") == 1
    assert bench.call(desk, "grep", pattern="(", path="a.py").startswith("Error: ")
    assert bench.call(desk, "grep", pattern="x", path="nowhere").startswith("Error: ")
    assert bench.call(desk, "grep", pattern="'; touch /home/user/hacked; '", glob="'$(touch /home/user/hacked)'") == "Nothing fits."
    assert bench.call(desk, "ls", path="/home/user/hacked").startswith("Error: ")


def test_a_patch_over_several_files_is_all_or_nothing(bench: Bench) -> None:
    desk = bench.desk()
    patch = ("*** Begin Patch\n*** Update File: a.py\n*** Move to: twice.py\n@@ def double(x):\n-    return x + x\n+    return 2 * x\n"
             "*** Add File: new/c.txt\n+hello\n+\n*** Delete File: sub/b.txt\n*** End Patch")
    assert bench.call(desk, "apply_patch", patch=patch) == "Changed:\nU twice.py\nA new/c.txt\nD sub/b.txt"
    assert bench.file(desk, "twice.py") == SOURCE.replace("return x + x\n", "return 2 * x\n", 1)
    assert bench.file(desk, "new/c.txt") == "hello\n\n"
    assert bench.call(desk, "glob", pattern="**") == f"{desk.workdir}/new/c.txt\n{desk.workdir}/twice.py"
    bad = "*** Begin Patch\n*** Delete File: twice.py\n*** Update File: new/c.txt\n@@\n-goodbye\n+hello\n*** End Patch"
    assert "do not stand in the file" in bench.call(desk, "apply_patch", patch=bad)
    assert bench.file(desk, "twice.py")


@pytest.mark.parametrize(("hunk", "after"), [
    ("@@\n-b\n+B\n", "a\nb  \nc\nB\n"), ("@@ c\n-b\n+B\n", "a\nb  \nc\nB\n"), ("@@\n+d\n", "a\nb  \nc\nb\nd\n"),
    ("@@\n c\n-b\n*** End of File\n", "a\nb  \nc\n"), (" a\n+z\n b\n", "a\nz\nb\nc\nb\n"),
])
def test_hunks_are_found_by_their_text(hunk: str, after: str) -> None:
    change, = parsed(f"*** Begin Patch\n*** Update File: f\n{hunk}*** End Patch")
    assert updated(change, "a\nb  \nc\nb\n") == after


@pytest.mark.parametrize("patch", [
    "", "*** Begin Patch\n*** End Patch", "*** Begin Patch\nx\n*** End Patch", "*** Begin Patch\n*** Add File: f\nx\n*** End Patch",
    "*** Begin Patch\n*** Update File: f\n*** End Patch", "*** Begin Patch\n*** Delete File: \n*** End Patch",
    "*** Begin Patch\n*** Update File: f\n@@\n!x\n*** End Patch", "*** Begin Patch\n*** Delete File: f\n-x\n*** End Patch",
])
def test_patches_that_are_none(patch: str) -> None:
    with pytest.raises(Fault):
        parsed(patch)


def test_commands_go_on_as_sessions(bench: Bench) -> None:
    desk = bench.desk()
    said = bench.call(desk, "bash", command="read line; echo got $line; exit 4", wait=0)
    assert said == "[it goes on as session 1]"
    assert bench.call(desk, "process", action="poll", session="1") == "[session 1: running]"
    said = bench.call(desk, "process", action="submit", session="1", data="it", seconds=60)
    assert said == "[session 1: exit status 4]\ngot it"
    assert "has ended" in bench.call(desk, "process", action="write", session="1", data="x")
    assert bench.call(desk, "process", action="log", session="1").endswith("got it")
    bench.call(desk, "bash", command="sleep 1000", background=True)
    assert "-9" in bench.call(desk, "process", action="kill", session="2")
    assert "there is no session" in bench.call(desk, "process", action="poll", session="9")
    assert "needs a session" in bench.call(desk, "process", action="poll")
    assert bench.call(desk, "process", action="list").count("exit status") == 2
    assert bench.call(desk, "bash", command="echo quick", wait=60) == "quick"
    bench.call(desk, "bash", command="sleep 1001", background=True)
    bench.loop.run_until_complete(desk.close())
    look = "while cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -q '[s]leep 1001'; do sleep 0.1; done; echo none is left"
    assert bench.call(bench.desk(), "bash", command=look, seconds=100) == "none is left"


def test_a_command_ends_in_time_and_keeps_its_directory(bench: Bench) -> None:
    desk = bench.desk()
    began = time.monotonic()
    assert "ended after 0.5 seconds" in bench.call(desk, "bash", command="echo a; sleep 1000", seconds=0.5)
    assert time.monotonic() - began < 500
    keeps = {"keeps": "directory"}
    assert bench.call(desk, "bash", keeps, command="cd sub; pwd") == f"{desk.workdir}" and desk.workdir.endswith("/sub")
    assert bench.call(desk, "bash", keeps, command="ls") == "b.txt"
    assert "[exit status 2]" in bench.call(desk, "bash", keeps, command="cd ..; exit 2") and not desk.workdir.endswith("/sub")
    assert bench.call(desk, "bash", directory="nowhere", command="ls").count("nowhere") == 1
    assert "characters" in bench.call(desk, "bash", command="true " + "x" * 200_000)


def test_python_keeps_its_variables_and_may_ask(bench: Bench) -> None:
    desk = bench.desk()
    desk.state["context"] = "a long text"
    assert bench.call(desk, "python", code="n = len(context)\nprint('read')\nn") == "read\n11"
    assert bench.call(desk, "python", code="n + 1") == "12"
    assert "ZeroDivisionError" in bench.call(desk, "python", code="1 / 0") and bench.call(desk, "python", code="n") == "11"
    assert bench.call(desk, "python", code="llm_query('Sum up: ' + context)") == "'I read: Sum up: a long text'"
    assert bench.call(desk, "python", {"queries": 2}, code="llm_query_batched(['a', 'b'])").startswith("Traceback")
    assert "anew" in bench.call(desk, "python", code="import os; os._exit(1)")
    assert bench.call(desk, "python", code="context") == "'a long text'"
    assert "anew" in bench.call(desk, "python", {"seconds": 0.5}, code="while True: pass")
    assert "anew" in bench.call(desk, "python", code="outbox = __import__('sys')._getframe(1).f_globals['outbox']; outbox.write('{}\\n')")
    assert bench.call(desk, "python", {"keeps": False}, code="kept = 1") == "The code printed nothing."
    assert "NameError" in bench.call(desk, "python", {"keeps": False}, code="kept")
    assert len(desk.model.trajectory.turns) == 1 and desk.model.trajectory.turns[0].purpose == "agent"  # type: ignore[attr-defined]
    bench.loop.run_until_complete(desk.close())


def test_an_ordinary_user_can_do_no_more_by_tools_than_by_commands(bench: Bench) -> None:
    desk = bench.desk(user="nobody")
    if bench.call(desk, "bash", command="id -un") != "nobody":
        pytest.skip("this sandbox has one user")
    assert bench.call(desk, "write", path="/etc/mine", content="x").startswith("Error: ")
    assert bench.call(desk, "write", path="/tmp/mine", content="x\n").startswith("Wrote 2 bytes")
    assert bench.call(desk, "read", path="/tmp/mine") == "     1\tx"
    assert bench.call(desk, "bash", command="stat -c %U /tmp/mine") == "nobody"
    bench.loop.run_until_complete(bench.box.write("/root/secret", b"s", 0o600))
    assert bench.call(desk, "read", path="/root/secret").startswith("Error: ")


def test_notes_lists_and_skills(bench: Bench) -> None:
    desk = bench.desk()
    assert bench.call(desk, "memory", action="add", target="memory", content="the tests need PYTHONPATH") == "- the tests need PYTHONPATH"
    bench.call(desk, "memory", target="memory", operations=[
        {"action": "add", "content": "two"}, {"action": "replace", "old_text": "PYTHON", "content": "one"}])
    assert bench.file(desk, "MEMORY.md") == "one\n---\ntwo\n"
    assert "possible" in bench.call(desk, "memory", action="add", target="memory", content="x" * 3000)
    assert "0 entries" in bench.call(desk, "memory", action="remove", target="memory", old="nothing")
    assert "there are no notes 'user'" in bench.call(desk, "memory", action="read", target="user")
    assert bench.call(desk, "plan", items=[{"text": "look", "status": "done"}, {"text": "mend"}]) == "1. [done] look\n2. [] mend"
    assert bench.call(desk, "plan") == "1. [done] look\n2. [] mend"
    desk.plan = []
    assert bench.call(desk, "tracker", action="create", subject="look") == "Made 1. [pending] look"
    assert bench.call(desk, "tracker", action="update", id="1", state="completed", waits_for=["2"]) == "1. [completed] look (after 2)"
    assert "no item '7'" in bench.call(desk, "tracker", action="get", id="7")
    assert bench.call(desk, "tracker", action="update", id="1", state="deleted") == "1. [deleted] look (after 2)"
    assert bench.call(desk, "tracker", action="list") == "There are no items."
    assert bench.call(desk, "skills").startswith("find-the-cause: ")
    assert bench.call(desk, "skill", name="find-the-cause", words="a.py").endswith("Apply it to: a.py")
    assert "did you mean 'find-the-cause'" in bench.call(desk, "skill", name="find-cause")
    assert "cannot call others" in bench.call(desk, "agent", prompt="x")


def test_patterns() -> None:
    assert expanded("{a,b}.{c,d}") == ["a.c", "a.d", "b.c", "b.d"]
    with pytest.raises(Fault):
        expanded("{a,b}" * 10)
    long = ("a" * 40 + "/") * 40 + "b"
    began = time.process_time()
    assert not matches(long.split("/"), ("**/" + "*a" * 40 + "/").split("/") * 20 + ["c"])
    assert time.process_time() - began < 50, "the work must not explode"
    assert matches(["a", "b", "c"], ["**", "c"]) and matches(["c"], ["**", "c"]) and not matches(["a", "c"], ["*"])
