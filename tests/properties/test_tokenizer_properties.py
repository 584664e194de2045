"""For every text: it comes back exactly, no marker appears, and both engines give the same ids."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.data import bpe
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.errors import DataError

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
TOKENIZER = train_tokenizer([*TEXTS, "aaaaaaaa abababab " * 50, "你好世界，你好。" * 20], 2048)
pytest.importorskip("tiktoken", reason="tiktoken is not installed: only one engine to compare")
FAST = bpe.TiktokenEngine(TOKENIZER.ranks)
SLOW = bpe.TokenizersEngine(TOKENIZER.ranks)

# Text with surrogates left out, and text dense in what the pattern treats specially.
anything = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
tricky = st.text(st.sampled_from("aabAB é\u0301ſ'stLL  \t\r\n\v\u00a0\u3000１2³ⅣǅʰªЖ你々〇〡カー.,#<|>_\u200d🙂"), max_size=80)
repeated = st.builds(lambda unit, count: unit * count, st.text(st.sampled_from("ab "), min_size=1, max_size=3), st.integers(1, 40))


@given(anything | tricky | repeated)
@settings(max_examples=400, deadline=None)
def test_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(index < len(TOKENIZER.ranks) for index in ids)


@given(anything | tricky | repeated)
@settings(max_examples=400, deadline=None)
def test_both_engines_agree(text: str) -> None:
    assert FAST.encode_batch([text]) == SLOW.encode_batch([text])


@given(tricky)
@settings(max_examples=300, deadline=None)
def test_pattern_agrees_with_an_engine_without_intersection(text: str) -> None:
    """The same alternatives, with each class intersection written as a look-ahead, in a third regular-expression engine."""
    regex = pytest.importorskip("regex", reason="the package regex is not installed")
    pattern = regex.sub(r"(\[(?:\\p\{\w+\})+)&&\[\^\\p\{Han\}\]\]", r"(?:(?!\\p{Han})\1])", bpe.PATTERN)
    assert "&&" not in pattern
    pieces = [match.group() for match in regex.finditer(pattern, text)]
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(bpe.PATTERN), behavior="isolated")
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces
    assert "".join(pieces) == text


@given(st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_surrogates_are_refused_and_nothing_else(text: str) -> None:
    has_surrogate = any("\ud800" <= character <= "\udfff" for character in text)
    try:
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    except DataError:
        assert has_surrogate
    else:
        assert not has_surrogate


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=50))
@settings(max_examples=100, deadline=None)
def test_any_ids_decode(ids: list[int]) -> None:
    names = {index: name.encode() for name, index in TOKENIZER.special_ids.items()}
    expected = b"".join(names.get(index) or TOKENIZER.ranks[index] for index in ids)
    assert TOKENIZER.decode_bytes(ids) == expected
    assert TOKENIZER.decode(ids) == expected.decode("utf-8", errors="replace")


@given(st.lists(st.tuples(st.sampled_from("a \n"), st.integers(1, 60_000)), max_size=8))
@settings(max_examples=20, deadline=None)
def test_pieces_respect_both_limits(runs: list[tuple[str, int]]) -> None:
    text = "".join(character * count for character, count in runs)
    parts = list(bpe.pieces(text))
    assert "".join(parts) == text
    for part in parts:
        assert len(part) <= bpe.PIECE_CHARACTERS
        assert longest_run(part) <= bpe.RUN_CHARACTERS


def longest_run(text: str) -> int:
    longest = current = 0
    previous = None
    for character in text:
        current = current + 1 if character.isspace() == previous else 1
        previous = character.isspace()
        longest = max(longest, current)
    return longest


def test_load_after_save_encodes_alike(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    assert Tokenizer.load(tmp_path).encode_batch(TEXTS) == TOKENIZER.encode_batch(TEXTS)
