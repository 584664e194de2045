"""Pictures that other programs make of code: pages of HTML in Chromium, charts by matplotlib (report §3.1). Both are optional.

Many are made in one start of the program. What was made is kept as a PNG file under the digest of its code, so each is made once, and a run
that is resumed sees the same pixels even where the program has been changed since. Read next: `picture_code.py`, which writes the code.
"""

from __future__ import annotations

import hashlib
import html
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image

from gnomon import whole
from gnomon.data.drawing import png
from gnomon.data.images import open_image
from gnomon.errors import ConfigError, DataError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

SECONDS = 300.0
"""A program that takes longer is ended; it makes some dozens of pictures in a few seconds."""

_FORMAT = 1  # of the digest
_MARGIN = 200  # rows under a sheet of pages: a browser may take some of a window for itself
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
          "--disable-lcd-text", "--font-render-hinting=none", "--force-device-scale-factor=1", "--host-resolver-rules=MAP * ~NOTFOUND",
          "--run-all-compositor-stages-before-draw", "--virtual-time-budget=1000",
          # frames are drawn by the page's own process and so together with it: those of other processes can be absent from the picture
          "--disable-features=IsolateSandboxedIframes", "--disable-site-isolation-trials")
_CHARTS = """
import json, sys
import matplotlib
matplotlib.use("agg")
from matplotlib import pyplot
for path, code in json.load(sys.stdin):
    pyplot.close("all")
    matplotlib.rcdefaults()
    exec(code, {})
    pyplot.gcf().savefig(path, format="png", dpi="figure")
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """A picture as the code that makes it, and its size in pixels."""

    language: Literal["html", "matplotlib"]
    code: str
    width: int
    height: int

    @property
    def digest(self) -> str:
        """What its file is called: content alone decides it."""
        return hashlib.sha256(json.dumps([_FORMAT, self.language, self.code, self.width, self.height]).encode()).hexdigest()


def missing(language: str) -> str | None:
    """What this machine lacks for a language, with a remedy; none if nothing."""
    if language == "html":
        return None if _browser() else "no Chromium is installed; apt install chromium"
    return None if importlib.util.find_spec("matplotlib") else "matplotlib is not installed; pip install matplotlib"


class Renderings:
    """Pictures of code, kept in a folder. Raises `DataError` where a program makes no picture, `ConfigError` where it is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, wanted: Rendering) -> bool:
        """Whether this picture is there already."""
        return self._path(wanted).is_file()

    def make(self, wanted: Sequence[Rendering]) -> None:
        """Make those that are not there yet, all of a language together."""
        for language in ("html", "matplotlib"):
            todo = {each.digest: each for each in wanted if each.language == language and not self.has(each)}
            if todo:
                absent = missing(language)
                if absent:
                    raise ConfigError(f"a picture is to be made of {language}, but {absent}")
                self.folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix="gnomon-") as folder:
                    made = (_pages if language == "html" else _charts)(list(todo.values()), Path(folder))
                for each, picture in zip(todo.values(), made, strict=True):
                    whole.write(self._path(each), png(picture))

    def picture(self, wanted: Rendering) -> Image.Image:
        """One picture, made if it is not there."""
        self.make([wanted])
        return open_image(self._path(wanted)).convert("RGB")

    def _path(self, wanted: Rendering) -> Path:
        return self.folder / f"{wanted.digest}.png"


def _browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def _pages(wanted: Sequence[Rendering], folder: Path) -> list[Image.Image]:
    """Pages one below the other on one sheet, each in a frame of its own that runs no scripts; the sheet is photographed and cut."""
    frames, top = [], 0
    for each in wanted:
        frames.append(f'<iframe sandbox scrolling="no" style="position:absolute;border:0;left:0;top:{top}px;width:{each.width}px;'
                      f'height:{each.height}px" srcdoc="{html.escape(each.code)}"></iframe>')
        top += each.height
    (folder / "sheet.html").write_text(f'<!doctype html><meta charset="utf-8"><body style="margin:0">{"".join(frames)}', encoding="utf-8")
    width = max(each.width for each in wanted)
    _run([str(_browser()), *_FLAGS, f"--user-data-dir={folder / 'profile'}", f"--screenshot={folder / 'sheet.png'}",
          f"--window-size={max(500, width)},{top + _MARGIN}", (folder / "sheet.html").as_uri()], None, folder / "sheet.png")
    sheet = open_image(folder / "sheet.png").convert("RGB")
    pages, top = [], 0
    for each in wanted:
        pages.append(sheet.crop((0, top, each.width, top + each.height)))
        top += each.height
    return pages


def _charts(wanted: Sequence[Rendering], folder: Path) -> list[Image.Image]:
    """Charts by one process of their own, which starts from matplotlib's own defaults for each."""
    paths = [folder / f"{number}.png" for number in range(len(wanted))]
    jobs = json.dumps([[str(path), each.code] for path, each in zip(paths, wanted, strict=True)])
    _run([sys.executable, "-c", _CHARTS], jobs, paths[-1])
    pictures = [open_image(path).convert("RGB") for path in paths]
    wrong = [picture.size for picture, each in zip(pictures, wanted, strict=True) if picture.size != (each.width, each.height)]
    if wrong:
        raise DataError(f"a chart came out as {wrong[0][0]} x {wrong[0][1]} pixels; let its code make the size that was said")
    return pictures


def _run(command: list[str], given: str | None, made: Path) -> None:
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DataError(f"{command[0]} made no picture within {SECONDS:g} s") from None
    if not made.is_file():
        raise DataError(f"{command[0]} made no picture: {done.stderr.strip()[-500:]}")
