"""Token shards: what is written is what was tokenised, a second run does nothing, an interrupted one goes on, damage is seen."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gnomon.data.corpus import Document, documents, open_corpus
from gnomon.data.shards import Shards, write_shards
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.errors import DataError

SOURCE = Path(json.__file__).parent


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([path.read_text(encoding="utf-8") for path in sorted(SOURCE.glob("*.py"))], 1024)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """60 documents of different lengths."""
    for number in range(60):
        text = "".join(f"document {number}, line {line}: ünïcode 你好\n" for line in range(5 + number))
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return tmp_path / "texts"


def restored(tokenizer: Tokenizer, shards: Shards) -> list[str]:
    texts = []
    for index in range(len(shards)):
        tokens = shards[index]
        assert tokens[-1] == tokenizer.document_end_id
        assert not tokens.flags.writeable
        texts.append(tokenizer.decode(tokens[:-1].tolist()))
    return texts


def test_both_splits_together_are_the_corpus(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    path = write_shards(open_corpus(folder), tokenizer, tmp_path, held_out=0.2, shard_tokens=3000)
    assert len(list(path.glob("*.tokens"))) > 3
    train, held_out = Shards.open(path), Shards.open(path, "held_out")
    texts = [document.text for document in documents(folder)]
    assert sorted(restored(tokenizer, train) + restored(tokenizer, held_out)) == sorted(texts)
    assert 2 <= len(held_out) <= 30
    assert train.num_bytes + held_out.num_bytes == sum(len(text.encode()) for text in texts)
    assert train.num_tokens == sum(len(train[index]) for index in range(len(train)))
    assert train[0].dtype == np.uint16
    assert train.vocab_size == 1024
    assert train.tokenizer_fingerprint == tokenizer.fingerprint
    assert train.fingerprint != held_out.fingerprint


def test_few_documents_are_split_by_tail(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    path = write_shards(open_corpus(folder), tokenizer, tmp_path, held_out=0.1)
    train, held_out = Shards.open(path), Shards.open(path, "held_out")
    assert len(train) == len(held_out) == 60
    both = zip(restored(tokenizer, train), restored(tokenizer, held_out), strict=True)
    assert [head + tail for head, tail in both] == [document.text for document in documents(folder)]


def test_a_second_run_reads_and_writes_nothing(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(folder)
    path = write_shards(corpus, tokenizer, tmp_path)
    before = {file: file.stat().st_mtime_ns for file in path.iterdir() if file.name != ".lock"}

    class Unreadable:
        key, size_bytes = corpus.key, 1

        def __iter__(self) -> Iterator[Document]:
            raise AssertionError("the corpus was read again")

    assert write_shards(Unreadable(), tokenizer, tmp_path) == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir() if file.name != ".lock"} == before
    # Any change of the inputs makes new shards.
    assert write_shards(corpus, tokenizer, tmp_path, held_out=0.3) != path
    (folder / "00.txt").write_text("changed " * 100)
    assert write_shards(open_corpus(folder), tokenizer, tmp_path) != path


def test_an_interrupted_run_goes_on_after_the_last_whole_shard(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(folder)

    class Interrupted:
        key, size_bytes = corpus.key, 1

        def __iter__(self) -> Iterator[Document]:
            for number, document in enumerate(corpus):
                if number == 45:
                    raise KeyboardInterrupt
                yield document

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gnomon.data.shards.BATCH_CHARACTERS", 2000)
        with pytest.raises(KeyboardInterrupt):
            write_shards(Interrupted(), tokenizer, tmp_path / "a", held_out=0.2, shard_tokens=3000)
        (partial,) = (tmp_path / "a").iterdir()
        with pytest.raises(DataError, match="no complete token shards"):
            Shards.open(partial)
        kept = {file: file.stat().st_mtime_ns for file in partial.glob("*.npy")}
        assert kept
        path = write_shards(corpus, tokenizer, tmp_path / "a", held_out=0.2, shard_tokens=3000)
        assert path == partial
        assert {file: file.stat().st_mtime_ns for file in kept} == kept
        fresh = write_shards(corpus, tokenizer, tmp_path / "b", held_out=0.2, shard_tokens=3000)
    assert Shards.open(path).fingerprint == Shards.open(fresh).fingerprint


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "the corpus is empty"), (" \n\n ", "the corpus is empty"), ("hello world\n", r"too small: 12 bytes of text.* at least 4096")],
)
def test_a_corpus_that_cannot_be_trained_on(tokenizer: Tokenizer, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        write_shards(open_corpus(tmp_path / "a.txt"), tokenizer, tmp_path / "out")


def test_a_bad_file_in_the_middle_is_named(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    (folder / "30.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"30\.txt, line 1: invalid UTF-8"):
        write_shards(open_corpus(folder), tokenizer, tmp_path)


def test_damage_is_seen_on_opening(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    path = write_shards(open_corpus(folder), tokenizer, tmp_path)
    tokens = path / "shard-00000.tokens"
    data = tokens.read_bytes()
    tokens.write_bytes(data[:-2])
    with pytest.raises(DataError, match=r"shard-00000\.tokens has .* bytes where its table says"):
        Shards.open(path)
    tokens.write_bytes(data)
    (path / "shard-00000.documents.npy").write_bytes(b"nothing")
    with pytest.raises(DataError, match="no complete token shards"):
        Shards.open(path)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"shards": 0, "format": 9}))
    with pytest.raises(DataError, match="format 9"):
        Shards.open(path)
    with pytest.raises(DataError, match="no complete token shards"):
        Shards.open(tmp_path / "nowhere")


WRITE = """
import sys
from gnomon.data.corpus import open_corpus
from gnomon.data.shards import Shards, write_shards
from gnomon.data.tokenizer import Tokenizer
path = write_shards(open_corpus(sys.argv[1]), Tokenizer.load(sys.argv[2]), sys.argv[3], shard_tokens=2000)
print(Shards.open(path).fingerprint)
"""


def test_two_processes_at_once_write_one_set(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    command = [sys.executable, "-c", WRITE, str(folder), str(tmp_path / "tokenizer"), str(tmp_path / "out")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    assert len(list((tmp_path / "out").iterdir())) == 1


FULL_DISK = """
import resource, sys
from gnomon.data.corpus import open_corpus
from gnomon.data.shards import write_shards
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import DataError
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_shards(open_corpus(sys.argv[1]), Tokenizer.load(sys.argv[2]), sys.argv[3])
except DataError as error:
    print(error)
    sys.exit(error.exit_status)
"""


def test_a_disk_that_fills_is_one_error(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    """A limit on the size of a file fails a write in the way a full disk does."""
    tokenizer.save(tmp_path / "tokenizer")
    command = [sys.executable, "-c", FULL_DISK, str(folder), str(tmp_path / "tokenizer"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "cannot write token shards" in done.stdout
    assert "Traceback" not in done.stderr


def test_progress_is_shown_on_request(tokenizer: Tokenizer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards(open_corpus(folder), tokenizer, tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    write_shards(open_corpus(folder), tokenizer, tmp_path / "shown", progress=True)
    assert "tokenising" in capsys.readouterr().err


def test_wide_vocabularies_take_wide_integers(folder: Path, tmp_path: Path) -> None:
    from gnomon.data import special_tokens

    ranks = [bytes([value]) for value in range(256)] + [b"%05d" % number for number in range(70_000)]
    wide = Tokenizer(ranks, special_tokens.block(len(ranks), 256))
    shards = Shards.open(write_shards(open_corpus(folder), wide, tmp_path, held_out=0.0))
    assert shards[0].dtype == np.uint32
    assert restored(wide, shards) == [document.text for document in documents(folder)]
    assert len(Shards.open(shards.folder, "held_out")) == 0
