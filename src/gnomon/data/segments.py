"""A conversation as pieces that are encoded one by one, and from there to `Encoded`.

A piece is an id, which only code can write, or text, which never yields a reserved id (`tokenizer.py`). Because each piece is encoded by
itself, a message cannot forge a marker, and no merge reaches across a border. Used by the formats in `formats/`.
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise

from gnomon.data.chat import Encoded
from gnomon.data.messages import Image
from gnomon.data.tokenizer import Tokenizer


class Segments:
    """Collects the pieces of a conversation in order. While `sampled` is true they count as written by an assistant, while `fallback` is
    true as a stand-in for arguments that were no JSON."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[int | str] = []
        self._states = [(0, False, False)]  # from which piece on, sampled, fallback
        self._boundaries: list[int] = []
        self._images: list[Image] = []

    @property
    def sampled(self) -> bool:
        """Whether what comes next counts as written by an assistant."""
        return self._states[-1][1]

    @sampled.setter
    def sampled(self, value: bool) -> None:
        self._states.append((len(self._pieces), value, self.fallback))

    @property
    def fallback(self) -> bool:
        """Whether what comes next stands in for arguments that were no JSON."""
        return self._states[-1][2]

    @fallback.setter
    def fallback(self, value: bool) -> None:
        self._states.append((len(self._pieces), self.sampled, value))

    def marker(self, index: int) -> None:
        """Add one reserved id."""
        self._pieces.append(index)

    def text(self, text: str) -> None:
        """Add text as a piece of its own; empty text adds nothing."""
        if text:
            self._pieces.append(text)

    def image(self, image: Image, markers: tuple[int, ...]) -> None:
        """Add an image: its size before anything was done to it as text, and one pad that stands for it. `markers` are the ids that begin
        it, begin its content, stand for it and end it. Raises DataError for bytes that are no picture."""
        from gnomon.data.images import open_image  # Pillow: only where there are images

        width, height = open_image(image.data).size
        begin, content, pad, end = markers
        self._pieces += (begin, f"image {width}x{height}", content, pad, end)
        self._images.append(image)

    def boundary(self) -> None:
        """What is here so far is a prefix that other requests may share."""
        self._boundaries.append(len(self._pieces))

    def encoded(self) -> Encoded:
        """The tokens of all pieces. Raises DataError for text that is not Unicode."""
        distinct = dict.fromkeys(self._pieces)
        texts = [piece for piece in distinct if isinstance(piece, str)]
        ids: dict[int | str, tuple[int, ...]] = {piece: (piece,) for piece in distinct if isinstance(piece, int)}
        ids.update(zip(texts, self._tokenizer.encode_again(texts), strict=True))
        runs = [ids[piece] for piece in self._pieces]
        ends = [0, *accumulate(map(len, runs))]
        stretches = [(ends[start], ends[stop], sampled, fallback)
                     for (start, sampled, fallback), (stop, _, _) in pairwise([*self._states, (len(runs), False, False)])]
        return Encoded(
            tokens=tuple(chain.from_iterable(runs)),
            mask=tuple(chain.from_iterable((sampled,) * (stop - start) for start, stop, sampled, _ in stretches)),
            fallback=_joined([(start, stop) for start, stop, _, inside in stretches if inside and stop > start]),
            boundaries=tuple(sorted({ends[count] for count in self._boundaries})),
            images=tuple(self._images),
        )


def _joined(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans that touch become one."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
