"""What every page of figures shares: its frame, its tiles and cards, the style of its plots, a plot as inline SVG. Free of torch."""

import html
import io
import re
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GRID, ACCENT, WARM, FAINT = "#26323f", "#e3e7ec", "#2f6db5", "#c8612b", "#a9bdd6"
"""Text, lines of a grid, what matters, what contrasts with it, what stands behind."""

STYLE: Any = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9.5,
    "axes.edgecolor": "#9aa6b2", "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "grid.color": GRID, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "legend.frameon": False,
}
"""Matplotlib settings of every plot."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ --ink:#26323f; --soft:#6b7783; --line:#e3e7ec; --accent:#2f6db5; }}
* {{ box-sizing:border-box }}
body {{ margin:0; background:#f5f7f9; color:var(--ink); font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif }}
main {{ max-width:1180px; margin:0 auto; padding:32px 20px 60px }}
h1 {{ font-size:26px; margin:0 0 2px }} h2 {{ font-size:16px; margin:0 0 2px }}
p {{ margin:0; color:var(--soft) }}
.tiles {{ display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:12px; margin:22px 0 }}
.tile,.card {{ background:#fff; border:1px solid var(--line); border-radius:10px }} .tile {{ padding:12px 16px }}
.tile b {{ display:block; font-size:23px; font-weight:600 }} .tile span {{ color:var(--soft); font-size:13px }}
.grid {{ display:grid; grid-template-columns:repeat(auto-fit,minmax(440px,1fr)); gap:14px; align-items:start }}
.card {{ padding:16px 18px; overflow:hidden }} .wide {{ grid-column:1/-1 }} .card p {{ font-size:13px; margin-bottom:8px }}
pre {{ overflow:auto; font-size:12.5px; line-height:1.45; margin:10px 0 0 }} summary {{ cursor:pointer; font-weight:600 }}
table {{ border-collapse:collapse; width:100%; font-size:14px }}
td,th {{ padding:5px 8px; border-bottom:1px solid var(--line); text-align:right }}
td:first-child,th:first-child {{ text-align:left }}
@media (max-width:520px) {{ .grid {{ grid-template-columns:1fr }} }}
</style></head><body><main>
<h1>{title}</h1><p>{subtitle}</p>
<div class="tiles">{tiles}</div><div class="grid">{cards}</div></main></body></html>
"""
"""A page: format it with `title`, `subtitle`, `tiles` and `cards`, the first two escaped."""


def context_length(tokens: float) -> str:
    """As context lengths are written: 512, 8K, 1M, in powers of two."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens / size:g}{letter}"
    return f"{tokens:g}"


def canvas(width: float = 6.2, height: float = 3.1) -> tuple[Figure, Axes]:
    """A figure of so many inches with one pair of axes; call it inside `matplotlib.rc_context(STYLE)`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element whose ids are its own, so that several can share a page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    opening = r'<svg xmlns:xlink="http://www.w3.org/1999/xlink" \1 style="width:100%;height:auto">'
    return re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', opening, text, count=1)


def tile(name: str, value: str) -> str:
    """A figure in large print above its name."""
    return f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'


def card(title: str, text: str, body: str, *, wide: bool = False) -> str:
    """A box with a title, a line of explanation and a body of HTML."""
    return f'<section class="card{" wide" if wide else ""}"><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{body}</section>'
