"""What an agent is asked to do, as data: the words, the machine, the files, what it may use, and who judges (report §4.2).

A task is frozen and is JSON both ways. Where it comes from (`harbor.py`), how it is judged (`verifier.py`) and what becomes of one with
several steps (`steps.py`) are other files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from gnomon.agent.fields import Fields, bytes_from_json, bytes_to_json, parsed
from gnomon.agent.message_json import part_from_json, part_to_json
from gnomon.agent.solution import Solution
from gnomon.data.messages import Image
from gnomon.errors import DataError
from gnomon.sandbox.sandbox import Limits, Network

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/#:+@-]{0,199}")
HIDDEN = "hidden"  # the check of a task as an agent sees it


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What an attempt may use; None is no limit. `tokens` counts what the model writes, `turns` its messages, `seconds` the clock."""

    tokens: int | None = None
    turns: int | None = None
    seconds: float | None = None
    dollars: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "turns", "seconds", "dollars"):
            value = getattr(self, name)
            if value is None:
                continue
            kinds = (int,) if name in ("tokens", "turns") else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value <= 0:
                raise DataError(f"'budget.{name}': {value!r}; write a {'whole ' if kinds == (int,) else ''}number above 0, or leave it out")

    def to_json(self) -> dict[str, Any]:
        """The limits that there are."""
        return {name: value for name in ("tokens", "turns", "seconds", "dollars") if (value := getattr(self, name)) is not None}

    @classmethod
    def from_json(cls, fields: Fields) -> Self:
        """What `to_json` wrote."""
        budget = cls(tokens=fields.maybe("tokens", fields.whole), turns=fields.maybe("turns", fields.whole),
                     seconds=fields.maybe("seconds", fields.number), dollars=fields.maybe("dollars", fields.number))
        fields.done()
        return budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Who judges: a verifier's kind, a file of `verifiers/` or `your_pkg.module:Class`, and its settings, which are JSON."""

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Kind and settings."""
        return {"kind": self.kind, "settings": dict(self.settings)}

    @classmethod
    def from_json(cls, fields: Fields) -> Self:
        """What `to_json` wrote."""
        check = cls(kind=fields.text("kind"), settings=fields.table("settings"))
        fields.done()
        return check


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """What must succeed in a machine before an agent begins: `command`, run by a shell, tried every `interval` seconds for `timeout` each.
    Failures within `grace` seconds do not count; of those after it, `retries` in a row are one too many."""

    command: str
    interval: float = 5.0
    timeout: float = 30.0
    grace: float = 0.0
    retries: int = 3

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Fields) -> Self:
        """What `to_json` wrote."""
        health = cls(command=fields.text("command"), interval=fields.number("interval", 5.0), timeout=fields.number("timeout", 30.0),
                     grace=fields.number("grace", 0.0), retries=fields.whole("retries", 3))
        fields.done()
        return health


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One of several parts of a task, done one after the other in the same machine; each has its request and is judged when it ends.

    Before it begins, `files` are put into the task's folder by relative path, those named in `programs` as programs, and then `setup`, one
    of them, is run. `least` are rewards, by name, below which no later step is attempted. `user`, `network` and `seconds` are the task's
    where they are None; `artifacts` are carried to the verifier beside the task's.
    """

    name: str
    prompt: str
    check: Check
    files: Mapping[str, bytes] = field(default_factory=dict)
    programs: tuple[str, ...] = ()
    setup: str | None = None
    health: Health | None = None
    user: str | None = None
    network: Network | None = None
    seconds: float | None = None
    artifacts: tuple[str, ...] = ()
    least: Mapping[str, float] = field(default_factory=dict)
    solution: Solution | None = None

    def __post_init__(self) -> None:
        if not self.name.strip() or len(self.name) > 255 or "/" in self.name or not self.name.isprintable():
            raise DataError(f"step 'name': {self.name[:100]!r}; up to 255 characters on one line, no '/'")
        for path in self.files:
            if path.startswith("/") or ".." in path.split("/") or "\0" in path:
                raise DataError(f"step {self.name}: 'files': {path!r}; write a relative path without '..'")
        for path in (*self.programs, *((self.setup,) if self.setup is not None else ())):
            if path not in self.files:
                raise DataError(f"step {self.name}: 'setup' or 'programs' name {path!r}, which is not among its files")

    def to_json(self) -> dict[str, Any]:
        """The step as a JSON object; what has its default is left out."""
        record: dict[str, Any] = {
            "name": self.name, "prompt": self.prompt, "check": self.check.to_json(),
            "files": {path: bytes_to_json(data) for path, data in self.files.items()}, "programs": list(self.programs), "setup": self.setup,
            "health": self.health.to_json() if self.health else None, "user": self.user,
            "network": list(self.network.allow) if self.network is not None else None, "seconds": self.seconds,
            "artifacts": list(self.artifacts), "least": dict(self.least), "solution": self.solution.to_json() if self.solution else None,
        }
        return {name: value for name, value in record.items() if name == "network" and value is not None or value not in (None, {}, [])}

    @classmethod
    def from_json(cls, fields: Fields) -> Self:
        """What `to_json` wrote."""
        files, least = fields.within("files"), fields.within("least")
        step = cls(
            name=fields.text("name"), prompt=fields.text("prompt"), check=Check.from_json(fields.inner("check")),
            files={path: bytes_from_json(files, path) for path in fields.table("files")}, programs=_texts(fields, "programs"),
            setup=fields.maybe("setup", fields.text), health=fields.maybe("health", lambda key: Health.from_json(fields.inner(key))),
            user=fields.maybe("user", fields.text),
            network=fields.maybe("network", lambda key: Network(allow=_texts(fields, key))), seconds=fields.maybe("seconds", fields.number),
            artifacts=_texts(fields, "artifacts"), least={name: least.number(name) for name in fields.table("least")},
            solution=fields.maybe("solution", lambda key: Solution.from_json(fields.inner(key))))
        fields.done()
        return step


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One thing to do.

    `id` is unique among the tasks of a run; `domain` chooses teachers and budgets (`general`, `agents`, `coding`, or your own word).
    `images` are pictures that come before the words, for harnesses that speak to the model themselves.
    `image` is what the sandbox starts from, None where the task needs no machine; `files` are written into it, by absolute path, before
    the agent begins. `check` decides and is hidden, and so is `solution`, which validation tries; `diagnosis` may be asked by the
    agent, where there is one; `health` must succeed before the agent begins. A task with `steps` asks for one after the other, each by its
    own words, and `check` is then `steps`, which makes one reward of theirs. `metadata` is JSON for people and programs that group tasks;
    nothing here reads it, and no secret belongs there. Raises `DataError` naming the field.
    """

    id: str
    prompt: str
    check: Check
    domain: str = "general"
    system: str | None = None
    images: tuple[Image, ...] = ()
    image: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    network: Network = field(default_factory=Network)
    limits: Limits | None = None
    artifacts: tuple[str, ...] = ()
    budget: Budget = field(default_factory=Budget)
    diagnosis: Check | None = None
    solution: Solution | None = None
    health: Health | None = None
    steps: tuple[Step, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not ID.fullmatch(self.id):
            raise DataError(f"task 'id': {self.id[:100]!r}; up to 200 of letters, digits and ._/#:+@-, a letter or digit first")
        if not self.check.kind:
            raise DataError(f"task {self.id}: 'check.kind' is empty; name a verifier, `exact` for instance")
        if self.image is None and (self.files or self.artifacts):
            raise DataError(f"task {self.id}: 'files' or 'artifacts' without an 'image' to hold them; `host` is one that is always there")
        if self.image is None and self.solution is not None and (self.solution.files or self.solution.script):
            raise DataError(f"task {self.id}: 'solution' has files or a script and the task no 'image' to run them in")
        for name, paths in (("files", self.files), ("artifacts", self.artifacts), ("workdir", (self.workdir,))):
            for path in paths:
                if path is not None and (not path.startswith("/") or ".." in path.split("/") or "\0" in path):
                    raise DataError(f"task {self.id}: '{name}': {path!r}; write an absolute path without '..'")
        self._check_steps()

    def _check_steps(self) -> None:
        names = [step.name for step in self.steps]
        if len(set(names)) < len(names):
            raise DataError(f"task {self.id}: 'steps': two have one name ({', '.join(names)})")
        if bool(self.steps) != (self.check.kind == "steps") and self.check.kind != HIDDEN:
            raise DataError(f"task {self.id}: 'check.kind' is '{self.check.kind}'; a task with 'steps' has `steps`, and no other has")
        if self.steps and (self.diagnosis is not None or self.solution is not None):
            raise DataError(f"task {self.id}: has 'steps'; each has its solution, and 'diagnosis' is for tasks without")
        if self.image is None and (self.health or any(step.files or step.artifacts or step.health for step in self.steps)):
            raise DataError(f"task {self.id}: 'health' or 'steps' need a machine, and there is no 'image'")

    def to_json(self) -> dict[str, Any]:
        """The task as a JSON object; what has its default is left out."""
        record: dict[str, Any] = {
            "id": self.id, "prompt": self.prompt, "check": self.check.to_json(), "domain": self.domain, "system": self.system,
            "images": [part_to_json(image) for image in self.images], "image": self.image,
            "files": {path: bytes_to_json(data) for path, data in self.files.items()}, "env": dict(self.env),
            "workdir": self.workdir, "user": self.user, "network": list(self.network.allow), "limits": _limits_to_json(self.limits),
            "artifacts": list(self.artifacts), "budget": self.budget.to_json(),
            "diagnosis": self.diagnosis.to_json() if self.diagnosis else None,
            "solution": self.solution.to_json() if self.solution else None, "health": self.health.to_json() if self.health else None,
            "steps": [step.to_json() for step in self.steps], "metadata": dict(self.metadata),
        }
        return {name: value for name, value in record.items() if value not in (None, {}, [])}

    @classmethod
    def from_json(cls, record: Any, where: str = "task") -> Self:
        """What `to_json` wrote. Raises `DataError` naming the field for an unknown one, a missing one, or a wrong type."""
        fields = Fields(record, where)
        files, env = fields.within("files"), fields.within("env")
        try:
            task = cls(
                id=fields.text("id"), prompt=fields.text("prompt"), check=Check.from_json(fields.inner("check")),
                domain=fields.text("domain", "general"), system=fields.maybe("system", fields.text),
                images=_images(fields), image=fields.maybe("image", fields.text),
                files={path: bytes_from_json(files, path) for path in fields.table("files")},
                env={name: env.text(name) for name in fields.table("env")}, workdir=fields.maybe("workdir", fields.text),
                user=fields.maybe("user", fields.text), network=Network(allow=_texts(fields, "network")), limits=_limits(fields),
                artifacts=_texts(fields, "artifacts"),
                budget=Budget.from_json(fields.within("budget")),
                diagnosis=fields.maybe("diagnosis", lambda key: Check.from_json(fields.inner(key))),
                solution=fields.maybe("solution", lambda key: Solution.from_json(fields.inner(key))),
                health=fields.maybe("health", lambda key: Health.from_json(fields.inner(key))),
                steps=tuple(Step.from_json(each) for each in fields.each("steps")), metadata=fields.table("metadata"))
        except DataError as error:
            raise DataError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
        fields.done()
        return task

    def shown(self) -> Self:
        """What may be shown to whoever attempts it: no solution, no later step, and nothing of the check, which `judge` then refuses."""
        return replace(self, check=Check(kind=HIDDEN), solution=None, steps=())

    @property
    def text(self) -> str:
        """The task as one line of JSON."""
        return json.dumps(self.to_json(), allow_nan=False)

    @classmethod
    def parse(cls, text: str | bytes, where: str = "task") -> Self:
        """The task of a JSON text."""
        return cls.from_json(parsed(text, where), where)


_LIMITS = ("memory_bytes", "disk_bytes", "cpus", "processes", "inodes", "open_files")


def _limits_to_json(limits: Limits | None) -> dict[str, Any] | None:
    return {name: getattr(limits, name) for name in _LIMITS} if limits else None


def _limits(fields: Fields) -> Limits | None:
    if not fields.has("limits"):
        fields.table("limits")
        return None
    inner, given = fields.inner("limits"), {}
    for name in _LIMITS:
        value = inner.maybe(name, inner.number if name == "cpus" else lambda key: inner.whole(key, least=1))
        if value is not None:
            given[name] = value
    inner.done()
    if given.get("cpus", 1.0) <= 0:
        raise inner.wrong("cpus", given["cpus"], "a number above 0")
    return Limits(**given)  # type: ignore[arg-type]


def _images(fields: Fields) -> tuple[Image, ...]:
    parts = [part_from_json(each) for each in fields.each("images")]
    if not all(isinstance(part, Image) for part in parts):
        raise fields.wrong("images", "text", "images")
    return tuple(part for part in parts if isinstance(part, Image))


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    items = tuple(fields.rows(name))
    for i, item in enumerate(items):
        if not isinstance(item, str):
            raise fields.wrong(f"{name}[{i}]", item, "a string")
    return items
