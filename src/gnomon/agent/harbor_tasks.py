"""Between Harbor task directories and tasks: what the agent is asked, in which machine, and which tests decide.

A directory with `steps` is one task that has them. Read next: `steps.py`, `verifiers/tests.py`.
"""

from __future__ import annotations

import hashlib
import posixpath
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon.agent import harbor_schema
from gnomon.agent import task as taken
from gnomon.agent.fields import bytes_to_json
from gnomon.agent.harbor import Entry, HarborTask, check
from gnomon.agent.harbor_schema import Agent, Artifact, Environment, HarborConfig, Healthcheck, Step, Verifier
from gnomon.agent.solution import Solution
from gnomon.agent.task import Budget, Check, Task
from gnomon.errors import ConfigError, DataError, Unsupported
from gnomon.sandbox import dockerfile
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import MEGABYTE, Backend, Limits, Network

MAX_TESTS_BYTES = 64 * MEGABYTE
"""Tests become part of the task, which is JSON; more than this belongs in the image of the verifier."""


def task(source: HarborTask) -> Task:
    """What a directory asks for. `image` is the name that `build` gives its machine; folder and user are the Dockerfile's where
    `task.toml` says none."""
    check(source)
    config, environment = source.config, source.config.environment
    agent = config.agent
    folder, owner = _in_dockerfile(source)
    user = agent.user if agent.user is not None else owner
    steps = tuple(_step(source, step, owner) for step in config.steps)
    name = config.task.name if config.task else source.name
    solution: Solution | None = None
    if steps:
        decides = Check(kind="steps", settings={"strategy": config.multi_step_reward_strategy or "mean"})
    else:
        decides, solution = Check(kind="tests", settings=_settings(source, None, owner)), _solution(source, None)
    return Task(
        id=name, prompt=_request(source), domain="agents", image=image_name(source),
        env=environment.env, workdir=environment.workdir or folder, user=str(user) if user is not None else None,
        network=network(agent if agent.network_mode is not None else environment), limits=_limits(environment),
        artifacts=tuple(artifact.source for artifact in config.artifacts), budget=Budget(seconds=agent.timeout_sec),
        check=decides, solution=solution, health=_health(environment.healthcheck), steps=steps,
        metadata={"harbor": name, "schema_version": config.schema_version})


def _request(source: HarborTask) -> str:
    """The words of the whole; those of a directory with steps are for people, and need not be there."""
    return source.instruction() if not source.config.steps or "instruction.md" in source.files else ""


def _step(source: HarborTask, step: Step, owner: str | None) -> taken.Step:
    """A step: what it says of its own. The network is said by each where one says its own, so that it is the task's again for the next."""
    config, agent = source.config, step.agent
    files = source.below(f"steps/{step.name}/workdir")
    own = any(each.agent.network_mode is not None for each in config.steps)
    phase = next(each for each in (agent, config.agent, config.environment) if each is config.environment or each.network_mode is not None)
    least = {"reward": step.min_reward} if isinstance(step.min_reward, (int, float)) else step.min_reward or {}
    return taken.Step(
        name=step.name, prompt=source.instruction(step), check=Check(kind="tests", settings=_settings(source, step, owner)),
        files={path: entry.content for path, entry in files.items()},
        programs=tuple(path for path, entry in files.items() if entry.executable), setup="setup.sh" if "setup.sh" in files else None,
        health=_health(step.healthcheck), user=str(agent.user) if agent.user is not None else None, network=network(phase) if own else None,
        seconds=agent.timeout_sec, artifacts=tuple(artifact.source for artifact in step.artifacts), least=least,
        solution=_solution(source, step))


def _health(given: Healthcheck | None) -> taken.Health | None:
    if given is None:
        return None
    return taken.Health(command=given.command, interval=given.interval_sec, timeout=given.timeout_sec, grace=given.start_period_sec,
                        retries=given.retries)


