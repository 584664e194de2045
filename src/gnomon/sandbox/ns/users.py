"""Ranges of users for sandboxes, so that no two of one machine have the same, whichever process made them.

A block of ranges belongs to the process that holds a lock on its file, which ends with the process. The files lie in a folder of root's.
"""

from __future__ import annotations

import fcntl
import os

USERS = 65536
FIRST_USER = 1 << 20
BLOCK = 256
BLOCKS = 250
PLACES = ("/run/gnomon-users", "/var/lib/gnomon-users")


class Ranges:
    """The ranges of one process: `take` and `give`. Without a folder for locks they are spread by process number, far apart."""

    def __init__(self, places: tuple[str, ...] = PLACES) -> None:
        self.folder = next((place for place in places if own(place)), "")
        self.free: list[int] = []
        self.locks: dict[int, int] = {}
        self.next = os.getpid() * BLOCK

    def take(self) -> int:
        """The first user of a range that nobody has. Raises `OSError` when none is left."""
        if not self.free and self.folder:
            self.free = self.block()
        if self.free:
            return self.free.pop()
        self.next += 1
        return FIRST_USER + USERS * (self.next % (BLOCK * BLOCKS))

    def give(self, first: int) -> None:
        """A range is free again."""
        if self.folder:
            self.free.insert(0, first)  # the one that was used last is used again last

    def block(self) -> list[int]:
        """Lock a block that no process has; its ranges."""
        for step in range(BLOCKS):
            number = (os.getpid() + step) % BLOCKS
            if number in self.locks:  # opening and closing its file once more would give up the lock
                continue
            handle = os.open(f"{self.folder}/{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                continue
            self.locks[number] = handle
            return [FIRST_USER + USERS * (number * BLOCK + index) for index in range(BLOCK - 1, -1, -1)]
        raise OSError(f"all {BLOCK * BLOCKS} ranges of users are taken (see {self.folder})")


def own(place: str) -> bool:
    """Make a folder that is this user's alone; False where that cannot be."""
    try:
        os.makedirs(place, 0o700, exist_ok=True)
        status = os.lstat(place)
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022 and os.access(place, os.W_OK)
