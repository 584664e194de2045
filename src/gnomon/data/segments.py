"""A conversation as pieces that are encoded one by one, and from there to `Encoded`.

A piece is an id, which only code can write, or text, which never yields a reserved id (`tokenizer.py`). Because each piece is encoded by
itself, a message cannot forge a marker, and no merge reaches across a border. Used by the formats in `formats/`.
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise, repeat

from gnomon.data.chat import Encoded
from gnomon.data.messages import Image
from gnomon.data.tokenizer import Tokenizer


class Segments:
    """Collects the pieces of a conversation in order. While `sampled` is true they count as written by an assistant, while `fallback` is
    true as a stand-in for arguments that were no JSON."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.sampled = False
        self.fallback = False
        self._tokenizer = tokenizer
        self._pieces: list[int | str] = []
        self._sampled: list[bool] = []
        self._fallback: list[bool] = []
        self._boundaries: list[int] = []
        self._images: list[Image] = []

    def marker(self, index: int) -> None:
        """Add one reserved id."""
        self._add(index)

    def text(self, text: str) -> None:
        """Add text as a piece of its own; empty text adds nothing."""
        if text:
            self._add(text)

    def image(self, image: Image, markers: tuple[int, ...]) -> None:
        """Add an image: its size before anything was done to it as text, and one pad that stands for it. `markers` are the ids that begin
        it, begin its content, stand for it and end it. Raises DataError for bytes that are no picture."""
        from gnomon.data.images import open_image  # Pillow: only where there are images

        width, height = open_image(image.data).size
        begin, content, pad, end = markers
        for piece in (begin, f"image {width}x{height}", content, pad, end):
            self._add(piece)
        self._images.append(image)

    def boundary(self) -> None:
        """What is here so far is a prefix that other requests may share."""
        self._boundaries.append(len(self._pieces))

    def encoded(self) -> Encoded:
        """The tokens of all pieces. Raises DataError for text that is not Unicode."""
        texts = list(dict.fromkeys(piece for piece in self._pieces if isinstance(piece, str)))
        ids = dict(zip(texts, self._tokenizer.encode_batch(texts), strict=True))
        runs = [ids[piece] if isinstance(piece, str) else [piece] for piece in self._pieces]
        ends = list(accumulate((len(run) for run in runs), initial=0))
        spans = [(start, stop) for (start, stop), inside in zip(pairwise(ends), self._fallback, strict=True) if inside]
        return Encoded(
            tokens=tuple(chain.from_iterable(runs)),
            mask=tuple(chain.from_iterable(map(repeat, self._sampled, map(len, runs)))),
            fallback=_joined(spans),
            boundaries=tuple(sorted({ends[count] for count in self._boundaries})),
            images=tuple(self._images),
        )

    def _add(self, piece: int | str) -> None:
        self._pieces.append(piece)
        self._sampled.append(self.sampled)
        self._fallback.append(self.fallback)


def _joined(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans that touch become one."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
