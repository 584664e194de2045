"""Kinds of pictures that are code made visible: the question is the code, pages as HTML and charts as Python (report §3.1).

Other programs draw them (`rendering.py`), so they are no part of the kinds that are taken by default. Every choice that the code makes is
to be seen in the picture. Read next: `picture_tasks.py` for the kinds that are drawn here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gnomon.data.drawing import COLOURS
from gnomon.data.long_tasks import RANGE, word
from gnomon.data.picture_tasks import KINDS, LETTERS, Random, Shown
from gnomon.data.rendering import Rendering

PAGE = (168, 140)
"""Width and height of a page in pixels: six by five fields of 28."""

CHART = (224, 168)
"""Width and height of a chart in pixels."""


def write_page(random: Random) -> Shown:
    """A small page of HTML: a heading, and below it a list, a table, a box of colour or a button."""
    parts = [f'<h1 style="color:{_hex(random)}">{_word(random)}</h1>']
    parts += [_BLOCKS[int(block)](random) for block in random.permutation(len(_BLOCKS))[: int(random.integers(1, 3))]]
    code = "\n".join(['<body style="margin:6px;font:12px sans-serif">', *parts, "</body>"])
    page = Rendering(language="html", code=f"<!doctype html>\n<style>h1{{font-size:16px;margin:0 0 6px}}</style>\n{code}", width=PAGE[0],
                     height=PAGE[1])
    return Shown(kind="page", parts=(page,), question="Write this page as HTML.", answer=code)


def write_chart(random: Random) -> Shown:
    """A chart by matplotlib: bars, a line or points, with a title."""
    count = int(random.integers(3, 6))
    values = [int(value) for value in random.integers(1, 10, size=count)]
    names = [LETTERS[index] for index in sorted(random.permutation(26)[:count].tolist())]
    draw = ("bar", "plot", "scatter")[int(random.integers(3))]
    code = "\n".join(["import matplotlib.pyplot as plt",
                      f"plt.figure(figsize=({CHART[0] / 100}, {CHART[1] / 100}), dpi=100, layout=\"tight\")",
                      f'plt.{draw}({names}, {values}, color="{_hex(random)}")', "plt.ylim(0, 10)", f'plt.title("{_word(random)}")'])
    chart = Rendering(language="matplotlib", code=code, width=CHART[0], height=CHART[1])
    return Shown(kind="plot", parts=(chart,), question="Write this chart with matplotlib.", answer=code)


def _list(random: Random) -> str:
    rows = "".join(f"<li>{_word(random)}</li>" for _ in range(int(random.integers(2, 4))))
    return f"<ul>{rows}</ul>" if random.random() < 0.5 else f"<ol>{rows}</ol>"


def _table(random: Random) -> str:
    rows = ["".join(f"<td>{int(number)}</td>" for number in row) for row in random.integers(1, 100, size=(2, 3))]
    return f'<table border="1">{"".join(f"<tr>{row}</tr>" for row in rows)}</table>'


def _box(random: Random) -> str:
    width, height = (10 * int(value) for value in random.integers(2, 13, size=1).tolist() + random.integers(1, 4, size=1).tolist())
    return f'<div style="width:{width}px;height:{height}px;background:{_hex(random)}"></div>'


def _button(random: Random) -> str:
    return f"<button>{_word(random)}</button>"


_BLOCKS = (_list, _table, _box, _button)


def _word(random: Random) -> str:
    return word(int(random.integers(RANGE)))


def _hex(random: Random) -> str:
    return "#{:02x}{:02x}{:02x}".format(*list(COLOURS.values())[int(random.integers(len(COLOURS)))])


RENDERED: Mapping[str, Callable[[Random], Shown]] = {"page": write_page, "plot": write_chart}
"""Kinds that another program draws, which not every machine has."""

ALL_KINDS: Mapping[str, Callable[[Random], Shown]] = {**KINDS, **RENDERED}
"""Every kind of picture by name."""
