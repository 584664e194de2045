"""A piece of a prefix as a file: the latents of some hash blocks and the state after them, in one.

Both travel together because one without the other is worth nothing, and believing otherwise gives wrong output that nobody notices. A file
is written under another name, flushed to the disk and renamed, so that it is there whole or not at all; it names what comes before it by
chained hash, and a digest over everything is compared when it is read. Read next: `disk.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnomon.errors import CheckpointError
from gnomon.serve.cache_settings import FORMS
from gnomon.serve.checkpoints import PackedState

MAGIC = b"gnomonPC"
SEAL_BYTES = 16
LONGEST_HEADER = 1 << 16
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentName:
    """Which piece: the blocks after hash `parent` to hash `digest`, tokens `start` to `stop`."""

    parent: bytes
    digest: bytes
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """The piece: ids as bytes, latents, the state after them; `error` bounds what packing ever lost on the way.

    `latents` are [tokens, layers, C+R]; those to be written may have their tokens on two axes, and in any order of memory.
    """

    name: SegmentName
    tokens: bytes
    latents: Tensor
    state: PackedState
    error: float

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        return len(self.tokens) + self.latents.nbytes + self.state.bytes


def write(path: Path, segment: Segment) -> int:
    """Write a segment so that the file is whole or absent, whenever the power goes. Returns its bytes; raises `OSError`."""
    state = segment.state
    tensors = {"latents": segment.latents, "matrices": state.matrices, "scales": state.scales, "conv": state.conv}
    shapes = {key: [str(x.dtype).removeprefix("torch."), list(x.shape)] for key, x in tensors.items() if x is not None}
    name = segment.name
    header = json.dumps({"parent": name.parent.hex(), "digest": name.digest.hex(), "start": name.start, "stop": name.stop,
                         "form": state.form, "lost": state.error, "error": segment.error, "tensors": shapes}).encode()
    seal, written = blake2b(digest_size=SEAL_BYTES), 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for piece in (MAGIC, len(header).to_bytes(4, "little"), header, segment.tokens, *(_bytes(x) for x in tensors.values())):
                seal.update(piece)
                written += file.write(piece)
            written += file.write(seal.digest())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return written


def read_name(path: Path) -> SegmentName:
    """Which piece a file says it holds; its contents are not looked at. Raises `CheckpointError` for a damaged file, `OSError`."""
    with path.open("rb") as file:
        header, offset = _header(file.read(LONGEST_HEADER), path)
    expected = offset + 4 * (header["stop"] - header["start"]) + sum(size for *_, size in _layout(header)) + SEAL_BYTES
    if path.stat().st_size != expected:
        raise CheckpointError(f"{path.name} has {path.stat().st_size} bytes where its header speaks of {expected}")
    return _name(header)


def read(path: Path) -> Segment:
    """The whole segment. Raises `CheckpointError` for a file that is not what was written, `OSError`."""
    data = memoryview(path.read_bytes())
    header, offset = _header(bytes(data[:LONGEST_HEADER]), path)
    if blake2b(data[:-SEAL_BYTES], digest_size=SEAL_BYTES).digest() != bytes(data[-SEAL_BYTES:]):
        raise CheckpointError(f"{path.name} is damaged: its digest is another")
    count = 4 * (header["stop"] - header["start"])
    tokens, offset = bytes(data[offset:offset + count]), offset + count
    tensors = {}
    for key, dtype, shape, size in _layout(header):
        raw = torch.from_numpy(np.frombuffer(data[offset:offset + size], np.uint8).copy())
        tensors[key], offset = raw.view(dtype).view(shape), offset + size
    state = PackedState(form=header["form"], matrices=tensors["matrices"], scales=tensors.get("scales"), conv=tensors["conv"],
                        error=header["lost"])
    return Segment(name=_name(header), tokens=tokens, latents=tensors["latents"].flatten(0, -3), state=state, error=header["error"])


def _bytes(x: Tensor | None) -> memoryview | bytes:
    return b"" if x is None or not x.numel() else x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _header(data: bytes, path: Path) -> tuple[dict[str, Any], int]:
    """The header and where it ends."""
    start = len(MAGIC) + 4
    stop = start + int.from_bytes(data[len(MAGIC):start], "little")
    try:
        if data[:len(MAGIC)] != MAGIC or not start < stop <= len(data):
            raise ValueError("it does not begin like one")
        header = json.loads(data[start:stop])
        if header["form"] not in FORMS or not 0 <= header["start"] < header["stop"]:
            raise ValueError("its header makes no sense")
        _name(header), list(_layout(header))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.name} is no segment of a cache: {error}") from None
    return header, stop


def _name(header: dict[str, Any]) -> SegmentName:
    return SegmentName(parent=bytes.fromhex(header["parent"]), digest=bytes.fromhex(header["digest"]), start=header["start"],
                       stop=header["stop"])


def _layout(header: dict[str, Any]) -> Iterator[tuple[str, torch.dtype, list[int], int]]:
    """Name, type, shape and bytes of each tensor in order."""
    for key, (dtype, shape) in header["tensors"].items():
        size = TYPES[dtype].itemsize
        for extent in shape:
            size *= extent
        yield key, TYPES[dtype], shape, size


def _sync_folder(folder: Path) -> None:
    """Make a rename outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
