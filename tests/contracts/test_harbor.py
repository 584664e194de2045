"""Harbor task directories: what is read, what is refused with its file and field, what is written, and the machines they ask for."""

import asyncio
import textwrap
from pathlib import Path

import pretend_backend
import pytest

from gnomon.agent import harbor, harbor_tasks
from gnomon.agent.harbor_schema import HarborConfig
from gnomon.agent.task import Budget, Check, Task
from gnomon.errors import ConfigError, DataError, Unsupported, VerifierError
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
    [task] = harbor_tasks.tasks(harbor.read(folder(tmp_path / "t", FULL)))
    assert (task.id, task.prompt, task.user, task.workdir) == ("org/example", "Do it.\n", "1000", "/app")
    assert task.budget == Budget(seconds=120.0) and task.limits is not None and task.limits.memory_bytes == 1024 * MEGABYTE
    assert task.network == Network(allow=("example.com:*", "*.pypi.org:*", "192.0.2.0/24:*"))
    assert task.check.kind == "tests" and task.check.settings["machine"] == "fresh" and task.artifacts == ("/app/answer.json", "/app/out")
    assert Task.parse(task.text) == task
    assert "reward" not in task.prompt and task.files == {}  # tests come after the agent's phase


def test_steps_are_tasks_and_their_rewards_are_combined(tmp_path):
    text = 'multi_step_reward_strategy = "final"\n[[steps]]\nname = "one"\n[steps.agent]\ntimeout_sec = 5\n[[steps]]\nname = "two"\n'
    place = folder(tmp_path / "t", text, **{"steps__one__instruction.md": "First.", "steps__two__instruction.md": "Second.",
                                            "steps__two__tests__test.sh": "own", "instruction.md": ""})
    one, two = harbor_tasks.tasks(harbor.read(place))
    assert (one.id, one.prompt, one.budget.seconds, two.prompt) == ("t#one", "First.", 5.0, "Second.")
    assert one.check.settings["files"]["test.sh"] != "own" == two.check.settings["files"]["test.sh"]
    assert harbor_tasks.combined([{"reward": 1.0}, None, {"reward": 0.0, "other": 1.0}]) == {"other": 0.5, "reward": 0.5}
    assert harbor_tasks.combined([{"reward": 1.0}, {"reward": 0.25}], "final") == {"reward": 0.25}
    for given, strategy in (([None], None), ([{"reward": 1.0}, None], "final")):
        with pytest.raises(VerifierError):
            harbor_tasks.combined(given, strategy)


def test_machines_are_built_from_local_files_and_no_registry_is_asked(tmp_path):
    backend = pretend_backend.Backend(LayerStore(tmp_path / "store"))

    def build(name: str, config: str = SMALLEST, **files: str) -> str:
        return asyncio.run(harbor_tasks.build(harbor.read(folder(tmp_path / name, config, **files)), backend, backend.store))

    name = build("local", **{"environment__Dockerfile": "FROM scratch\nCOPY a.txt /app/\n", "environment__a.txt": "a"})
    assert name == harbor_tasks.tasks(harbor.read(tmp_path / "local"))[0].image
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
    [back] = harbor_tasks.tasks(made)
    assert (back.prompt, back.workdir, back.artifacts, back.budget) == (task.prompt, task.workdir, task.artifacts, task.budget)
    assert back.check.settings["files"] == task.check.settings["files"] and back.check.settings["machine"] == "fresh"
    assert made.files["solution/solve.sh"].executable and made.text("environment/Dockerfile").splitlines()[1] == 'COPY files/0 "/app/a b"'
    with pytest.raises(DataError, match="has no test script"):
        harbor_tasks.directory(Task(id="x", prompt="", check=Check(kind="exact")))
