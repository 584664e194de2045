"""What natural documents lose before they are trained on: copies, near copies, binary matter, machine logs, files cut off (report §3.4).

Near copies are found by MinHash: a signature of minima of hashed word runs, compared only where whole bands of it agree; the share of
equal minima estimates the share of common runs. Everything depends on the documents and their order alone. Free of torch.
Read next: `corpus.py`, which applies it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gnomon.config import setting
from gnomon.errors import ConfigError

HASHES = 128
"""Minima of a signature: an estimate is off by less than a tenth nearly always."""

BANDS = 32
"""Parts of a signature; documents that agree in one of them are compared."""

_STAMP = re.compile(r"^\W*(?:\d{4}-\d\d-\d\d|\d\d[:/]\d\d[:/]\d\d|\w{3} +\d{1,2} \d\d:\d\d:\d\d|\d+\.\d{3,})")
_VARYING = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8,}|\d+")
_BLOB = re.compile(r"\S{400,}")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanConfig:
    """What is thrown out."""

    copies: bool = setting(True, "texts that are equal but for white space")
    near: float = setting(0.8, "share of common word runs from which a text counts as a copy of an earlier one; 0: keep near copies")
    run: int = setting(5, "words of a run")
    binary: bool = setting(True, "texts with many control characters, or mostly long strings without a space")
    logs: bool = setting(True, "texts of lines that a program wrote again and again with other numbers")
    structure: bool = setting(True, "JSON, Python and HTML files that end too early")

    def __post_init__(self) -> None:
        if not 0 <= self.near <= 1 or self.run < 1:
            raise ConfigError(f"'near' is {self.near} and 'run' {self.run}; a share from 0 to 1, and at least one word")


class Cleaner:
    """Decides for one document after the other; remembers what it kept. `dropped` counts the rest by reason."""

    def __init__(self, config: CleanConfig) -> None:
        self.config = config
        self.dropped: Counter[str] = Counter()
        self._seen: set[bytes] = set()
        self._near = NearCopies(config.near, config.run) if config.near else None

    def keeps(self, text: str, source: str = "") -> bool:
        """Whether the document stays."""
        why = self._why_not(text, source)
        if why is not None:
            self.dropped[why] += 1
        return why is None

    def _why_not(self, text: str, source: str) -> str | None:
        config = self.config
        if config.binary and is_binary(text):
            return "binary"
        if config.logs and is_log(text):
            return "log"
        if config.structure and is_cut_off(text, source):
            return "cut off"
        if config.copies:
            digest = hashlib.blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if digest in self._seen:
                return "copy"
            self._seen.add(digest)
        return "near copy" if self._near is not None and self._near.knows(text) else None


class NearCopies:
    """Texts seen so far, by signature."""

    def __init__(self, share: float, run: int) -> None:
        self.share, self.run = share, run
        self._signatures: list[np.ndarray] = []
        self._bands: list[dict[bytes, list[int]]] = [{} for _ in range(BANDS)]

    def knows(self, text: str) -> bool:
        """Whether an earlier text has about so large a share of runs in common; if not, this one is remembered."""
        signature = minima(text, self.run)
        if signature is None:
            return False
        keys = [part.tobytes() for part in signature.reshape(BANDS, -1)]
        candidates = dict.fromkeys(index for band, key in zip(self._bands, keys, strict=True) for index in band.get(key, ()))
        if any(float((self._signatures[index] == signature).mean()) >= self.share for index in candidates):
            return True
        for band, key in zip(self._bands, keys, strict=True):
            band.setdefault(key, []).append(len(self._signatures))
        self._signatures.append(signature)
        return False


def minima(text: str, run: int) -> np.ndarray | None:
    """The signature [HASHES] of a text's word runs; none for a text shorter than a run."""
    words = [word.lower() for word in _WORD.findall(text)]
    runs = {" ".join(words[start : start + run]) for start in range(len(words) - run + 1)}
    if not runs:
        return None
    raw = b"".join(hashlib.blake2b(each.encode("utf-8", "surrogatepass"), digest_size=8).digest() for each in sorted(runs))
    values = np.frombuffer(raw, "<u8").astype(np.uint64)
    random = np.random.Generator(np.random.Philox(key=61))
    factors = random.integers(1 << 62, size=HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)  # odd, so that nothing is lost
    found = np.full(HASHES, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(values), 4096):  # bounded memory for long documents
        mixed = values[start : start + 4096, None] * factors  # modulo 2^64
        found = np.minimum(found, mixed.min(0))
    return found


def is_binary(text: str) -> bool:
    """Many characters that no text has, or mostly strings of hundreds of characters without a space."""
    strange = sum(1 for character in text[:100_000] if (character < " " and character not in "\t\n\r\f") or character in "\x7f\ufffd")
    if strange > 0.005 * min(len(text), 100_000):
        return True
    return sum(len(match) for match in _BLOB.findall(text)) > 0.3 * len(text)


def is_log(text: str) -> bool:
    """Lines that begin with a time, or few patterns of line written again and again."""
    lines = [line for line in text[:200_000].splitlines() if line.strip()]
    if len(lines) < 30:
        return False
    stamped = sum(1 for line in lines if _STAMP.match(line))
    patterns = len({_VARYING.sub("#", line) for line in lines})
    numbers = sum(1 for line in lines if _VARYING.search(line))
    return stamped > 0.6 * len(lines) or (patterns < 0.15 * len(lines) and numbers > 0.8 * len(lines))


def is_cut_off(text: str, source: str) -> bool:
    """Whether a file of a format that tells its end does not have one; other files are believed."""
    suffix = source.partition("#")[0].rpartition(".")[2].lower()
    check = _CHECKS.get(suffix)
    return check is not None and not check(text)


def _whole_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _whole_python(text: str) -> bool:
    """Python that parses, or that fails before its last lines: that is another dialect, not a cut."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except SyntaxError as error:
        return (error.lineno or 0) < text.count("\n") and "was never closed" not in str(error) and "unterminated" not in str(error)
    except (ValueError, RecursionError, MemoryError):
        return True
    return True


def _whole_html(text: str) -> bool:
    lower = text.lower()
    return "<html" not in lower or "</html>" in lower


_CHECKS: dict[str, Callable[[str], bool]] = {"json": _whole_json, "py": _whole_python, "html": _whole_html, "htm": _whole_html}


def cleaned(texts: Iterable[tuple[str, str]], config: CleanConfig) -> Iterator[tuple[str, str]]:
    """Of pairs (text, source) those that stay, in order."""
    cleaner = Cleaner(config)
    yield from (pair for pair in texts if cleaner.keeps(*pair))
