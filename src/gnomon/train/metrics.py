"""What a run writes down while it goes: one JSON object per line, and TensorBoard where it is installed.

The file is cut back to the checkpoint's length on resume, so a step appears once, however often the run was killed.
Read next: `report.py`, which draws it.
"""

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from gnomon.errors import CheckpointError


class Metrics:
    """The metrics of one run: `metrics.jsonl`, and event files in `tensorboard/`. Use it as a context manager.

    `board_missing` says that TensorBoard is not installed, so that the caller can tell the user once.
    """

    def __init__(self, run: Path, offset: int = 0, step: int = 0) -> None:
        self.path = run / "metrics.jsonl"
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < offset:
            raise CheckpointError(f"{self.path} has {size} bytes, but the checkpoint was taken at {offset}: it was changed since then; "
                                  "restore the file, or start a new run")
        self._file = self.path.open("ab")
        self._file.truncate(offset)
        self._file.seek(0, os.SEEK_END)  # cutting a file does not move the place that `tell` reports
        self.board_missing = importlib.util.find_spec("tensorboard") is None
        self._board: Any = None
        if not self.board_missing:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=step, flush_secs=10)

    @property
    def offset(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; numbers also go to TensorBoard under their key, at the row's `step`."""
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        if self._board is not None:
            for key, value in row.items():
                if isinstance(value, (int, float)) and key != "step":
                    self._board.add_scalar(key, value, row["step"])

    def sync(self) -> int:
        """Make what was written durable; returns the length, for the checkpoint."""
        os.fsync(self._file.fileno())
        return self.offset

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read(run: Path) -> list[dict[str, Any]]:
    """All rows of a run, oldest first; a last line that was cut by a kill is left out."""
    path = run / "metrics.jsonl"
    if not path.exists():
        raise CheckpointError(f"{run} is no run folder: {path.name} is missing")
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]
