"""Pictures become patches by exact rules, and what is no picture is one clear error."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gnomon.data.images import RELEASED, ImageLimits, open_image, prepare, prepare_video
from gnomon.errors import ConfigError, DataError


def encoded(image: Image.Image, form: str = "PNG", **how: object) -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    image.save(file, form, **how)
    return file.getvalue()


@pytest.mark.parametrize(("width", "height", "tokens"), [
    (448, 448, 256), (4000, 3000, 15_444), (30, 16, 2), (1, 1, 1), (28, 28, 1), (29, 28, 2)])
def test_token_counts_of_the_release(width: int, height: int, tokens: int) -> None:
    assert RELEASED.tokens(width, height) == tokens


@given(width=st.integers(1, 30_000), height=st.integers(1, 30_000))
def test_no_size_breaks_the_limits(width: int, height: int) -> None:
    new = RELEASED.resized(width, height)
    rows, columns = RELEASED.grid(width, height)
    assert 1 <= new[0] <= min(width, 7168) and 1 <= new[1] <= min(height, 7168)
    assert rows % 2 == columns % 2 == 0 and (rows - 2) * 14 < new[1] <= rows * 14 and (columns - 2) * 14 < new[0] <= columns * 14
    slack = (1 + 1 / max(1, width // 14)) * (1 + 1 / max(1, height // 14))  # the release counts whole patches before it scales
    assert new[0] // 14 * (new[1] // 14) <= 65_536 * slack


def test_padding_is_black_and_values_are_centred() -> None:
    pixels = prepare(Image.new("RGB", (30, 16), (255, 255, 255)))
    assert (pixels.rows, pixels.columns, pixels.width, pixels.height, pixels.tokens) == (2, 4, 30, 16, 2)
    whole = pixels.patches.reshape(2, 4, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(28, 56, 3)
    assert (whole[:16, :30] == 1).all() and (whole[16:] == -1).all() and (whole[:, 30:] == -1).all()


def test_transparent_places_show_the_chessboard() -> None:
    pixels = prepare(Image.new("RGBA", (28, 28), (9, 9, 9, 0)))
    whole = pixels.patches.reshape(2, 2, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(28, 28, 3)
    white, gray = np.float32(1.0), np.float32((np.float32(180) / 255 - 0.5) / 0.5)
    assert whole[0, 0, 0] == whole[8, 8, 0] == whole[16, 0, 0] == white
    assert whole[0, 8, 0] == whole[8, 0, 0] == whole[7, 15, 2] == gray


def test_sixteen_bits_are_scaled_and_floats_clipped() -> None:
    deep = Image.fromarray(np.array([[0, 65_535], [32_768, 256]], np.uint16).repeat(14, 0).repeat(14, 1))
    values = prepare(deep).patches[:, 0, 0, 0]
    np.testing.assert_allclose((values + 1) / 2 * 255, [0, 255, 128, 1], atol=1e-4)
    assert (prepare(Image.new("F", (28, 28), 2.5)).patches == 1).all()


def test_of_an_animation_the_first_frame_and_as_the_camera_says() -> None:
    frames = [Image.new("RGB", (28, 28), colour) for colour in ("red", "blue")]
    shown = open_image(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert shown.convert("RGB").getpixel((3, 3)) == (255, 0, 0)
    turned = Image.new("RGB", (20, 10))
    meta = turned.getexif()
    meta[0x0112] = 6
    assert open_image(encoded(turned, "JPEG", exif=meta)).size == (10, 20)


def test_what_is_no_picture_is_one_error(tmp_path: object) -> None:
    png, jpeg = (encoded(Image.effect_noise((200, 200), 50).convert("RGB"), form) for form in ("PNG", "JPEG"))
    for data, words in ((b"", "no known"), (b"hello", "no known"), (png[: len(png) // 2], "damaged"), (jpeg[:1000], "damaged"),
                        (png[:60] + b"\0" * 40 + png[100:], "damaged")):
        with pytest.raises(DataError, match=words):
            open_image(data)
    with pytest.raises(DataError, match="does not exist"):
        open_image("no/such/file.png")


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    bomb = encoded(Image.new("1", (30_000, 30_000)))
    assert len(bomb) < 200_000
    with pytest.raises(DataError, match=r"268,435,456"):
        open_image(bomb)
    strip = open_image(encoded(Image.new("L", (20_000, 30))))
    assert strip.size == (20_000, 30) and prepare(strip).columns == 512


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_picture_or_one_error(data: bytes) -> None:
    for head in (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b"RIFF\x24\0\0\0WEBP", b"II*\0"):
        try:
            prepare(open_image(head + data))
        except DataError:
            continue


def test_a_video_is_cut_into_items_of_four_frames() -> None:
    frames = [Image.new("RGB", (56, 28), (value, 0, 0)) for value in range(0, 60, 10)]
    items = prepare_video(frames)
    assert [item.frames for item in items] == [4, 2]
    assert items[0].patches.shape == (4 * 2 * 4, 3, 14, 14) and items[0].tokens == 2
    with pytest.raises(DataError, match="several sizes"):
        prepare_video([frames[0], Image.new("RGB", (28, 28))])
    with pytest.raises(DataError, match="no frames"):
        prepare_video([])
    with pytest.raises(ConfigError, match="patch_size"):
        ImageLimits(patch_size=0)
