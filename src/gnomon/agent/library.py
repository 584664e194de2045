"""Local documents that can be searched: passages in SQLite's full-text index, in memory (report §4.2.2, retrieval)."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gnomon.errors import ConfigError, DataError

SUFFIXES = (".md", ".txt", ".rst")
MOST_FILES, MOST_BYTES = 5_000, 1 << 20
WORD = re.compile(r"[^\W\d_][\w-]{2,}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """A paragraph: the document it is from, and its number there."""

    document: str
    number: int
    text: str


class Library:
    """Documents of a folder, in the order of their names. Raises `DataError` where there are none, `ConfigError` without FTS5."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.documents = {path.relative_to(self.folder).as_posix(): _text(path) for path in _files(self.folder)}
        if not self.documents:
            raise DataError(f"'documents': {folder}: no {', '.join(SUFFIXES)} files there")
        self.passages = [Passage(document=name, number=number, text=text) for name, whole in self.documents.items()
                         for number, text in enumerate(_paragraphs(whole))]
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._index.execute("CREATE VIRTUAL TABLE passages USING fts5 (text, tokenize = 'porter unicode61')")
        except sqlite3.OperationalError as error:
            raise ConfigError(f"this Python's SQLite has no full-text index ({error}); use a Python built with FTS5") from None
        self._index.executemany("INSERT INTO passages (rowid, text) VALUES (?, ?)",
                                [(i, each.text) for i, each in enumerate(self.passages)])

    def search(self, words: str, count: int = 5) -> list[Passage]:
        """The passages that fit words best, at most `count`; equal ones in the order of the documents."""
        terms = [f'"{word}"' for word in WORD.findall(words)]
        if not terms:
            return []
        rows = self._index.execute("SELECT rowid FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?",
                                   (" OR ".join(terms), count)).fetchall()
        return [self.passages[row] for row, in rows]

    def close(self) -> None:
        """Give the index back."""
        self._index.close()


def _files(folder: Path) -> Iterator[Path]:
    found = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink())
    yield from (path for path in found[:MOST_FILES] if path.stat().st_size <= MOST_BYTES)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _paragraphs(text: str) -> list[str]:
    """Paragraphs of running text; headings, tables and code are left out."""
    plain = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    found = [" ".join(part.split()) for part in re.split(r"\n\s*\n", plain)]
    return [part for part in found if len(part) >= 60 and part[0] not in "#|<=" and not part.startswith(("..", "---"))]
