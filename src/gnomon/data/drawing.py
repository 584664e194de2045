"""Pictures that a program draws: lines of text, scenes of coloured shapes, bars; with Pillow alone.

What is drawn depends on the arguments alone. Text is set in Pillow's built-in bitmap letters, so that no font file matters. Shapes are
drawn four times as large and averaged. Read next: `picture_tasks.py`, which decides what is drawn and what is asked about it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageChops, ImageDraw, ImageFont

Colour = tuple[int, int, int]

COLOURS: Mapping[str, Colour] = {"red": (205, 40, 40), "orange": (245, 145, 30), "yellow": (245, 220, 50), "green": (40, 150, 60),
                                 "blue": (40, 80, 200), "purple": (130, 50, 170), "black": (25, 25, 25)}
"""Colours that have one name each, far apart."""

SHAPES = ("circle", "square", "triangle", "diamond", "cross", "star", "ring")

_FINE = 4  # times as large as a picture is drawn before it is averaged
_LETTER = (6, 11)  # pixels of a built-in letter


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A coloured shape; `x`, `y` is its middle and `size` its width, in pixels."""

    kind: str
    colour: Colour
    x: float
    y: float
    size: float

    def outline(self) -> list[tuple[float, float]]:
        """Corners of the shape; of circles and rings nothing, they have none."""
        half = self.size / 2
        if self.kind == "square":
            half *= 0.9
            corners = [(-half, -half), (half, -half), (half, half), (-half, half)]
        elif self.kind == "triangle":
            corners = [(0.0, -half), (half, half), (-half, half)]
        elif self.kind == "diamond":
            corners = [(0.0, -half), (half, 0.0), (0.0, half), (-half, 0.0)]
        elif self.kind == "cross":
            arm = half / 3
            corners = [(-arm, -half), (arm, -half), (arm, -arm), (half, -arm), (half, arm), (arm, arm), (arm, half), (-arm, half),
                       (-arm, arm), (-half, arm), (-half, -arm), (-arm, -arm)]
        elif self.kind == "star":
            radii = [half if point % 2 == 0 else 0.4 * half for point in range(10)]
            turns = [point * math.pi / 5 for point in range(10)]
            corners = [(radius * math.sin(turn), -radius * math.cos(turn)) for turn, radius in zip(turns, radii, strict=True)]
        else:
            corners = []
        return [(self.x + dx, self.y + dy) for dx, dy in corners]


def scene(width: int, height: int, paper: Colour, shapes: Sequence[Shape]) -> Image.Image:
    """Shapes on plain paper, later ones on top."""
    image = Image.new("RGB", (width * _FINE, height * _FINE), paper)
    pen = ImageDraw.Draw(image)
    for shape in shapes:
        half = shape.size / 2
        box = [_FINE * value for value in (shape.x - half, shape.y - half, shape.x + half, shape.y + half)]
        if shape.kind == "circle":
            pen.ellipse(box, fill=shape.colour)
        elif shape.kind == "ring":
            pen.ellipse(box, outline=shape.colour, width=max(1, round(shape.size * _FINE / 5)))
        else:
            pen.polygon([(_FINE * x, _FINE * y) for x, y in shape.outline()], fill=shape.colour)
    return image.reduce(_FINE)


def line(text: str, size: tuple[int, int], *, scale: tuple[float, float], at: tuple[int, int] = (0, 0), ink: Colour = (0, 0, 0),
         paper: Colour = (255, 255, 255)) -> Image.Image:
    """A line of text, its top left corner `at`; each letter is 6 x 11 pixels times `scale`, which may be wider than high."""
    image = Image.new("RGB", size, paper)
    write(image, text, at, scale, ink)
    return image


def write(image: Image.Image, text: str, at: tuple[int, int], scale: tuple[float, float], ink: Colour) -> None:
    """Set text on a picture."""
    letters = getattr(ImageFont, "load_default_imagefont", ImageFont.load_default)()
    mask = Image.new("L", (_LETTER[0] * len(text), _LETTER[1]))
    ImageDraw.Draw(mask).text((0, 0), text, fill=255, font=letters)
    size = max(1, round(mask.width * scale[0])), max(1, round(mask.height * scale[1]))
    image.paste(ink, at, mask.resize(size, Image.Resampling.BICUBIC))


def bars(names: Sequence[str], values: Sequence[int], most: int, colours: Sequence[Colour]) -> Image.Image:
    """A bar chart with a scale from 0 to `most`; each bar has its name under it. 28 pixels for each bar, 112 high."""
    height, floor = 112, 92
    image = Image.new("RGB", (28 * (len(names) + 1), height), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    step = (floor - 8) / most
    for value in range(most + 1):
        y = round(floor - value * step)
        pen.line([(20, y), (image.width - 4, y)], fill=(225, 225, 225) if value else (0, 0, 0))
        write(image, str(value), (2, y - 6), (1.0, 1.0), (90, 90, 90))
    for place, (name, value, colour) in enumerate(zip(names, values, colours, strict=True)):
        left = 28 * (place + 1) - 4
        pen.rectangle([left, round(floor - value * step), left + 18, floor - 1], fill=colour)
        write(image, name, (left + 4, floor + 2), (1.5, 1.5), (0, 0, 0))
    return image


def svg(width: int, height: int, paper: Colour, shapes: Sequence[Shape]) -> str:
    """The same scene as SVG code, one shape on each line."""
    lines = [f'<svg width="{width}" height="{height}">', f'<rect width="{width}" height="{height}" fill="{_hex(paper)}"/>']
    for shape in shapes:
        if shape.kind == "circle":
            lines.append(f'<circle cx="{shape.x:g}" cy="{shape.y:g}" r="{shape.size / 2:g}" fill="{_hex(shape.colour)}"/>')
        elif shape.kind == "ring":
            stroke = shape.size / 5
            lines.append(f'<circle cx="{shape.x:g}" cy="{shape.y:g}" r="{(shape.size - stroke) / 2:g}" fill="none" '
                         f'stroke="{_hex(shape.colour)}" stroke-width="{stroke:g}"/>')
        else:
            points = " ".join(f"{round(x, 1):g},{round(y, 1):g}" for x, y in shape.outline())
            lines.append(f'<polygon points="{points}" fill="{_hex(shape.colour)}"/>')
    return "\n".join([*lines, "</svg>"])


def differs(one: Image.Image, other: Image.Image) -> bool:
    """Whether two pictures differ in size or in any pixel."""
    return one.size != other.size or ImageChops.difference(one.convert("RGB"), other.convert("RGB")).getbbox() is not None


def png(image: Image.Image) -> bytes:
    """A picture as the bytes of a PNG file."""
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
