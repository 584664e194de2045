"""Verifiers: honest work scores 1, nothing and every trick score 0 or are an error, and a failed judge is never a 0."""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sandbox_backends import namespaces

from gnomon import extend
from gnomon.agent.task import Check, Task
from gnomon.agent.trajectory import Score, Trajectory, Turn
from gnomon.agent.verifier import KINDS, judge, opened, rewards
from gnomon.agent.verifiers.numeric import number
from gnomon.agent.verifiers.sqlite import asked
from gnomon.data.messages import Message, Text
from gnomon.errors import ConfigError, DataError, SandboxError, SandboxLost, VerifierError
from gnomon.sandbox.sandbox import Command, FileInfo, Limits, Result, Spec

Program = Callable[["Box", Command], Result]


class Box:
    """A machine that is a dictionary of files; what programs do is a function of the test. Links are strings that begin with `->`."""

    def __init__(self, files: dict[str, bytes] | None = None, program: Program | None = None, spec: Spec | None = None) -> None:
        self.files, self.program, self.spec, self.id = dict(files or {}), program, spec or Spec(), "box"
        self.lost, self.killed, self.daemon = False, False, False

    async def exec(self, command: Command) -> Result:
        assert self.program is not None
        return self.program(self, command)

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        if self.lost:
            raise SandboxLost("gone")
        if path not in self.files:
            raise SandboxError(f"{path}: no such file")
        return self.files[path]

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        self.files[path] = data

    async def list(self, path: str, depth: int = 1) -> Sequence[FileInfo]:
        found = {}
        for name, data in self.files.items():
            if name.startswith(path.rstrip("/") + "/"):
                first, slash, _ = name.removeprefix(path.rstrip("/") + "/").partition("/")
                kind = "directory" if slash else "symlink" if data.startswith(b"->") else "file"
                found[first] = FileInfo(path=f"{path.rstrip('/')}/{first}", kind=kind, size=0, mode=0, modified_seconds=0)
        return [found[name] for name in sorted(found)]

    async def remove(self, path: str) -> None:
        self.files = {name: data for name, data in self.files.items() if name != path and not name.startswith(path + "/")}

    async def upload(self, source: Path, path: str) -> None:
        for file in [source] if source.is_file() else source.rglob("*"):
            if file.is_file():
                self.files[path if file == source else f"{path}/{file.relative_to(source)}"] = file.read_bytes()

    async def download(self, path: str, target: Path) -> None:
        below = {name: data for name, data in self.files.items() if name == path or name.startswith(path + "/")}
        if not below:
            raise SandboxError(f"{path}: no such file")
        for name, data in below.items():
            place = target if name == path else target / name.removeprefix(path + "/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if data.startswith(b"->"):
                place.symlink_to(data[2:].decode())
            else:
                place.write_bytes(data)

    async def fork(self, count: int = 1, *, memory: bool = False) -> Sequence[Any]:
        if self.lost:
            raise SandboxLost("gone")
        return [Box(self.files, self.program, self.spec) for _ in range(count)]

    async def kill(self) -> None:
        self.killed = True


class Boxes:
    """A backend whose machines start with the image's files and run the image's programs, whatever the agent did to its own."""

    def __init__(self, image: dict[str, bytes], program: Program) -> None:
        self.image, self.program, self.made = image, program, []

    async def create(self, spec: Spec) -> Box:
        self.made.append(Box(self.image, self.program, spec))
        return self.made[-1]


@pytest.fixture(autouse=True)
def _renewed(monkeypatch):
    async def renew(*_: object, **__: object) -> None:
        return None

    monkeypatch.setattr("gnomon.sandbox.cycles.renew", renew)


def said(text: str) -> Trajectory:
    return Trajectory(id="t", task_id="t").appended(Turn(messages=(Message(role="assistant", content=(Text(text=text),)),)))


def scored(kind: str, settings: dict[str, Any], answer: str = "", box: Box | None = None, boxes: Boxes | None = None, **task: Any) -> Score:
    made = Task(id="t", prompt="", image="host", check=Check(kind=kind, settings=settings), **task)
    return asyncio.run(judge(made, said(answer), box, boxes))


SMALL = Limits(memory_bytes=128 << 20, disk_bytes=32 << 20)
ANSWER = b"42\n"
TESTS = {"files": {"test.sh": "check", "expected": "42"}}


def runs_tests(box: Box, command: Command) -> Result:
    """What an honest image does with the test script: compares the answer with what was expected, and says so."""
    assert box.files["/tests/test.sh"] == b"check" and not any(name.startswith("/logs/verifier/reward") for name in box.files)
    assert set(box.files) & {"/tests/conftest.py", "/etc/ld.so.preload", "/usr/bin/python3"} == set() and command.env["LD_PRELOAD"] == ""
    right = box.files.get("/app/answer", b"").strip() == box.files["/tests/expected"]
    box.files["/logs/verifier/reward.txt"] = b"1" if right else b"0"
    return Result(code=0, stdout=b"", stderr=b"")


def patched(box: Box, command: Command) -> Result:
    """A shell of the agent's own making, which always says 1."""
    box.files["/logs/verifier/reward.txt"] = b"1"
    return Result(code=0, stdout=b"all passed", stderr=b"")


@pytest.mark.parametrize(("files", "reward"), [
    ({"/app/answer": ANSWER}, 1.0), ({}, 0.0), ({"/app/answer": b"41"}, 0.0),
    ({"/logs/verifier/reward.txt": b"1"}, 0.0), ({"/logs/verifier/reward.json": b'{"reward": 1}'}, 0.0),
    ({"/tests/test.sh": b"echo 1", "/tests/conftest.py": b"cheat"}, 0.0), ({"/etc/ld.so.preload": b"/app/cheat.so"}, 0.0),
    ({"/usr/bin/python3": b"shadow", "/app/python3": b"shadow"}, 0.0), ({"/logs": b"->/app/logs"}, 0.0),
    ({"/app/answer": b"->/tests/expected"}, 0.0), ({"/app/answer": b"->../tests/expected"}, 0.0),
    ({"/app/answer": ANSWER, "/logs/verifier/reward.txt": b"0"}, 1.0),
])
def test_a_fresh_machine_takes_nothing_but_the_artifacts(files, reward):
    agent, boxes = Box(files, patched), Boxes({}, runs_tests)
    score = scored("tests", TESTS, box=agent, boxes=boxes, artifacts=("/app",))
    assert score.reward == reward and score.error is None
    assert agent.files == files and all(box.killed for box in boxes.made)  # judging leaves the agent's machine as it was


@pytest.mark.parametrize("files", [
    {"/logs/verifier/reward.txt": b"1"}, {"/logs/verifier/reward.json": b"1"}, {"/tests/conftest.py": b"cheat"}, {"/tests": b"->/app"},
    {"/logs": b"->/app"}, {"/etc/ld.so.preload": b"/app/cheat.so"},
])
def test_in_a_copy_what_was_written_before_is_removed(files):
    agent = Box(files, runs_tests)
    assert scored("tests", {**TESTS, "machine": "fork"}, box=agent).reward == 0.0
    assert scored("tests", {**TESTS, "machine": "fork"}, box=Box({**files, "/app/answer": ANSWER}, runs_tests)).reward == 1.0
    assert agent.files == files


@pytest.mark.parametrize("path", ["/", "/tests", "/logs/verifier/", "/usr", "/etc", "/usr/local/bin/cat", "/etc/ld.so.preload"])
def test_what_decides_how_tests_run_is_not_carried(path):
    score = scored("tests", TESTS, box=Box({}, patched), boxes=Boxes({}, runs_tests), artifacts=(path,))
    assert score.reward is None and "is not carried" in str(score.error)


def test_what_the_agent_removed_is_gone_in_the_fresh_machine():
    boxes = Boxes({"/app/answer": ANSWER}, runs_tests)
    for files, reward in ({}, 0.0), ({"/app/answer": ANSWER}, 1.0):
        assert scored("tests", TESTS, box=Box(files), boxes=boxes, artifacts=("/app",)).reward == reward


@pytest.mark.parametrize("said_by_tests", [b"", b"NaN", b"Infinity", b"1e309", b'"1"', b"one", b"true", b"null", b"[1]", b"{}",
                                           b'{"reward": "1"}', b'{"reward": NaN}', b'{"a": 1, "b": 0}', None])
def test_a_reward_that_is_none_is_an_error_and_not_0(said_by_tests):
    def program(box: Box, _: Command) -> Result:
        if said_by_tests is not None:
            box.files["/logs/verifier/reward.json"] = said_by_tests
        return Result(code=0, stdout=b"", stderr=b"")

    score = scored("tests", {**TESTS, "machine": "fork"}, box=Box({}, program))
    assert score.reward is None and score.error is not None and score.error.startswith("VerifierError")


def test_rewards_with_names():
    assert rewards(b' {"reward": 0.5, "speed": 2}', "f") == {"reward": 0.5, "speed": 2.0} and rewards(b"1\n", "f") == {"reward": 1.0}


@pytest.mark.parametrize(("result", "reward"), [
    (Result(code=0, stdout=b"", stderr=b""), 1.0), (Result(code=1, stdout=b"", stderr=b""), 0.0),
    (Result(code=127, stdout=b"", stderr=b""), None),
    (Result(code=-9, stdout=b"", stderr=b""), None), (Result(code=0, stdout=b"", stderr=b"", timed_out=True), None),
])
def test_a_script_that_crashes_has_not_judged(result, reward):
    score = scored("tests", {**TESTS, "machine": "fork", "reward": "exit"}, box=Box({}, lambda *_: result))
    assert score.reward == reward and (score.error is None) == (reward is not None)


def test_lost_machines_and_crashing_verifiers_are_errors(monkeypatch):
    lost = Box()
    lost.lost = True
    condition = {"files": {"/a": {"absent": True}}}
    assert "SandboxLost" in str(scored("files", condition, box=lost).error) and scored("files", condition, box=lost).reward is None
    assert "there is none" in str(scored("files", condition).error)
    assert "give a backend" in str(scored("tests", TESTS, box=Box()).error)
    monkeypatch.setattr("gnomon.agent.verifiers.exact.Verifier.score", lambda *_: 1 / 0)
    assert "crashed: ZeroDivisionError" in str(scored("exact", {"answer": "a"}).error)


@pytest.mark.parametrize(("kind", "settings", "says"), [
    ("exakt", {}, "did you mean 'exact'"), ("exact", {}, "'answer' or 'answers'"), ("exact", {"answer": ""}, "none of them empty"),
    ("exact", {"answr": "x"}, "did you mean 'answer'"), ("numeric", {"answer": "4"}, "'answer': expected a number"),
    ("files", {}, "'files': name at least one"), ("files", {"files": {"/a": {}}}, r"'files\./a'"),
    ("files", {"files": {"/a": 3}}, "an object"),
    ("sqlite", {"database": "/d"}, "'queries'"),
    ("sqlite", {"database": "/d", "queries": [{"sql": "x", "rows": [1]}]}, r"queries\[0\]\.rows"),
    ("program", {"argv": [], "cases": []}, "'argv'"), ("program", {"argv": ["a"], "cases": []}, "'cases'"),
    ("tests", {}, "'test.sh' is missing"),
    ("tests", {**TESTS, "machine": "shared"}, "'machine': expected fresh or fork"),
    ("tests", {"files": {"test.sh": "", "../x": ""}}, "relative"),
])
def test_a_malformed_check_is_the_tasks_fault(kind, settings, says):
    with pytest.raises((DataError, ConfigError), match=says):
        scored(kind, settings)


def test_every_kind_keeps_the_contract():
    for kind in extend.kinds(KINDS):
        with pytest.raises(DataError, match=f"task x: verifier '{kind}': .*'nonsense'|task x: verifier '{kind}'"):
            opened(Check(kind=kind, settings={"nonsense": 1}), "task x")
        assert extend.find(KINDS, kind, "Verifier").score.__doc__


@pytest.mark.parametrize(("answer", "reward"), [(" paris\n", 1.0), ("Paris or London", 0.0), ("", 0.0), ("PARIS", 1.0)])
def test_exact(answer, reward):
    assert scored("exact", {"answers": ["Paris", "Lutetia"]}, answer).reward == reward


@pytest.mark.parametrize(("answer", "reward"), [
    ("1,234.5", 1.0), ("It is so. Answer: $1234.50.", 1.0), ("1234.5000001", 1.0), ("1235", 0.0), ("1234.5 or 7", 0.0), ("nan", 0.0),
    ("", 0.0),
    ("1e999", 0.0), ("Answer: 1234.5\nAnswer: 7", 0.0),
])
def test_numeric(answer, reward):
    assert scored("numeric", {"answer": 1234.5}, answer).reward == reward
    assert number("٣") is None or number("٣") == 3.0


@pytest.mark.parametrize(("files", "reward"), [
    ({"/a": b"4\n", "/j": b'{"b": 1, "a": [2]}'}, 1.0), ({"/a": b"4.0000000001", "/j": b'{"a":[2],"b":1}'}, 1.0), ({}, 0.0),
    ({"/a": b"5", "/j": b'{"b": 1, "a": [2]}'}, 0.0), ({"/a": b"4", "/j": b"{"}, 0.0), ({"/a": b"4", "/j": b'{"b": true, "a": [2]}'}, 0.0),
    ({"/a": b"4", "/j": b'{"b": 1, "a": [2]}', "/gone": b""}, 0.0),
])
def test_files(files, reward):
    wanted = {"/a": {"number": 4}, "/j": {"json": {"a": [2], "b": 1}}, "/gone": {"absent": True}}
    assert scored("files", {"files": wanted}, box=Box(files)).reward == reward


def database(*statements: str) -> bytes:
    connection = sqlite3.connect(":memory:")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    return connection.serialize()


ENDLESS = "CREATE VIEW mail AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, '' AS subject FROM n"


@pytest.mark.parametrize(("statements", "reward"), [
    (["CREATE TABLE mail (id, subject)", "INSERT INTO mail VALUES (2, 'b'), (1, 'a')"], 1.0),
    (["CREATE TABLE mail (id, subject)", "INSERT INTO mail VALUES (1, 'a')"], 0.0),
    (["CREATE TABLE mail (id, subject)", "INSERT INTO mail VALUES ('1', 'a'), (2, 'b')"], 0.0),
    (["CREATE TABLE other (id)"], 0.0), ([ENDLESS], 0.0),
])
def test_rows(statements, reward, monkeypatch):
    monkeypatch.setattr("gnomon.agent.verifiers.sqlite.SECONDS", 0.3)
    query = {"sql": "SELECT id, subject FROM mail", "rows": [[1, "a"], [2, "b"]]}
    box = Box({"/mail.db": database(*statements)})
    assert scored("sqlite", {"database": "/mail.db", "queries": [query]}, box=box).reward == reward


def test_rows_that_no_memory_holds_are_not_taken(monkeypatch):
    monkeypatch.setattr("gnomon.agent.verifiers.sqlite.MOST_BYTES", 1 << 20)
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100)"
    large = ((f"{many} SELECT hex(zeroblob(10000)) AS a FROM n", "its rows hold more"), ("SELECT zeroblob(1 << 21) AS a", "too big"))
    for view, says in large:
        found = asked(database(f"CREATE VIEW journal AS {view}"), None, "SELECT a FROM journal")
        assert isinstance(found, str) and says in found
    few = database(f"CREATE VIEW journal AS {many} SELECT i AS a FROM n")
    assert asked(few, None, "SELECT a FROM journal") == [(i,) for i in range(1, 101)]


