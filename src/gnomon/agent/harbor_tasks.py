"""Between Harbor task directories and tasks: what the agent is asked, in which machine, and which tests decide.

A directory with `steps` is one task for each step, in order; `combined` makes one reward of theirs. Read next: `verifiers/tests.py`.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from gnomon.agent import harbor_schema
from gnomon.agent.fields import bytes_to_json
from gnomon.agent.harbor import Entry, HarborTask, check
from gnomon.agent.harbor_schema import Agent, Artifact, Environment, HarborConfig, Step, Verifier
from gnomon.agent.solution import Solution
from gnomon.agent.task import Budget, Check, Task
from gnomon.errors import ConfigError, DataError, Unsupported, VerifierError
from gnomon.sandbox import dockerfile
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import MEGABYTE, Backend, Limits, Network

MAX_TESTS_BYTES = 64 * MEGABYTE
"""Tests become part of the task, which is JSON; more than this belongs in the image of the verifier."""


def tasks(source: HarborTask) -> tuple[Task, ...]:
    """What a directory asks for. `image` is the name that `build` gives its machine."""
    check(source)
    return tuple(_task(source, step) for step in source.config.steps or (None,))


def _task(source: HarborTask, step: Step | None) -> Task:
    config = source.config
    agent = step.agent if step else config.agent
    environment = config.environment
    name = config.task.name if config.task else source.name
    seconds = agent.timeout_sec if agent.timeout_sec is not None else config.agent.timeout_sec
    user = agent.user if agent.user is not None else config.agent.user
    phase = agent if agent.network_mode is not None else config.agent
    return Task(
        id=f"{name}#{step.name}" if step else name, prompt=source.instruction(step), domain="agents", image=image_name(source),
        env=environment.env, workdir=environment.workdir, user=str(user) if user is not None else None,
        network=network(phase if phase.network_mode is not None else environment), limits=_limits(environment),
        artifacts=tuple(artifact.source for artifact in config.kept(step)), budget=Budget(seconds=seconds),
        check=Check(kind="tests", settings=_settings(source, step)), solution=_solution(source, step),
        metadata={"harbor": name, "schema_version": config.schema_version, **({"step": step.name} if step else {})})


def _settings(source: HarborTask, step: Step | None) -> dict[str, Any]:
    """The settings of the verifier `tests`."""
    shared = source.config.verifier
    verifier = step.verifier if step else shared
    files = {**source.below("tests"), **source.below(source.tests(step))}
    contents = {path: entry.content for path, entry in files.items()}
    if sum(map(len, contents.values())) > MAX_TESTS_BYTES:
        raise DataError(f"{source.folder or source.name}: its tests exceed {MAX_TESTS_BYTES // MEGABYTE} MiB; put data into an image")
    separate = verifier.separate or (verifier.environment_mode is None and shared.separate)
    user = verifier.user if verifier.user is not None else shared.user
    return {
        "files": {path: bytes_to_json(data) for path, data in contents.items()}, "machine": "fresh" if separate else "fork",
        "timeout_seconds": verifier.timeout_sec if verifier != Verifier() else shared.timeout_sec,
        "env": {**shared.env, **verifier.env}, **({"user": str(user)} if user is not None else {}),
    }


def _solution(source: HarborTask, step: Step | None) -> Solution | None:
    """`solution/solve.sh`. Steps share a machine, so a step's solution does those before it too."""
    files: dict[str, bytes] = {}
    lines = []
    for each in source.config.steps[:source.config.steps.index(step) + 1] if step else (None,):
        own, place = (f"steps/{each.name}/solution", f"/solution/{each.name}") if each else ("solution", "/solution")
        entries = source.below(own)
        if "solve.sh" not in entries:
            return None
        files.update({f"{place}/{path}": entry.content for path, entry in entries.items()})
        lines.append(f"{shlex.quote(f'{place}/solve.sh')} || exit $?")
    if sum(map(len, files.values())) > MAX_TESTS_BYTES:
        raise DataError(f"{source.folder or source.name}: its solution exceeds {MAX_TESTS_BYTES // MEGABYTE} MiB; put data into an image")
    return Solution(files=files, script="\n".join(lines) + "\n", env=source.config.solution.env)


