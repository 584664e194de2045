"""Is a program right, and how fast beside a known one? Settings: `argv` and `cases` as for `program`; `reference`, `files` by absolute path
and `argv` of the known program; `best`, how many times faster earns 1, 2 by default; `relative`, how far numbers may be off, 0 by default.

Every timed run has an input of its own and its output is checked, so a cached, replayed or rougher answer earns nothing. As fast as the
reference earns 0.5, `best` times as fast 1, slower in proportion less (report §4.2.4). The machine is fresh: set the task's `artifacts`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.agent.fields import Fields, bytes_from_json
from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.errors import DataError, VerifierError
from gnomon.sandbox.sandbox import Command, Sandbox

MIN_CASES = 3


class Verifier:
    """Runs the reference on all inputs and takes it away, then the agent's program, which so finds nothing to copy or to slow down."""

    machine: Machine = "fresh"

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        reference = fields.inner("reference")
        files = Fields(reference.table("files"), "settings", "reference.files")
        self.reference = {path: bytes_from_json(files, path) for path in reference.table("files")}
        self.argv, self.known = _words(fields), _words(reference)
        reference.done()
        self.cases = []
        for case in fields.each("cases"):
            self.cases.append((case.text("stdin"), case.text("stdout")))
            case.done()
        self.best, self.relative = fields.number("best", 2.0), fields.number("relative", 0.0)
        self.seconds = fields.number("seconds", 60.0)
        fields.done()
        if len({given for given, _ in self.cases}) != len(self.cases) or len(self.cases) < MIN_CASES:
            raise DataError(f"'cases': give at least {MIN_CASES}, each with an input of its own, or a program could answer from memory")
        if self.best <= 1 or self.seconds <= 0 or self.relative < 0:
            raise DataError("'best' must be more than 1, 'seconds' more than 0, 'relative' 0 or more")

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """0 for one wrong output, else by speed. Raises `VerifierError` where the reference itself is wrong here."""
        if sandbox is None:
            raise VerifierError("programs run in a machine, and there is none")
        for path, data in self.reference.items():
            await sandbox.write(path, data, 0o700)
        total = {"known": 0.0, "given": 0.0}
        for which, argv, user in (("known", self.known, "root"), ("given", self.argv, task.user)):
            for number, (given, wanted) in enumerate(self.cases):
                result = await sandbox.exec(Command(argv=argv, stdin=given.encode(), timeout_seconds=self.seconds, cwd=task.workdir,
                                                    user=user))
                right = result.code == 0 and not (result.timed_out or result.truncated) and same(result.text, wanted, self.relative)
                if not right and which == "known":
                    raise VerifierError(f"the reference fails case {number}: status {result.code}, {result.text[:80]!r}")
                if not right:
                    return Score(reward=0.0, evidence=(f"case {number}: status {result.code}, printed {result.text[:80]!r}",))
                total[which] += result.seconds
            for path in self.reference if which == "known" else ():
                await sandbox.remove(path)
        ratio = total["known"] / max(total["given"], 1e-9)
        return Score(reward=worth(ratio, self.best), metrics={"times_as_fast": ratio, "seconds": total["given"]},
                     evidence=(f"all outputs are right; {ratio:.3g} times as fast as the reference",))


def worth(ratio: float, best: float) -> float:
    """The reward of being `ratio` times as fast as the reference."""
    return 0.5 * ratio if ratio < 1 else min(1.0, 0.5 + 0.5 * math.log(ratio) / math.log(best))


def same(text: str, wanted: str, relative: float) -> bool:
    """Whether two outputs are the same words, numbers among them within a relative distance."""
    words, others = text.split(), wanted.split()
    return len(words) == len(others) and all(word == other or _near(word, other, relative) for word, other in zip(words, others))


def _near(word: str, other: str, relative: float) -> bool:
    try:
        a, b = float(word), float(other)
    except ValueError:
        return False
    return relative > 0 and math.isfinite(a) and math.isfinite(b) and math.isclose(a, b, rel_tol=relative)


def _words(fields: Fields) -> tuple[str, ...]:
    words: Sequence[Any] = fields.rows("argv")
    if not words or not all(isinstance(word, str) and word for word in words):
        raise fields.wrong("argv", list(words), "the program and its arguments as texts")
    return tuple(words)
