"""Small tasks whose evidence can be torn apart: several statements, a question, and an answer that needs every one of them.

Each piece of evidence carries one value, drawn evenly from a known range, and with all other pieces known the answer differs for each
value of it: whoever misses one piece can do no better than guess. That is the whole point of the long samples of report §3.4; the tests
prove it by trying every value. Read next: `long_context.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

RANGE = 1000
"""Values that a piece of evidence can take: 0 to 999, or as many words."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Values of the kinds that have small ones."""

_ONSETS = ("b", "br", "d", "dr", "f", "g", "gl", "h", "k", "kr", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ei", "ou")
_ENDINGS = ("", "l", "n", "r", "s", "th", "x", "m")


_WORDS = tuple(f"{onset}{vowel}{ending}o" for onset in _ONSETS for vowel in _VOWELS for ending in _ENDINGS)[:RANGE]
_NAMES = tuple(each.capitalize() for each in _WORDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubTask:
    """Statements, a question about them, and its answer.

    `parts` are the characters of the answer, first and past the last, that one statement decides alone, in the order of the statements;
    none where the answer is made of all of them together.
    """

    kind: str
    evidence: tuple[str, ...]
    question: str
    answer: str
    parts: tuple[tuple[int, int], ...] = ()


def total(called: Sequence[str], values: Sequence[int]) -> SubTask:
    """Amounts booked to one account; the question is their sum (modulo 1000, so that every answer is as likely)."""
    account, count = called[0], len(values)
    entries = tuple(f"Entry {place} of the account {account} is {value}." for place, value in enumerate(values, 1))
    return SubTask(kind="total", evidence=entries, answer=str(sum(values) % RANGE),
                   question=f"What is the sum of the {count} entries of the account {account}, modulo {RANGE}?")


def code(called: Sequence[str], values: Sequence[int]) -> SubTask:
    """Parts of a code; the question is the whole of it."""
    vault, count = called[0], len(values)
    parts = tuple(f"Part {place} of {count} of the code of {vault} is {value:03d}." for place, value in enumerate(values, 1))
    return SubTask(kind="code", evidence=parts, question=f"What is the whole code of {vault}?",
                   answer="-".join(f"{value:03d}" for value in values), parts=tuple((4 * at, 4 * at + 3) for at in range(count)))


def chain(called: Sequence[str], values: Sequence[int]) -> SubTask:
    """Each name is the next one and something more; the question is the first (modulo 1000). Evidence must be followed hop by hop."""
    count = len(values)
    hops = [f"{called[place]} is {called[place + 1]} plus {values[place]}." for place in range(count - 1)]
    hops.append(f"{called[count - 1]} is {values[-1]}.")
    return SubTask(kind="chain", evidence=tuple(hops), question=f"What is {called[0]}, modulo {RANGE}?", answer=str(sum(values) % RANGE))


def order(called: Sequence[str], values: Sequence[int]) -> SubTask:
    """Words with their places in a line; the question is the line."""
    line, count = called[0], len(values)
    words = [word(value) for value in values]
    stated = tuple(f"In the line {line} the word at place {place} is {each}." for place, each in enumerate(words, 1))
    return SubTask(kind="order", evidence=stated, question=f"What are the {count} words of the line {line}?", answer=" ".join(words),
                   parts=_spans(words))


def boxes(called: Sequence[str], values: Sequence[int]) -> SubTask:
    """Boxes named a, b, c … with a letter in each; the question is what is in all of them. What a small model can learn: the answer says
    again what stood in the evidence, in order."""
    stated = [f"#{_box(place)}={LETTERS[value]}" for place, value in enumerate(values[: len(called)])]
    return SubTask(kind="boxes", evidence=tuple(stated), question="What is in the boxes?", answer=" ".join(stated),
                   parts=tuple((last - 1, last) for _, last in _spans(stated)))


def _box(place: int) -> str:
    """a … z, then aa, ab …"""
    first, last = divmod(place, len(LETTERS))
    return (LETTERS[first - 1] if first else "").lower() + LETTERS[last].lower()


KINDS: Mapping[str, Callable[[Sequence[str], Sequence[int]], SubTask]] = {
    "total": total, "code": code, "chain": chain, "order": order, "boxes": boxes}
"""Each kind makes a task of names, as many as values, and values."""

RANGES: Mapping[str, int] = {"boxes": len(LETTERS)}
"""Values that a piece of evidence can take, where they are fewer than `RANGE`."""


def word(value: int) -> str:
    """One of a thousand different made-up words."""
    return _WORDS[value % RANGE]


def _spans(words: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Where each word is in a text that joins them with spaces."""
    ends = accumulate(len(each) + 1 for each in words)
    return tuple((end - 1 - len(each), end - 1) for each, end in zip(words, ends, strict=True))


def names(numbers: Sequence[Sequence[int]]) -> list[str]:
    """Made-up names that text does not hold by chance, of three numbers below `RANGE` each."""
    return [f"{_NAMES[first]} {_NAMES[second]} {number:03d}" for first, second, number in numbers]


def draw(kind: str, pieces: int, random: np.random.Generator) -> SubTask:
    """A task of a kind with so many pieces of evidence."""
    drawn, largest = random.random(4 * pieces).tolist(), RANGES.get(kind, RANGE)
    numbers = [int(RANGE * chance) for chance in drawn[pieces:]]
    return KINDS[kind](names(list(zip(*[iter(numbers)] * 3, strict=True))), [int(largest * chance) for chance in drawn[:pieces]])
