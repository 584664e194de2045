"""Short made texts to tokens, word by word: the same words come again and again, and what they became is remembered.

A word is what a space begins. The pattern that cuts text before bytes are merged (`bpe.py`) has a cut before every space that follows
something else, and nothing is merged across a cut, so words may be encoded one by one. Read next: `long_context.py`, whose sentences share
nearly all their words.
"""

from __future__ import annotations

from itertools import chain

from gnomon.data.tokenizer import Tokenizer


def by_word(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids that `tokenizer.encode` gives, from the tokenizer's memory where it can."""
    first, *rest = text.split(" ")
    return list(chain.from_iterable(tokenizer.encode_again([first, *[f" {word}" for word in rest]])))