def _in_dockerfile(source: HarborTask) -> tuple[str | None, str | None]:
    """The folder and the user that a Dockerfile leaves its machine in, None where it says none; `build` says what is wrong with one."""
    folder, user = None, None
    try:
        lines = dockerfile.parse(source.text("environment/Dockerfile"), "Dockerfile") if "environment/Dockerfile" in source.files else []
    except ConfigError:
        return None, None
    for line in lines:
        if line.word == "WORKDIR" and "$" not in line.rest:
            folder = posixpath.normpath(posixpath.join(folder or "/", line.rest.strip('"')))
        elif line.word == "USER" and "$" not in line.rest:
            user = line.rest.split(":")[0]
    return folder, user


def _settings(source: HarborTask, step: Step | None, owner: str | None) -> dict[str, Any]:
    """The settings of the verifier `tests`."""
    shared = source.config.verifier
    verifier = step.verifier if step else shared
    files = {**source.below("tests"), **source.below(source.tests(step))}
    contents = {path: entry.content for path, entry in files.items()}
    if sum(map(len, contents.values())) > MAX_TESTS_BYTES:
        raise DataError(f"{source.folder or source.name}: its tests exceed {MAX_TESTS_BYTES // MEGABYTE} MiB; put data into an image")
    separate = verifier.separate or (verifier.environment_mode is None and shared.separate)
    user = next((each for each in (verifier.user, shared.user, owner) if each is not None), None)
    if user is None and (source.config.agent.user is not None or (step and step.agent.user is not None)):
        user = "root"  # the verifier is not the agent
    return {
        "files": {path: bytes_to_json(data) for path, data in contents.items()}, "machine": "fresh" if separate else "fork",
        "timeout_seconds": verifier.timeout_sec if verifier != Verifier() else shared.timeout_sec,
        "env": {**shared.env, **verifier.env}, **({"user": str(user)} if user is not None else {}),
    }


def _solution(source: HarborTask, step: Step | None) -> Solution | None:
    """`solution/solve.sh`: a step's own, else the task's."""
    place = f"steps/{step.name}/solution" if step and source.below(f"steps/{step.name}/solution") else "solution"
    files = {f"/solution/{path}": entry.content for path, entry in source.below(place).items()}
    if "/solution/solve.sh" not in files:
        return None
    if sum(map(len, files.values())) > MAX_TESTS_BYTES:
        raise DataError(f"{source.folder or source.name}: its solution exceeds {MAX_TESTS_BYTES // MEGABYTE} MiB; put data into an image")
    return Solution(files=files, script="/solution/solve.sh || exit $?\n", env=source.config.solution.env)


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
    start = image or task.image or "scratch"
    files = {"instruction.md": Entry(data=task.prompt.encode())} if task.prompt or not task.steps else {}
    lines = [f"FROM {start}"]
    for number, (path, data) in enumerate(sorted(task.files.items())):
        files[f"environment/files/{number}"] = Entry(data=data)
        lines.append(f'COPY files/{number} "{path}"' if " " in path else f"COPY files/{number} {path}")
    lines += [f"WORKDIR {task.workdir}"] if task.workdir else []
    files["environment/Dockerfile"] = Entry(data=("\n".join(lines) + "\n").encode())
    files |= _solving(task.solution, solution)
    verifier = Verifier()
    if not task.steps:
        verifier = _verifier(task.check, task.id)
        files |= _tests(task.check)
    for step in task.steps:
        place = f"steps/{step.name}"
        files[f"{place}/instruction.md"] = Entry(data=step.prompt.encode())
        files |= {f"{place}/workdir/{path}": Entry(data=data, executable=path in step.programs) for path, data in step.files.items()}
        files |= {f"{place}/{path}": entry for path, entry in {**_tests(step.check), **_solving(step.solution, None)}.items()}
    config = HarborConfig(
        agent=Agent(timeout_sec=task.budget.seconds, user=task.user), environment=_environment(task), verifier=verifier,
        artifacts=tuple(Artifact(source=path) for path in task.artifacts), steps=tuple(_written(step, task) for step in task.steps),
        multi_step_reward_strategy=task.check.settings.get("strategy") if task.steps else None,
        solution=harbor_schema.Solution(env=next((dict(each.env) for each in _solutions(task)), {})))
    return HarborTask(name=task.id.split("/")[-1], config=config, files=files)


def _solutions(task: Task) -> list[Solution]:
    return [found for found in (task.solution, *(step.solution for step in task.steps)) if found is not None]