def network(policy: Environment | Agent | Verifier) -> Network:
    """What Harbor's `network_mode` lets through. Addresses inside the host's network stay closed whatever it says."""
    if policy.network_mode == "public":
        return Network(allow=("*:*",))
    if policy.network_mode == "allowlist":
        return Network(allow=tuple(f"[{host}]:*" if ":" in host else f"{host}:*" for host in policy.allowed_hosts or ()))
    return Network()


def _limits(environment: Environment) -> Limits | None:
    given = {"cpus": environment.cpus, "memory_bytes": environment.memory_mb and environment.memory_mb * MEGABYTE,
             "disk_bytes": environment.storage_mb and environment.storage_mb * MEGABYTE}
    limits = replace(Limits(), **{name: value for name, value in given.items() if value})  # type: ignore[arg-type]
    return limits if limits != Limits() else None


def image_name(source: HarborTask) -> str:
    """The name of the machine's image: what `docker_image` says, else one made of the content of `environment/`."""
    files = source.below("environment")
    if "Dockerfile" not in files and source.config.environment.docker_image:
        return source.config.environment.docker_image
    total = hashlib.sha256()
    for path, entry in sorted(files.items()):
        total.update(f"{path}\0{entry.executable}\0".encode() + hashlib.sha256(entry.content).digest())
    return f"harbor/{total.hexdigest()[:32]}"


async def build(source: HarborTask, backend: Backend, store: LayerStore, how: dockerfile.Building | None = None) -> str:
    """Make sure that the store has the machine's image, and give its name.

    Raises `ConfigError` for a Dockerfile that starts from an image which is not there (none is fetched) or is beyond what
    `sandbox/dockerfile.py` reads, `Unsupported` for compositions of several services and for accelerators.
    """
    where, environment = source.folder or source.name, source.config.environment
    files = source.below("environment")
    compositions = [path for path in files if path.endswith(("compose.yaml", "compose.yml"))]
    if compositions:
        raise Unsupported(f"{where}/environment/{compositions[0]}: several services are not supported here; a Dockerfile is")
    if environment.gpus or environment.tpu:
        raise Unsupported(f"{where}/task.toml: 'environment.{'gpus' if environment.gpus else 'tpu'}': sandboxes here have none")
    name = image_name(source)
    try:
        store.resolve(name)
        return name
    except ConfigError as error:
        if "Dockerfile" in files:
            path = files["Dockerfile"].path
            if path is None:
                raise DataError(f"{source.name}: write the task to a folder before its image is built") from None
            how = how or dockerfile.Building(step_seconds=environment.build_timeout_sec)
            await dockerfile.build(backend, store, path, name, how=how)
            return name
        if environment.docker_image:
            remedy = f"`docker save {name} -o image.tar`, then `gnomon sandbox build --archive image.tar --name {name}`"
            raise ConfigError(f"{where}/task.toml: 'environment.docker_image': {error}. Images are not fetched from registries: where one "
                              f"can be reached, {remedy}") from None
        raise DataError(f"{where}: no environment/Dockerfile, no 'environment.docker_image': nothing says what the machine is") from None


def directory(task: Task, *, solution: str | None = None, image: str | None = None) -> HarborTask:
    """A task as a Harbor directory, for `harbor.write`. `image` is a public image for FROM; by default the task's own. `solution` is the
    script that solves it, by default what the task's own solution does.

    Only the verifier `tests` can be written: others have no script. Raises `DataError` for the rest.
    """
    settings = task.check.settings
    if task.check.kind != "tests" or "files" not in settings:
        raise DataError(f"task {task.id}: verifier '{task.check.kind}' has no test script; only `tests` with `files` becomes a Harbor task")
    start = image or task.image or "scratch"
    files = {"instruction.md": Entry(data=task.prompt.encode())}
    lines = [f"FROM {start}"]
    for number, (path, data) in enumerate(sorted(task.files.items())):
        files[f"environment/files/{number}"] = Entry(data=data)
        lines.append(f'COPY files/{number} "{path}"' if " " in path else f"COPY files/{number} {path}")
    lines += [f"WORKDIR {task.workdir}"] if task.workdir else []
    files["environment/Dockerfile"] = Entry(data=("\n".join(lines) + "\n").encode())
    for path, content in settings["files"].items():
        data = content.encode() if isinstance(content, str) else _decoded(content)
        files[f"tests/{path}"] = Entry(data=data, executable=path == "test.sh")
    files.update(_solving(task, solution))
    config = HarborConfig(
        agent=Agent(timeout_sec=task.budget.seconds, user=task.user), environment=_environment(task),
        verifier=Verifier(timeout_sec=float(settings.get("timeout_seconds", 600.0)), env=dict(settings.get("env", {})),
                          user=settings.get("user"), environment_mode="separate" if settings.get("machine", "fresh") == "fresh" else None),
        artifacts=tuple(Artifact(source=path) for path in task.artifacts),
        solution=harbor_schema.Solution(env=dict(task.solution.env) if task.solution else {}))
    return HarborTask(name=task.id.split("/")[-1], config=config, files=files)


