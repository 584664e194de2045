"""Who is missing when ranks stop answering: each one signs a roll, and those that are left name who did not.

A collective that fails says little: a connection closed, a time ran out. The ranks it failed on then sign off in the store that torchrun
keeps beside the ranks, and wait a little for the others to do the same. Who has not signed off has died or hangs. Read next: `mesh.py`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from gnomon.errors import TrainingError

GRACE = 15.0  # seconds that ranks have to sign off after the first of them did; waits of one collective end nearly together


class Roll:
    """One rank's hand on the roll of `world` ranks."""

    def __init__(self, store: dist.Store, rank: int, world: int):
        self.store, self.rank, self.world = store, rank, world
        store.set(f"who/{rank}", f"process {os.getpid()} on {socket.gethostname()}")

    def mark(self, step: int) -> None:
        """This rank has come to a step."""
        self.store.set(f"step/{self.rank}", str(step))

    def missing(self, grace: float = GRACE) -> list[str]:
        """Sign off, and after a while tell which ranks have not."""
        self.store.set(f"off/{self.rank}", "1")
        end, left = time.monotonic() + grace, list(range(self.world))
        while left and time.monotonic() < end:
            left = [rank for rank in left if not self.store.check([f"off/{rank}"])]
            time.sleep(min(0.1, grace / 10))
        return [self._told(rank) for rank in left]

    def _told(self, rank: int) -> str:
        who, step = (self.store.get(key).decode() if self.store.check([key]) else "" for key in (f"who/{rank}", f"step/{rank}"))
        return f"rank {rank} ({who or 'never seen'}, {f'last seen at step {step}' if step else 'before its first step'})"


def is_lost(error: RuntimeError) -> bool:
    """Whether an error is that of ranks which could not talk to each other."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo" in text or "connection closed by peer" in text


@contextmanager
def named(roll: Roll | None) -> Iterator[None]:
    """Inside, a collective that fails becomes a `TrainingError` that names the ranks which are missing."""
    try:
        yield
    except RuntimeError as error:
        if roll is None or not is_lost(error):
            raise
        missing = roll.missing()
        if not missing:
            raise
        raise TrainingError(
            f"{' and '.join(missing)} died or {'hang' if len(missing) > 1 else 'hangs'}: the others waited in vain ({error}); "
            "look at the output of those ranks, and start the same command again to go on from the last checkpoint; "
            "torchrun --max-restarts 3 does that by itself; 'mesh.patience' is how long ranks wait") from error
