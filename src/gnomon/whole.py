"""Files that are there whole or not at all, whenever a process ends and whoever reads meanwhile."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, data: str | bytes, *, sync: bool = False) -> None:
    """Write a file beside its place, then move it there; text as UTF-8. `sync` waits for the disk before the move.

    The folder must be there. Raises `OSError`.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)
