"""Frames between the host and what it cannot trust: a kind, the number of the call, a few whole numbers, a few strings of bytes.

A frame is `<length><kind><call><numbers><strings>` and at most `MAX_FRAME` long; whatever does not parse is a `ValueError` and ends the
conversation. Nothing is ever unpickled, and no name from inside is looked up.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

MAX_FRAME = (1 << 20) + 65536
CHUNK = 1 << 16
"""How many bytes of a file or of output one frame carries."""

# Requests to the agent inside.
EXEC, STDIN, CLOSE_STDIN, SIGNAL, CREDIT, READ, WRITE, LIST, REMOVE, WATCH, CANCEL, STOP_ALL, CONTINUE_ALL, USAGE, LISTEN, LINK = (
    range(1, 17))  # fmt: skip
# Answers of the agent, and of the zygote.
READY, OK, ERROR, OUTPUT, EXIT, EVENT, DATA, ENTRY = range(32, 40)
# Requests to the zygote.
CREATE, KILL, SEAL, COPY, DROP, FREEZE, THAW, COUNT, EXPORT, HELLO, GONE = range(64, 75)

HEADER = struct.Struct("<IBIHH")
Frame = tuple[int, int, tuple[int, ...], tuple[bytes, ...]]


def pack(kind: int, call: int, numbers: Sequence[int] = (), strings: Sequence[bytes] = ()) -> bytes:
    """One frame as bytes."""
    size = HEADER.size - 4 + 8 * len(numbers) + sum(4 + len(text) for text in strings)
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes is longer than {MAX_FRAME}")
    parts = [HEADER.pack(size, kind, call, len(numbers), len(strings)), struct.pack(f"<{len(numbers)}q", *numbers)]
    parts.append(struct.pack(f"<{len(strings)}I", *[len(text) for text in strings]))
    parts.extend(strings)
    return b"".join(parts)


def unpack(body: bytes) -> Frame:
    """The frame that `pack` made, its length in front included; `ValueError` if it is none."""
    if len(body) < HEADER.size:
        raise ValueError("a frame is too short")
    size, kind, call, count, texts = HEADER.unpack_from(body)
    at = HEADER.size
    if size != len(body) - 4 or at + 8 * count + 4 * texts > len(body):
        raise ValueError("a frame is shorter than it says")
    numbers = struct.unpack_from(f"<{count}q", body, at)
    at += 8 * count
    lengths = struct.unpack_from(f"<{texts}I", body, at)
    at += 4 * texts
    if at + sum(lengths) != len(body):
        raise ValueError("the strings of a frame do not fill it")
    strings = []
    for length in lengths:
        strings.append(body[at : at + length])
        at += length
    return kind, call, numbers, tuple(strings)


class Splitter:
    """Cuts a stream of bytes into frames; never holds more than one frame and what came with it."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole now."""
        rest = self.rest + data if self.rest else data
        frames, at = [], 0
        while len(rest) - at >= 4:
            size = int.from_bytes(rest[at : at + 4], "little")
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes is longer than {MAX_FRAME}")
            if len(rest) - at < size + 4:
                break
            frames.append(unpack(rest[at : at + 4 + size]))
            at += size + 4
        self.rest = rest[at:]
        return frames
