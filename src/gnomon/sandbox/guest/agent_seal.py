"""What keeps programs inside from speaking in the agent's name; a part of `agent`, runs inside under any Python from 3.9 on.

Root inside may open whatever lies in `/proc/1/fd`, the channel to the host too. So every frame carries a seal that is made with a key
which was there before the first program, and which no program can read: the agent has one power more than programs ever get, to trace, and
is not dumpable; without that power nobody looks into a process that has it. The host makes the same seals and compares.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from _blake2 import blake2b

SEAL_BYTES = 16
PR_SET_DUMPABLE, PR_CAPBSET_DROP = 4, 24
CAP_SYS_RAWIO, CAP_SYS_MODULE, CAP_SYS_PTRACE, CAP_SYS_BOOT, CAP_SYS_RESOURCE = 17, 16, 19, 22, 24
CAPABILITY_VERSION = 0x20080522


def close_up() -> None:
    """Take the power to trace from every program to come, hide this one's memory, and find no more code in files from now on."""
    library = ctypes.CDLL(None, use_errno=True)
    for power in (CAP_SYS_PTRACE, CAP_SYS_MODULE, CAP_SYS_RAWIO, CAP_SYS_BOOT, CAP_SYS_RESOURCE):
        library.prctl(PR_CAPBSET_DROP, power, 0, 0, 0)
    header, data = struct.pack("II", CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    if library.capget(header, data) == 0:
        words = list(struct.unpack("6I", data.raw))
        words[2], words[5] = 0, 0  # nothing to inherit: what programs get is the bounding set
        library.capset(header, struct.pack("6I", *words))
    if os.getpid() == 1:
        library.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        sys.path.clear()
        sys.meta_path.clear()
        sys.path_hooks.clear()


class Seal:
    """Seals frames one after the other: none can be left out, repeated or put between. `turn` begins a new row after a checkpoint."""

    def __init__(self, key: bytes = b"") -> None:
        self.key, self.word, self.count = key, b"", 0

    def turn(self, key: str, word: str) -> None:
        """Begin a new row; the key is taken once."""
        self.key = self.key or bytes.fromhex(key)
        self.word, self.count = bytes.fromhex(word), 0

    def of(self, *parts: bytes) -> bytes:
        """The seal of the next frame."""
        digest = blake2b(self.word + struct.pack(">Q", self.count), digest_size=SEAL_BYTES, key=self.key)
        self.count += 1
        for part in parts:
            digest.update(part)
        return digest.digest()