def test_a_damaged_database_is_the_agents_doing_and_queries_only_read():
    query = {"sql": "SELECT 1", "rows": [[1]]}
    read = {"database": "/d", "queries": [{"sql": "SELECT * FROM t", "rows": []}]}
    assert scored("sqlite", read, box=Box({"/d": b"no database at all, " * 99})).reward == 0.0
    assert scored("sqlite", read, box=Box()).reward == 0.0
    assert scored("sqlite", {"database": "/d", "queries": [query]}, box=Box({"/d": database("CREATE TABLE t (a)")})).reward == 1.0
    attach = {"sql": "ATTACH '/etc/passwd' AS p", "rows": []}
    assert scored("sqlite", {"database": "/d", "queries": [attach]}, box=Box({"/d": database("CREATE TABLE t (a)")})).reward == 0.0


@pytest.mark.parametrize(("result", "reward"), [
    (Result(code=0, stdout=b"6 \n\n", stderr=b"noise"), 1.0), (Result(code=0, stdout=b"7", stderr=b""), 0.0),
    (Result(code=1, stdout=b"6", stderr=b""), 0.0),
    (Result(code=0, stdout=b"6", stderr=b"", timed_out=True), 0.0), (Result(code=0, stdout=b"6", stderr=b"", truncated=True), 0.0),
])
def test_program_output(result, reward):
    def program(box: Box, command: Command) -> Result:
        assert command.stdin == b"1 2 3" and not any(b"6" in data for data in box.files.values())
        return result

    settings = {"argv": ["./sum"], "cases": [{"stdin": "1 2 3", "stdout": "6"}]}
    assert scored("program", settings, box=Box({"/app/sum": b"x"}, program)).reward == reward


