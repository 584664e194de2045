"""Are the rows as they should be? Settings: `database`, an absolute path; `queries`, each `{"sql": …, "rows": [[…]], "ordered": false}`.

The database is the agent's, so it is read as hostile data: from a copy, read-only, without functions in its schema, within a time and
within a size: a view of a few bytes can give rows that no memory holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.agent.verifiers.files import read
from gnomon.errors import DataError, VerifierError
from gnomon.sandbox.sandbox import Sandbox

SECONDS = 10.0
MOST_ROWS = 100_000
MOST_BYTES = 64 << 20
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


class Verifier:
    """Asks queries of a copy of the database, write-ahead log included."""

    machine: Machine = "fork"

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.database = fields.text("database")
        self.queries = []
        for query in fields.each("queries"):
            rows = query.rows("rows")
            if not all(isinstance(row, (list, tuple)) for row in rows):
                raise query.wrong("rows", rows, "a list of rows, each a list of values")
            self.queries.append((query.text("sql"), [tuple(row) for row in rows], query.flag("ordered", False)))
            query.done()
        fields.done()
        if not self.queries:
            raise DataError("'queries': ask at least one")

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """1 when each query gives its rows; a database that is missing or damaged is 0."""
        if sandbox is None:
            raise VerifierError("the database lies in a machine, and there is none")
        data, log = await read(sandbox, self.database), await read(sandbox, f"{self.database}-wal")
        if data is None:
            return Score(reward=0.0, evidence=(f"{self.database} is not there",))
        wrong = await asyncio.to_thread(self._asked, data, log)
        share = 1 - len(wrong) / len(self.queries)
        return Score(reward=float(not wrong), metrics={"share": share}, evidence=(*wrong,) or ("all rows are right",))

    def _asked(self, data: bytes, log: bytes | None) -> list[str]:
        with copied(data, log) as copy:
            return [why for sql, rows, ordered in self.queries if (why := _why(copy, sql, rows, ordered))]


@contextlib.contextmanager
def copied(data: bytes, log: bytes | None) -> Iterator[Path]:
    """A database and its write-ahead log as files, for as long as the block takes."""
    with tempfile.TemporaryDirectory(prefix="gnomon-rows-") as folder:
        copy = Path(folder) / "copy.db"
        copy.write_bytes(data)
        if log:
            Path(f"{copy}-wal").write_bytes(log)
        yield copy


def asked(data: bytes, log: bytes | None, sql: str) -> list[tuple[Any, ...]] | str:
    """The rows of one query to a database that is hostile data; the reason where there are none to be had."""
    with copied(data, log) as copy:
        try:
            return _rows(copy, sql)
        except (sqlite3.Error, sqlite3.Warning) as error:
            return str(error)


def _why(copy: Path, sql: str, wanted: Sequence[tuple[Any, ...]], ordered: bool) -> str:
    """Why a query's rows are not those; empty where they are."""
    try:
        found = _rows(copy, sql)
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"{sql}: {error}"
    key = lambda row: [(type(value).__name__, str(value)) for value in row]  # noqa: E731 - values of several types have no order
    if not ordered:
        found, wanted = sorted(found, key=key), sorted(wanted, key=key)
    same = len(found) == len(wanted) and all(map(_same, found, wanted))
    return "" if same else f"{sql}: {len(found)} rows, the first {found[:3]!r}"


def _rows(copy: Path, sql: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(copy)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA query_only = ON")
        until = time.monotonic() + SECONDS
        connection.set_progress_handler(lambda: time.monotonic() > until, 10_000)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        rows: list[tuple[Any, ...]] = []
        size = 0
        for row in itertools.islice(connection.execute(sql), MOST_ROWS):
            size += sum(len(value) for value in row if isinstance(value, (str, bytes)))
            if size > MOST_BYTES:
                raise sqlite3.DataError(f"its rows hold more than {MOST_BYTES} bytes")
            rows.append(row)
        return rows
    finally:
        connection.close()


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, float) and isinstance(b, (int, float)):
            return math.isclose(a, b, rel_tol=1e-9)
        return type(a) is type(b) and a == b

    return len(one) == len(other) and all(map(equal, one, other))
