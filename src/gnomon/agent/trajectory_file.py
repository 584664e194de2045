"""A trajectory on disk: a line of JSON for each turn, written when it happens; a process that is killed loses at most its last line.

The first line says what the attempt is, then come turns, ends of steps, scores, and the end. `TrajectoryFile` goes on where a killed
process stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from gnomon.agent.fields import Fields, parsed
from gnomon.agent.message_json import tool_from_json, tool_to_json
from gnomon.agent.trajectory import Score, StepEnd, StopReason, Trajectory, Turn, turn_from_json, turn_to_json
from gnomon.errors import DataError

FORMAT = 1


def read(path: Path) -> Trajectory:
    """The trajectory of a file; a last line that was cut is left out. Raises `DataError` naming the line that cannot be read."""
    return _read(path)[0]


def write(trajectory: Trajectory, path: Path) -> None:
    """A whole trajectory into a new file."""
    with TrajectoryFile(path, replace(trajectory, turns=(), steps=(), score=None, stop_reason=None, seconds={})) as file:
        for number, turn in enumerate(trajectory.turns):
            for step in trajectory.steps[len(file.trajectory.steps):]:
                if step.turns <= number:
                    file.step(step)
            file.append(turn)
        for step in trajectory.steps[len(file.trajectory.steps):]:
            file.step(step)
        if trajectory.score is not None:
            file.judge(trajectory.score)
        if trajectory.stop_reason is not None:
            file.end(trajectory.stop_reason, trajectory.seconds)


class TrajectoryFile:
    """A trajectory while it grows. Opening one that exists goes on with it, after dropping a line that was cut.

    Raises `DataError` where the file is of another attempt.
    """

    def __init__(self, path: Path, beginning: Trajectory) -> None:
        if beginning.turns or beginning.steps or beginning.score or beginning.stop_reason:
            raise DataError(f"{path}: a file begins with an empty trajectory; append its turns")
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115 - it stays open
        try:
            if self._file.tell():
                self.trajectory, whole = _read(self.path)
                if self.trajectory.id != beginning.id or self.trajectory.task_id != beginning.task_id:
                    raise DataError(f"{self.path}: is of '{self.trajectory.id}', task '{self.trajectory.task_id}'; name another file")
                self._file.truncate(whole)
            else:
                self.trajectory = beginning
                self._line("begin", _beginning(beginning))
        except BaseException:
            self._file.close()
            raise

    def append(self, turn: Turn) -> Trajectory:
        """One turn more, on disk before this returns."""
        longer = self.trajectory.appended(turn)
        self._line("turn", turn_to_json(turn))
        self.trajectory = longer
        return longer

    def step(self, end: StepEnd) -> None:
        """A step has ended."""
        self._line("step", {"name": end.name, "turns": end.turns, "stop_reason": end.stop_reason, "score": end.score.to_json()})
        self.trajectory = replace(self.trajectory, steps=(*self.trajectory.steps, end))

    def judge(self, score: Score) -> None:
        """Its score. A later one counts instead; the earlier stays in the file."""
        self._line("score", score.to_json())
        self.trajectory = replace(self.trajectory, score=score)

    def end(self, reason: StopReason, seconds: Mapping[str, float] | None = None) -> None:
        """No turn comes after this. `seconds` is how long the attempt's parts took."""
        self._line("end", {"stop_reason": reason, **({"seconds": dict(seconds)} if seconds else {})})
        self.trajectory = replace(self.trajectory, stop_reason=reason, seconds=dict(seconds or {}))

    def close(self) -> None:
        """Let go of the file; twice is no error."""
        self._file.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """`close`."""
        self.close()

    def _line(self, kind: str, record: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, **record}, allow_nan=False).encode("ascii") + b"\n")
        self._file.flush()
        os.fdatasync(self._file.fileno())


def _beginning(trajectory: Trajectory) -> dict[str, Any]:
    return {"format": FORMAT, "id": trajectory.id, "task_id": trajectory.task_id, "harness": trajectory.harness, "model": trajectory.model,
            "effort": trajectory.effort, "group": trajectory.group, "tools": [tool_to_json(tool) for tool in trajectory.tools],
            "metadata": dict(trajectory.metadata)}


def _read(path: Path) -> tuple[Trajectory, int]:
    """The trajectory, and how many bytes of the file are whole lines."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    whole = data.rfind(b"\n") + 1
    trajectory: Trajectory | None = None
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
        where = f"{path}:{number}"
        fields = Fields(parsed(line, where), where)
        kind = fields.text("kind")
        try:
            trajectory = _began(fields) if trajectory is None else _grown(trajectory, kind, fields)
        except DataError as error:
            raise error if str(error).startswith(where) else DataError(f"{where}: {error}") from None
    if trajectory is None:
        raise DataError(f"{path}: has no whole line; remove it and begin again")
    return trajectory, whole


def _began(fields: Fields) -> Trajectory:
    if fields.text("kind") != "begin" or fields.whole("format") != FORMAT:
        raise DataError(f"no trajectory of format {FORMAT}; its first line says kind \"begin\", format {FORMAT}")
    made = Trajectory(
        id=fields.text("id"), task_id=fields.text("task_id"), harness=fields.text("harness", ""), model=fields.text("model", ""),
        effort=fields.maybe("effort", fields.text), group=fields.maybe("group", fields.text),
        tools=tuple(tool_from_json(each) for each in fields.each("tools")), metadata=fields.table("metadata"))
    fields.done()
    return made


def _grown(trajectory: Trajectory, kind: str, fields: Fields) -> Trajectory:
    if kind == "turn":
        return trajectory.appended(turn_from_json(fields))
    if kind == "score":
        return replace(trajectory, score=Score.from_json(fields))
    reason = fields.text("stop_reason") if kind in ("end", "step") else None
    if reason not in get_args(StopReason):
        raise fields.wrong("kind", kind, "turn, score, or step or end with a stop_reason")
    if kind == "step":
        end = StepEnd(name=fields.text("name"), turns=fields.whole("turns"), stop_reason=reason,  # type: ignore[arg-type]
                      score=Score.from_json(fields.inner("score")))
        fields.done()
        return replace(trajectory, steps=(*trajectory.steps, end))
    seconds = Fields(fields.table("seconds"), "end", "seconds")
    took = {name: seconds.number(name) for name in fields.table("seconds")}
    fields.done()
    return replace(trajectory, stop_reason=reason, seconds=took)  # type: ignore[arg-type]
