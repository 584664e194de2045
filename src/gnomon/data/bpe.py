"""Byte-pair merging: K3's pre-tokenisation pattern and the two engines that can run it.

The meaning of a vocabulary is its list of ranks: token `i` is a byte string, and inside each pre-token the adjacent pair
whose concatenation has the lowest rank is merged first (leftmost on a tie). The Rust library ``tokenizers`` needs explicit
merges, ``tiktoken`` works from the ranks and is several times faster; both give the same ids and are checked against
each other. Training always uses ``tokenizers``; encoding uses ``tiktoken`` where it is installed. Read next:
``tokenizer.py``.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from gnomon.errors import DataError

_U = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_W = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_C = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(  # the alternatives of the K3 tokenizer, in order: Han runs, words, digits, signs, line ends, spaces
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_U}*{_W}+{_C}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_U}+{_W}*{_C}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
PIECE_CHARACTERS = 400_000  # K3 encodes text in pieces of at most this length,
RUN_CHARACTERS = 25_000  # and without runs of white space or non-space longer than this
SHORT_BATCH = 1 << 16  # characters of a batch that are encoded sooner than threads would start
_LONG_RUN = re.compile(rf"\s{{{RUN_CHARACTERS + 1},}}|\S{{{RUN_CHARACTERS + 1},}}")


@runtime_checkable
class Engine(Protocol):
    """What a byte-pair engine does: pieces of text to ids, specials unknown to it."""

    def encode_batch(self, pieces: Sequence[str]) -> list[list[int]]:
        """Ids of each piece."""


def pieces(text: str) -> Iterator[str]:
    """Cut `text` as K3 does before encoding: every 400,000 characters, then so that no run of white space or of
    non-space characters exceeds 25,000."""
    for start in range(0, len(text), PIECE_CHARACTERS):
        part, begin = text[start : start + PIECE_CHARACTERS], 0
        for run in _LONG_RUN.finditer(part):
            for cut in range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS):
                yield part[begin:cut]
                begin = cut
        yield part[begin:]


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte value in ``tokenizer.json`` files (the byte-level alphabet).

    Printable Latin-1 bytes stand for themselves; the others take the code points from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(value) if value in printable else chr(next(spare)) for value in range(256)]


_LETTERS = byte_letters()
_BYTES = {letter: value for value, letter in enumerate(_LETTERS)}


def to_letters(token: bytes) -> str:
    """Spell a byte string in the byte-level alphabet."""
    return "".join([_LETTERS[value] for value in token])


def from_letters(token: str) -> bytes:
    """Inverse of `to_letters`; raises DataError for a letter outside the alphabet."""
    try:
        return bytes([_BYTES[letter] for letter in token])
    except KeyError as error:
        raise DataError(f"token {token!r} is not written in the byte-level alphabet (letter {error})") from None


def merges_of(ranks: Sequence[bytes]) -> list[tuple[str, str]]:
    """All merges that the ranks imply, in the order in which they apply: each way to build token `i` from two tokens."""
    rank = {token: index for index, token in enumerate(ranks)}
    merges: list[tuple[str, str]] = []
    for token in ranks:
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = sorted((rank[left], rank[right]) for left, right in splits if left in rank and right in rank)
        merges += [(to_letters(ranks[left]), to_letters(ranks[right])) for left, right in pairs]
    return merges


def graph_of(ranks: Sequence[bytes]) -> Any:
    """A ``tokenizers.Tokenizer`` with these ranks, K3's pattern and no special token at all."""
    from tokenizers import Tokenizer, models

    vocabulary = {to_letters(token): index for index, token in enumerate(ranks)}
    graph = Tokenizer(models.BPE(vocab=vocabulary, merges=merges_of(ranks), ignore_merges=True))
    _attach_pattern(graph)
    return graph


def train_ranks(texts: Iterable[str], count: int) -> list[bytes]:
    """Learn `count` ranks (the 256 bytes, then merges by frequency) from an iterable of texts.

    Raises DataError when the text is too small or too repetitive to fill the vocabulary.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    graph = Tokenizer(models.BPE())
    _attach_pattern(graph)
    trainer = trainers.BpeTrainer(
        vocab_size=count,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    characters = 0

    def counted() -> Iterator[str]:
        nonlocal characters
        for text in texts:
            characters += len(text)
            yield from pieces(text)

    graph.train_from_iterator(counted(), trainer)
    if characters == 0:
        raise DataError("the corpus is empty: there is no text to train a tokenizer on")
    vocabulary = graph.get_vocab()
    if len(vocabulary) < count:
        raise DataError(
            f"the corpus is too small for its tokenizer: {characters} characters yield {len(vocabulary)} byte-pair tokens where "
            f"{count} were asked for; give more text or lower vocab_size"
        )
    return [from_letters(token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]


def _attach_pattern(graph: Any) -> None:
    from tokenizers import Regex, decoders, pre_tokenizers

    graph.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    graph.decoder = decoders.ByteLevel()


class TokenizersEngine:
    """Runs a ``tokenizers.Tokenizer``; batches are spread over the cores by the library."""

    def __init__(self, ranks: Sequence[bytes]) -> None:
        self._graph = graph_of(ranks)

    def encode_batch(self, pieces: Sequence[str]) -> list[list[int]]:
        """Ids of each piece."""
        encodings = self._graph.encode_batch_fast(list(pieces), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


class TiktokenEngine:
    """Runs ``tiktoken`` on the ranks; batches are spread over threads. Raises ImportError when it is not installed."""

    def __init__(self, ranks: Sequence[bytes]) -> None:
        import tiktoken

        table = {token: index for index, token in enumerate(ranks)}
        self._encoding = tiktoken.Encoding("gnomon", pat_str=PATTERN, mergeable_ranks=table, special_tokens={})
        self._threads = os.cpu_count() or 1

    def encode_batch(self, pieces: Sequence[str]) -> list[list[int]]:
        """Ids of each piece."""
        if len(pieces) == 1 or sum(map(len, pieces)) < SHORT_BATCH:
            return [self._encoding.encode_ordinary(piece) for piece in pieces]
        return self._encoding.encode_ordinary_batch(list(pieces), num_threads=self._threads)


def engine_for(ranks: Sequence[bytes]) -> Engine:
    """The fastest engine that is installed; the choice does not change a single id."""
    if importlib.util.find_spec("tiktoken") is not None:
        return TiktokenEngine(ranks)
    return TokenizersEngine(ranks)