SCRIPT = "#!/bin/sh\nif [ \"$(cat /app/answer)\" = \"$(cat /tests/expected)\" ]; then r=1; else r=0; fi\n"
SCRIPT += "echo $r > /logs/verifier/reward.txt\n"
REAL = {"files": {"test.sh": SCRIPT, "expected": "42\n"}}
CHEAT = ("mkdir -p /logs/verifier /tests /app && echo 1 > /logs/verifier/reward.txt && "
         "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; "
         "ln -s /tests/expected /app/answer; printf '#!/bin/sh\\necho same\\n' > /usr/local/bin/cat; chmod +x /usr/local/bin/cat; "
         "(while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; sleep 0.05; done) >/dev/null 2>&1 & true")


def test_in_real_machines_honest_work_scores_1_and_tampering_does_not():
    async def main() -> None:
        async with namespaces() as backend:
            found = {}
            for name, work in {"honest": "mkdir -p /app && echo 42 > /app/answer", "nothing": "true", "cheat": CHEAT}.items():
                for machine in ("fresh", "fork"):
                    task = Task(id=name, prompt="", image="host", artifacts=("/app",), limits=SMALL,
                                check=Check(kind="tests", settings={**REAL, "machine": machine}))
                    async with await backend.create(Spec(limits=SMALL)) as box:
                        await box.exec(Command(argv=("/bin/sh", "-c", work), timeout_seconds=20))
                        found[name, machine] = await judge(task, said(""), box, backend)
            assert [found["honest", machine].reward for machine in ("fresh", "fork")] == [1.0, 1.0], found
            assert [found["nothing", machine].reward for machine in ("fresh", "fork")] == [0.0, 0.0], found
            assert found["cheat", "fresh"].reward == 0.0, found

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_verifier_error_is_no_score():
    with pytest.raises(VerifierError, match="no number"):
        rewards(b"passed", "reward.txt")
