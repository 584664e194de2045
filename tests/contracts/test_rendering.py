"""Pictures that other programs make of code: what they show, and that each is made once, whoever asks and however often."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from gnomon.data import pictures, rendering
from gnomon.data.images import RELEASED
from gnomon.data.picture_code import CHART, PAGE, RENDERED, write_chart, write_page
from gnomon.data.pictures import Pictures, PicturesConfig
from gnomon.data.rendering import Rendering, Renderings, missing
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.errors import ConfigError, DataError

HTML = '<!doctype html><body style="margin:0"><div style="width:20px;height:10px;background:#cc2828"></div>'
PLOT = """import matplotlib.pyplot as plt
plt.figure(figsize=(1, 0.5), dpi=100)
plt.axes((0, 0, 1, 1))
plt.axis("off")
plt.fill([0, 1, 1, 0], [0, 0, 1, 1], color="#cc2828")
plt.xlim(0, 2)
plt.ylim(0, 1)"""


def wanted(language: str) -> list[Rendering]:
    """Two pictures whose left part is red: 20 x 10 pixels of a page, half of a chart; the second is larger or longer."""
    if language == "html":
        return [Rendering(language="html", code=HTML + "<!-- two -->" * n, width=60, height=40 + 20 * n) for n in range(2)]
    return [Rendering(language="matplotlib", code=PLOT + "\n# two" * n, width=100, height=50) for n in range(2)]


def stream(number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=3, counter=[0, 0, 0, number]))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([f"{RENDERED[kind](stream(i)).answer}\n" for kind in RENDERED for i in range(20)], 400)


@pytest.mark.parametrize("language", ["html", "matplotlib"])
def test_a_picture_shows_its_code_and_is_made_once(language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = missing(language)
    if absent:
        pytest.skip(absent)
    made, (first, second) = Renderings(tmp_path / "kept"), wanted(language)
    made.make([first, second, first])
    assert made.has(first) and made.has(second) and len(list(made.folder.iterdir())) == 2
    for each in (first, second):
        picture = made.picture(each)
        red = np.abs(np.asarray(picture).astype(int) - (204, 40, 40)).max(-1) < 8
        box = (20, 10) if language == "html" else (each.width // 2, each.height)
        assert picture.size == (each.width, each.height)
        assert red[1 : box[1] - 1, 1 : box[0] - 1].all() and not red[:, box[0] + 1 :].any() and not red[box[1] + 1 :].any()
    monkeypatch.setattr(rendering, "_run", None)  # no program is started again
    assert Renderings(tmp_path / "kept").picture(first).tobytes() == made.picture(first).tobytes()


def test_charts_are_training_items(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the code, and the pictures of many samples come from one start of the program."""
    if missing("matplotlib"):
        pytest.skip(str(missing("matplotlib")))
    monkeypatch.setattr(pictures, "AHEAD", 6)
    config = PicturesConfig(kinds=("plot", "shape"), chat=0.0)
    source = Pictures(tokenizer, config, RELEASED, tmp_path)
    samples = [source.sample(number) for number in range(4)]
    plots = [sample for sample in samples if sample.shown.kind == "plot"]
    assert plots and len(list(tmp_path.iterdir())) > len(plots)
    monkeypatch.setattr(rendering, "_run", None)
    again = Pictures(tokenizer, config, RELEASED, tmp_path)
    for number, sample in enumerate(samples):
        other = again.sample(number)
        assert np.array_equal(sample.item.tokens, other.item.tokens)
        assert all(np.array_equal(a.pixels.patches, b.pixels.patches)
                   for a, b in zip(sample.item.images, other.item.images, strict=True))
    start, length = plots[0].answer
    assert tokenizer.decode(plots[0].item.tokens[start : start + length]).strip() == plots[0].shown.answer


@pytest.mark.parametrize(("write", "size"), [(write_page, PAGE), (write_chart, CHART)])
def test_equal_numbers_write_equal_code(write, size) -> None:
    codes = [write(stream(number)).parts[0] for number in (1, 1, 2)]
    assert codes[0] == codes[1] and codes[0].digest == codes[1].digest != codes[2].digest
    assert (codes[0].width, codes[0].height) == size


def test_what_cannot_be_made_is_said(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'page', which another program draws"):
        Pictures(tokenizer, PicturesConfig(kinds=("page",)), RELEASED)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="apt install chromium"):
        Renderings(tmp_path).make(wanted("html"))
    if not missing("matplotlib"):
        wrong = Rendering(language="matplotlib", code="raise ValueError('of this')", width=1, height=1)
        with pytest.raises(DataError, match=r"(?s)made no picture.*of this"):
            Renderings(tmp_path).make([wrong])
    assert os.listdir(tmp_path) == []
