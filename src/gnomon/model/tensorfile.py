"""safetensors files, streamed: headers are checked before any data is read, and data moves in bounded pieces.

The format is eight bytes of header length, a JSON header, then raw little-endian tensors. Reading goes straight into the tensor's
own memory instead of through a memory map: mapped pages count as resident, and a map of a shard would cost its whole size on top
of the model. Read next: `weights.py`, which knows what the tensors mean.
"""

import json
import math
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gnomon.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}
"""Type tags of the format that occur in checkpoints."""

TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
"""The tag of a torch type."""

PIECE = 16 << 20
"""Bytes that are converted or written at a time."""

READ_LIMIT = 1 << 30
"""Bytes asked of one read call; Linux returns at most 2 GiB minus one page."""

LONG = 1 << 30
"""Bytes from which a progress bar is worth its lines."""

_MAX_HEADER = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Where one tensor lies: file, type tag, shape and byte range."""

    path: Path
    tag: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self) -> Tensor:
        """The tensor as it is stored, on the CPU."""
        out = torch.empty(self.shape, dtype=DTYPES[self.tag])
        self.read_into(out)
        return out

    def read_into(self, out: Tensor) -> None:
        """Fill `out`, converting to its type and device piece by piece; its elements must be as many as the stored ones."""
        flat = out.view(-1)
        direct = flat.dtype == DTYPES[self.tag] and flat.device.type == "cpu"
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            if direct:
                _fill(file.readinto, flat, self.path)
                return
            step = PIECE // DTYPES[self.tag].itemsize
            for first in range(0, flat.numel(), step):
                piece = torch.empty(min(step, flat.numel() - first), dtype=DTYPES[self.tag])
                _fill(file.readinto, piece, self.path)
                flat[first : first + piece.numel()].copy_(piece)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _fill(readinto: Callable[[memoryview], int | None], tensor: Tensor, path: Path) -> None:
    view, done = raw(tensor), 0
    while done < len(view):
        count = readinto(view[done : done + READ_LIMIT])
        if not count:
            raise CheckpointError(f"{path}: the file ended {len(view) - done} bytes too early")
        done += count


def read_header(path: Path) -> dict[str, Stored]:
    """Every tensor of a file, after checking that the header is sound and that the file has exactly the bytes it announces.

    Raises `CheckpointError` for a missing, truncated or damaged file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))[0]
            if length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(f"{path.name}: {size} bytes, too short for its header; the file is truncated or not safetensors")
            table = json.loads(file.read(length))
        entries = {name: _entry(path, 8 + length, item) for name, item in table.items() if name != "__metadata__"}
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name}: the header is damaged ({error})") from None
    _check_ranges(path, 8 + length, size, entries)
    return entries


def _entry(path: Path, base: int, item: dict) -> Stored:
    start, stop = item["data_offsets"]
    return Stored(path=path, tag=item["dtype"], shape=tuple(map(int, item["shape"])), start=base + start, stop=base + stop)


def _check_ranges(path: Path, base: int, size: int, entries: dict[str, Stored]) -> None:
    end = base
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].stop)):
        if entry.tag not in DTYPES:
            raise CheckpointError(f"{path.name}: {name} has the unknown type {entry.tag}")
        if entry.start != end or entry.stop - entry.start != math.prod(entry.shape) * DTYPES[entry.tag].itemsize:
            raise CheckpointError(f"{path.name}: the header is damaged ({name}: byte range does not fit {list(entry.shape)} {entry.tag})")
        end = entry.stop
    if end != size:
        raise CheckpointError(f"{path.name}: {size} bytes where the header announces {end}; the file is "
                              + ("truncated" if size < end else "longer than it should be"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One tensor to be written: name, type, shape, and a function that yields its values in order, in pieces of any size."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The values of a tensor as contiguous CPU pieces of the wanted type, so that converting never copies the whole."""
    flat = tensor.detach().reshape(-1)
    step = PIECE // dtype.itemsize
    for first in range(0, flat.numel(), step):
        yield flat[first : first + step].to("cpu", dtype).contiguous()


def write(path: Path, planned: list[Planned], advance: Callable[[int], None]) -> None:
    """Write one file and make it durable; `advance` is told the bytes as they go out.

    Wider types come first, so that every tensor starts at a multiple of its item size.
    """
    ordered = sorted(planned, key=lambda item: -item.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in ordered:
        header[item.name] = {"dtype": TAGS[item.dtype], "shape": list(item.shape), "data_offsets": [offset, offset + item.nbytes]}
        offset += item.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for item in ordered:
            written = 0
            for piece in item.pieces():
                written += file.write(raw(piece))
                advance(piece.nbytes)
            if written != item.nbytes:
                raise CheckpointError(f"{item.name}: {written} bytes produced, {item.nbytes} announced")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A fresh folder beside `folder` that takes its place when the block ends well, and disappears when it does not."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; a checkpoint needs a folder, choose another name")
    if folder.exists() and not (folder / "config.json").exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: exists and is not a checkpoint; choose another folder or empty it")
    fresh, old = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")
    try:
        if old.exists() and not folder.exists():  # a writer was killed between the two renames below
            old.rename(folder)
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh.mkdir(parents=True)
        yield fresh
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        kept = "; the previous checkpoint is untouched" if folder.exists() else ""
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror}){kept}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over bytes when there are many and someone is watching."""
    if total < LONG or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)
