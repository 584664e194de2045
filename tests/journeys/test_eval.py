"""`gnomon eval` from a shell: a table and pages, whatever ends it in between, and a page that can be read in a browser."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chromium import Chromium, program

from gnomon.agent import trajectory_file
from gnomon.agent.evaluate_serving import serving
from gnomon.errors import PolicyError

WAIT = 120.0
# Sums, answered at once, but the third and later ones only once the file `go` is there.
POLICY = """
import asyncio, pathlib
from gnomon.agent.policies.scripted import ScriptedPolicy
from gnomon.errors import PolicyError

class Waits(ScriptedPolicy):
    async def complete(self, session, conversation, sampling):
        number = int(conversation.messages[-1].text.split()[2])
        while number >= 2 and not pathlib.Path("go").exists():
            await asyncio.sleep(0.02)
        return await super().complete(session, conversation, sampling)

class Dead(ScriptedPolicy):
    async def complete(self, session, conversation, sampling):
        raise PolicyError("nobody answers at http://127.0.0.1:9")

def opened(settings):
    return Waits(lambda conversation: str(2 * int(conversation.messages[-1].text.split()[2])), name="waits")

def dead(settings):
    return Dead([], name="dead")
"""
HARNESS = """
from gnomon.data.messages import Conversation, Message, Text

class Harness:
    name = "asks"

    async def run(self, task, model, box, *, effort=None):
        await model.complete(Conversation(messages=(Message(role="user", content=(Text(text=task.prompt),)),)))
        return "finished"
"""
RECIPE = """
folder = "run"
concurrency = 1
harnesses = ["asks:Harness"]
tasks = [{ kind = "jsonl", path = "tasks.jsonl" }]
[policies.waits]
kind = "waits:opened"
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A recipe with a policy and a harness of its own, and four tasks of which the last is answered wrongly."""
    (tmp_path / "waits.py").write_text(POLICY)
    (tmp_path / "asks.py").write_text(HARNESS)
    (tmp_path / "eval.toml").write_text(RECIPE)
    checks = [{"kind": "exact", "settings": {"answer": str(2 * i + (i == 3))}} for i in range(4)]
    tasks = [{"id": f"sum-{i}", "prompt": f"What is {i} and {i}?", "check": check} for i, check in enumerate(checks)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return tmp_path


@pytest.fixture
def start(workplace: Path, repository: Path) -> Any:
    """`start("eval", …)` begins `gnomon eval …` in that folder; whatever still runs at the end is killed."""
    running: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": f"{repository / 'src'}:{workplace}", "COLUMNS": "100"}
        process = subprocess.Popen([*before, sys.executable, "-m", "gnomon", *arguments], cwd=workplace, env=environment, text=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], seconds: float = WAIT) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def until(process: subprocess.Popen[str], met: Callable[[], bool]) -> None:
    """Wait for something that the process does."""
    deadline = time.monotonic() + WAIT
    while not met():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def waiting(folder: Path) -> bool:
    """Whether two attempts have ended and the third has begun."""
    files = sorted(folder.glob("run/attempts/*/*.jsonl"))
    return len(files) == 3 and sum(b'"kind": "end"' in file.read_bytes() for file in files) == 2


def figures(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run/eval.json").read_text())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_it_goes_on(start: Any, workplace: Path, how: signal.Signals) -> None:
    process = start("eval", "eval.toml")
    until(process, lambda: waiting(workplace))
    process.send_signal(how)
    status, _, err = ended(process)
    if how == signal.SIGINT:
        assert (status, "the same command again goes on" in err) == (130, True)
        assert len(figures(workplace)["attempts"]) == 2
        assert (workplace / "run/index.html").is_file()
    else:
        assert status == -how
    finished = {file: file.read_bytes() for file in workplace.glob("run/attempts/*/*.jsonl") if b'"kind": "end"' in file.read_bytes()}
    (workplace / "go").touch()
    status, out, err = ended(start("eval", "eval.toml"))
    assert status == 0, err
    assert "2 of them finished earlier" in err
    assert "1 attempts begin anew" in err
    assert "0.750" in out
    assert all(file.read_bytes() == data for file, data in finished.items())  # they were not attempted again
    [interrupted] = workplace.glob("run/attempts/*/*.jsonl.1")
    assert trajectory_file.read(interrupted).stop_reason is None
    assert [attempt["reward"] for attempt in figures(workplace)["attempts"]] == [1.0, 1.0, 1.0, 0.0]


def test_a_dead_endpoint_is_an_error_and_no_zero(start: Any, workplace: Path) -> None:
    (workplace / "go").touch()
    status, out, err = ended(start("eval", "eval.toml", "policies.dead.kind=waits:dead", "give_up_after=2", "retries=0"))
    assert status == 1
    assert "nobody answers at http://127.0.0.1:9" in err.splitlines()[-1]
    assert "2 attempts are missing" in err.splitlines()[-1]
    columns = {column["policy"]: column for column in figures(workplace)["columns"]}
    assert columns["dead"]["reward"]["mean"] is None
    assert (columns["dead"]["excluded"], columns["dead"]["missing"]) == (2, 2)
    assert columns["waits"]["reward"]["mean"] == 0.75
    assert "excluded, 2 of dead" in out


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the program unshare")
def test_a_full_disk_is_said_and_the_same_command_goes_on(start: Any, workplace: Path) -> None:
    """The disk is a small tmpfs in a mount namespace of the test's own; it is full after some attempts, then grows."""
    (workplace / "go").touch()
    (workplace / "disk").mkdir()
    attempted = subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(workplace / "disk")], check=False,
                               capture_output=True, text=True)
    if attempted.returncode:
        pytest.skip(f"no namespaces here: {attempted.stderr.strip()}")
    script = 'mount -t tmpfs -o size=32k none disk && { "$@"; echo "status $?"; mount -o remount,size=20m disk; "$@" --json; }'
    process = start("eval", "eval.toml", "folder=disk/run", before=("unshare", "-Urm", "sh", "-c", script, "sh"))
    status, out, err = ended(process)
    assert status == 0, err
    assert "status 1\n" in out
    assert "No space left on device; free space" in err
    assert [attempt["reward"] for attempt in json.loads(out.partition("status 1\n")[2])["attempts"]] == [1.0, 1.0, 1.0, 0.0]


