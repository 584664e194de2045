"""The default corpus: real code and real prose that every machine with Python already has, so that nothing is downloaded.

Four kinds, the first two everywhere, the last two where the system ships them: the reference text inside `pydoc_data`, the
source of the standard library, the documentation under `/usr/share/doc`, the manual pages. Left out, because they would
teach tables instead of text: test folders, generated tables (`encodings`, `_sysconfigdata`, tokens of lib2to3), change logs,
copyright files, non-English manuals, and the surplus of any family of more than 60 manual pages (some command-line suites
generate thousands). Read next: `corpus.py`.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gnomon.data.corpus import Corpus
from gnomon.data.readers import kind_of, read_texts
from gnomon.errors import DataError

DEFAULT_BYTES = 24_000_000
DOC_ROOT = Path("/usr/share/doc")
MANUAL_ROOT = Path("/usr/share/man")

_SKIPPED_PART = re.compile("tests?|idle_test|site-packages|dist-packages|encodings|__pycache__|pgen2|turtledemo|pydoc_data")
_GENERATED = re.compile(r"^_sysconfigdata|^_pydecimal\.py$|^entities\.py$|^locale\.py$|^mimetypes\.py$|^stringprep\.py$")
_DOC_KINDS = frozenset((".txt", ".md", ".rst"))
_NOT_PROSE = re.compile(r"change|copyright|licen[cs]e|symbols|status|\bthanks\b|authors|credits|requirements", re.IGNORECASE)
_PAGE = re.compile(r"^(?P<family>[A-Za-z0-9+]+)[^/]*\.[1-8][a-z]*(\.gz)?$")
_PAGES_PER_FAMILY = 60
_SMALLEST, _LARGEST = 256, 1_000_000  # file sizes: stubs say nothing, and one huge file would stand for its whole kind


def default_corpus(max_bytes: int = DEFAULT_BYTES) -> Corpus:
    """Python's own text and the documentation found on this machine, at most about `max_bytes` of text.

    Code and prose get half of the budget each; what prose does not use, code may, and the reverse. Inside a kind the files
    are taken in the order of a hash of their names, so a smaller budget is a fair sample and the order is always the same.
    """
    library = Path(sysconfig.get_path("stdlib"))
    topics = [path for path in (library / "pydoc_data" / "topics.py",) if path.is_file()]
    code_files = _shuffled(_library_files(library), library)
    prose_files = topics + _shuffled([*_documentation(DOC_ROOT), *_manual(MANUAL_ROOT)], Path("/"))
    code, code_bytes = _within(code_files, max_bytes // 2)
    prose, prose_bytes = _within(prose_files, max_bytes - code_bytes)
    if len(code) < len(code_files):
        code, _ = _within(code_files, max_bytes - prose_bytes)
    files = tuple(_interleaved(code, prose))
    if not files:
        raise DataError("no text was found on this machine for the default corpus; name your own files with --data PATH")
    return Corpus(files=files, read=_read, reading="machine text 1")


def _read(path: Path) -> Iterable[str]:
    if path.name == "topics.py" and path.parent.name == "pydoc_data":
        return _topics(path)
    if _PAGE.match(path.name):
        return (plain_manual(text) for text in read_texts(path))
    return read_texts(path)


def _topics(path: Path) -> Iterator[str]:
    """Each entry of the reference topics, which the module holds as one dictionary literal; read without running it."""
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.Assign):
            topics = ast.literal_eval(statement.value)
            yield from (topics[name] for name in sorted(topics))


def _library_files(library: Path) -> Iterator[Path]:
    for path in library.rglob("*.py"):
        if not any(map(_SKIPPED_PART.fullmatch, path.relative_to(library).parts)) and not _GENERATED.match(path.name):
            yield path


def _documentation(root: Path) -> Iterator[Path]:
    for path in root.glob("**/*"):
        readme = path.name.removesuffix(".gz").startswith("README")
        kind = kind_of(path)
        if (kind in _DOC_KINDS or (readme and not kind)) and not _NOT_PROSE.search(str(path.relative_to(root))):
            yield path


def _manual(root: Path) -> Iterator[Path]:
    pages: Counter[str] = Counter()
    for path in sorted(root.glob("man[1-8]/*"), key=_name_hash):
        if match := _PAGE.match(path.name):
            pages[match["family"]] += 1
            if pages[match["family"]] <= _PAGES_PER_FAMILY:
                yield path


def _name_hash(path: Path) -> bytes:
    return hashlib.blake2b(path.name.encode("utf-8", "surrogateescape")).digest()


def _shuffled(paths: Iterable[Path], root: Path) -> list[Path]:
    """Files of a sensible size in the order of a hash of their place below `root`, aliases (links) left out."""

    def place(path: Path) -> bytes:
        return hashlib.blake2b(str(path.relative_to(root)).encode("utf-8", "surrogateescape")).digest()

    usable = (path for path in paths if not path.is_symlink() and path.is_file())
    return sorted((path for path in usable if _SMALLEST <= path.stat().st_size <= _LARGEST), key=place)


def _within(paths: Sequence[Path], max_bytes: int) -> tuple[list[Path], int]:
    """The first of `paths` whose text together stays within the budget, and its size."""
    chosen, used = [], 0
    for path in paths:
        try:
            size = sum(len(text.encode()) for text in _read(path))
        except DataError:
            continue  # the machine's files are a found collection: what is not UTF-8 text is simply not part of it
        if used + size > max_bytes:
            break
        chosen.append(path)
        used += size
    return chosen, used


def _interleaved(first: Sequence[Path], second: Sequence[Path]) -> Iterator[Path]:
    """Both lists spread evenly over the whole, so that any prefix is a fair sample."""
    places = [((i + 0.5) / len(part), which, path) for which, part in enumerate((first, second)) for i, path in enumerate(part)]
    yield from (path for _, _, path in sorted(places))


_ESCAPES = [
    (re.compile(r"\\f(\[[^]]*\]|\(..|.)"), ""),
    (re.compile(r"\\s[-+]?\d+|\\[&|^/,:cd]|\\\".*$", re.MULTILINE), ""),
    (re.compile(r"\\\*?\((?:lq|rq|dq)|\\\*?\[(?:lq|rq|dq)\]"), '"'),
    (re.compile(r"\\\*?\((?:aq|cq|oq)|\\\*?\[(?:aq|cq|oq)\]"), "'"),
    (re.compile(r"\\\(bu|\\\[bu\]"), "-"),
    (re.compile(r"\\(?:\(em|\[em\]|\(en|\[en\])"), "--"),
    (re.compile(r"\\[(*\[](?:[^\]\s]{2}\]?)"), ""),
    (re.compile(r"\\([- ~.'`])"), r"\1"),
    (re.compile(r"\\e"), r"\\"),
]
_BREAK = re.compile("L?P|PP|TP|IP|HP|sp|br|Pp|It|Bl|El|nf|fi|RS|RE|EX|EE")
_FONT = re.compile("[BIR]|BI|IB|BR|RB|IR|RI|SM|SB")
_SILENT = re.compile("TH|Dd|Os|Dt|so|de|ds|if|ie|el|ig|nr|ft|ad|na|nh|hy|ne|in|ta|ti|tr|UR|UE|MT|ME|PD|TS|TE")


def plain_manual(source: str) -> str:
    """The words of a manual page, its typesetting commands removed: headings alone on a line, paragraphs kept apart."""
    lines: list[str] = []
    for line in source.splitlines():
        if not line.startswith((".", "'")):
            lines.append(line)
            continue
        command, _, rest = line[1:].strip().partition(" ")
        words = rest.replace('"', "").strip()
        if command in ("SH", "SS", "Sh", "Ss"):
            lines += ["", words, ""]
        elif _BREAK.fullmatch(command):
            lines += ["", words] if words and command in ("IP", "It") else [""]
        elif _FONT.fullmatch(command):
            lines.append(_joined(command, rest))
        elif not _SILENT.fullmatch(command) and command[:1].isalpha() and words:
            lines.append(words)
    text = "\n".join(lines)
    for pattern, plain in _ESCAPES:
        text = pattern.sub(plain, text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _joined(command: str, rest: str) -> str:
    """Arguments of a font macro: two-letter macros alternate fonts and set their arguments without spaces between."""
    words = [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', rest)]
    return ("" if len(command) == 2 and command not in ("SM", "SB") else " ").join(words)
