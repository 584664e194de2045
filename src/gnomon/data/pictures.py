"""Made pictures as training items: image pads among tokens, pixels beside them, the answer after (report §3.1).

An item is a document `pictures and words, question, answer`, or the same as a conversation in the chat format. Each image takes as many
pads as it has tokens; pads are never learnt, and with `learn = "answers"` nothing but the answers is: they are what the picture decides.
Sample number n depends on seed and n alone, so the state is one number.
Read next: `packing.py`, which lays items beside text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image as Picture

from gnomon.config import setting
from gnomon.data.chat import chat_format, marker_ids
from gnomon.data.drawing import png
from gnomon.data.images import FRAMES, ImageAt, ImageLimits, prepare, prepare_video
from gnomon.data.messages import Conversation, Image, Message, Text
from gnomon.data.mixture import Item, State
from gnomon.data.picture_code import ALL_KINDS, RENDERED
from gnomon.data.picture_tasks import KINDS, Clip, Part, Shown, stills
from gnomon.data.rendering import Rendering, Renderings
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import CheckpointError, ConfigError
from gnomon.extend import suggestion

AHEAD = 64
"""Samples that are looked at from one on whose rendering is missing, so that one start of a program makes all of theirs."""

IMAGE_MARKERS = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")


@dataclass(frozen=True, kw_only=True, slots=True)
class PicturesConfig:
    """Pictures that a program makes, with questions and answers."""

    kinds: tuple[str, ...] = setting(tuple(KINDS), "kinds of pictures, by chance; named twice, twice as often; page and plot need programs")
    chat: float = setting(0.25, "share of the items that are conversations in the chat format; the rest are plain documents")
    learn: Literal["all", "answers"] = setting("all", "tokens that are learnt: all but the pads of images, or the answers alone")
    seed: int = setting(0, "the same seed and number give the same picture")

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in ALL_KINDS]
        if unknown or not self.kinds:
            close = suggestion(unknown[0], list(ALL_KINDS)) if unknown else ""
            raise ConfigError(f"'kinds' is {list(self.kinds)}{close} (kinds: {', '.join(ALL_KINDS)})")
        if not 0 <= self.chat <= 1 or self.seed < 0:
            raise ConfigError(f"'chat' is {self.chat} and 'seed' {self.seed}; a share from 0 to 1, and a seed of at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSample:
    """One item, what it shows, and where the tokens of its answer are: first and number."""

    item: Item
    shown: Shown
    answer: tuple[int, int]


class Pictures:
    """An endless, resumable source of made pictures.

    `renderings` is the folder where pictures are kept that other programs make. Raises `ConfigError` for a tokenizer that names no image
    markers, or no chat markers where conversations are wanted, and for kinds that need a folder where none is given.
    """

    def __init__(self, tokenizer: Tokenizer, config: PicturesConfig, limits: ImageLimits, renderings: Path | None = None) -> None:
        needy = [kind for kind in config.kinds if kind in RENDERED]
        if needy and renderings is None:
            raise ConfigError(f"'kinds' has '{needy[0]}', which another program draws; name a folder to keep such pictures in")
        self._renderings = None if renderings is None else Renderings(renderings)
        self.tokenizer, self.config, self.limits = tokenizer, config, limits
        self.markers = marker_ids(tokenizer, IMAGE_MARKERS, "pictures")
        self._chat = chat_format(tokenizer) if config.chat else None
        self.index = 0

    def next_item(self) -> Item:
        """The next picture with its words."""
        self.index += 1
        return self.sample(self.index - 1).item

    def state(self) -> State:
        """The number of the next sample, and what the numbers mean."""
        return {"index": self.index, "seed": self.config.seed, "tokenizer": self.tokenizer.fingerprint}

    def restore(self, state: State) -> None:
        """Go to where `state` was taken; raises `CheckpointError` when it belongs to other pictures."""
        mine = self.state()
        for name in ("seed", "tokenizer"):
            if state.get(name) != mine[name]:
                raise CheckpointError(f"the position belongs to other pictures: {name} {state.get(name)!r}, here {mine[name]!r}")
        self.index = state["index"]

    def sample(self, index: int) -> PictureSample:
        """Sample number `index`."""
        as_chat, shown = self._shown(index)
        shown = self._rendered(index, shown)
        return self._conversation(shown) if as_chat else self._document(shown)

    def _shown(self, index: int) -> tuple[bool, Shown]:
        """Whether the sample is a conversation, and what it shows; renderings are not made yet."""
        random = np.random.Generator(np.random.Philox(key=self.config.seed, counter=[0, 0, 0, index]))
        as_chat = random.random() < self.config.chat
        return as_chat, ALL_KINDS[self.config.kinds[int(random.integers(len(self.config.kinds)))]](random)

    def _rendered(self, index: int, shown: Shown) -> Shown:
        """The same with pictures instead of code; where one is missing, those of the next samples are made with it."""
        wanted = _code(shown)
        if not wanted:
            return shown
        assert self._renderings is not None
        if not all(map(self._renderings.has, wanted)):
            self._renderings.make([*wanted, *(part for ahead in range(index + 1, index + AHEAD) for part in _code(self._shown(ahead)[1]))])
        made = [self._renderings.picture(part) if isinstance(part, Rendering) else part for part in shown.parts]
        return replace(shown, parts=tuple(made))

    def _document(self, shown: Shown) -> PictureSample:
        """Parts, question, answer and the end of the document, one after the other."""
        pieces: list[Part] = [*shown.parts, f"\n{shown.question}"]
        tokens, learnt, images = self.laid(pieces)
        answer = self._answer(shown, " ")
        whole = np.array([*tokens, *answer, self.tokenizer.document_end_id], np.int64)
        return self._sample(shown, whole, learnt, images, (len(tokens), len(answer)))

    def _conversation(self, shown: Shown) -> PictureSample:
        """A user's message of parts and question, and the assistant's answer, in the chat format, where frames are images."""
        assert self._chat is not None
        parts = stills(shown.parts)
        content = tuple(Text(text=part) if isinstance(part, str) else Image(data=png(part), media_type="image/png")
                        for part in parts)
        user = Message(role="user", content=(*content, Text(text=shown.question)))
        asked = self._chat.encode(Conversation(messages=(user,), thinking=False), images=True)
        tokens, learnt, images = expand(np.array(asked.tokens, np.int64), [part for part in parts if not isinstance(part, str)],
                                        self.markers[2], self.limits)
        answer = self._answer(shown, "")
        tail = [*answer, *self._chat.answer_closes, self.tokenizer.eos_id]
        return self._sample(shown, np.array([*tokens, *tail], np.int64), learnt, images, (len(tokens), len(answer)))

    def _sample(self, shown: Shown, tokens: np.ndarray, asked: list[bool], images: tuple[ImageAt, ...],
                answer: tuple[int, int]) -> PictureSample:
        """The item; `asked` says which tokens before the answer may be learnt."""
        before = asked if self.config.learn == "all" else [False] * len(asked)
        mask = np.array([*before, *[True] * (len(tokens) - len(asked))], np.bool_)
        return PictureSample(item=Item(tokens=tokens, loss_mask=mask, images=images, whole=True), shown=shown, answer=answer)

    def _answer(self, shown: Shown, before: str) -> list[int]:
        """Tokens of the answer; what is spelled gives each letter tokens of its own."""
        if not shown.spelled:
            return self.tokenizer.encode(before + shown.answer)
        return [token for ids in self.tokenizer.encode_batch([before, *shown.answer]) for token in ids]

    def laid(self, pieces: Sequence[Part]) -> tuple[list[int], list[bool], tuple[ImageAt, ...]]:
        """Pieces one after the other: tokens, which of them are learnt, and the images at their places."""
        tokens: list[int] = []
        images: list[ImageAt] = []
        for piece in pieces:
            ids, found = self.piece(piece)
            images += [image.moved(len(tokens)) for image in found]
            tokens += ids
        pad = self.markers[2]
        return tokens, [token != pad for token in tokens], tuple(images)

    def piece(self, part: Part) -> tuple[list[int], tuple[ImageAt, ...]]:
        """Tokens of words, or those of a picture or video with its pads, and what stands at the pads.

        How a video is written is a choice of ours, since the release says nothing of it: each item of up to four frames as an image is, but
        called `video WxH` with the numbers of its first and last frame.
        """
        if isinstance(part, str):
            return self.tokenizer.encode(part), ()
        assert not isinstance(part, Rendering)
        if not isinstance(part, Clip):
            items, titles = [prepare(part, self.limits)], [f"image {part.width}x{part.height}"]
        else:
            (width, height), count = part.frames[0].size, len(part.frames)
            items = prepare_video(part.frames, self.limits)
            titles = [f"video {width}x{height} {first}-{min(first + FRAMES - 1, count)}" for first in range(1, count + 1, FRAMES)]
        begin, content, pad, end = self.markers
        tokens: list[int] = []
        images = []
        for pixels, title in zip(items, titles, strict=True):
            tokens += [begin, *self.tokenizer.encode(title), content]
            images.append(ImageAt(pixels=pixels, start=len(tokens), count=pixels.tokens))
            tokens += [*[pad] * pixels.tokens, end]
        return tokens, tuple(images)


def _code(shown: Shown) -> list[Rendering]:
    return [part for part in shown.parts if isinstance(part, Rendering)]


def expand(tokens: np.ndarray, pictures: list[Picture.Image], pad: int, limits: ImageLimits
           ) -> tuple[list[int], list[bool], tuple[ImageAt, ...]]:
    """Each pad of a prompt as many times as its image has tokens; which tokens are learnt; the images at their places.

    Raises `ConfigError` where pads and pictures differ in number.
    """
    waiting = [prepare(picture, limits) for picture in pictures]
    if int((tokens == pad).sum()) != len(waiting):
        raise ConfigError(f"the prompt has {int((tokens == pad).sum())} places for images and {len(waiting)} images are given")
    laid: list[int] = []
    images: list[ImageAt] = []
    for token in tokens.tolist():
        if token == pad:
            pixels = waiting[len(images)]
            images.append(ImageAt(pixels=pixels, start=len(laid), count=pixels.tokens))
            laid += [pad] * pixels.tokens
        else:
            laid.append(token)
    return laid, [token != pad for token in laid], tuple(images)
