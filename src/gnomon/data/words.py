"""Short made texts to tokens, word by word: the same words come again and again, and what they became is remembered.

A word is what a space begins. The pattern that cuts text before bytes are merged (`bpe.py`) has a cut before every space that follows
something else, and nothing is merged across a cut, so words may be encoded one by one. Read next: `long_context.py`, whose sentences share
nearly all their words.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

from gnomon.data.tokenizer import Tokenizer


def by_word(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids that `tokenizer.encode` gives of each text, from the tokenizer's memory where it can."""
    words: list[str] = []
    counts = []
    for text in texts:
        first, *rest = text.split(" ")
        words.append(first)
        words += map(" ".__add__, rest)
        counts.append(1 + len(rest))
    encoded = iter(tokenizer.encode_again(words))
    return [list(chain.from_iterable(islice(encoded, count))) for count in counts]
