"""Short made texts to tokens, word by word: the same words come again and again, and what they became is remembered.

A word is what a space begins. The pattern that cuts text before bytes are merged (`bpe.py`) has a cut before every space that follows
something else, and nothing is merged across a cut, so words may be encoded one by one. Read next: `long_context.py`, whose sentences share
nearly all their words.
"""

from __future__ import annotations

from gnomon.data.tokenizer import Tokenizer

MOST = 1 << 16
"""Words that are remembered; then memory starts anew."""


class WordByWord:
    """Encodes as the tokenizer does, from memory where it can."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids that `Tokenizer.encode` gives."""
        known, found = self._known, list[int]()
        first, *rest = text.split(" ")
        for word in (first, *[f" {word}" for word in rest]):
            ids = known.get(word)
            found += self._learnt(word) if ids is None else ids
        return found

    def _learnt(self, word: str) -> list[int]:
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[word] = self._tokenizer.encode(word)
        return self._known[word]
