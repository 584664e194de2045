"""Long samples that can be solved only from evidence scattered over the whole window (report §3.4).

A model that is given long documents learns to look nearby, for most of what predicts a token is near. So samples are built: ordinary text
fills a window, the evidence of a few small tasks is strewn into it, and questions with their answers stand at the end, closed as a
document is. Each task has evidence in every quarter of the window, so the first and the last piece are at least half a window apart. With
`pictures` some of the evidence is to be read in pictures, and documents of pictures stand among the text. With `strewn = false` nothing
stands between the pieces, and the guarantees above do not hold: what to look for is learnt much faster from such short samples first. A
sample is a function of seed and number alone: a run resumes by remembering one number. Read next: `long_tasks.py`, `mixture.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, Protocol

import numpy as np

from gnomon.config import setting
from gnomon.data import drawing
from gnomon.data.images import ImageAt, ImageLimits
from gnomon.data.long_tasks import KINDS, SubTask, draw
from gnomon.data.mixture import Item, State
from gnomon.data.picture_tasks import Part, tell_apart
from gnomon.data.pictures import Pictures, PicturesConfig
from gnomon.data.tokenizer import Tokenizer
from gnomon.data.words import by_word
from gnomon.errors import CheckpointError, ConfigError, DataError
from gnomon.extend import suggestion

DEFAULT_WINDOW = 4096
QUARTERS = 4
TRIES = 100
"""Draws of places until all guarantees hold; fewer than two are needed unless the window is nearly full of evidence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongConfig:
    """What a long sample is made of."""

    window: int | None = setting(None, "tokens of a sample, question and answer included; none: what the training's context holds")
    tasks: int = setting(2, "tasks in a sample")
    pieces: tuple[int, int] = setting((4, 6), "fewest and most pieces of evidence of a task")
    kinds: tuple[str, ...] = setting(tuple(KINDS), "kinds of tasks, taken in turn by chance")
    learn: Literal["all", "answers"] = setting("all", "tokens that are learnt: all of the sample, or the answers alone")
    strewn: bool = setting(True, "strew the evidence over a window of text; false: piece after piece, to learn from first")
    pictures: float = setting(0.0, "share of the pieces that are to be read in pictures; documents of pictures then stand in the text")
    seed: int = setting(0, "the same seed and number give the same sample")

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            close = suggestion(unknown[0], list(KINDS)) if unknown else ""
            raise ConfigError(f"'kinds' is {list(self.kinds)}{close} (kinds: {', '.join(KINDS)})")
        if not QUARTERS <= self.pieces[0] <= self.pieces[1]:
            raise ConfigError(f"'pieces' is {list(self.pieces)}; give the fewest and the most, at least {QUARTERS}: one for each quarter")
        if not 0 <= self.pictures <= 1:
            raise ConfigError(f"'pictures' is {self.pictures}; it is a share from 0 to 1")
        if self.tasks < 1 or self.seed < 0 or (self.window is not None and self.window < 1):
            raise ConfigError(f"'tasks' is {self.tasks}, 'window' {self.window}, 'seed' {self.seed}; use positive numbers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A task with the places of its evidence and of its answer in the sample: (first token, tokens) each."""

    task: SubTask
    evidence: tuple[tuple[int, int], ...]
    answer: tuple[int, int]

    @property
    def distances(self) -> tuple[int, ...]:
        """Tokens from the start of each piece of evidence to the start of the answer."""
        return tuple(self.answer[0] - start for start, _ in self.evidence)

    @property
    def span(self) -> int:
        """Tokens from the start of the first piece to the start of the last."""
        starts = [start for start, _ in self.evidence]
        return max(starts) - min(starts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Tokens that are strewn into the window, and the images among them."""

    tokens: list[int]
    images: tuple[ImageAt, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LongSample:
    """One sample and what it depends on."""

    item: Item
    tasks: tuple[Placed, ...]


class Documents(Protocol):
    """Tokenised documents by number, such as `Shards`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...


class LongContext:
    """An endless, resumable source of long samples over documents that fill them.

    `limits` are those of the model's eye, where evidence stands in pictures. Raises `DataError` for documents too short to fill a window,
    `ConfigError` for a window that cannot hold its evidence apart, and for pictures without an eye.
    """

    def __init__(self, documents: Documents, tokenizer: Tokenizer, config: LongConfig, limits: ImageLimits | None = None) -> None:
        if config.pictures and limits is None:
            raise ConfigError(f"'pictures' is {config.pictures}, but the model has no eye; add a [model.vision] table, or use 0")
        self._pictures = Pictures(tokenizer, PicturesConfig(chat=0.0), limits) if config.pictures and limits is not None else None
        if not len(documents):
            raise DataError("there are no documents to fill long samples with")
        self.documents, self.tokenizer, self.config = documents, tokenizer, config
        self.index, self.window = 0, config.window or DEFAULT_WINDOW
        self._bits = np.random.Philox(key=config.seed)
        self._numbers, self._start = np.random.Generator(self._bits), self._bits.state

    def set_context(self, context: int) -> None:
        """Fill rows of so many tokens from the next sample on, unless the window was given."""
        if self.config.window is None:
            self.window = context + 1  # the last token of a row is only predicted

    def next_item(self) -> Item:
        """The next sample as an item that is kept whole."""
        self.index += 1
        return self.sample(self.index - 1).item

    def state(self) -> State:
        """The number of the next sample, and what the numbers mean."""
        return {"index": self.index, "window": self.window, "seed": self.config.seed, "tokenizer": self.tokenizer.fingerprint}

    def restore(self, state: State) -> None:
        """Go to where `state` was taken; raises `CheckpointError` when it belongs to other samples."""
        mine = self.state()
        for name in ("seed", "tokenizer"):
            if state.get(name) != mine[name]:
                raise CheckpointError(f"the position belongs to other long samples: {name} {state.get(name)!r}, here {mine[name]!r}")
        self.index, self.window = state["index"], state["window"]

    def sample(self, index: int) -> LongSample:
        """Sample number `index` at the present window."""
        random = self._random(0, index)
        config = self.config
        fewest, most = config.pieces
        tasks = [draw(config.kinds[int(len(config.kinds) * kind)], fewest + int((most + 1 - fewest) * count), random)
                 for kind, count in random.random((config.tasks, 2)).tolist()]
        evidence, tail, answers = self._encoded(tasks)
        strewn = [*evidence, *self._seen(tasks, evidence, random)]
        lengths = [[len(piece.tokens) for piece in pieces] for pieces in strewn]
        body = self.window - len(tail) if config.strewn else sum(map(sum, lengths))
        places = self._places(lengths, body, random) if config.strewn else _in_a_row(lengths, random)
        tokens = self._filler(self.window, random) if config.strewn else np.empty(body + len(tail), np.int64)
        tokens[body:] = tail
        images: list[ImageAt] = []
        for pieces, starts in zip(strewn, places, strict=True):
            for piece, start in zip(pieces, starts, strict=True):
                tokens[start : start + len(piece.tokens)] = piece.tokens
                images += [image.moved(start) for image in piece.images]
        placed = tuple(
            Placed(task=task, evidence=tuple((start, len(piece.tokens)) for piece, start in zip(pieces, starts, strict=True)),
                   answer=(body + answer[0], answer[1]))
            for task, pieces, starts, answer in zip(tasks, evidence, places, answers, strict=False))
        images.sort(key=lambda image: image.start)
        mask = self._mask(len(tokens), placed, images)
        return LongSample(item=Item(tokens=tokens, loss_mask=mask, whole=True, images=tuple(images)), tasks=placed)

    def without(self, index: int, task: int, piece: int) -> Item:
        """A sample with one piece of evidence overwritten by ordinary text: what a proof by ablation compares with."""
        sample = self.sample(index)
        start, length = sample.tasks[task].evidence[piece]
        random = self._random(1 + task * QUARTERS**3 + piece, index)
        tokens = sample.item.tokens.copy()
        tokens[start : start + length] = self._filler(length, random)
        left = tuple(image for image in sample.item.images if not start <= image.start < start + length)
        return replace(sample.item, tokens=tokens, images=left)

    def _random(self, use: int, index: int) -> np.random.Generator:
        """The numbers of a sample, as a new Philox(key=seed, counter=[0, 0, use, index]) gives them, which takes longer to make. They are
        for one sample at a time."""
        self._start["state"]["counter"][:] = 0, 0, use, index
        self._bits.state = self._start
        return self._numbers

    def _seen(self, tasks: Sequence[SubTask], evidence: list[list[_Piece]], random: np.random.Generator) -> list[list[_Piece]]:
        """Puts pictures in place of some of the evidence, and returns documents of pictures to be strewn, one for each quarter."""
        if self._pictures is None:
            return []
        for task, pieces in zip(tasks, evidence, strict=True):
            for place in np.flatnonzero(random.random(len(pieces)) < self.config.pictures).tolist():
                ink, paper = int(random.integers(0, 90)), int(random.integers(170, 256))
                text = task.evidence[place]
                line = drawing.line(text, (28 * len(text), 28), scale=(28 / 6, 28 / 11), ink=(ink,) * 3, paper=(paper,) * 3)
                pieces[place] = self._laid(["\n", line, "\n"])
        return [[self._laid(["\n", *tell_apart(random).parts, "\n"]) for _ in range(QUARTERS)]]

    def _laid(self, parts: Sequence[Part]) -> _Piece:
        assert self._pictures is not None
        tokens, _, images = self._pictures.laid(parts)
        return _Piece(tokens=tokens, images=images)

    def _encoded(self, tasks: Sequence[SubTask]) -> tuple[list[list[_Piece]], list[int], list[tuple[int, int]]]:
        """The pieces of evidence of each task, the questions and answers at the end, and where in them the answers are."""
        texts = [f"\n{piece}\n" for task in tasks for piece in task.evidence]
        for task in tasks:
            texts += [f"\nQuestion: {task.question}\nAnswer:", f" {task.answer}\n"]
        encoded = iter(by_word(self.tokenizer, texts))
        evidence = [[_Piece(tokens=next(encoded)) for _ in task.evidence] for task in tasks]
        tail: list[int] = []
        answers = []
        for question, answer in zip(encoded, encoded, strict=True):
            answers.append((len(tail) + len(question), len(answer)))
            tail += [*question, *answer]
        return evidence, [*tail, self.tokenizer.document_end_id], answers

    def _places(self, lengths: list[list[int]], body: int, random: np.random.Generator) -> list[list[int]]:
        """Starts of all pieces: apart from each other, before `body`, and of each task at least one in every quarter of the window."""
        quarter = self.window / QUARTERS
        flat = [length for each in lengths for length in each]
        if body - 3 * quarter < max(flat):
            raise ConfigError(f"the window is {self.window} tokens: questions and answers leave no room in its last quarter; widen it")
        for _ in range(TRIES):
            targets = []
            for each in lengths:
                drawn = random.random((3, len(each))).tolist()  # few numbers: plain Python is faster than NumPy here
                quarters = [piece if piece < QUARTERS else int(QUARTERS * chance) for piece, chance in enumerate(drawn[0])]
                order = sorted(range(len(each)), key=drawn[1].__getitem__)
                for length, place, chance in zip(each, order, drawn[2], strict=True):
                    low = quarters[place] * quarter
                    targets.append(low + chance * max(0.0, min(low + quarter, body) - length - low))
            starts, cursor = [0] * len(flat), 0
            for position in sorted(range(len(flat)), key=targets.__getitem__):
                starts[position] = max(int(targets[position]), cursor)
                cursor = starts[position] + flat[position]
            found = _by_task(starts, lengths)
            if cursor <= body and all(len({int(start // quarter) for start in each}) == QUARTERS for each in found):
                return found
        raise ConfigError(f"the window is {self.window} tokens: {len(flat)} pieces of evidence do not fit apart; widen it, or make 'tasks' "
                          "fewer")

    def _filler(self, length: int, random: np.random.Generator) -> np.ndarray:
        """So many tokens of documents drawn by chance, ends of documents left out: the sample is one document."""
        tokens = np.empty(length, np.int64)
        filled, empty, end = 0, 0, self.tokenizer.document_end_id
        while filled < length:
            document = self.documents[int(random.integers(len(self.documents)))]
            document = document[:-1] if len(document) and document[-1] == end else document
            start = int(random.integers(max(1, len(document) - length + filled))) if len(document) else 0
            part = document[start : start + length - filled]
            tokens[filled : filled + len(part)] = part
            filled += len(part)
            empty = 0 if len(part) else empty + 1
            if empty > TRIES:
                raise DataError(f"{TRIES} documents in turn are empty; long samples need text to fill them")
        return tokens

    def _mask(self, length: int, placed: Sequence[Placed], images: Sequence[ImageAt]) -> np.ndarray | None:
        if self.config.learn == "all" and not images:
            return None
        mask = np.full(length, self.config.learn == "all", np.bool_)
        for image in images:  # pads are never learnt
            mask[image.start : image.start + image.count] = False
        for task in placed:
            mask[task.answer[0] : task.answer[0] + task.answer[1]] = True
        return mask


def _in_a_row(lengths: list[list[int]], random: np.random.Generator) -> list[list[int]]:
    """Starts of all pieces in an order drawn by chance, with nothing between them."""
    flat = [length for each in lengths for length in each]
    order = random.permutation(len(flat))
    starts = np.zeros(len(flat), np.int64)
    starts[order] = np.cumsum([0, *(flat[place] for place in order[:-1])])
    return _by_task(starts.tolist(), lengths)


def _by_task(starts: list[int], lengths: list[list[int]]) -> list[list[int]]:
    ends = list(accumulate(map(len, lengths), initial=0))
    return [starts[first:last] for first, last in pairwise(ends)]
