"""`gnomon sandbox` as people use it, over the default backend; and what is left when it is interrupted or killed: nothing."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pretend_backend
import pytest
from rich.console import Console

from gnomon import cli
from gnomon.errors import SandboxError, Unsupported
from gnomon.sandbox import listing, owners, reaper
from gnomon.sandbox.backends.namespaces import Backend
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.open import Verdict
from gnomon.sandbox.reach import Reach, call
from gnomon.sandbox.registry import Registry
from gnomon.sandbox.sandbox import Capabilities, Spec


@pytest.fixture(scope="module", autouse=True)
def works() -> None:
    """The default backend, or a skip with the reason why it does not work here."""
    async def probe() -> None:
        backend = Backend()
        try:
            await backend.probe()
        finally:
            await backend.close()

    try:
        asyncio.run(probe())
    except Unsupported as error:
        pytest.skip(str(error))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LayerStore:
    monkeypatch.setenv("GNOMON_SANDBOX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "160")
    return LayerStore(tmp_path / "home")


def argv(*words: str) -> list[str]:
    return [sys.executable, "-m", "gnomon", "sandbox", *words]


def gnomon(*words: str, code: int = 0, stdin: bytes = b"") -> tuple[str, str]:
    """What the command says on both streams."""
    done = subprocess.run(argv(*words), input=stdin, capture_output=True, check=False, timeout=120)
    out, errors = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, (done.returncode, out, errors)
    return out, errors


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_one_command_runs_an_untrusted_program(home, tmp_path):
    (tmp_path / "data").write_text("in")
    program = "cat /tmp/data - > /tmp/out; echo $WORD; echo trouble >&2; exit 3"
    out, errors = gnomon("run", "--env", "WORD=hello", "--copy", str(tmp_path / "data"), "/tmp/data", "--stdin", "--fetch", "/tmp/out",
                         str(tmp_path / "out"), "--keep", "after:1", "--", "sh", "-c", program, code=3, stdin=b" and more")
    assert (out, errors) == ("hello\n", "trouble\n") and (tmp_path / "out").read_text() == "in and more"
    assert gnomon("run", "--image", "after:1", "--", "cat", "/tmp/out")[0] == "in and more"
    assert "after:1" in gnomon("images")[0] and json.loads(gnomon("images", "--json")[0])[0]["parent"] == "host"
    gnomon("images", "--forget", "after:1")
    assert "1 layers" in gnomon("gc")[0]
    assert gnomon("run", "--timeout", "0.5s", "--", "sleep", "60", code=124)[1].startswith("gnomon: ended after 0.5s")
    assert gnomon("run", "--", "sh", "-c", "kill -9 $$", code=137)
    assert json.loads(gnomon("ls", "--json")[0]) == []


def test_a_detached_sandbox_is_seen_used_and_ended(home):
    id = gnomon("run", "--detach", "--timeout", "10m")[0].strip()
    table = gnomon("ls")[0]
    assert id in table and "running" in table and "keeper" in table and "namespaces" in table
    [row] = json.loads(gnomon("ls", "--json")[0])
    assert row["id"] == id and row["seconds_left"] <= 600 and (row["memory_bytes"] is None or row["memory_bytes"] > 100_000)
    assert gnomon("exec", id[:6], "--", "sh", "-c", "echo out; echo err >&2; exit 5", code=5) == ("out\n", "err\n")
    assert gnomon("kill", id[:6])[0] == f"ended {id}\n"
    until(lambda: owners.start_ticks(row["owner_pid"]) is None)
    assert gnomon("ls", "--json")[0].strip() == "[]"
    assert "no sandbox is called" in gnomon("exec", id, "--", "true", code=2)[1]


@pytest.mark.parametrize(("words", "says"), [
    (("run",), "which program"), (("run", "--memory", "lots", "--", "true"), "'lots' is not a size"),
    (("run", "--env", "x", "--", "true"), "NAME=VALUE"), (("run", "--allow", "10.0.0.1:80", "--", "true"), "private"),
    (("run", "--image", "hots", "--", "true"), "did you mean 'host'"), (("kill",), "--all"),
    (("build", "--name", "x"), "what to build from"),
    (("run", "--backend", "namespace", "--", "true"), "unknown kind"), (("build", "--name", "x", "/nowhere/Dockerfile"), "No such file"),
    (("images", "--forget", "x"), "unknown image"), (("run", "--detach", "--keep", "x"), "do not go with --detach"),
])
def test_mistakes_are_named(home, words, says, capsys):
    assert cli.main(["sandbox", *words]) == 2
    assert says in capsys.readouterr().err


def test_builds(home, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM host\nENV A=1\nWORKDIR /srv\nCOPY file .\nRUN echo $A > made && cat file >> made\nCMD x\n")
    (tmp_path / "file").write_text("copied")
    out = gnomon("build", "--name", "mine", str(tmp_path))[0]
    assert "RUN echo" in out and "CMD is left out" in out
    assert gnomon("run", "--image", "mine", "--workdir", "/srv", "--", "sh", "-c", "echo $A; cat made")[0] == "1\n1\ncopied"
    assert "found, built before" in gnomon("build", "--name", "again", str(tmp_path))[0]
    (tmp_path / "Dockerfile").write_text("FROM host\nRUN false\n")
    assert "Dockerfile:2" in gnomon("build", "--name", "bad", str(tmp_path), code=1)[1]


def test_probe_says_what_works(home, capsys):
    assert cli.main(["sandbox", "probe", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} >= {"namespaces"} and all(row["capabilities"] or row["reason"] for row in rows)


def test_what_a_probe_found_is_read_by_people_in_eighty_columns():
    can = Capabilities(backend="one", isolation="strong", pause=frozenset({"freeze"}), snapshot_files=True, snapshot_memory=False,
                       live_fork=False, network=True, rootless=True, unenforced=frozenset({"cpus"}), notes=("a note of a [bracket]",))
    verdicts = [Verdict(name="another", reason="another: it wants KVM, " + "and more " * 20), Verdict(name="one", capabilities=can)]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(listing.backends(verdicts))
    said = console.export_text()
    assert "…" not in said and said.index("one  ") < said.index("another  ")
    for words in ("works, strong isolation; as an ordinary user", "does not hold: cpus", "note: a note of a [bracket]",
                  "does not work: it wants KVM"):
        assert words in said


def test_serve_wants_a_key(home, monkeypatch):
    pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'gnomon[serve]'")
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    assert "set E2B_API_KEY" in gnomon("serve", code=2)[1]
    monkeypatch.setenv("E2B_API_KEY", "k" * 20)
    server = subprocess.Popen(argv("serve", "--port", "0"), stdout=subprocess.PIPE, text=True)
    try:
        assert "serving sandboxes (namespaces) at http://127.0.0.1:" in server.stdout.readline()
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)


def sleeping(home: LayerStore) -> tuple[subprocess.Popen[str], str]:
    """A command whose program sleeps, and the id of its sandbox."""
    words = argv("run", "--", "sh", "-c", "echo up; exec sleep 600")
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert command.stdout.readline() == "up\n"
    [record] = [r for r in Registry(home).list() if r.state == "running"]
    return command, record.id


def clean(home: LayerStore, pids: list[int]) -> None:
    """Nothing is left of it: no record, no process, no folder."""
    until(lambda: all(owners.start_ticks(pid) is None for pid in pids))
    registry = Registry(home)
    reaper.sweep(registry, collect=True)
    assert registry.list() == [] and os.listdir(home.root / "scratch") == [] and os.listdir(home.root / "layers") == []
    assert "gnomon" not in Path("/proc/self/mountinfo").read_text() or str(home.root) not in Path("/proc/self/mountinfo").read_text()
    registry.close()


def inside(home: LayerStore, id: str) -> list[int]:
    record = Registry(home).get(id)
    return [pid for pid, _ in record.traces.processes]


@pytest.mark.parametrize("signals", [1, 2])
def test_interrupted_once_or_twice_leaves_nothing(home, signals):
    command, id = sleeping(home)
    pids = inside(home, id)
    for _ in range(signals):
        command.send_signal(signal.SIGINT)
        time.sleep(0.01)
    command.communicate(timeout=60)
    assert command.returncode in (130, -signal.SIGINT, 1)
    clean(home, pids)


def test_killed_owners_leave_nothing_after_gc(home):
    command, id = sleeping(home)
    detached = gnomon("run", "--detach")[0].strip()
    pids = [*inside(home, id), *inside(home, detached)]
    keeper = Registry(home).get(detached).owner.pid
    os.kill(command.pid, signal.SIGKILL)
    os.kill(keeper, signal.SIGKILL)
    command.communicate(timeout=60)
    until(lambda: len(Registry(home).dead()) == 2)
    assert [row["state"] for row in json.loads(gnomon("ls", "--json")[0])] == ["dead", "dead"]
    assert "2 sandboxes ended" in gnomon("gc")[0]
    clean(home, pids)


def test_kill_ends_what_an_owner_that_takes_no_calls_holds(home):
    command, id = sleeping(home)
    pids = inside(home, id)
    if not pids:
        gnomon("kill", id, code=1)  # as an ordinary user the process is known to its owner alone
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=60)
    else:
        assert gnomon("kill", "--all")[0] == f"ended {id}\n"
        command.communicate(timeout=60)
        assert command.returncode == 1
    clean(home, pids)


def test_calls_between_processes_are_bounded_and_checked(home):
    async def main() -> None:
        backend = pretend_backend.Backend(home)
        box = await backend.create(Spec(image="scratch"))
        mine = owners.own(home.root / "owners").id
        async with Reach(home, {box.id: box}.get):
            assert os.stat(home.root / "reach").st_mode & 0o077 == 0
            for wish, says in (({"do": "kill", "id": "other"}, "is gone"), ({"id": box.id}, "do"), ({"do": "exec", "id": box.id}, "argv")):
                with pytest.raises(SandboxError, match=says):
                    [answer async for answer in call(home, mine, wish)]
            assert [answer async for answer in call(home, mine, {"do": "kill", "id": box.id})] == [{"code": 0}]
            assert not backend.living
        with pytest.raises(SandboxError, match="takes no calls"):
            [answer async for answer in call(home, mine, {"do": "kill", "id": box.id})]
        await asyncio.sleep(0.05)

    asyncio.run(main())
