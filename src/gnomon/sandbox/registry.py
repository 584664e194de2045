"""Which sandboxes exist, who owns them, and until when: one SQLite file that any number of processes share.

A sandbox is recorded before anything of it is made and forgotten after all of it is gone, together with its *traces*: processes, control
groups, mounts and files that must not outlive it. So whatever dies in between, somebody finds what is left: `reaper.py`, which reads next.
Deadlines are of the clock that counts from boot (`owners.now`): setting the date moves none of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gnomon.errors import CapacityError, SandboxError
from gnomon.sandbox import owners
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.owners import Owner
from gnomon.sandbox.sandbox import Spec

T = TypeVar("T")

STATES = ("creating", "running", "paused", "hibernated", "ending")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sandboxes (
    id TEXT PRIMARY KEY, backend TEXT NOT NULL, state TEXT NOT NULL, owner TEXT NOT NULL, image TEXT NOT NULL, metadata TEXT NOT NULL,
    idempotency_key TEXT UNIQUE, created REAL NOT NULL, created_date REAL NOT NULL, deadline REAL, lease REAL, traces TEXT NOT NULL
);
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traces:
    """What a sandbox has outside itself: processes as pid and start time, folders of control groups, mount points, files and folders."""

    processes: tuple[tuple[int, int], ...] = ()
    cgroups: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One sandbox. `created`, `deadline` and `lease` are seconds since boot, `created_date` is the wall clock's; no deadline: for ever."""

    id: str
    backend: str
    state: str
    owner: Owner
    image: str
    metadata: Mapping[str, str]
    idempotency_key: str | None
    created: float
    created_date: float
    deadline: float | None
    lease: float | None
    traces: Traces = field(default_factory=Traces)

    @property
    def age_seconds(self) -> float:
        """How long ago it was made; across a restart of the machine by the date, which is all there is."""
        return max(0.0, owners.now() - self.created if self.owner.boot == owners.boot() else time.time() - self.created_date)


