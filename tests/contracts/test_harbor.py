"""Harbor task directories: what is read, what is refused with its file and field, what is written, and the machines they ask for."""

import asyncio
import textwrap
from dataclasses import replace
from pathlib import Path

import pretend_backend
import pytest

from gnomon.agent import harbor, harbor_tasks
from gnomon.agent.harbor_schema import HarborConfig
from gnomon.agent.task import Budget, Check, Step, Task
from gnomon.errors import ConfigError, DataError, Unsupported
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import MEGABYTE, Network

SMALLEST = 'schema_version = "1.4"\n'
FULL = """
schema_version = "1.4"
artifacts = ["/app/answer.json", {source = "/app/out", destination = "out", exclude = ["*.tmp"]}]
multi_step_reward_strategy = "final"
invented = 1

[task]
name = "org/example"
version = "0.1.0"
keywords = ["web"]

[[task.authors]]
name = "Somebody"
email = "somebody@example.com"

[metadata]
difficulty = "easy"
made = 2025-01-02T03:04:05Z
"an odd key" = [1, {deep = "x"}]

[agent]
timeout_sec = 120
user = 1000
network_mode = "allowlist"
allowed_hosts = ["example.com", "*.pypi.org", "192.0.2.0/24"]

[verifier]
timeout_sec = 60.0
environment_mode = "separate"
env = {A = "1"}
unheard_of = true

[verifier.environment]
docker_image = "judge:1"
network_mode = "no-network"

[[verifier.collect]]
command = "dump > /app/out/state"

[environment]
cpus = 2
memory_mb = 1024
workdir = "/app"
network_mode = "public"
env = {B = "two"}

[environment.healthcheck]
command = "true"

[[environment.mcp_servers]]
name = "tools"
url = "http://tools/sse"

[solution]
env = {C = "3"}
"""


def folder(place: Path, config: str = SMALLEST, **files: str) -> Path:
    """A task directory; `__` in a keyword is a slash, `_` before the suffix a dot."""
    named = {"instruction.md": "Do it.\n", "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
             "environment/Dockerfile": "FROM scratch\n"}
    named.update({name.replace("__", "/"): text for name, text in files.items()})
    for name, text in {"task.toml": config, **named}.items():
        if text:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(textwrap.dedent(text))
    return place


def contents(task: harbor.HarborTask) -> dict[str, tuple[bytes, bool]]:
    return {path: (entry.content, entry.executable) for path, entry in task.files.items()}


def test_everything_that_schema_1_4_says_is_read(tmp_path):
    task = harbor.read(folder(tmp_path / "t", FULL))
    config = task.config
    assert task.unknown == ("invented", "verifier.unheard_of")
    assert config.task is not None and config.task.authors[0].email == "somebody@example.com"
    assert [(a.source, a.destination, a.exclude) for a in config.artifacts] == [
        ("/app/answer.json", None, ()), ("/app/out", "out", ("*.tmp",))]
    assert config.agent.timeout_sec == 120.0 and config.agent.user == 1000
    assert config.verifier.separate and config.verifier.environment is not None and config.verifier.collect[0].service == "main"
    assert config.environment.healthcheck is not None and config.environment.healthcheck.retries == 3
    assert config.environment.mcp_servers[0].transport == "sse"
    assert config.metadata["an odd key"] == [1, {"deep": "x"}]


def test_what_is_written_is_read_back(tmp_path):
    first = harbor.read(folder(tmp_path / "t", FULL, **{"tests__data": "12", "solution__solve.sh": "true\n"}))
    (tmp_path / "t" / "tests" / "test.sh").chmod(0o755)
    first = harbor.read(tmp_path / "t")
    second = harbor.read(harbor.write(first, tmp_path / "copy"))
    assert second.config == first.config and contents(second) == contents(first)
    with pytest.raises(DataError, match="not empty"):
        harbor.write(first, tmp_path / "copy")


