"""Images to patches, exactly as the released preprocessing does it: shrink, flatten transparency, pad, normalise, cut (report §2.4).

An image is never enlarged. Resizing is Pillow's bicubic filter with antialiasing on 8-bit values; transparent places show a chessboard,
laid after resizing; padding to the right and below is black. Free of torch. Read next: `model/vision.py`.
"""

from __future__ import annotations

import io
import math
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from gnomon.config import setting
from gnomon.errors import ConfigError, DataError

MAX_PIXELS = 1 << 28
"""Pixels of a picture before it is shrunk; more are refused before anything is decoded."""

FRAMES = 4
"""Frames that the tower pools into one item."""

_SQUARE, _WHITE, _GRAY = 8, 255, 180  # the chessboard under transparent places, white at the top left
_SIXTEEN_BIT = ("I", "I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLimits:
    """How large an image may become, as released; videos have a limit for each frame."""

    patch_size: int = setting(14, "pixels per side of a patch")
    merge_size: int = setting(2, "patches per side that become one token")
    in_patch_limit: int = setting(65_536, "patches of an image at most")
    in_patch_limit_each_frame: int = setting(16_384, "patches of a frame at most")
    patch_limit_on_one_side: int = setting(512, "patches along one side at most")

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "in_patch_limit", "in_patch_limit_each_frame", "patch_limit_on_one_side"):
            if getattr(self, name) < 1:
                raise ConfigError(f"'{name}' is {getattr(self, name)}; it must be at least 1")

    def resized(self, width: int, height: int, limit: int | None = None) -> tuple[int, int]:
        """Width and height in pixels after shrinking, before padding."""
        limit = self.in_patch_limit if limit is None else limit
        patches = max(1.0, width // self.patch_size) * max(1.0, height // self.patch_size)
        side = self.patch_limit_on_one_side * self.patch_size
        scale = min(1.0, math.sqrt(limit / patches), side / width, side / height)
        return min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side)

    def grid(self, width: int, height: int, limit: int | None = None) -> tuple[int, int]:
        """Rows and columns of patches of an image of this size, padding included."""
        cell = self.patch_size * self.merge_size
        new_width, new_height = self.resized(width, height, limit)
        return -(-new_height // cell) * self.merge_size, -(-new_width // cell) * self.merge_size

    def tokens(self, width: int, height: int) -> int:
        """Tokens that an image of this size takes in a prompt, markers not counted."""
        rows, columns = self.grid(width, height)
        return rows * columns // self.merge_size**2

    def preprocessor_config(self) -> dict[str, dict[str, object]]:
        """What `preprocessor_config.json` beside a released checkpoint says of all this."""
        return {"media_proc_cfg": {
            "in_patch_limit": self.in_patch_limit, "patch_size": self.patch_size, "merge_kernel_size": self.merge_size,
            "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "patch_limit_on_one_side": self.patch_limit_on_one_side,
            "in_patch_limit_each_frame": self.in_patch_limit_each_frame, "fixed_output_tokens": None, "temporal_merge_kernel_size": FRAMES}}


RELEASED = ImageLimits()
"""The limits of the released model."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pixels:
    """One item for the tower: `patches` [frames·rows·columns, 3, P, P] in [-1, 1], row by row, and the size before anything was done."""

    patches: np.ndarray
    frames: int
    rows: int
    columns: int
    width: int
    height: int
    merge_size: int = 2

    @property
    def tokens(self) -> int:
        """Tokens that it becomes; frames are pooled."""
        return self.rows * self.columns // self.merge_size**2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageAt:
    """An image among tokens: its tokens `skip` … `skip + count - 1` stand from position `start` on. A cut may leave a part of them."""

    pixels: Pixels
    start: int
    count: int
    skip: int = 0

    def moved(self, by: int) -> ImageAt:
        """The same so many positions later."""
        return replace(self, start=self.start + by)

    def within(self, first: int, stop: int) -> ImageAt | None:
        """What of it lies in positions `first` … `stop - 1`, at its place among those; none if nothing does."""
        low, high = max(self.start, first), min(self.start + self.count, stop)
        if low >= high:
            return None
        return replace(self, start=low - first, count=high - low, skip=self.skip + low - self.start)


def open_image(source: bytes | str | Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode a picture; of an animation the first frame, turned as its camera says.

    Raises `DataError` for what is no picture, is cut off, or is larger than `max_pixels`, which is checked before decoding.
    """
    name = "the image" if isinstance(source, bytes) else str(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, which are checked below, and of small damage that hides no pixel
            image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
            width, height = image.size
            if width * height > max_pixels:
                raise DataError(f"{name} has {width} x {height} pixels, more than {max_pixels:,}; scale it down first")
            image.load()
            return ImageOps.exif_transpose(image)
    except Image.DecompressionBombError:
        raise DataError(f"{name} has more than {max_pixels:,} pixels; scale it down first") from None
    except UnidentifiedImageError:
        raise DataError(f"{name} is in no known picture format; give PNG, JPEG, WebP, GIF, BMP or TIFF") from None
    except FileNotFoundError:
        raise DataError(f"{name} does not exist") from None
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error) as error:
        raise DataError(f"{name} is damaged or cut off: {error}") from None


def prepare(image: Image.Image, limits: ImageLimits = RELEASED) -> Pixels:
    """The patches of an image."""
    return _item([image], limits, limits.in_patch_limit)


def prepare_video(frames: Sequence[Image.Image], limits: ImageLimits = RELEASED) -> list[Pixels]:
    """Items of up to four frames each, of frames that were sampled already.

    A choice of ours: the release says how the tower pools frames and how large each may be, but not how a video is cut into items.
    All frames must have one size; raises `DataError` otherwise.
    """
    if not frames:
        raise DataError("a video of no frames; give at least one")
    sizes = sorted({frame.size for frame in frames})
    if len(sizes) > 1:
        raise DataError(f"the frames of a video have several sizes ({sizes[0]} and {sizes[-1]}); scale them to one")
    return [_item(frames[start : start + FRAMES], limits, limits.in_patch_limit_each_frame) for start in range(0, len(frames), FRAMES)]


def _item(frames: Sequence[Image.Image], limits: ImageLimits, limit: int) -> Pixels:
    width, height = frames[0].size
    if width < 1 or height < 1:
        raise DataError(f"an image of {width} x {height} pixels shows nothing")
    size, (rows, columns), side = limits.resized(width, height, limit), limits.grid(width, height, limit), limits.patch_size
    cut = []
    for frame in frames:
        canvas = np.zeros((rows * side, columns * side, 3), np.uint8)
        canvas[: size[1], : size[0]] = _flattened(_eight_bit(frame).resize(size, Image.Resampling.BICUBIC))
        values = (canvas.astype(np.float32) / 255 - 0.5) / 0.5
        cut.append(values.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side))
    return Pixels(patches=np.concatenate(cut), frames=len(frames), rows=rows, columns=columns, width=width, height=height,
                  merge_size=limits.merge_size)


