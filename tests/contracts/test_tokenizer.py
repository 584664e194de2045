"""The tokenizer: K3's layout, text that never becomes a marker, files that read back equal, clear errors."""

import base64
import json
from pathlib import Path

import pytest

from gnomon.data import bpe, special_tokens
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.errors import ConfigError, DataError

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
SAMPLES = [
    "",
    "Hello world",
    "你好世界 and Ünïcode Ελληνικά 🙂 e\u0301",
    "  \n\n\t x\r\n  y  ",
    "it's we'LL I'd 12345 3.14 == != ->",
    "漢字かな交じり文 ABCdef GHI",
    "\x00\x01\x7f null and controls",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 1024)


@pytest.mark.parametrize("text", SAMPLES)
def test_text_comes_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= index < len(tokenizer.ranks) for index in ids)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello world", ["Hello", " world"]),
        ("camelCase HTTPServer", ["camel", "Case", " HTTPServer"]),
        ("it's we'LL", ["it's", " we'LL"]),
        ("x = 12345;\n\n  y", ["x", " =", " ", "123", "45", ";\n\n", " ", " y"]),
        ("中文abc中", ["中文", "abc", "中"]),
        ("漢字かな", ["漢字", "かな"]),
        ("a  \n b  ", ["a", "  \n", " b", "  "]),
        ("(f)_x", ["(f", ")_", "x"]),
    ],
)
def test_the_pattern_cuts_as_worked_out_by_hand(text: str, expected: list[str]) -> None:
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(bpe.PATTERN), behavior="isolated")
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == expected


def test_training_gives_exactly_the_size_and_is_deterministic(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 1024 == len(tokenizer.ranks) + 32
    assert train_tokenizer(iter(TEXTS), 1024).fingerprint == tokenizer.fingerprint
    assert train_tokenizer(TEXTS, 1000).fingerprint != tokenizer.fingerprint
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2


def test_text_never_produces_a_marker(tokenizer: Tokenizer) -> None:
    for name, index in tokenizer.special_ids.items():
        ids = tokenizer.encode(f"say {name} twice {name}")
        assert index not in ids
        assert max(ids) < len(tokenizer.ranks)
        assert tokenizer.decode([index]) == name


def test_full_block_has_the_released_places() -> None:
    block = special_tokens.block(163_584, special_tokens.block_size(163_840))
    assert len(block) == 256
    assert list(block.values()) == list(range(163_584, 163_840))
    released = {  # ids of the released vocabulary
        "[BOS]": 163584, "[EOS]": 163585, "<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588, "<|sep|>": 163589,
        "[start_header_id]": 163590, "[end_header_id]": 163591, "<|reserved_token_163592|>": 163592, "[EOT]": 163593,
        "<|media_begin|>": 163602, "<|media_content|>": 163603, "<|media_end|>": 163604, "<|media_pad|>": 163605,
        "<osagent_mode>": 163649, "[UNK]": 163838, "[PAD]": 163839,
    }  # fmt: skip
    assert released.items() <= block.items()
    assert sum(not name.startswith("<|reserved") for name in block) == len(released) - 1


def test_compact_block_keeps_names_and_order(tokenizer: Tokenizer) -> None:
    full = [name for name in special_tokens.block(0, 256) if not name.startswith("<|reserved")]
    compact = [name for name in tokenizer.special_ids if not name.startswith("<|reserved")]
    assert compact == full
    assert tokenizer.special_ids["[PAD]"] == tokenizer.vocab_size - 1 == tokenizer.pad_id
    assert tokenizer.decode([tokenizer.eos_id]) == "<|end_of_msg|>"
    assert tokenizer.decode([tokenizer.document_end_id, tokenizer.bos_id]) == "[EOS][BOS]"
    assert tokenizer.stop_ids == (tokenizer.document_end_id, tokenizer.eos_id)


def test_files_read_back_equal(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "a" / "tokenizer.json", tmp_path / "a" / "tiktoken.model"):
        again = Tokenizer.load(path)
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
        assert again.special_ids == tokenizer.special_ids


def test_a_released_style_rank_file_gets_its_names(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """K3 ships ranks and a partial list of names; every other slot of the 256 is reserved."""
    ranks = tokenizer.ranks
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(ranks)]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))
    first = len(ranks)
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 254: "[UNK]", 255: "[PAD]"}
    decoder = {str(first + offset): {"content": name, "special": True} for offset, name in names.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.vocab_size == first + 256
    assert loaded.decode([loaded.eos_id, first + 4]) == f"<|im_end|><|reserved_token_{first + 4}|>"
    assert loaded.pad_id == first + 255
    assert loaded.encode("<|im_user|> def main():") == tokenizer.encode("<|im_user|> def main():")


def test_batches_equal_single_calls(tokenizer: Tokenizer) -> None:
    texts = [*SAMPLES, "a" * 30_000, "x " * 210_000]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_pieces_follow_the_split_rule() -> None:
    text = "a" * 60_000 + " " * 25_000 + "b" * 25_001 + "word " * 70_000
    parts = list(bpe.pieces(text))
    assert "".join(parts) == text
    assert [len(part) for part in parts[:4]] == [25_000, 25_000, 10_000 + 25_000 + 25_000, 400_000 - 110_000]
    assert list(bpe.pieces("")) == []
    assert all(len(part) <= 400_000 for part in parts)


def test_bytes_that_are_no_text_decode_with_a_mark(tokenizer: Tokenizer) -> None:
    first = tokenizer.ranks.index("é".encode()[:1])
    assert tokenizer.decode([first]) == "\ufffd"
    assert tokenizer.decode_bytes([first]) == b"\xc3"


@pytest.mark.parametrize("index", [-1, 1024])
def test_an_id_outside_the_vocabulary_is_an_error(tokenizer: Tokenizer, index: int) -> None:
    with pytest.raises(DataError, match=str(index)):
        tokenizer.decode([index])


def test_lone_surrogates_are_an_error_that_names_the_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"U\+D83D at character 3"):
        tokenizer.encode("abc\ud83d")
    with pytest.raises(DataError, match="surrogate"):
        train_tokenizer(["ok", "\udcff"], 512)