def test_earlier_spellings_are_understood(tmp_path):
    text = 'version = "1.0"\nmulti_step_reward_mode = "x"\n'
    text += '[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\nos = "Linux"\n'
    config = harbor.read(folder(tmp_path / "t", text)).config
    assert config.schema_version == "1.0"
    assert (config.environment.memory_mb, config.environment.storage_mb, config.environment.network_mode) == (2048, 512, "no-network")
    plain = harbor.read(folder(tmp_path / "u", "# nothing\n")).config
    assert plain == HarborConfig()


@pytest.mark.parametrize(("text", "says"), [
    ("schema_version = ", r"task.toml: cannot be read"), ('schema_version = "2.0"', r"'schema_version': '2.0'"),
    ("[agent]\ntimeout_sec = \"long\"", r"task.toml: 'agent.timeout_sec': expected float, got 'long'"),
    ("[agent]\ntimeout_sec = nan", r"'agent.timeout_sec'"), ("[agent]\ntimeout_sec = 0", r"'timeout_sec': 0"),
    ("[verifier]\ntimeout_sec = true", r"'verifier.timeout_sec'"),
    ("[environment]\nnetwork_mode = \"allow\"", r"'environment.network_mode': 'allow' is not one of.*did you mean 'allowlist'"),
    ("[environment]\nallowed_hosts = [\"a.b\"]", r"'allowed_hosts' needs network_mode"),
    ("[agent]\nnetwork_mode = \"allowlist\"\nallowed_hosts = [\"http://a.b\"]", r"'allowed_hosts': 'http://a.b'"),
    ("[environment]\nmemory = 3", r"'environment.memory': 3"),
    ("[environment]\nmemory = \"2G\"\nmemory_mb = 3", "contradicts memory_mb"),
    ("[environment]\nenv = {A = 1}", r"'environment.env.A': expected str, got 1"),
    ("[verifier]\nenvironment_mode = \"shared\"\n[verifier.environment]\ncpus = 1", "contradicts"),
    ("artifacts = [{source = \"/a/../b\"}]", r"'artifacts.0'.*'source'"), ("artifacts = \"x\"", r"'artifacts': expected a list"),
    ("[task]\nname = \"plain\"", r"organisation/name"), ("steps = [{name = \"a/b\"}]", r"'steps.0'.*cannot name a folder"),
    ("steps = [{name = \"a\"}, {name = \"A\"}]", "two steps"), ("agent = 3", r"'agent': expected a table"),
    ("[[environment.mcp_servers]]\nname = \"x\"", r"'url' is required"),
])
def test_malformed_configurations_name_the_field(tmp_path, text, says):
    with pytest.raises(DataError, match=says):
        harbor.read(folder(tmp_path / "t", text))


@pytest.mark.parametrize(("missing", "says"), [
    ("tests/test.sh", "tests/test.sh is missing"), ("instruction.md", "instruction.md: there is no such file"),
    ("task.toml", "no task.toml"),
])
def test_missing_files_are_named(tmp_path, missing, says):
    (folder(tmp_path / "t") / missing).unlink()
    with pytest.raises(DataError, match=says):
        harbor.read(tmp_path / "t")


def test_links_do_not_lead_out_of_a_task(tmp_path):
    place = folder(tmp_path / "t")
    (place / "tests" / "expected").symlink_to("/etc/hostname")
    with pytest.raises(DataError, match="leads out of the task"):
        harbor.read(place)
    (place / "tests" / "expected").unlink()
    (place / "tests" / "more").symlink_to(tmp_path)
    with pytest.raises(DataError, match="a link to a folder"):
        harbor.read(place)


