"""One program as the agent inside keeps it; used by `agent` alone and, like it, runs inside under any Python from 3.9 on."""

from __future__ import annotations

import os
import subprocess


class Child:
    """One program: its pipes, how much of its output the host wants, and how it ended."""

    def __init__(self, key: int, process: subprocess.Popen[bytes], limit: int | None, credit: int | None) -> None:
        self.key: int | None = key
        self.process = process
        self.pid = process.pid
        self.limits, self.credit = {"stdout": limit, "stderr": limit}, credit
        self.truncated = False
        self.code: int | None = None
        self.ended = 0.0
        self.outputs: dict[int, str] = {}
        for name in ("stdout", "stderr"):
            stream = getattr(process, name)
            if stream is not None:
                self.outputs[stream.fileno()] = name
                os.set_blocking(stream.fileno(), False)
        self.pending = bytearray()
        self.closing = False
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)

    @property
    def waits_for_host(self) -> bool:
        """Whether the host takes no more of its output for now."""
        return self.credit is not None and self.credit <= 0 and self.key is not None
