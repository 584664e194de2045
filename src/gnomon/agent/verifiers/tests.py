"""Do hidden tests pass? Harbor's protocol: `/tests/test.sh` writes `/logs/verifier/reward.json` or `reward.txt`.

Settings: `files`, the tests by relative path; `script`, `test.sh` by default; `machine`, `fresh` (only the task's artifacts are carried)
or `fork` (a copy of the agent's machine, whose programs are then trusted); `timeout_seconds`, `env`, `user`; `reward`, `file`, or `exit`
for scripts that say it by status 0 or 1. Tests and logs that were there before are removed first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields, bytes_from_json
from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, rewards, settings
from gnomon.agent.verifiers.files import read
from gnomon.errors import DataError, SandboxError, SandboxLost, SandboxTimeout, VerifierError
from gnomon.sandbox.sandbox import Command, Result, Sandbox

TESTS, LOGS = "/tests", "/logs/verifier"
CLEAN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LD_PRELOAD": "", "LD_LIBRARY_PATH": "",
         "PYTHONPATH": "", "PYTHONSTARTUP": "", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", "BASH_ENV": "", "ENV": ""}


class Verifier:
    """Brings the tests in after the agent has gone, runs them, and reads what they say."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        files, env = Fields(fields.table("files"), "settings", "files"), Fields(fields.table("env"), "settings", "env")
        self.files = {path: bytes_from_json(files, path) for path in fields.table("files")}
        self.script = fields.text("script", "test.sh")
        machine, self.by = fields.text("machine", "fresh"), fields.text("reward", "file")
        self.seconds = fields.number("timeout_seconds", 600.0)
        self.env = {name: env.text(name) for name in fields.table("env")}
        self.user = fields.maybe("user", fields.text)
        fields.done()
        if machine not in ("fresh", "fork"):
            raise fields.wrong("machine", machine, "fresh or fork")
        if self.by not in ("file", "exit"):
            raise fields.wrong("reward", self.by, "file or exit")
        if self.script not in self.files:
            raise DataError(f"'files': '{self.script}' is missing; without a test script nothing decides")
        if any(path.startswith("/") or ".." in path.split("/") for path in self.files):
            raise DataError("'files': write relative paths without '..'")
        self.machine: Machine = "fresh" if machine == "fresh" else "fork"

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """What the tests say. Raises `VerifierError` for a script that says nothing, or something that is no number."""
        if sandbox is None:
            raise VerifierError("tests run in a machine, and there is none")
        await cleared(sandbox, "/etc/ld.so.preload")
        for place in (TESTS, LOGS):
            await cleared(sandbox, place)
        for path, data in self.files.items():
            await sandbox.write(f"{TESTS}/{path}", data, 0o755 if path == self.script else 0o644)
        await sandbox.write(f"{LOGS}/.made", b"")
        result = await sandbox.exec(Command(argv=("/bin/sh", "-c", f'exec "{TESTS}/$0"', self.script), env={**CLEAN, **self.env},
                                            timeout_seconds=self.seconds, cwd=task.workdir, user=self.user))
        tail = (result.stdout + result.stderr)[-2000:].decode("utf-8", "replace")
        if result.timed_out:
            raise VerifierError(f"the tests ran past {self.seconds:g} s: {tail[-200:]}")
        table = _by_exit(result, tail) if self.by == "exit" else await _by_file(sandbox, tail)
        if "reward" not in table and len(table) > 1:
            raise VerifierError(f"the tests gave {', '.join(table)} and no 'reward'")
        reward = table["reward"] if "reward" in table else next(iter(table.values()))
        return Score(reward=reward, metrics={name: value for name, value in table.items() if name != "reward"}, evidence=(tail,))


def _by_exit(result: Result, tail: str) -> dict[str, float]:
    if result.code not in (0, 1):
        raise VerifierError(f"the test script ended with status {result.code}; 0 is passed, 1 failed, all else a crash: {tail[-200:]}")
    return {"reward": 1.0 - result.code}


async def _by_file(sandbox: Sandbox, tail: str) -> dict[str, float]:
    for name in ("reward.json", "reward.txt"):
        data = await read(sandbox, f"{LOGS}/{name}")
        if data is not None:
            return rewards(data, f"{LOGS}/{name}")
    raise VerifierError(f"the tests wrote neither reward.json nor reward.txt in {LOGS}: {tail[-200:]}")


async def cleared(sandbox: Sandbox, path: str) -> None:
    """Remove what lies at a path, and anything above it that is no folder: a link put there would turn writes elsewhere."""
    parts = path.strip("/").split("/")
    for depth in range(1, len(parts) + 1):
        place = "/" + "/".join(parts[:depth])
        above = "/" + "/".join(parts[:depth - 1])
        try:
            entries = {info.path.rstrip("/").rsplit("/", 1)[-1]: info for info in await sandbox.list(above)}
        except (SandboxLost, SandboxTimeout):
            raise
        except SandboxError:
            return
        info = entries.get(parts[depth - 1])
        if info is None:
            return
        if depth == len(parts) or info.kind != "directory":
            await sandbox.remove(place)