def test_a_directory_becomes_a_task(tmp_path):
    task = harbor_tasks.task(harbor.read(folder(tmp_path / "t", FULL)))
    assert (task.id, task.prompt, task.user, task.workdir) == ("org/example", "Do it.\n", "1000", "/app")
    assert task.budget == Budget(seconds=120.0) and task.limits is not None and task.limits.memory_bytes == 1024 * MEGABYTE
    assert task.network == Network(allow=("example.com:*", "*.pypi.org:*", "192.0.2.0/24:*"))
    assert task.check.kind == "tests" and task.check.settings["machine"] == "fresh" and task.artifacts == ("/app/answer.json", "/app/out")
    assert Task.parse(task.text) == task
    assert "reward" not in task.prompt and task.files == {}  # tests come after the agent's phase


STEPS = """
multi_step_reward_strategy = "final"
artifacts = ["/app/all"]
[agent]
timeout_sec = 60
user = "agent"
[verifier]
env = {A = "1"}
[environment.healthcheck]
command = "test -d /app"
[[steps]]
name = "one"
min_reward = 0.5
artifacts = ["/app/one"]
[steps.agent]
timeout_sec = 5
network_mode = "allowlist"
allowed_hosts = ["example.com"]
[steps.verifier]
environment_mode = "separate"
env = {B = "2"}
[[steps]]
name = "the second"
min_reward = {tidy = 1.0}
[steps.agent]
user = 1001
[steps.healthcheck]
command = "true"
retries = 1
"""
STEP_FILES = {"steps__one__instruction.md": "First.", "steps__the second__instruction.md": "Second.",
              "steps__the second__tests__test.sh": "own", "steps__one__workdir__setup.sh": "touch made\n",
              "steps__one__workdir__data__x.txt": "x", "steps__one__solution__solve.sh": "do one\n",
              "solution__solve.sh": "do it\n", "tests__extra": "e", "instruction.md": "",
              "environment__Dockerfile": "FROM host\nWORKDIR /app\nWORKDIR work\nUSER me:us\n"}


def test_a_directory_with_steps_is_one_task_that_has_them(tmp_path):
    task = harbor_tasks.task(harbor.read(folder(tmp_path / "t", STEPS, **STEP_FILES)))
    one, two = task.steps
    assert (task.id, task.prompt, task.workdir, task.user, task.artifacts) == ("t", "", "/app/work", "agent", ("/app/all",))
    assert task.check == Check(kind="steps", settings={"strategy": "final"}) and task.health.command == "test -d /app"
    assert (one.name, one.prompt, one.seconds, one.user, one.artifacts) == ("one", "First.", 5.0, None, ("/app/one",))
    assert (one.files, one.setup) == ({"data/x.txt": b"x", "setup.sh": b"touch made\n"}, "setup.sh") and one.least == {"reward": 0.5}
    assert one.network == Network(allow=("example.com:*",)) and two.network == Network(allow=("*:*",))  # each says its own
    assert one.check.settings["machine"] == "fresh" and one.check.settings["env"] == {"A": "1", "B": "2"}
    assert (two.name, two.user, two.seconds, two.least, two.health.retries) == ("the second", "1001", None, {"tidy": 1.0}, 1)
    assert two.check.settings["machine"] == "fork" and two.check.settings["user"] == "me"
    assert {**two.check.settings["files"]} == {"test.sh": "own", "extra": "e"} and "own" not in one.check.settings["files"].values()
    assert one.solution.files["/solution/solve.sh"] == b"do one\n" and two.solution.files["/solution/solve.sh"] == b"do it\n"
    assert Task.parse(task.text) == task and task.shown().steps == ()


def test_tasks_with_steps_are_written_and_read_back(tmp_path):
    task = harbor_tasks.task(harbor.read(folder(tmp_path / "t", STEPS, **STEP_FILES)))
    made = harbor.read(harbor.write(harbor_tasks.directory(task, image="host"), tmp_path / "made" / "t"))
    back = harbor_tasks.task(made)
    assert [replace(each, solution=None) for each in back.steps] == [replace(each, solution=None) for each in task.steps]
    assert [each.solution.files["/solution/solve.sh"] for each in back.steps] == [b"do one\n", b"do it\n"]
    assert (back.check, back.health, back.workdir, back.budget, back.artifacts) == (
        task.check, task.health, task.workdir, task.budget, task.artifacts)
    with pytest.raises(DataError, match=r"Harbor runs `setup\.sh`"):
        harbor_tasks.directory(replace(task, steps=(replace(task.steps[1], files={"go": b""}, setup="go"),)))


