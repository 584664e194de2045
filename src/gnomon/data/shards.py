"""Tokenised documents on disk, memory-mapped: written once per corpus and tokenizer, opened in no time afterwards.

A folder holds ``shard-00000.tokens`` (little-endian uint16 or uint32, each document closed by ``[EOS]``), beside it
``shard-00000.documents.npy`` with a row (tokens, bytes, held out) per document, and ``meta.json``, which is written last. A
shard counts only when its table exists, so an interrupted run goes on after the last whole shard. Read next: `mixture.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from gnomon.data.corpus import Document, hold_out
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import DataError

FORMAT = 1
META_FILE = "meta.json"
SHARD_TOKENS = 32 << 20
BATCH_CHARACTERS = 2 << 20  # text in flight while tokenising
SMALLEST_CORPUS = 4096  # bytes; less can neither fill a batch nor spare a held-out part

Split = Literal["train", "held_out"]


@runtime_checkable
class DocumentSource(Protocol):
    """What `write_shards` reads: an iterable of documents with a key that names its content and a size for the progress bar."""

    def __iter__(self) -> Iterator[Document]:
        """The documents, in the same order each time."""

    @property
    def key(self) -> str:
        """Equal keys promise equal documents."""

    @property
    def size_bytes(self) -> int:
        """Approximate size, for display."""


def write_shards(
    corpus: DocumentSource,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    held_out: float = 0.02,
    progress: bool = False,
    shard_tokens: int = SHARD_TOKENS,
) -> Path:
    """Tokenise `corpus` below `folder` unless that was done before; returns the folder for `Shards.open`.

    The folder's name is a key over corpus, tokenizer and `held_out`, so any change makes a new one. Several processes may
    call this at once: one works, the others wait. Raises DataError for an empty or too small corpus, for whatever is wrong
    in its files, and when the disk is full; complete shards stay and are reused by the next call.
    """
    facts = [FORMAT, corpus.key, tokenizer.fingerprint, held_out]
    target = Path(folder) / f"tokens-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
    try:
        target.mkdir(parents=True, exist_ok=True)
        with _locked(target / ".lock"):
            if not (target / META_FILE).is_file():
                _write_all(corpus, tokenizer, target, held_out, progress, shard_tokens)
    except OSError as error:
        raise DataError(f"cannot write token shards in {target}: {error.strerror or error}; free space or set another folder") from None
    return target


def _write_all(corpus: DocumentSource, tokenizer: Tokenizer, target: Path, held_out: float, progress: bool, shard_tokens: int) -> None:
    tables = _complete_tables(target)
    number, done = len(tables), sum(map(len, tables))
    with _bar(corpus.size_bytes, progress) as advance:
        marked = hold_out(_counted(corpus, advance), held_out)
        for _ in islice(marked, done):  # read again (cheap), not tokenised again
            pass
        encoded = _encoded(marked, tokenizer)
        while table := _write_shard(encoded, target, number, _dtype(tokenizer.vocab_size), shard_tokens):
            tables.append(np.array(table, dtype=np.int64))
            number += 1
    _require_enough(np.concatenate(tables) if tables else np.zeros((0, 3), np.int64), held_out)
    digest = hashlib.sha256()
    for index in range(number):
        for path in _shard_files(target, index):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    meta = {
        "format": FORMAT,
        "shards": number,
        "dtype": _dtype(tokenizer.vocab_size).str,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "fingerprint": digest.hexdigest(),
    }
    _replace(target / META_FILE, (json.dumps(meta, indent=1) + "\n").encode())


def _require_enough(table: np.ndarray, held_out: float) -> None:
    size = int(table[:, 1].sum())
    if size == 0:
        raise DataError("the corpus is empty: its files hold no text besides white space; give at least a few kilobytes")
    if size < SMALLEST_CORPUS:
        raise DataError(
            f"the corpus is too small: {size} bytes of text, where training with a held-out part needs at least {SMALLEST_CORPUS}; "
            "give more text"
        )
    kept = int(table[table[:, 2] == 0, 1].sum())
    if held_out > 0 and not 0 < kept < size:
        raise DataError(f"held_out = {held_out} leaves {kept} of {size} bytes for training; give more text or another fraction")


def _write_shard(
    encoded: Iterator[tuple[np.ndarray, int, bool]], target: Path, number: int, dtype: np.dtype, limit: int
) -> list[tuple[int, int, bool]]:
    """Write documents until the shard is full or the stream ends; returns the rows of its table (empty at the end)."""
    tokens_path, table_path = _shard_files(target, number)
    table: list[tuple[int, int, bool]] = []
    size = 0
    with tokens_path.open("wb") as file:
        for tokens, num_bytes, held_out in encoded:
            file.write(tokens.astype(dtype).tobytes())
            table.append((len(tokens), num_bytes, held_out))
            size += len(tokens)
            if size >= limit:
                break
        file.flush()
        os.fsync(file.fileno())
    if not table:
        tokens_path.unlink()
        return table
    temporary = table_path.with_suffix(".partial")
    with temporary.open("wb") as file:
        np.save(file, np.array(table, dtype=np.int64))
    temporary.replace(table_path)
    return table


def _encoded(marked: Iterable[tuple[Document, bool]], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int, bool]]:
    end = tokenizer.document_end_id
    for batch in _batches(marked):
        ids = tokenizer.encode_batch([document.text for document, _ in batch])
        for (document, held_out), tokens in zip(batch, ids, strict=True):
            tokens.append(end)
            yield np.array(tokens, dtype=np.uint32), len(document.text.encode()), held_out


def _batches(marked: Iterable[tuple[Document, bool]]) -> Iterator[list[tuple[Document, bool]]]:
    batch: list[tuple[Document, bool]] = []
    size = 0
    for document, held_out in marked:
        batch.append((document, held_out))
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _counted(corpus: DocumentSource, advance: Callable[[int], None]) -> Iterator[Document]:
    for document in corpus:
        yield document
        advance(len(document.text))


@contextmanager
def _bar(total: int, show: bool) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task("tokenising", total=total)
        yield lambda size: bar.advance(task, size)
        bar.update(task, total=max(1, int(bar.tasks[0].completed)))  # compressed files hold more text than bytes on disk


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _complete_tables(target: Path) -> list[np.ndarray]:
    tables: list[np.ndarray] = []
    while (path := _shard_files(target, len(tables))[1]).is_file():
        tables.append(np.load(path))
    return tables


def _shard_files(target: Path, number: int) -> tuple[Path, Path]:
    return target / f"shard-{number:05d}.tokens", target / f"shard-{number:05d}.documents.npy"


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".partial")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Shards:
    """The tokenised documents of one split: `shards[i]` is a view of document `i` on disk, its closing ``[EOS]`` included."""

    def __init__(self, folder: Path, meta: dict, tables: Sequence[np.ndarray], split: Split) -> None:
        self.folder, self.split = folder, split
        self.vocab_size: int = meta["vocab_size"]
        self.tokenizer_fingerprint: str = meta["tokenizer"]
        self.fingerprint: str = f"{meta['fingerprint']}:{split}"
        dtype = np.dtype(meta["dtype"])
        self._maps = [_mapped(folder, number, dtype, int(table[:, 0].sum())) for number, table in enumerate(tables)]
        starts = np.concatenate([np.cumsum(table[:, 0]) - table[:, 0] for table in tables])
        shard = np.concatenate([np.full(len(table), number) for number, table in enumerate(tables)])
        table = np.concatenate(tables)
        kept = table[:, 2] == (split == "held_out")
        self.lengths = table[kept, 0]
        self._bytes, self._starts, self._shard = table[kept, 1], starts[kept], shard[kept]

    @classmethod
    def open(cls, folder: str | Path, split: Split = "train") -> Shards:
        """Open the folder that `write_shards` returned. Raises DataError when it is incomplete, damaged or foreign."""
        folder = Path(folder)
        try:
            meta = json.loads((folder / META_FILE).read_text())
            tables = [np.load(_shard_files(folder, number)[1]) for number in range(meta["shards"])]
            known = meta["format"] == FORMAT and split in ("train", "held_out")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder} holds no complete token shards ({error}); run write_shards again") from None
        if not known:
            raise DataError(f"{folder}: shard format {meta['format']} or split '{split}' is unknown; write the shards again")
        return cls(folder, meta, tables, split)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Document `index` as a read-only integer array."""
        start = self._starts[index]
        return self._maps[self._shard[index]][start : start + self.lengths[index]]

    @property
    def num_tokens(self) -> int:
        """All tokens of the split, the closing ones included."""
        return int(self.lengths.sum())

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text behind the split: the denominator of bits per byte."""
        return int(self._bytes.sum())


class Pieces:
    """Documents of `shards` cut into pieces of `size` tokens, each of which counts as a document of its own.

    A piece also holds the first token of the next one, which is only predicted there, so that no target is lost. A batch of few rows has
    text from many places so, where a long document would fill a row for many batches.
    """

    def __init__(self, shards: Shards, size: int) -> None:
        counts = np.maximum(1, -(-(shards.lengths - 1) // size))
        self._shards, self._size = shards, size
        self._document = np.repeat(np.arange(len(counts)), counts)
        self._start = (np.arange(len(self._document)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
        self.folder, self.split, self.fingerprint = shards.folder, shards.split, f"{shards.fingerprint}:{size}"
        self.lengths = np.minimum(size + 1, shards.lengths[self._document] - self._start)

    def __len__(self) -> int:
        """Number of pieces."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Piece `index` as a read-only integer array."""
        start = self._start[index]
        return self._shards[int(self._document[index])][start : start + self.lengths[index]]


def _mapped(folder: Path, number: int, dtype: np.dtype, tokens: int) -> np.ndarray:
    path = _shard_files(folder, number)[0]
    size = path.stat().st_size if path.is_file() else 0
    if size != tokens * dtype.itemsize:
        raise DataError(f"{path} has {size} bytes where its table says {tokens * dtype.itemsize}; delete {folder} and write it again")
    return np.memmap(path, dtype=dtype, mode="r")
