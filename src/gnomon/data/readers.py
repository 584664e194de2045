"""From a file to texts: plain text, JSON lines, Parquet, each also behind gzip or zstd.

Everything streams, so a file may be larger than memory, and every way in which a file can be unusable is one DataError that
names the file, the place in it and the remedy. Read next: `corpus.py`, which chooses the files.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gnomon.errors import ConfigError, DataError

COMPRESSED = (".gz", ".zst")
_CHUNK = 1 << 20
_LARGEST_TEXT = 64 << 20  # a longer plain file becomes several documents, so that none has to fit in memory twice
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON escapes can spell half of a character
_BOM = b"\xef\xbb\xbf"


def kind_of(path: Path) -> str:
    """The lower-case suffix that says what the file holds, a compression suffix set aside ("" when there is none)."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.suffix.lower()


def read_texts(path: Path, text_field: str = "text") -> Iterator[str]:
    """The texts in one file: each row's `text_field` for ``.jsonl``, ``.ndjson`` and ``.parquet``, else the whole file.

    Line ends are kept as they are; a UTF-8 byte order mark is dropped. A plain file beyond 64 MiB is cut at line ends.
    Raises DataError for a binary, damaged or non-UTF-8 file, a broken line or a missing field.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        return _parquet(path, text_field)
    if kind in (".jsonl", ".ndjson"):
        return _json_lines(path, text_field)
    return _plain(path)


def _plain(path: Path) -> Iterator[str]:
    held = bytearray()
    line = 1
    for chunk in _chunks(path):
        held += chunk
        if len(held) >= _LARGEST_TEXT:
            cut = held.rfind(b"\n") + 1 or _character_start(held)
            yield _decoded(bytes(held[:cut]), path, line)
            line += held.count(b"\n", 0, cut)
            del held[:cut]
    yield _decoded(bytes(held), path, line)


def _character_start(data: bytearray) -> int:
    """The last place where a UTF-8 character starts, so that a text without line ends is not cut inside one."""
    return next((place for place in range(len(data) - 1, len(data) - 5, -1) if data[place] & 0xC0 != 0x80), len(data))


def _json_lines(path: Path, field: str) -> Iterator[str]:
    for number, raw in enumerate(_lines(path), start=1):
        line = _decoded(raw, path, number)
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: broken JSON ({error.msg} at column {error.colno}); mend or remove the line") from None
        yield _field(row, field, f"{path}, line {number}")


def _field(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object with the field '{field}', got {type(row).__name__}")
    if field not in row:
        known = ", ".join(map(str, row)) or "none"
        raise DataError(f"{where}: no field '{field}' (fields: {known}); set text_field to the one that holds the text")
    if not isinstance(row[field], str):
        raise DataError(f"{where}: field '{field}' holds {type(row[field]).__name__}, not text; filter such rows or choose another field")
    if half := _SURROGATE.search(row[field]):
        raise DataError(f"{where}: field '{field}' holds the lone surrogate U+{ord(half[0]):04X}, which is not text; mend the row")
    return row[field]


def _parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"reading {path} needs the package pyarrow: pip install 'gnomon[data]'") from None
    row = 0
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if field not in names:
                known = ", ".join(names) or "none"
                raise DataError(f"{path}: no column '{field}' (columns: {known}); set text_field to the one that holds the text")
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _field({field: value}, field, f"{path}, row {row}")
    except (pyarrow.ArrowException, OSError) as error:
        place = f"after row {row} " if row else ""
        raise DataError(f"{path} is not a readable Parquet file, {place}({_first_line(error)}); fetch or write it again") from None


def _lines(path: Path) -> Iterator[bytes]:
    held: list[bytes] = []
    for chunk in _chunks(path):
        first, *rest = chunk.split(b"\n")
        held.append(first)
        if rest:
            yield b"".join(held)
            yield from rest[:-1]
            held = [rest[-1]]
    if last := b"".join(held):
        yield last


def _chunks(path: Path) -> Iterator[bytes]:
    suffix = path.suffix.lower()
    try:
        if suffix == ".zst":
            yield from _zstd_chunks(path)
            return
        with gzip.open(path) if suffix == ".gz" else path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a damaged gzip file ({_first_line(error)}); fetch or write it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"reading {path} needs the package zstandard: pip install 'gnomon[data]'") from None
    # A stream reader ends quietly on a truncated frame; the object interface knows whether the frame was complete.
    frame = None
    try:
        with path.open("rb") as file:
            while data := file.read(_CHUNK):
                while data:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    if out := frame.decompress(data):
                        yield out
                    data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise DataError(f"{path} is a damaged zstd file ({_first_line(error)}); fetch or write it again") from None
    if frame is not None:
        raise DataError(f"{path} is a truncated zstd file; fetch or write it again")


def _decoded(data: bytes, path: Path, first_line: int) -> str:
    if first_line == 1:
        data = data.removeprefix(_BOM)
    zero = data.find(b"\0")
    if zero >= 0:
        hint = "; it looks like UTF-16: convert it with iconv -t UTF-8" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise DataError(f"{path} is a binary file (zero byte at offset {zero}), not text{hint or '; leave it out of the sources'}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line}: invalid UTF-8 (byte 0x{data[error.start]:02x}); convert the file with iconv -t UTF-8 or leave it out"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