@pytest.mark.parametrize(("steps", "says"), [
    ((Step(name="a", prompt="", check=Check(kind="exact")),) * 2, "two have one name"),
    ((), "'check.kind' is 'steps'"),
])
def test_steps_that_do_not_fit_are_named(steps, says):
    with pytest.raises(DataError, match=says):
        Task(id="t", prompt="", image="host", check=Check(kind="steps"), steps=steps)
    for wrong, what in (({"files": {"../x": b""}}, "relative path"), ({"setup": "x"}, "not among its files"), ({"name": "a/b"}, "'name'")):
        with pytest.raises(DataError, match=what):
            Step(**{"name": "a", "prompt": "", "check": Check(kind="exact"), **wrong})


def test_machines_are_built_from_local_files_and_no_registry_is_asked(tmp_path):
    backend = pretend_backend.Backend(LayerStore(tmp_path / "store"))

    def build(name: str, config: str = SMALLEST, **files: str) -> str:
        return asyncio.run(harbor_tasks.build(harbor.read(folder(tmp_path / name, config, **files)), backend, backend.store))

    name = build("local", **{"environment__Dockerfile": "FROM scratch\nCOPY a.txt /app/\n", "environment__a.txt": "a"})
    assert name == harbor_tasks.task(harbor.read(tmp_path / "local")).image
    assert (backend.store.flat(backend.store.resolve(name)) / "app" / "a.txt").read_text() == "a"
    assert asyncio.run(harbor_tasks.build(harbor.read(tmp_path / "local"), backend, backend.store)) == name and backend.created == 1
    with pytest.raises(ConfigError, match=r"Dockerfile:1: FROM python:3.12-slim: .*not fetched from registries.*docker save"):
        build("far", **{"environment__Dockerfile": "FROM python:3.12-slim\n"})
    with pytest.raises(ConfigError, match=r"'environment.docker_image'.*not fetched from registries"):
        build("named", '[environment]\ndocker_image = "ghcr.io/org/image:1"\n', **{"environment__Dockerfile": ""})
    with pytest.raises(Unsupported, match="several services"):
        build("many", **{"environment__docker-compose.yaml": "services: {}\n"})
    with pytest.raises(Unsupported, match=r"environment\.gpus"):
        build("gpu", "[environment]\ngpus = 1\n")
    with pytest.raises(DataError, match="nothing says what the machine is"):
        build("none", **{"environment__Dockerfile": ""})


def test_a_task_of_ours_becomes_a_directory(tmp_path):
    task = Task(id="mine", prompt="Write 4 into /app/n.", image="host", files={"/app/a b": b"\xff"}, workdir="/app", artifacts=("/app",),
                network=Network(allow=("example.com:443",)), budget=Budget(seconds=30.0),
                check=Check(kind="tests", settings={"files": {"test.sh": "exit 0\n", "x": {"base64": "/w=="}}, "machine": "fresh"}))
    made = harbor.read(harbor.write(harbor_tasks.directory(task, solution="echo 4 > /app/n\n"), tmp_path / "made"))
    back = harbor_tasks.task(made)
    assert (back.prompt, back.workdir, back.artifacts, back.budget) == (task.prompt, task.workdir, task.artifacts, task.budget)
    assert back.check.settings["files"] == task.check.settings["files"] and back.check.settings["machine"] == "fresh"
    assert made.files["solution/solve.sh"].executable and made.text("environment/Dockerfile").splitlines()[1] == 'COPY files/0 "/app/a b"'
    with pytest.raises(DataError, match="has no test script"):
        harbor_tasks.directory(Task(id="x", prompt="", check=Check(kind="exact")))
