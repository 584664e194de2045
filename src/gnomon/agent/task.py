"""What an agent is asked to do, as data: the words, the machine, the files, what it may use, and who judges (report §4.2).

A task is frozen and is JSON both ways. Where it comes from (`harbor.py`) and how it is judged (`verifier.py`) are other files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from gnomon.agent.fields import Fields, bytes_from_json, bytes_to_json, parsed
from gnomon.agent.solution import Solution
from gnomon.errors import DataError
from gnomon.sandbox.sandbox import Limits, Network

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/#:+@-]{0,199}")


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
class Task:
    """One thing to do.

    `id` is unique among the tasks of a run; `domain` chooses teachers and budgets (`general`, `agents`, `coding`, or your own word).
    `image` is what the sandbox starts from, None where the task needs no machine; `files` are written into it, by absolute path, before
    the agent begins. `check` decides and is hidden, and so is `solution`, which validation tries; `diagnosis` may be asked by the
    agent, where there is one. `metadata` is JSON for people and programs that group tasks; nothing here reads it, and no secret belongs
    there. Raises `DataError` naming the field.
    """

    id: str
    prompt: str
    check: Check
    domain: str = "general"
    system: str | None = None
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

    def to_json(self) -> dict[str, Any]:
        """The task as a JSON object; what has its default is left out."""
        record: dict[str, Any] = {
            "id": self.id, "prompt": self.prompt, "check": self.check.to_json(), "domain": self.domain, "system": self.system,
            "image": self.image, "files": {path: bytes_to_json(data) for path, data in self.files.items()}, "env": dict(self.env),
            "workdir": self.workdir, "user": self.user, "network": list(self.network.allow), "limits": _limits_to_json(self.limits),
            "artifacts": list(self.artifacts), "budget": self.budget.to_json(),
            "diagnosis": self.diagnosis.to_json() if self.diagnosis else None,
            "solution": self.solution.to_json() if self.solution else None, "metadata": dict(self.metadata),
        }
        return {name: value for name, value in record.items() if value not in (None, {}, [])}

    @classmethod
    def from_json(cls, record: Any, where: str = "task") -> Self:
        """What `to_json` wrote. Raises `DataError` naming the field for an unknown one, a missing one, or a wrong type."""
        fields = Fields(record, where)
        files = Fields(fields.table("files"), where, "files")
        env = Fields(fields.table("env"), where, "env")
        try:
            task = cls(
                id=fields.text("id"), prompt=fields.text("prompt"), check=Check.from_json(fields.inner("check")),
                domain=fields.text("domain", "general"), system=fields.maybe("system", fields.text),
                image=fields.maybe("image", fields.text), files={path: bytes_from_json(files, path) for path in fields.table("files")},
                env={name: env.text(name) for name in fields.table("env")}, workdir=fields.maybe("workdir", fields.text),
                user=fields.maybe("user", fields.text), network=Network(allow=_texts(fields, "network")), limits=_limits(fields),
                artifacts=_texts(fields, "artifacts"),
                budget=Budget.from_json(fields.inner("budget")) if fields.has("budget") else Budget(),
                diagnosis=Check.from_json(fields.inner("diagnosis")) if fields.has("diagnosis") else None,
                solution=Solution.from_json(fields.inner("solution")) if fields.has("solution") else None,
                metadata=fields.table("metadata"))
        except DataError as error:
            raise DataError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
        for name in ("budget", "diagnosis", "solution"):
            fields.maybe(name, fields.table)
        fields.done()
        return task

    def shown(self) -> Self:
        """What may be shown to whoever attempts it: no solution, and nothing of the check, which `judge` then refuses."""
        return replace(self, check=Check(kind="hidden"), solution=None)

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


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    items = tuple(fields.rows(name))
    for i, item in enumerate(items):
        if not isinstance(item, str):
            raise fields.wrong(f"{name}[{i}]", item, "a string")
    return items
