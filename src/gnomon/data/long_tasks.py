"""Small tasks whose evidence can be torn apart: several statements, a question, and an answer that needs every one of them.

Each piece of evidence carries one value, drawn evenly from a known range, and with all other pieces known the answer differs for each
value of it: whoever misses one piece can do no better than guess. That is the whole point of the long samples of report §3.4; the tests
prove it by trying every value. Read next: `long_context.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RANGE = 1000
"""Values that a piece of evidence can take: 0 to 999, or as many words."""

_ONSETS = ("b", "br", "d", "dr", "f", "g", "gl", "h", "k", "kr", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ei", "ou")
_ENDINGS = ("", "l", "n", "r", "s", "th", "x", "m")


@dataclass(frozen=True, kw_only=True, slots=True)
class SubTask:
    """Statements, a question about them, and its answer."""

    kind: str
    evidence: tuple[str, ...]
    question: str
    answer: str


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
                   answer="-".join(f"{value:03d}" for value in values))


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
    return SubTask(kind="order", evidence=stated, question=f"What are the {count} words of the line {line}?", answer=" ".join(words))


KINDS: Mapping[str, Callable[[Sequence[str], Sequence[int]], SubTask]] = {"total": total, "code": code, "chain": chain, "order": order}
"""Each kind makes a task of names, as many as values, and values."""


def word(value: int) -> str:
    """One of a thousand different made-up words."""
    onset, rest = divmod(value % RANGE, len(_VOWELS) * len(_ENDINGS))
    vowel, ending = divmod(rest, len(_ENDINGS))
    return _ONSETS[onset] + _VOWELS[vowel] + _ENDINGS[ending] + "o"


def names(count: int, random: np.random.Generator) -> list[str]:
    """Made-up names that text does not hold by chance."""
    drawn = random.integers(RANGE, size=(count, 3)).tolist()
    return [f"{word(first).capitalize()}{word(second)}-{number:03d}" for first, second, number in drawn]


def draw(kind: str, pieces: int, random: np.random.Generator) -> SubTask:
    """A task of a kind with so many pieces of evidence."""
    return KINDS[kind](names(pieces, random), random.integers(RANGE, size=pieces).tolist())