def _solving(task: Task, script: str | None) -> dict[str, Entry]:
    """The files of `solution/`: a script that puts the solution's files where they belong, then does what its own script does."""
    if script is not None:
        return {"solution/solve.sh": Entry(data=script.encode(), executable=True)}
    if task.solution is None:
        return {}
    own = {path.removeprefix("/"): Entry(data=data, executable=True) for path, data in task.solution.files.items()
           if path.startswith("/solution/")}
    if "solution/solve.sh" in own:
        return own
    lines = ["#!/bin/sh", "set -e"]
    for number, (path, data) in enumerate(sorted(task.solution.files.items())):
        if path.startswith("/solution/"):
            continue
        own[f"solution/files/{number}"] = Entry(data=data)
        folder, target = shlex.quote(path.rpartition("/")[0] or "/"), shlex.quote(path)
        lines += [f"mkdir -p {folder}", f"cp /solution/files/{number} {target}", f"chmod 755 {target}"]
    lines += ["set +e", task.solution.script] if task.solution.script else []
    return {**own, "solution/solve.sh": Entry(data=("\n".join(lines) + "\n").encode(), executable=True)}


def _decoded(content: Mapping[str, str]) -> bytes:
    import base64

    return base64.b64decode(content["base64"])


def _environment(task: Task) -> Environment:
    allow = task.network.allow
    limits = task.limits or Limits()
    mode: Literal["public", "no-network", "allowlist"] = "public" if "*:*" in allow else "allowlist" if allow else "no-network"
    hosts = tuple(entry.rpartition(":")[0].strip("[]") for entry in allow) if mode == "allowlist" else None
    return Environment(
        env=dict(task.env), workdir=task.workdir, network_mode=mode, allowed_hosts=hosts,
        cpus=limits.cpus if task.limits else None, memory_mb=limits.memory_bytes // MEGABYTE if task.limits else None,
        storage_mb=limits.disk_bytes // MEGABYTE if task.limits else None)


def combined(rewards: Sequence[Mapping[str, float] | None], strategy: Literal["mean", "final"] | None = None) -> dict[str, float]:
    """One set of rewards of several steps, as Harbor makes it: `final` is the last step's, `mean` of each key over the steps judged.

    None is a step whose verifier failed; a key that a judged step lacks counts 0. Raises `VerifierError` where nothing was judged.
    """
    if strategy == "final":
        if not rewards or rewards[-1] is None:
            raise VerifierError("the last step was not judged, and it alone decides (multi_step_reward_strategy = \"final\")")
        return dict(rewards[-1])
    judged = [each for each in rewards if each is not None]
    if not judged:
        raise VerifierError("no step was judged, so there is no reward")
    return {name: sum(each.get(name, 0.0) for each in judged) / len(judged) for name in sorted({name for each in judged for name in each})}


def folders(root: Path) -> list[Path]:
    """The task directories of a folder: itself if it is one, else those directly below it, sorted."""
    if (root / "task.toml").is_file():
        return [root]
    found = sorted(path.parent for path in root.glob("*/task.toml"))
    if not found:
        raise DataError(f"{root}: neither a Harbor task nor a folder of some; a task has a file task.toml")
    return found