def test_mistakes_are_said_in_one_line(start: Any, workplace: Path) -> None:
    for overrides, said in ((("efforts=[\"hihg\"]",), "did you mean 'high'"), (("tasks=[]",), "'tasks' names none"),
                            (("harnesses=[\"minimall\"]",), "did you mean 'minimal'")):
        status, out, err = ended(start("eval", "eval.toml", *overrides))
        assert (status, out, len(err.splitlines())) == (2, "", 1)
        assert said in err


@pytest.mark.slow
def test_a_run_folder_is_served_for_as_long_as_it_is_asked(base: Any, tmp_path: Path, repository: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    monkeypatch.setenv("PYTHONPATH", str(repository / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def served() -> str:
        async with serving(base.run, {"name": "small", "cache": {"memory_bytes": 64 << 20}}, tmp_path / "log") as url:
            async with httpx.AsyncClient(timeout=WAIT) as client:
                models = (await client.get(f"{url}/v1/models")).json()
            assert [model["id"] for model in models["data"]] == ["small"]
            return url

    url = asyncio.run(served())
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/v1/models")


@pytest.mark.slow
def test_a_run_folder_is_a_policy_whose_ids_are_on_record(base: Any, start: Any, workplace: Path) -> None:
    """The small run is served by a process of its own; it solves nothing, is judged, and what it sampled is on record to the id."""
    (workplace / "go").touch()
    served = (f'policies.small.serve="{base.run}"', "policies.small.serving.cache.memory_bytes=67108864", "budget.tokens=48")
    status, out, err = ended(start("eval", "eval.toml", *served), seconds=600)
    assert status == 0, err
    columns = {column["policy"]: column for column in figures(workplace)["columns"]}
    assert (columns["small"]["scored"], columns["small"]["excluded"]) == (4, 0)
    for attempt in figures(workplace)["attempts"]:
        if attempt["id"].startswith("small"):
            [turn] = trajectory_file.read(workplace / "run" / attempt["path"]).turns
            assert turn.spans[-1].sampled
            assert len(turn.spans[-1].logprobs) == len(turn.spans[-1].token_ids) > 0
    assert "small" in out


@pytest.mark.slow
def test_a_server_that_does_not_come_up_says_why(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(repository / "src"))

    async def refused() -> None:
        async with serving(tmp_path / "nowhere", {"prot": 1}, tmp_path / "log"):
            pass

    with pytest.raises(PolicyError, match="did you mean 'port'"):
        asyncio.run(refused())


@pytest.mark.skipif(program() is None, reason="no Chromium on this machine")
def test_the_pages_in_a_browser(start: Any, workplace: Path) -> None:
    (workplace / "go").touch()
    assert ended(start("eval", "eval.toml", "samples=2"))[0] == 0
    with Chromium(workplace / "profile", width=1200) as page:
        page.open(f"file://{workplace}/run/index.html")
        assert page.evaluate("document.querySelectorAll('.matrix .cell').length") == 8
        page.evaluate("document.getElementById('search').value = 'sum-3'; filter()")
        assert page.evaluate("[...document.querySelectorAll('.matrix tr[data-task]')].filter((line) => !line.hidden).length") == 1
        page.evaluate("document.querySelector('.matrix tr[data-task=\"sum-3\"] .cell').click()")
        page.until("document.querySelector('.turn') !== null")
        text = page.evaluate("document.body.innerText")
        for part in ("sum-3", "reward 0", "Why this score", "What is 3 and 3?", "6"):
            assert part in text
        page.until("document.querySelectorAll('#siblings a').length === 2")  # the frame around attempts comes in its own time
        page.press("n")
        page.until("document.body.innerText.includes('attempt 2')")
        page.until("document.getElementById('next').style.visibility === 'hidden'")
        page.evaluate("document.getElementById('previous').click()")
        page.until("document.body.innerText.includes('attempt 1')")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert not page.complaints
