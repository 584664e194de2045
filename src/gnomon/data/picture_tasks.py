"""What made pictures show, what is asked about them, and the answer (report §3.1): the picture decides the answer, the answer the picture.

A kind makes a `Shown` of random numbers: lines to read, shapes to name with colour and place, charts, pictures as code, coordinates in
pixels and as shares of the picture, several pictures among words, clips of a shape that moves. Read next: `picture_code.py` for pages and
charts that other programs draw, `pictures.py`, which makes training items of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from gnomon.data import drawing
from gnomon.data.drawing import COLOURS, SHAPES, Colour, Shape
from gnomon.data.rendering import Rendering

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

PLACES = ("top left", "top middle", "top right", "middle left", "centre", "middle right", "bottom left", "bottom middle", "bottom right")

SIDE = 84
"""Width and height of a scene in pixels: three by three fields of 28."""


MOVES = {"goes right": (1, 0), "goes left": (-1, 0), "goes down": (0, 1), "goes up": (0, -1), "stands still": (0, 0)}
"""What a shape of a clip may do, and which way that is."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Clip:
    """The frames of a video, all of one size."""

    frames: tuple[Image.Image, ...]


Part = str | Image.Image | Clip | Rendering
"""Words, a picture, a video, or a picture that another program makes of code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """Pictures and words in their order, a question about them, and its answer.

    `spelled` says that the answer is read letter by letter: each letter becomes tokens of its own.
    """

    kind: str
    parts: tuple[Part, ...]
    question: str
    answer: str
    spelled: bool = False


Random = np.random.Generator


def read_letter(random: Random) -> Shown:
    """One to three letters or digits, each in a field of its own: who cannot read yet begins with these."""
    return _set(random, "letter", int(random.integers(1, 4)))


def read_word(random: Random) -> Shown:
    """Four to seven letters and digits."""
    return _set(random, "word", int(random.integers(4, 8)))


def read_phrase(random: Random) -> Shown:
    """Eight to eleven letters and digits."""
    return _set(random, "phrase", int(random.integers(8, 12)))


def read_line(random: Random) -> Shown:
    """A line of twelve random letters and digits."""
    return _set(random, "line", 12)


def read_label(random: Random) -> Shown:
    """One to twelve letters and digits of several sizes and places, dark on light or light on dark: letters lie across fields."""
    text = _letters(random, int(random.integers(1, 13)))
    scale = float(random.uniform(3.6, 4.6)), float(random.uniform(2.0, 2.4))
    room = 28 - 11 * scale[1]
    at = int(random.integers(0, 6)), int(random.integers(0, max(1, int(room)) + 1))
    dark, light = _shade(random, 0, 90), _shade(random, 170, 256)
    ink, paper = (light, dark) if random.random() < 0.25 else (dark, light)
    image = drawing.line(text, (int(6 * scale[0] * len(text)) + 8, 28), scale=scale, at=at, ink=ink, paper=paper)
    return Shown(kind="label", parts=(image,), question="Read the line.", answer=text, spelled=True)


def _set(random: Random, kind: str, characters: int) -> Shown:
    """Letters in fields of 28 pixels, dark on light, pushed about by a pixel."""
    text, at = _letters(random, characters), (int(random.integers(-1, 2)), int(random.integers(-1, 2)))
    image = drawing.line(text, (28 * characters, 28), scale=(28 / 6, 28 / 11), at=at, ink=_shade(random, 0, 90),
                         paper=_shade(random, 170, 256))
    return Shown(kind=kind, parts=(image,), question="Read the line.", answer=text, spelled=True)


def _letters(random: Random, characters: int) -> str:
    return "".join(LETTERS[index] for index in random.integers(len(LETTERS), size=characters))


def name_shape(random: Random) -> Shown:
    """One shape in a field of its own, named by colour and shape: who cannot name scenes yet begins with these."""
    shape, colour = _shape(random, 14, 14)
    image = drawing.scene(28, 28, _shade(random, 225, 256), [shape])
    return Shown(kind="shape", parts=(image,), question="What is in the picture?",
                 answer=f"{_article(colour).capitalize()} {colour} {shape.kind}.")


def name_scene(random: Random) -> Shown:
    """One or two shapes; each is named by colour, shape and place, in reading order."""
    count = int(random.integers(1, 3))
    fields = sorted(int(field) for field in random.permutation(9)[:count])
    shapes, words = [], []
    for field in fields:
        shape, colour = _shape(random, 28 * (field % 3) + 14, 28 * (field // 3) + 14)
        shapes.append(shape)
        words.append(f"{_article(colour)} {colour} {shape.kind} at the {PLACES[field]}" if field != 4 else
                     f"{_article(colour)} {colour} {shape.kind} in the centre")
    image = drawing.scene(SIDE, SIDE, _shade(random, 225, 256), shapes)
    return Shown(kind="scene", parts=(image,), question="What is in the picture?", answer=" and ".join(words).capitalize() + ".")


def read_chart(random: Random) -> Shown:
    """A bar chart; its values by name."""
    count = int(random.integers(3, 6))
    names = [LETTERS[index] for index in sorted(random.permutation(26)[:count])]
    values = [int(value) for value in random.integers(1, 10, size=count)]
    colours = [_jittered(random, list(COLOURS.values())[index]) for index in random.permutation(len(COLOURS))[:count]]
    answer = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
    return Shown(kind="chart", parts=(drawing.bars(names, values, 9, colours),), question="What are the values?", answer=answer)


def write_code(random: Random) -> Shown:
    """A scene as SVG code: shapes on a coarse grid, from top to bottom, each of them to be seen, so that the picture decides the code."""
    paper, count = (255, 255, 255), int(random.integers(1, 4))
    while True:
        spots = sorted({(4 * int(y), 4 * int(x)) for y, x in random.integers(4, 18, size=(count, 2))})
        shapes = [Shape(kind=SHAPES[int(random.integers(len(SHAPES)))], x=x, y=y, size=20 if random.random() < 0.5 else 30,
                        colour=list(COLOURS.values())[int(random.integers(len(COLOURS)))]) for y, x in spots]
        image = drawing.scene(SIDE, SIDE, paper, shapes)
        if all(drawing.differs(image, drawing.scene(SIDE, SIDE, paper, [*shapes[:n], *shapes[n + 1 :]])) for n in range(len(shapes))):
            break
    return Shown(kind="code", parts=(image,), question="Write this picture as SVG.", answer=drawing.svg(SIDE, SIDE, paper, shapes))


def point_at(random: Random) -> Shown:
    """Where a shape is: in pixels, or as shares of width and height, as the question says."""
    width, height = (int(value) * 28 for value in random.integers(3, 6, size=2))
    colours = random.permutation(len(COLOURS))[: int(random.integers(1, 4))]
    shapes: list[Shape] = []
    for index in colours:
        x, y = int(random.integers(14, width - 14)), int(random.integers(14, height - 14))
        kind = SHAPES[int(random.integers(len(SHAPES)))]
        size = int(random.integers(16, 25))
        shapes.append(Shape(kind=kind, colour=_jittered(random, list(COLOURS.values())[index]), x=x, y=y, size=size))
    asked = len(shapes) - 1  # the last one lies on top, so all of it is seen
    colour, shape = list(COLOURS)[colours[asked]], shapes[asked]
    image = drawing.scene(width, height, _shade(random, 225, 256), shapes)
    if random.random() < 0.5:
        return Shown(kind="point", parts=(image,), question=f"Where is the {colour} {shape.kind}, in pixels?",
                     answer=f"({shape.x:.0f}, {shape.y:.0f})")
    return Shown(kind="point", parts=(image,), question=f"Where is the {colour} {shape.kind}, from 0 to 1?",
                 answer=f"({shape.x / width:.2f}, {shape.y / height:.2f})")


def tell_apart(random: Random) -> Shown:
    """A document of several pictures with words between them; the question needs all of it."""
    count = int(random.integers(3, 6))
    chosen = random.permutation(len(COLOURS))[:count]
    parts: list[Part] = []
    numbers = [int(value) for value in random.integers(1, 100, size=count)]
    kinds = [SHAPES[int(index)] for index in random.integers(len(SHAPES), size=count)]
    for place, (index, number, kind) in enumerate(zip(chosen, numbers, kinds, strict=True), 1):
        colour = _jittered(random, list(COLOURS.values())[index])
        shape = Shape(kind=kind, colour=colour, x=28 + int(random.integers(-6, 7)), y=28 + int(random.integers(-6, 7)), size=28)
        parts += [f"Picture {place} costs {number}:", drawing.scene(56, 56, _shade(random, 225, 256), [shape])]
    asked = int(random.integers(count))
    colour_name = list(COLOURS)[chosen[asked]]
    return Shown(kind="document", parts=tuple(parts), question=f"What shape is {colour_name}, and what does its picture cost?",
                 answer=f"The {kinds[asked]} is {colour_name} and costs {numbers[asked]}.")


def watch_clip(random: Random) -> Shown:
    """Two to eight frames of a shape that moves or stands: what it is, and where it goes."""
    count, step = int(random.integers(2, 9)), int(random.integers(5, 8))
    did = list(MOVES)[int(random.integers(len(MOVES)))]
    dx, dy = MOVES[did]
    shape, colour = _shape(random, SIDE // 2 - dx * step * (count - 1) // 2, SIDE // 2 - dy * step * (count - 1) // 2)
    paper = _shade(random, 225, 256)
    frames = tuple(drawing.scene(SIDE, SIDE, paper, [replace(shape, x=shape.x + dx * step * n, y=shape.y + dy * step * n)])
                   for n in range(count))
    return Shown(kind="clip", parts=(Clip(frames=frames),), question="What happens?", answer=f"The {colour} {shape.kind} {did}.")


def stills(parts: Sequence[Part]) -> list[str | Image.Image]:
    """The same with the frames of each clip one after another, for who takes no videos. Renderings must have been made."""
    flat: list[str | Image.Image] = []
    for part in parts:
        assert not isinstance(part, Rendering)
        flat += part.frames if isinstance(part, Clip) else [part]
    return flat


KINDS: Mapping[str, Callable[[Random], Shown]] = {
    "letter": read_letter, "word": read_word, "phrase": read_phrase, "line": read_line, "label": read_label,
    "shape": name_shape, "scene": name_scene, "chart": read_chart, "code": write_code, "point": point_at, "document": tell_apart,
    "clip": watch_clip,
}
"""Kinds of pictures; each draws on a random stream of its own."""


def _shape(random: Random, x: int, y: int) -> tuple[Shape, str]:
    """A random shape near a place, and the name of its colour."""
    colour = list(COLOURS)[int(random.integers(len(COLOURS)))]
    dx, dy = (int(value) for value in random.integers(-3, 4, size=2))
    return Shape(kind=SHAPES[int(random.integers(len(SHAPES)))], colour=_jittered(random, COLOURS[colour]), x=x + dx, y=y + dy,
                 size=int(random.integers(18, 25))), colour


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _jittered(random: Random, colour: Colour) -> Colour:
    red, green, blue = (int(np.clip(value + random.integers(-12, 13), 0, 255)) for value in colour)
    return red, green, blue


def _shade(random: Random, low: int, high: int) -> Colour:
    """A grey with a hint of colour."""
    grey = int(random.integers(low, high))
    red, green, blue = (int(np.clip(grey + random.integers(-12, 13), 0, 255)) for _ in range(3))
    return red, green, blue