def _verifier(check: Check, where: str) -> Verifier:
    """The table `[verifier]` of a check. Raises `DataError` for one that has no script."""
    settings = check.settings
    if check.kind != "tests" or "files" not in settings:
        raise DataError(f"task {where}: verifier '{check.kind}' has no test script; only `tests` with `files` becomes a Harbor task")
    return Verifier(timeout_sec=float(settings.get("timeout_seconds", 600.0)), env=dict(settings.get("env", {})), user=settings.get("user"),
                    environment_mode="separate" if settings.get("machine", "fresh") == "fresh" else "shared")


def _tests(check: Check) -> dict[str, Entry]:
    found = {}
    for path, content in check.settings["files"].items():
        data = content.encode() if isinstance(content, str) else _decoded(content)
        found[f"tests/{path}"] = Entry(data=data, executable=path == "test.sh")
    return found


def _written(step: taken.Step, task: Task) -> Step:
    """A row of `[[steps]]`. Raises `DataError` for a setup of another name than Harbor looks for."""
    if step.setup not in (None, "setup.sh"):
        raise DataError(f"task {task.id}: step '{step.name}': 'setup': {step.setup!r}; Harbor runs `setup.sh`")
    phase = _phase(step.network) if step.network is not None else {}
    return Step(
        name=step.name, agent=Agent(timeout_sec=step.seconds, user=step.user, **phase), verifier=_verifier(step.check, task.id),
        min_reward=dict(step.least) or None, healthcheck=_checked(step.health),
        artifacts=tuple(Artifact(source=path) for path in step.artifacts))


def _checked(health: taken.Health | None) -> Healthcheck | None:
    if health is None:
        return None
    return Healthcheck(command=health.command, interval_sec=health.interval, timeout_sec=health.timeout, start_period_sec=health.grace,
                       retries=health.retries)


def _solving(solution: Solution | None, script: str | None) -> dict[str, Entry]:
    """The files of `solution/`: a script that puts the solution's files where they belong, then does what its own script does."""
    if script is not None:
        return {"solution/solve.sh": Entry(data=script.encode(), executable=True)}
    if solution is None:
        return {}
    own = {path.removeprefix("/"): Entry(data=data, executable=True) for path, data in solution.files.items()
           if path.startswith("/solution/")}
    if "solution/solve.sh" in own:
        return own
    lines = ["#!/bin/sh", "set -e"]
    for number, (path, data) in enumerate(sorted(solution.files.items())):
        if path.startswith("/solution/"):
            continue
        own[f"solution/files/{number}"] = Entry(data=data)
        folder, target = shlex.quote(path.rpartition("/")[0] or "/"), shlex.quote(path)
        lines += [f"mkdir -p {folder}", f"cp /solution/files/{number} {target}", f"chmod 755 {target}"]
    lines += ["set +e", solution.script] if solution.script else []
    return {**own, "solution/solve.sh": Entry(data=("\n".join(lines) + "\n").encode(), executable=True)}


def _decoded(content: Mapping[str, str]) -> bytes:
    import base64

    return base64.b64decode(content["base64"])


def _environment(task: Task) -> Environment:
    limits = task.limits or Limits()
    return Environment(
        env=dict(task.env), workdir=task.workdir, healthcheck=_checked(task.health), **_phase(task.network),
        cpus=limits.cpus if task.limits else None, memory_mb=limits.memory_bytes // MEGABYTE if task.limits else None,
        storage_mb=limits.disk_bytes // MEGABYTE if task.limits else None)


def _phase(given: Network) -> dict[str, Any]:
    """`network_mode` and `allowed_hosts` of a network."""
    mode = "public" if "*:*" in given.allow else "allowlist" if given.allow else "no-network"
    hosts = tuple(entry.rpartition(":")[0].strip("[]") for entry in given.allow) if mode == "allowlist" else None
    return {"network_mode": mode, "allowed_hosts": hosts}


def folders(root: Path) -> list[Path]:
    """The task directories of a folder: itself if it is one, else those directly below it, sorted."""
    if (root / "task.toml").is_file():
        return [root]
    found = sorted(path.parent for path in root.glob("*/task.toml"))
    if not found:
        raise DataError(f"{root}: neither a Harbor task nor a folder of some; a task has a file task.toml")
    return found
