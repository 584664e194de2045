"""Which files make a corpus, in which order, and which documents are held out.

The order is that of the sources as given and of sorted paths below a folder, so the same files always give the same stream.
Exact duplicates are removed. Held-out documents are chosen by a hash of their text, so the choice does not move when files
are renamed, reordered or added. Read next: `readers.py` for one file, `shards.py` for what becomes of a corpus.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gnomon.data.cleaning import CleanConfig, Cleaner
from gnomon.data.readers import read_texts
from gnomon.errors import ConfigError, DataError

# What a folder contributes; a file that is named, or matched by a glob, is read whatever it is called.
_PROSE = "txt|md|rst|tex|adoc|org|html?|xml|csv|tsv"
_CODE = (
    "pyi?|c|h|cc|cpp|cxx|hpp|hh|cu|cuh|rs|go|java|kt|scala|m?js|tsx?|jsx|rb|pl|pm|php|lua|r|jl|hs|mli?|exs?|erl|clj|lisp|el|scm|swift|"
    "m|cs|fs|sh|bash|zsh|sql|s?css|json|ya?ml|toml|ini|cfg|cmake|mk|proto|asm|s|s?v|vhd|tcl|vim"
)
_ROWS = "jsonl|ndjson|parquet"
_PLAIN_NAMES = "README|LICENSE|COPYING|NEWS|AUTHORS|CONTRIBUTING|Makefile|Dockerfile"
TEXT_NAME = re.compile(rf"(?:{_PLAIN_NAMES}|[^.].*\.(?:{_PROSE}|{_CODE}|{_ROWS}))(?:\.gz|\.zst)?", re.IGNORECASE)
SKIPPED_FOLDERS = frozenset(("__pycache__", "node_modules"))

FEW_DOCUMENTS_PER_FRACTION = 8  # below 8/fraction documents a choice by hash could come out empty
_FEW_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text and where it came from (a path, with a row for files of many documents)."""

    text: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A fixed list of files and the way to read one; iterating yields its documents, without blank ones and duplicates.

    `clean` throws out more (`cleaning.py`).
    """

    files: tuple[Path, ...]
    read: Callable[[Path], Iterable[str]] = read_texts
    reading: str = "text"  # names what `read` does, so that another way of reading gives another key
    clean: CleanConfig | None = None

    def __iter__(self) -> Iterator[Document]:
        if self.clean is None:
            yield from self._documents()
            return
        cleaner = Cleaner(self.clean)
        yield from (document for document in self._documents() if cleaner.keeps(document.text, document.source))

    def _documents(self) -> Iterator[Document]:
        seen: set[bytes] = set()
        for path in self.files:
            for row, text in enumerate(self.read(path)):
                digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if digest not in seen and not text.isspace() and text:
                    seen.add(digest)
                    yield Document(text=text, source=f"{path}#{row}" if row else str(path))

    @property
    def key(self) -> str:
        """Digest of paths, sizes and modification times: equal keys mean that nothing has to be read again."""
        try:
            stats = [(str(path.resolve()), path.stat()) for path in self.files]
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}; the list of sources is out of date") from None
        reading = self.reading if self.clean is None else f"{self.reading}, {self.clean}"
        facts = [reading, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Bytes of the files on disk, compressed where they are."""
        return sum(path.stat().st_size for path in self.files)


def open_corpus(sources: str | Path | Sequence[str | Path], text_field: str = "text", clean: CleanConfig | None = None) -> Corpus:
    """The corpus of files, folders and globs (``**`` allowed); a folder contributes the text files below it.

    `text_field` is the field or column that holds the text in ``.jsonl`` and ``.parquet`` files. Raises DataError when a
    source does not exist or matches no file; whatever is wrong inside a file is raised when that file is reached.
    """
    listed = [sources] if isinstance(sources, (str, Path)) else list(sources)
    if not listed:
        raise DataError("the corpus has no sources: name at least one file, folder or glob")
    files = dict.fromkeys(path for source in listed for path in _expand(source))
    return Corpus(files=tuple(files), read=lambda path: read_texts(path, text_field), reading=f"text:{text_field}", clean=clean)


def documents(sources: str | Path | Sequence[str | Path], text_field: str = "text") -> Iterator[Document]:
    """Stream the documents of `open_corpus(sources, text_field)`."""
    return iter(open_corpus(sources, text_field))


def _expand(source: str | Path) -> Iterator[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _text_files(path)
    elif path.exists():
        yield path
    elif glob.has_magic(str(path)):
        found = sorted(match for match in map(Path, glob.glob(str(path), recursive=True)) if match.is_file())
        if not found:
            raise DataError(f"no file matches '{source}'; quote the pattern so that the shell leaves it alone, and check the folder")
        yield from found
    else:
        raise DataError(f"'{source}' does not exist; give a file, a folder or a glob such as 'texts/**/*.md'")


def _text_files(folder: Path) -> Iterator[Path]:
    found, passed_over = [], set()
    for parent, names, files in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        for path in (Path(parent, name) for name in files):
            if TEXT_NAME.fullmatch(path.name) and path.is_file():
                found.append(path)
            elif not path.name.startswith("."):
                passed_over.add(path.suffix or path.name)
    if not found:
        others = f" (only {', '.join(sorted(passed_over)[:8])})" if passed_over else " (it is empty)"
        raise DataError(f"folder '{folder}' holds no text files{others}; name the files, or use a glob to read any suffix")
    yield from sorted(found)


def hold_out(stream: Iterable[Document], fraction: float) -> Iterator[tuple[Document, bool]]:
    """Mark each document as held out (True) or for training (False); about `fraction` of the text is held out.

    With many documents (at least 8 / fraction) whole documents are held out, by a hash of their text. With few, the last
    `fraction` of each document is, cut at a line end where there is one, so that a single book can be trained on too.
    Raises ConfigError unless 0 ≤ fraction ≤ 0.5.
    """
    if not 0.0 <= fraction <= 0.5:
        raise ConfigError(f"held_out = {fraction}: the held-out fraction must lie between 0 and 0.5")
    iterator = iter(stream)
    if fraction == 0.0:
        yield from ((document, False) for document in iterator)
        return
    first, size, enough = [], 0, FEW_DOCUMENTS_PER_FRACTION / fraction
    for document in iterator:
        first.append(document)
        size += len(document.text)
        if len(first) >= enough or size > _FEW_BYTES:
            break
    by_hash = len(first) >= enough
    for part in (first, iterator):
        for document in part:
            if by_hash:
                yield document, is_held_out(document.text, fraction)
            else:
                yield from _without_tail(document, fraction)


def is_held_out(text: str, fraction: float) -> bool:
    """The choice by hash: true for about `fraction` of all texts, always the same for the same text."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _without_tail(document: Document, fraction: float) -> Iterator[tuple[Document, bool]]:
    text = document.text
    wanted = int(len(text) * (1.0 - fraction))
    cut = max(text.rfind("\n", 0, wanted), text.rfind(" ", 0, wanted) if "\n" not in text[:wanted] else -1) + 1 or wanted
    for part, held_out in ((text[:cut], False), (text[cut:], True)):
        if part and not part.isspace():
            yield Document(text=part, source=document.source), held_out