class Registry:
    """The sandboxes of a store. Every call is one transaction, safe among threads and processes.

    Raises `CapacityError` where the disk is full, `SandboxError` where the file is damaged.
    """

    def __init__(self, store: LayerStore | None = None) -> None:
        self.store = store or LayerStore()
        self.path = self.store.root / "registry.sqlite"
        self._folder = self.store.root / "owners"
        self._guard = threading.RLock()
        self._pid = 0
        self._connection: sqlite3.Connection | None = None

    def claim(self, id: str, backend: str, spec: Spec, *, traces: Traces | None = None) -> Record:
        """Record a sandbox that is about to be made, as `creating`, owned by this process.

        If `spec.idempotency_key` is that of a sandbox which lives, nothing is recorded and *its* record is returned: compare the `id`. A
        dead one with that key loses the key to the new one. Raises `SandboxError` if the id is taken.
        """
        now = owners.now()
        key = spec.idempotency_key
        row = (id, backend, "creating", owners.own(self._folder).id, spec.image, json.dumps(dict(spec.metadata)), key, now, time.time(),
               None if spec.ttl_seconds is None else now + spec.ttl_seconds, None, _dump(traces or Traces()))

        def run(connection: sqlite3.Connection) -> Record:
            if key is not None:
                for record in self._select(connection, "WHERE idempotency_key = ?", key):
                    if self.why_dead(record) is None:
                        return record
                    connection.execute("UPDATE sandboxes SET idempotency_key = NULL WHERE id = ?", (record.id,))
            if self._select(connection, "WHERE id = ?", id):
                raise SandboxError(f"sandbox id '{id}' is taken; choose another")
            connection.execute(f"INSERT INTO sandboxes VALUES ({','.join('?' * len(row))})", row)
            return self._select(connection, "WHERE id = ?", id)[0]

        return self._do(run)

    def update(
        self, id: str, *, state: str | None = None, traces: Traces | None = None, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Change what is known of a sandbox. Raises `SandboxError` if it is not recorded: then somebody has reaped it."""
        if state is not None and state not in STATES:
            raise ValueError(f"state '{state}'; it is one of {', '.join(STATES)}")
        changes = {"state": state, "traces": None if traces is None else _dump(traces),
                   "metadata": None if metadata is None else json.dumps(dict(metadata))}
        self._change(id, {name: value for name, value in changes.items() if value is not None})

    def expire(self, id: str, seconds: float | None) -> None:
        """Let a sandbox end this long from now, or never."""
        self._change(id, {"deadline": None if seconds is None else owners.now() + seconds})

    def lease(self, id: str, seconds: float | None) -> None:
        """Promise to call again within `seconds`; a sandbox whose promise is broken counts as dead. `None`: the owner's life is enough."""
        self._change(id, {"lease": None if seconds is None else owners.now() + seconds})

    def take(self, id: str) -> bool:
        """Make this process the owner of a sandbox whose owner is gone; `False` if another was faster, or if it is not dead."""
        mine = owners.own(self._folder).id

        def run(connection: sqlite3.Connection) -> bool:
            found = self._select(connection, "WHERE id = ?", id)
            if not found or self.why_dead(found[0]) is None:
                return False
            connection.execute("UPDATE sandboxes SET owner = ?, state = 'ending' WHERE id = ?", (mine, id))
            return True

        return self._do(run)

    def release(self, id: str) -> None:
        """Forget a sandbox, when nothing of it is left. One that is not recorded is no error."""
        self._do(lambda connection: connection.execute("DELETE FROM sandboxes WHERE id = ?", (id,)) and None)

    def find(self, idempotency_key: str) -> Record | None:
        """The living sandbox that was made with a key."""
        found = self._do(lambda connection: self._select(connection, "WHERE idempotency_key = ?", idempotency_key))
        return next((record for record in found if self.why_dead(record) is None), None)

    def get(self, id: str) -> Record | None:
        """The record of a sandbox."""
        found = self._do(lambda connection: self._select(connection, "WHERE id = ?", id))
        return found[0] if found else None

    def list(self) -> Sequence[Record]:
        """All records, oldest first, those of dead sandboxes too."""
        return self._do(lambda connection: self._select(connection, "ORDER BY created_date, id"))

    def dead(self) -> Sequence[tuple[Record, str]]:
        """The sandboxes that nobody will end any more, or whose time is over, each with the reason."""
        return [(record, why) for record in self.list() if (why := self.why_dead(record)) is not None]

    def why_dead(self, record: Record) -> str | None:
        """Why a sandbox should not exist any more, or `None`."""
        now = owners.now()
        if not owners.alive(self._folder, record.owner.id):
            restarted = record.owner.boot != owners.boot()
            return "the machine was restarted" if restarted else f"its owner, process {record.owner.pid}, is gone"
        if record.deadline is not None and now >= record.deadline:
            return "its time is over"
        if record.lease is not None and now >= record.lease:
            return "its owner stopped renewing it"
        return None

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        with self._guard:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def _change(self, id: str, values: Mapping[str, Any]) -> None:
        if not values:
            return
        text = ", ".join(f"{name} = ?" for name in values)

        def run(connection: sqlite3.Connection) -> None:
            if not connection.execute(f"UPDATE sandboxes SET {text} WHERE id = ?", (*values.values(), id)).rowcount:
                raise SandboxError(f"sandbox '{id}' is not in the registry: it was ended, or reaped (gnomon sandbox ls)")

        self._do(run)

    def _do(self, run: Callable[[sqlite3.Connection], T]) -> T:
        """One transaction that no other process can come between."""
        with self._guard:
            try:
                connection = self._open()
                connection.execute("BEGIN IMMEDIATE")
                try:
                    result = run(connection)
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
            except sqlite3.DatabaseError as error:
                raise self._explained(error) from error
            return result

    def _open(self) -> sqlite3.Connection:
        if self._connection is None or self._pid != os.getpid():  # a connection must not cross a fork; the parent's is left alone
            self._connection = sqlite3.connect(self.path, timeout=30.0, isolation_level=None, check_same_thread=False)
            self._pid = os.getpid()
            os.chmod(self.path, 0o600)
            # Without a flush per transaction: a power cut, which alone could lose one, ends every sandbox of this machine anyway.
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "busy_timeout = 30000"):
                self._connection.execute(f"PRAGMA {pragma}").fetchall()
            self._connection.executescript(_SCHEMA)
        return self._connection

    def _explained(self, error: sqlite3.DatabaseError) -> Exception:
        text = str(error)
        if "full" in text or "disk I/O" in text:
            return CapacityError(f"{self.path}: {text}; free space on its file system, or run `gnomon sandbox gc`")
        if isinstance(error, sqlite3.OperationalError):
            return SandboxError(f"{self.path}: {text}; check its rights and that its folder is on a local disk")
        return SandboxError(f"{self.path} is damaged ({text}): move the file away and run `gnomon sandbox gc`")

    @staticmethod
    def _select(connection: sqlite3.Connection, condition: str, *values: object) -> Sequence[Record]:
        cursor = connection.execute(f"SELECT * FROM sandboxes {condition}", values)
        names = [column[0] for column in cursor.description]
        return [_record(dict(zip(names, row))) for row in cursor]


def _record(row: dict[str, Any]) -> Record:
    traces = json.loads(row["traces"])
    traces["processes"] = [tuple(pair) for pair in traces["processes"]]
    return Record(**(row | {"owner": Owner.parse(row["owner"]), "metadata": json.loads(row["metadata"]),
                            "traces": Traces(**{name: tuple(value) for name, value in traces.items()})}))


def _dump(traces: Traces) -> str:
    return json.dumps(dataclasses.asdict(traces))
