"""The fields of Harbor's `task.toml`, schema 1.4, as Harbor 0.26 reads them; names and defaults are Harbor's.

Keys that Harbor does not know it ignores, and so does `harbor.py`, which lists them. Not checked here although Harbor does: the
credentials in the headers of MCP servers, collisions between artifacts, names of Windows devices.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from gnomon.errors import ConfigError

NetworkMode = Literal["public", "no-network", "allowlist"]
ORGANISED_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
STEP_NAME = re.compile(r'[^<>:"/\\|?*\x00-\x1f\x7f]*[^<>:"/\\|?*\x00-\x1f\x7f. ]')
_SERVICE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def _allowed(mode: str | None, hosts: tuple[str, ...] | None) -> None:
    if hosts and mode != "allowlist":
        raise ConfigError(f"'allowed_hosts' needs network_mode = \"allowlist\", not {mode!r}")
    for host in hosts or ():
        name = host.strip().lower().rstrip(".")
        try:
            ipaddress.ip_network(name, strict=True)
        except ValueError:
            if not name or not all(map(_LABEL.fullmatch, name.removeprefix("*.").split("."))):
                raise ConfigError(f"'allowed_hosts': {host!r}; write a host, *.domain, an address or a network, and no port") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Author:
    """Who wrote a task."""

    name: str
    email: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """`[task]`: the name under which a registry knows the task, `organisation/name`."""

    name: str
    version: str | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not ORGANISED_NAME.fullmatch(self.name) or ".." in self.name:
            raise ConfigError(f"'name': {self.name!r}; write organisation/name of letters, digits and ._-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Healthcheck:
    """A command that must succeed before the agent begins."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Tpu:
    """A slice of TPUs; nothing here can give one."""

    type: str
    topology: str


@dataclass(frozen=True, kw_only=True, slots=True)
class McpServer:
    """A server of tools for the agent."""

    name: str
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ConfigError(f"'{needed}' is required for transport '{self.transport}'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """`[environment]`: the machine."""

    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: Tpu | None = None
    mcp_servers: tuple[McpServer, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    network_mode: NetworkMode = "public"
    allowed_hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _allowed(self.network_mode, self.allowed_hosts)
        for name in ("build_timeout_sec", "cpus", "memory_mb", "storage_mb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"'{name}': {value!r}; write a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """`[agent]`: the agent's phase. A user is a name or a number."""

    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _allowed(self.network_mode, self.allowed_hosts)
        if self.timeout_sec is not None and self.timeout_sec <= 0:
            raise ConfigError(f"'timeout_sec': {self.timeout_sec!r}; write a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collect:
    """`[[verifier.collect]]`: a command that keeps running state in files before they are carried to the verifier."""

    command: str
    service: str = "main"
    timeout_sec: float = 60.0
    user: str | int | None = None

    def __post_init__(self) -> None:
        if not _SERVICE.fullmatch(self.service):
            raise ConfigError(f"'service': {self.service!r} is no name of a service")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verifier:
    """`[verifier]`: the verifier's phase, in the agent's machine or in one of its own."""

    timeout_sec: float = 600.0
    env: dict[str, str] = field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: tuple[Collect, ...] = ()
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _allowed(self.network_mode, self.allowed_hosts)
        if self.environment_mode == "shared" and self.environment is not None:
            raise ConfigError("'environment_mode' is \"shared\", which a table 'environment' contradicts; leave one of them out")
        if self.timeout_sec <= 0:
            raise ConfigError(f"'timeout_sec': {self.timeout_sec!r}; write a number above 0")

    @property
    def separate(self) -> bool:
        """Whether judging has a machine of its own."""
        return self.environment_mode == "separate" or self.environment is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """What is carried out of the agent's machine: to the verifier's, and to whoever reads the trial."""

    source: str
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("source", self.source), ("destination", self.destination)):
            if value is not None and ".." in PurePosixPath(value).parts:
                raise ConfigError(f"'{name}': {value!r} must not contain '..'")
        if self.destination and (self.destination.startswith("/") or "\\" in self.destination):
            raise ConfigError(f"'destination': {self.destination!r}; write a relative path with forward slashes")
        if self.service is not None and not _SERVICE.fullmatch(self.service):
            raise ConfigError(f"'service': {self.service!r} is no name of a service")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """`[[steps]]`: one of several parts, with `steps/NAME/instruction.md` and tests of its own or the task's."""

    name: str
    agent: Agent = field(default_factory=Agent)
    verifier: Verifier = field(default_factory=Verifier)
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()

    def __post_init__(self) -> None:
        if not STEP_NAME.fullmatch(self.name) or not self.name.strip() or self.name in (".", "..") or len(self.name.encode()) > 255:
            raise ConfigError(f"'name': {self.name!r} cannot name a folder everywhere")


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """`[solution]`: the environment of the reference solution."""

    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class HarborConfig:
    """All of `task.toml`."""

    schema_version: str = "1.4"
    task: Package | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    verifier: Verifier = field(default_factory=Verifier)
    agent: Agent = field(default_factory=Agent)
    environment: Environment = field(default_factory=Environment)
    solution: Solution = field(default_factory=Solution)
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: tuple[Step, ...] = ()
    artifacts: tuple[Artifact, ...] = ()

    def __post_init__(self) -> None:
        names = [step.name.casefold() for step in self.steps]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"'steps': two steps are called '{name}'")

    def kept(self, step: Step | None = None) -> tuple[Artifact, ...]:
        """The artifacts of the task, and of a step."""
        return (*self.artifacts, *(step.artifacts if step else ()))
