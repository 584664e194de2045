"""Reading a corpus: which files, in which order, what is held out, and one clear error for each kind of bad input."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gnomon.data import machine_text
from gnomon.data.corpus import Document, documents, hold_out, is_held_out, open_corpus
from gnomon.data.machine_text import default_corpus, plain_manual
from gnomon.errors import ConfigError, DataError


def texts(*sources: str | Path, **options: str) -> list[str]:
    return [document.text for document in documents(list(sources), **options)]


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def write_parquet(path: Path, **columns: list) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


def compress_zst(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    return zstandard.compress(data)


def test_every_kind_of_file(tmp_path: Path) -> None:
    rows = [{"text": "one\nline"}, {"text": "two", "id": 7}]
    lines = "\n".join(map(json.dumps, rows))
    write(tmp_path / "a.txt", "plain\r\ntext ü\n")
    write(tmp_path / "b.py", "print('code')\n")
    write(tmp_path / "c.jsonl", lines + "\n\n")
    write_parquet(tmp_path / "d.parquet", text=["row one", "row two"], other=[1, 2])
    write(tmp_path / "e.md.gz", gzip.compress(b"# packed\n"))
    write(tmp_path / "f.txt.zst", compress_zst(b"frame one ") + compress_zst(b"frame two\n"))
    write(tmp_path / "g.jsonl.gz", gzip.compress(json.dumps({"text": "packed row"}).encode()))
    write(tmp_path / "h.txt", b"\xef\xbb\xbfwith a byte order mark")
    expected = ["plain\r\ntext ü\n", "print('code')\n", "one\nline", "two", "row one", "row two", "# packed\n", "frame one frame two\n"]
    assert texts(tmp_path) == [*expected, "packed row", "with a byte order mark"]
    sources = [document.source for document in documents(tmp_path)]
    assert sources[2:4] == [str(tmp_path / "c.jsonl"), f"{tmp_path / 'c.jsonl'}#1"]


def test_another_field(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", json.dumps({"content": "x"}))
    write_parquet(tmp_path / "b.parquet", content=["y"])
    assert texts(tmp_path, text_field="content") == ["x", "y"]


def test_folders_globs_and_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.md", "README", ".hidden.txt", ".git/x.txt", "__pycache__/y.py", "image.png", "b/c/3.rs"):
        write(tmp_path / name, f"text of {name}")
    expected = ["README", "a.md", "b/1.txt", "b/2.txt", "b/c/3.rs"]
    assert texts(tmp_path) == [f"text of {name}" for name in expected]
    assert texts(f"{tmp_path}/**/*.txt") == ["text of b/1.txt", "text of b/2.txt"]
    assert texts(f"{tmp_path}/image.*") == ["text of image.png"]  # what is named is read
    assert texts(tmp_path / "b" / "2.txt", tmp_path / "b") == [f"text of b/{name}" for name in ("2.txt", "1.txt", "c/3.rs")]
    assert texts(tmp_path) == texts(tmp_path)


def test_duplicates_and_blanks_go(tmp_path: Path) -> None:
    for name, text in (("1.txt", "same"), ("2.txt", "same"), ("3.txt", " \n"), ("4.txt", ""), ("5.txt", "other")):
        write(tmp_path / name, text)
    assert texts(tmp_path) == ["same", "other"]


def test_a_large_file_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnomon.data.readers._LARGEST_TEXT", 1000)
    monkeypatch.setattr("gnomon.data.readers._CHUNK", 300)
    lines = [f"line {number} ünïcode\n" for number in range(500)]
    path = write(tmp_path / "big.txt", "".join(lines))
    parts = texts(path)
    assert "".join(parts) == "".join(lines)
    assert len(parts) > 5
    assert all(part.endswith("\n") and len(part.encode()) <= 1300 for part in parts)
    solid = "".join(f"é{number}" for number in range(1000))  # no line end: cut between characters
    assert "".join(texts(write(path, solid))) == solid
    assert len(texts(path)) > 2
    write(path, "".join(lines).encode() + b"\xff\n")
    with pytest.raises(DataError, match="line 501: invalid UTF-8"):
        texts(path)


def test_json_lines_may_be_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnomon.data.readers._CHUNK", 7)
    rows = ["a" * length for length in (0, 1, 5, 6, 7, 8, 30, 100)]
    path = tmp_path / "a.jsonl"
    for end in ("", "\n", "\r\n"):
        write(path, "\n".join(json.dumps({"text": row + "."}) for row in rows) + end)
        assert texts(path) == [row + "." for row in rows]


def test_key_follows_the_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x")
    key = open_corpus(tmp_path).key
    assert open_corpus(tmp_path).key == key
    assert open_corpus(tmp_path, text_field="body").key != key
    os.utime(path, ns=(1, 1))
    assert open_corpus(tmp_path).key != key
    assert open_corpus(tmp_path).size_bytes == 1
    corpus = open_corpus(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="out of date"):
        _ = corpus.key


def damaged_parquet(path: Path) -> Path:
    write_parquet(path, text=["some text " * 50, "more"])
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    return write(path, bytes(data))


def truncated(path: Path, data: bytes) -> Path:
    return write(path, data[: len(data) - 6])


BAD = {
    "binary": (lambda d: write(d / "x.txt", b"ab\0cd"), "binary file .zero byte at offset 2"),
    "utf-16": (lambda d: write(d / "x.txt", "hello".encode("utf-16")), "UTF-16.*iconv"),
    "latin-1": (lambda d: write(d / "x.txt", b"one\ntwo\ncaf\xe9\n"), r"line 3: invalid UTF-8 \(byte 0xe9\)"),
    "gzip that is none": (lambda d: write(d / "x.txt.gz", b"plain text"), "damaged gzip"),
    "truncated gzip": (lambda d: truncated(d / "x.txt.gz", gzip.compress(b"text " * 99)), "damaged gzip"),
    "corrupt gzip": (lambda d: write(d / "x.gz", gzip.compress(b"text " * 9)[:12] + b"\xff\xff\xff" * 9), "damaged gzip"),
    "zstd that is none": (lambda d: write(d / "x.txt.zst", b"plain text"), "damaged zstd"),
    "truncated zstd": (lambda d: truncated(d / "x.txt.zst", compress_zst(b"text " * 99)), "truncated zstd"),
    "broken json line": (lambda d: write(d / "x.jsonl", '{"text": "ok"}\n{"text": \n'), "line 2: broken JSON"),
    "json line without field": (lambda d: write(d / "x.jsonl", '{"body": 0, "id": 1}'), r"line 1: no field 'text' \(fields: body, id\)"),
    "json line with a number": (lambda d: write(d / "x.jsonl", '{"text": 3}\n'), "line 1: field 'text' holds int"),
    "json line that is a list": (lambda d: write(d / "x.jsonl", "[1]\n"), "line 1: expected a JSON object"),
    "json line with half a character": (lambda d: write(d / "x.jsonl", '{"text": "\\ud83d"}\n'), r"line 1: .*lone surrogate U\+D83D"),
    "json line with bad bytes": (lambda d: write(d / "x.jsonl", b'{"text": "ok"}\n{"text": "\xff"}'), "line 2: invalid UTF-8"),
    "parquet that is none": (lambda d: write(d / "x.parquet", b"PAR1 nothing"), "not a readable Parquet"),
    "empty parquet file": (lambda d: write(d / "x.parquet", b""), "not a readable Parquet"),
    "damaged parquet": (lambda d: damaged_parquet(d / "x.parquet"), "not a readable Parquet"),
    "parquet without column": (lambda d: write_parquet(d / "x.parquet", body=["a"]), r"no column 'text' \(columns: body\)"),
    "parquet with a null": (lambda d: write_parquet(d / "x.parquet", text=["a", None]), "row 2: field 'text' holds NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_files(tmp_path: Path, kind: str) -> None:
    make, message = BAD[kind]
    path = make(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        texts(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 1


SOURCES: dict[str, tuple[Callable[[Path], list], str]] = {
    "none": (lambda d: [], "no sources"),
    "absent": (lambda d: [d / "nowhere.txt"], "does not exist"),
    "glob": (lambda d: [f"{d}/*.text"], "no file matches"),
    "empty folder": (lambda d: [d], r"holds no text files \(it is empty\)"),
    "folder of images": (lambda d: [write(d / "sub" / "a.png", b"x").parent], r"holds no text files \(only \.png\)"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_sources_that_lead_nowhere(tmp_path: Path, kind: str) -> None:
    make, message = SOURCES[kind]
    with pytest.raises(DataError, match=message):
        open_corpus(make(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x")
    path.chmod(0)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        texts(path)


def test_missing_optional_packages_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, name in (("pyarrow", "x.parquet"), ("zstandard", "x.txt.zst")):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(ConfigError, match=rf"needs the package {package}: pip install 'gnomon\[data\]'"):
            texts(write(tmp_path / name, b"x"))


def many(count: int) -> list[Document]:
    return [Document(text=f"document number {number}\n" * 3, source=str(number)) for number in range(count)]


def test_many_documents_are_held_out_whole_and_by_content() -> None:
    stream = many(2000)
    marks = {document.text: held for document, held in hold_out(stream, 0.1)}
    assert len(marks) == 2000
    assert 150 < sum(marks.values()) < 250
    assert marks == {document.text: held for document, held in hold_out(reversed(stream), 0.1)}
    assert all(held == is_held_out(text, 0.1) for text, held in marks.items())
    # A larger fraction only adds to the held-out set.
    assert all(is_held_out(text, 0.2) for text, held in marks.items() if held)


def test_few_documents_give_their_tails() -> None:
    book = Document(text="".join(f"line {number}\n" for number in range(1000)), source="book")
    parts = list(hold_out([book], 0.1))
    assert [held for _, held in parts] == [False, True]
    assert "".join(document.text for document, _ in parts) == book.text
    assert parts[0][0].text.endswith("\n")
    assert 0.09 < len(parts[1][0].text) / len(book.text) < 0.11
    line = Document(text="word " * 1000, source="one line")
    parts = list(hold_out([line], 0.1))
    assert "".join(document.text for document, _ in parts) == line.text
    assert len(parts[1][0].text) == pytest.approx(500, abs=6)
    solid = Document(text="x" * 1000, source="no space")
    assert [len(document.text) for document, _ in hold_out([solid], 0.1)] == [900, 100]


def test_no_held_out_part_on_request() -> None:
    assert [held for _, held in hold_out(many(3), 0.0)] == [False] * 3
    for fraction in (-0.1, 0.6, float("nan")):
        with pytest.raises(ConfigError, match="held_out"):
            list(hold_out(many(3), fraction))


def test_default_corpus_is_real_bounded_and_stable() -> None:
    corpus = default_corpus(400_000)
    found = list(corpus)
    size = sum(len(document.text.encode()) for document in found)
    assert 250_000 < size <= 400_000
    assert corpus.files == default_corpus(400_000).files
    assert not [path for path in corpus.files if {"test", "tests", "site-packages"} & set(path.parts)]
    assert any("def " in document.text and document.source.endswith(".py") for document in found)


def test_default_corpus_needs_only_the_standard_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_text, "DOC_ROOT", tmp_path / "no-doc")
    monkeypatch.setattr(machine_text, "MANUAL_ROOT", tmp_path / "no-man")
    corpus = default_corpus(3_000_000)
    kinds = {path.suffix for path in corpus.files}
    assert kinds == {".py"}
    topics = [document.text for document in corpus if "pydoc_data" in document.source]
    assert len(topics) > 50
    assert not any(text.startswith("#") or "'assert':" in text for text in topics)  # prose, not the module that holds it
    assert sum(len(document.text.encode()) for document in corpus) > 2_500_000


def test_default_corpus_on_a_machine_without_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_text, "DOC_ROOT", tmp_path)
    monkeypatch.setattr(machine_text, "MANUAL_ROOT", tmp_path)
    monkeypatch.setattr(machine_text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="--data PATH"):
        default_corpus()


def test_documentation_and_manuals_are_chosen_with_care(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prose = "Some honest sentences about a program. " * 20
    for name in ("doc/a/README", "doc/a/guide.txt", "doc/a/changelog.txt", "doc/a/copyright", "doc/b/x.png", "lib/m.py", "lib/test/t.py"):
        write(tmp_path / name, f"{name}\n{prose}")
    write(tmp_path / "doc/b/NOTES.md", b"\xff" * 500)
    for number in range(100):
        write(tmp_path / f"man/man1/suite-cmd{number}.1", f".SH NAME\ncmd{number}\n{prose}")
    monkeypatch.setattr(machine_text, "DOC_ROOT", tmp_path / "doc")
    monkeypatch.setattr(machine_text, "MANUAL_ROOT", tmp_path / "man")
    monkeypatch.setattr(machine_text.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    names = {str(path.relative_to(tmp_path)) for path in default_corpus().files}
    pages = {name for name in names if name.startswith("man")}
    assert names - pages == {"doc/a/README", "doc/a/guide.txt", "lib/m.py"}
    assert len(pages) == 60


def test_plain_manual_keeps_words_and_drops_commands() -> None:
    page = '.\\" comment\n.TH X 1\n'
    page += '.SH NAME\nx \\- do \\fBthings\\fP\n.SH "SEE ALSO"\n.BR ls (1),\n.I cat dog\n.PP\nA \\(lqquoted\\(rq word\\e.\n'
    assert plain_manual(page) == 'NAME\n\nx - do things\n\nSEE ALSO\n\nls(1),\ncat dog\n\nA "quoted" word\\.\n'