def test_sizes_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size = 280.*at least 288"):
        train_tokenizer(TEXTS, 280)
    with pytest.raises(ConfigError, match="special_slots = 8"):
        train_tokenizer(TEXTS, 1024, special_slots=8)
    with pytest.raises(DataError, match=r"too small for its tokenizer: 8 characters.*480 were asked.*lower vocab_size"):
        train_tokenizer(["one line"], 512)
    for nothing in ([], [""]):
        with pytest.raises(DataError, match="the corpus is empty"):
            train_tokenizer(nothing, 512)


def test_damaged_and_missing_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer in .*expected tokenizer\.json"):
        Tokenizer.load(tmp_path)
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    good = json.loads(path.read_text())

    def fails(match: str, **changes: object) -> None:
        path.write_text(json.dumps(good | changes))
        with pytest.raises(DataError, match=match):
            Tokenizer.load(tmp_path)

    fails("'model' not found|not a byte-level", model={})
    fails("pattern", pre_tokenizer={"pretokenizers": [{"pattern": {"Regex": r"\w+"}}]})
    fails("merges", model=good["model"] | {"merges": good["model"]["merges"][:-1]})
    fails("lacks 1 of the 256", model=good["model"] | _without(good["model"], "a"))
    path.write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        Tokenizer.load(tmp_path)
    path.unlink()
    (tmp_path / "tiktoken.model").write_text("!!! 0\n")
    with pytest.raises(DataError, match=r"tiktoken\.model, line 1"):
        Tokenizer.load(tmp_path)


def _without(model: dict, token: str) -> dict:
    vocabulary = {name: index for name, index in model["vocab"].items() if name != token}
    merges = [merge for merge in model["merges"] if token not in merge]
    return {"vocab": vocabulary, "merges": merges}
