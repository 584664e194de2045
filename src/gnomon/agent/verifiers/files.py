"""Are the files as they should be? Settings: `files`, for each absolute path what must hold.

`{"equals": text}`, `{"contains": text}`, `{"number": 4, "relative": 1e-6}`, `{"json": value}`, `{"sha256": hex}`, `{"absent": true}`;
several in one must all hold. The reward is 1 when all files are right; `share` among the metrics says how many were.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.agent.verifiers.numeric import number
from gnomon.errors import DataError, SandboxError, SandboxLost, SandboxTimeout, VerifierError
from gnomon.sandbox.sandbox import Sandbox

CONDITIONS = ("equals", "contains", "number", "json", "sha256", "absent")


class Verifier:
    """Reads files in a copy of the agent's machine and runs nothing there."""

    machine: Machine = "fork"

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        table = fields.table("files")
        self.files = {path: _condition(Fields(condition, "settings", f"files.{path}")) for path, condition in table.items()}
        fields.done()
        if not self.files:
            raise DataError("'files': name at least one file; nothing to check would be a reward for nothing")

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """1 when all conditions hold."""
        if sandbox is None:
            raise VerifierError("files are looked for in a machine, and there is none")
        wrong = [f"{path}: {why}" for path, condition in self.files.items() if (why := _wrong(await read(sandbox, path), condition))]
        share = 1 - len(wrong) / len(self.files)
        return Score(reward=float(not wrong), metrics={"share": share}, evidence=(*wrong,) or ("all files are right",))


async def read(sandbox: Sandbox, path: str) -> bytes | None:
    """A file's bytes; None where there is no readable file of that name, which is the agent's doing. A lost machine is not."""
    try:
        return await sandbox.read(path)
    except (SandboxLost, SandboxTimeout):
        raise
    except SandboxError:
        return None


def _condition(fields: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("equals", "contains", "sha256"):
        if fields.has(name):
            found[name] = fields.text(name)
    if fields.has("number"):
        found["number"] = fields.number("number")
    if fields.has("json"):
        found["json"] = fields.get("json")
    if fields.has("absent"):
        found["absent"] = fields.flag("absent")
    relative = fields.number("relative", 1e-6)
    fields.done()
    if not found or found.get("contains") == "" or (found.get("absent") and len(found) > 1):
        raise fields.wrong("", found, f"one of {', '.join(CONDITIONS)}, with something to compare")
    return {**found, "relative": relative}


def _wrong(data: bytes | None, condition: Mapping[str, Any]) -> str:
    """Why a file is not as it should be; empty where it is."""
    if condition.get("absent") is True:
        return "" if data is None else "is there and should not be"
    if data is None:
        return "is not there"
    text = data.decode("utf-8", "replace")
    if "equals" in condition and text.rstrip("\n") != condition["equals"].rstrip("\n"):
        return f"holds {text[:80]!r}"
    if "contains" in condition and condition["contains"] not in text:
        return "does not contain what it should"
    if "sha256" in condition and hashlib.sha256(data).hexdigest() != condition["sha256"].lower():
        return "has another digest"
    if "number" in condition:
        value = number(text)
        if value is None or not math.isclose(value, condition["number"], rel_tol=condition["relative"]):
            return f"holds {text[:80]!r}"
    if "json" in condition:
        try:
            same = json.dumps(json.loads(data), sort_keys=True) == json.dumps(condition["json"], sort_keys=True)
        except (ValueError, RecursionError):
            return "is no JSON"
        return "" if same else "holds another value"
    return ""
