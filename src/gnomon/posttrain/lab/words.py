"""The lab's language: sixty-four words, one id each, so that a model of a few hundred thousand weights can think in it.

A text of the lab is words with blanks between. Read next: `domain.py`, what is said in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from gnomon.errors import DataError

DIGITS = tuple("0123456789")
OPERATORS = ("+", "-", "*")
LABELS = tuple("abcdefgh")
DOMAINS = ("general", "agents", "coding")
Effort = Literal["low", "high", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
MARKS = ("<pad>", "<bos>", "<eos>", "<eom>", "<think>", "<answer>", "<dense>")
VERBS = ("get", "del", "biggest", "smallest", "holds", "yes", "no", "=", ";")
SIZE = 64
"""Ids of the vocabulary; those after the last word stay unused."""

WORDS = (*MARKS, *DIGITS, *OPERATORS, *LABELS, *DOMAINS, *EFFORTS, *VERBS)
IDS = {word: index for index, word in enumerate(WORDS)}
PAD, BOS, EOS, EOM, ANSWER = (IDS[word] for word in ("<pad>", "<bos>", "<eos>", "<eom>", "<answer>"))


def ids(text: str | Iterable[str]) -> tuple[int, ...]:
    """The ids of a text, or of words. Raises `DataError` for a word that the lab does not have."""
    words = text.split() if isinstance(text, str) else tuple(text)
    for word in words:
        if word not in IDS:
            raise DataError(f"'{word}' is no word of the lab (words: {' '.join(WORDS)})")
    return tuple(IDS[word] for word in words)


def words(tokens: Sequence[int]) -> tuple[str, ...]:
    """The words of ids; an id that stands for none is `?`."""
    return tuple(WORDS[token] if 0 <= token < len(WORDS) else "?" for token in tokens)


def calculated(left: int, operator: str, right: int) -> int:
    """One step of the lab's arithmetic, modulo 10."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % 10


def drawn_sum(rng: random.Random) -> tuple[int, str, int]:
    """A digit, an operator and a digit that is not 0."""
    return rng.randrange(10), rng.choice(OPERATORS), rng.randrange(1, 10)
