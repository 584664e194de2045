"""The disk tier: prefixes that outlive memory and the process, as files named by their chained hash.

A folder belongs to one model, one set of weights, one type and one size of hash block; what would not fit is refused when the server
starts. Files are written by a thread of their own from copies, so that neither decoding nor the reuse of a slot waits for a disk; where it
cannot keep up, what is offered is dropped and counted. Processes may share a folder: files never change once they are there. Read next:
`segments.py`.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon.errors import CheckpointError, ConfigError
from gnomon.serve.segments import Segment, SegmentName, read, read_name, write

VERSION = 1
SUFFIX = ".segment"
LOG = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class DiskCounters:
    """What the tier holds, and what happened since the start."""

    segments: int = 0
    bytes: int = 0
    written: int = 0
    read: int = 0
    dropped: int = 0
    damaged: int = 0
    failed: int = 0
    evicted: int = 0


@dataclass(kw_only=True, slots=True)
class _Entry:
    name: SegmentName
    bytes: int
    used: float


class DiskTier:
    """Segments in `folder`, at most `budget_bytes` of them; `belongs` is what a folder must agree on. One owner per object.

    Raises `ConfigError` for a folder that belongs to another model or cannot be used.
    """

    def __init__(self, folder: Path, belongs: dict[str, Any], budget_bytes: int, queue_bytes: int):
        self.folder, self.budget_bytes, self.queue_bytes = folder, budget_bytes, queue_bytes
        self.counters = DiskCounters()
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._children: Counter[bytes] = Counter()  # how many segments begin where one ends
        self._queue: queue.SimpleQueue[Segment | None] = queue.SimpleQueue()
        self._queued: dict[bytes, int] = {}
        self._writer: threading.Thread | None = None
        self._clock = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _claim(folder, {"version": VERSION, **belongs})
            self._scan()
        except OSError as error:
            raise ConfigError(f"the cache folder '{folder}' cannot be used: {error.strerror or error}; choose another") from None

    def ends(self, digests: list[bytes]) -> set[bytes]:
        """Those of the hashes with which a segment ends that is there or about to be."""
        with self._lock:
            return {digest for digest in digests if digest in self._entries or digest in self._queued}

    def chain(self, root: bytes, digests: list[bytes], above: int) -> list[SegmentName]:
        """The segments that lead from a root to the deepest of these hashes after more than `above` blocks; empty where there are none."""
        with self._lock:
            for depth in range(len(digests), above, -1):
                found, digest = [], digests[depth - 1]
                while digest != root and (entry := self._entries.get(digest)) is not None:
                    found.append(entry.name)
                    digest = entry.name.parent
                if found and digest == root:
                    return found[::-1]
        return []

    def read(self, name: SegmentName) -> Segment | None:
        """A segment's contents, or `None`, and it is forgotten, where they are not what was written."""
        path = self._path(name.digest)
        try:
            segment = read(path)
            if segment.name != name:
                raise CheckpointError(f"{path.name} holds another piece than its name says")
        except (CheckpointError, OSError) as error:
            evicted = isinstance(error, FileNotFoundError)  # meanwhile, by the writer or by another process
            if not evicted:
                LOG.warning("a segment of the prefix cache is removed: %s", error)
            with self._lock:
                self.counters.damaged += not evicted
                self._forget(name.digest)
            return None
        with self._lock:
            self.counters.read += 1
            if (entry := self._entries.get(name.digest)) is not None:
                self._clock += 1
                entry.used = self._clock
        _touch(path)
        return segment

    def room(self, size: int) -> bool:
        """Whether the writer can take so many bytes more; ask before copying. What it cannot is counted as dropped."""
        with self._lock:
            fits = sum(self._queued.values()) + size <= self.queue_bytes and size <= self.budget_bytes
            self.counters.dropped += not fits
            return fits

    def offer(self, segment: Segment) -> None:
        """Have the writer write this; its tensors are its own from now on."""
        with self._lock:
            self._queued[segment.name.digest] = segment.bytes
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="prefix-cache-writer", daemon=True)
            self._writer.start()
        self._queue.put(segment)

    def close(self) -> None:
        """Write what is waiting, then end."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join()
            self._writer = None

    def _path(self, digest: bytes) -> Path:
        return self.folder / f"{digest.hex()}{SUFFIX}"

    def _write_all(self) -> None:
        while (segment := self._queue.get()) is not None:
            name, size = segment.name, None
            try:
                size = write(self._path(name.digest), segment)
            except OSError as error:
                LOG.warning("the prefix cache cannot write to '%s': %s", self.folder, error)
            with self._lock:
                del self._queued[name.digest]
                if size is None:
                    self.counters.failed += 1
                else:
                    self.counters.written += 1
                    self._add(name, size)
                    self._fit(name.digest)

    def _scan(self) -> None:
        """Read the names of what is there; remove what a process left behind when it was killed."""
        found = []
        for path in self.folder.iterdir():
            if path.name.endswith(".tmp"):
                if not _alive(path.name.split(".")[-2]):
                    path.unlink(missing_ok=True)
            elif path.suffix == SUFFIX:
                try:
                    found.append((path.stat().st_mtime, path.stat().st_size, read_name(path)))
                    if self._path(found[-1][2].digest) != path:
                        raise CheckpointError(f"{path.name} holds another piece than its name says")
                except CheckpointError as error:
                    LOG.warning("a damaged segment of the prefix cache is removed: %s", error)
                    self.counters.damaged += 1
                    path.unlink(missing_ok=True)
                except FileNotFoundError:
                    continue  # another process evicted it just now
        for _, size, name in sorted(found, key=lambda entry: entry[0]):
            self._add(name, size)
        self._fit(b"")

    def _add(self, name: SegmentName, size: int) -> None:
        self._forget(name.digest, unlink=False)
        self._clock += 1
        self._entries[name.digest] = _Entry(name=name, bytes=size, used=self._clock)
        self._children[name.parent] += 1
        self.counters.segments += 1
        self.counters.bytes += size

    def _forget(self, digest: bytes, *, unlink: bool = True) -> None:
        entry = self._entries.pop(digest, None)
        if entry is None:
            return
        self._children[entry.name.parent] -= 1
        if not self._children[entry.name.parent]:
            del self._children[entry.name.parent]
        self.counters.segments -= 1
        self.counters.bytes -= entry.bytes
        if unlink:
            self._path(digest).unlink(missing_ok=True)

    def _fit(self, new: bytes) -> None:
        """Keep the budget: what nothing builds on and was not used for longest goes, the newest last."""
        while self.counters.bytes > self.budget_bytes:
            leaves = [entry for digest, entry in self._entries.items() if not self._children[digest] and digest != new]
            self._forget(min(leaves, key=lambda entry: entry.used).name.digest if leaves else new)
            self.counters.evicted += 1


def _claim(folder: Path, belongs: dict[str, Any]) -> None:
    """Write down whose folder this is, or compare."""
    path, remedy = folder / "cache.json", f"choose another folder or remove '{folder}'"
    if not path.exists():
        if any(folder.glob(f"*{SUFFIX}")):
            raise ConfigError(f"the cache folder '{folder}' has segments but no cache.json; {remedy}")
        temporary = folder / f".cache.json.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(belongs, indent=1), encoding="utf-8")
        temporary.replace(path)
        return
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        there = None
    if not isinstance(there, dict):
        raise ConfigError(f"'{path}' cannot be read; {remedy}")
    for key, value in json.loads(json.dumps(belongs)).items():
        if there.get(key) != value:
            raise ConfigError(f"the cache folder '{folder}' belongs to another model or version: '{key}' is {there.get(key)!r} there and "
                              f"{value!r} here; {remedy}")


def _alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _touch(path: Path) -> None:
    """Remember the use across restarts."""
    try:
        os.utime(path)
    except OSError:
        return
