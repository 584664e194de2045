"""A line for each request: written by a thread of its own, so that no answer waits for a slow disk or terminal. Read next: `api.py`."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

ENDLESS = 10_000  # lines that may wait; a log that nobody can write is no reason to stop answering
LONGEST = 4000  # characters of a field; clients choose the length of some


class RequestLog:
    """Takes records and writes them as lines of JSON, or of text for people."""

    def __init__(self, form: Literal["json", "text", "none"], out: TextIO | None = None) -> None:
        self._form = form
        self._out = sys.stderr if out is None else out
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue(ENDLESS)
        self._thread: threading.Thread | None = None
        if form != "none":
            self._thread = threading.Thread(target=self._write, name="log", daemon=True)
            self._thread.start()

    def record(self, **fields: Any) -> None:
        """Write a line; never waits. Fields that are None are left out."""
        if self._thread is not None:
            try:
                self._queue.put_nowait({"time": time.time(), **fields})
            except queue.Full:
                return

    def close(self) -> None:
        """Write what is left, and stop."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=5)
            self._thread = None

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._out.write(self._line(record) + "\n")
                self._out.flush()
            except (OSError, ValueError):  # the terminal is gone
                continue

    def _line(self, record: Mapping[str, Any]) -> str:
        moment = datetime.fromtimestamp(record["time"], UTC).isoformat(timespec="milliseconds")
        fields = {name: _rounded(value) for name, value in record.items() if value is not None and name != "time"}
        if self._form == "json":
            return json.dumps({"time": moment, **fields}, ensure_ascii=False, default=str)
        return f"{moment} " + " ".join(f"{name}={_one_line(value)}" for name, value in fields.items())


def _rounded(value: Any) -> Any:
    if isinstance(value, str) and len(value) > LONGEST:
        return value[:LONGEST] + "…"
    return round(value, 4) if isinstance(value, float) else value


def _one_line(value: Any) -> str:
    """A value for people. What a client sent may hold line breaks and commands for terminals; those are escaped."""
    text = str(value)
    return text if text.isprintable() else json.dumps(text)