def _eight_bit(image: Image.Image) -> Image.Image:
    """Palettes become RGBA, as released; 16-bit and floating greys, of which the release says nothing, are scaled to 8 bits."""
    if image.mode == "P":
        return image.convert("RGBA")
    if image.mode in _SIXTEEN_BIT:
        return Image.fromarray((np.clip(np.asarray(image), 0, 65_535) // 256).astype(np.uint8))
    if image.mode == "F":
        return Image.fromarray((np.clip(np.nan_to_num(np.asarray(image)), 0, 1) * 255).astype(np.uint8))
    return image


def _flattened(image: Image.Image) -> np.ndarray:
    """RGB values [H, W, 3]; what is transparent shows the chessboard."""
    if image.mode == "RGB" or ("A" not in image.getbands() and "transparency" not in image.info):
        return np.asarray(image.convert("RGB"))
    pixels = np.asarray(image.convert("RGBA"))
    rows, columns = (np.arange(size) // _SQUARE for size in pixels.shape[:2])
    board = np.where((rows[:, None] + columns) % 2, _GRAY, _WHITE).astype(np.uint8)[:, :, None]
    share = pixels[:, :, 3:].astype(np.float32) / 255
    return (share * pixels[:, :, :3] + (1 - share) * board).astype(np.uint8)
