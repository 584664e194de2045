"""What the agent does for a kernel that is its own; used by `agent` and, like it, runs inside under any Python from 3.9 on.

A kernel that was written down and starts again has the clock of that moment, and the random numbers of every other copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

SLACK_SECONDS = 0.02
RESEED = 0x5207
"""`RNDRESEEDCRNG` of linux/random.h: numbers from now on depend on what was just mixed in."""

KERNEL_THREAD = 0x00200000
"""`PF_KTHREAD` of linux/sched.h, in the flags of `/proc/PID/stat`."""


def set_clock(seconds: float) -> None:
    """The time of day, unless it is right already."""
    if abs(time.time() - seconds) > SLACK_SECONDS:
        time.clock_settime(time.CLOCK_REALTIME, seconds)


def reseed(words: str) -> None:
    """Other random numbers from now on than any other copy has."""
    handle = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, bytes.fromhex(words))
        with contextlib.suppress(OSError):
            fcntl.ioctl(handle, RESEED)
    finally:
        os.close(handle)


def is_program(status: list[str]) -> bool:
    """Whether a process is no thread of the kernel, by the fields of its `stat` from the state on; one that has gone is none either."""
    return len(status) > 6 and not int(status[6]) & KERNEL_THREAD


def used() -> int:
    """Bytes of the file system that holds what was written."""
    held = os.statvfs("/")
    return (held.f_blocks - held.f_bfree) * held.f_frsize
