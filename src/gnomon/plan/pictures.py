"""The planner's figures as inline SVG: roofline, map of walls, knob tornado, front of cost against speed.

Each takes plain numbers, so it can be drawn for anything. Read next: `page.py`, which puts them on a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from gnomon.train.canvas import ACCENT, FAINT, INK, STYLE, WARM, canvas, svg
from gnomon.units import format_count

WALLS = ("latency", "bandwidth", "compute", "communication", "capacity")
"""The walls in the order of their colours."""

COLOURS = {"latency": "#f0c05a", "bandwidth": "#2f6db5", "compute": "#4c8c4a", "communication": "#8d5fa8", "capacity": "#c4cad1"}
SOFT = "#6b7783"
LEAST_BAR = 5e-4  # smaller effects would be printed as 0.0 %


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A point of the roofline: FLOPs per byte that it moves, and the FLOP/s that it gets out of a device."""

    label: str
    intensity: float
    rate: float


def roofline(peaks: dict[str, float], bandwidth: float, marks: Sequence[Mark]) -> str:
    """One device: its memory slope, a roof per number format, and where the work lands below them (FLOP/s, B/s)."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(6.2, 3.9)
        xs = [mark.intensity for mark in marks] or [1.0]
        balance = max(peaks.values()) / bandwidth
        low, high = min(*xs, 1.0) / 2, max(*xs, balance) * 4
        grid = np.geomspace(low, high, 200)
        for rank, (name, peak) in enumerate(sorted(peaks.items(), key=lambda item: item[1])):
            top = rank == len(peaks) - 1
            axes.plot(grid, np.minimum(grid * bandwidth, peak), color=INK if top else FAINT, linewidth=1.6 if top else 1.2)
            axes.annotate(name, (high, peak), xytext=(-3, 3), textcoords="offset points", ha="right", color=INK, fontsize=8.5)
        axes.annotate("memory bandwidth", (low * 1.6, low * 1.6 * bandwidth), xytext=(0, 10), textcoords="offset points", color=SOFT,
                      fontsize=8, rotation=32)
        for mark in marks:
            axes.plot(mark.intensity, mark.rate, marker="o", markersize=5.5, color=WARM, linestyle="none")
            axes.annotate(mark.label, (mark.intensity, mark.rate), xytext=(5, -9), textcoords="offset points", fontsize=8, color=INK)
        axes.set(xlabel="FLOP per byte moved", ylabel="FLOP/s on one device")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _si(v)))
        return svg(figure, "roofline")


Axis = tuple[str, Sequence[float]]
"""A title, and the values at which a map was made, rising."""


def wall_map(rows: Sequence[Sequence[str]], x: Axis, y: Axis, here: tuple[float, float]) -> str:
    """Which wall binds, row by row from the smallest `y`; `here` marks the plan."""
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure, axes = canvas(6.2, 3.9)
        table = np.array([[WALLS.index(wall) for wall in row] for row in rows])
        axes.imshow(table, origin="lower", aspect="auto", cmap=ListedColormap([COLOURS[wall] for wall in WALLS]), vmin=-0.5,
                    vmax=len(WALLS) - 0.5, interpolation="nearest")
        axes.set_xticks(range(len(x[1])), [_size(v) for v in x[1]])
        axes.set_yticks(range(len(y[1])), [_size(v) for v in y[1]])
        axes.set(xlabel=x[0], ylabel=y[0])
        place = [float(np.interp(np.log(value), np.log(axis[1]), range(len(axis[1])))) for value, axis in zip(here, (x, y), strict=True)]
        axes.plot(*place, marker="D", markersize=7, color="white", markeredgecolor=INK, markeredgewidth=1.6, linestyle="none")
        used = [wall for wall in WALLS if any(wall in row for row in rows)]
        names = {"capacity": "does not fit"}
        axes.legend(handles=[Patch(color=COLOURS[wall], label=names.get(wall, wall)) for wall in used], loc="lower center",
                    bbox_to_anchor=(0.5, 1.0), ncols=len(used), handlelength=1.1, columnspacing=1.2)
        return svg(figure, "walls")


def shares(steps: Sequence[tuple[str, dict[str, float]]]) -> str:
    """What each kind of step waits for: one bar per step, its seconds by wall as shares of their sum."""
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure, axes = canvas(6.2, 0.75 + 0.5 * len(steps))
        for place, (_, parts) in enumerate(reversed(steps)):
            left, whole = 0.0, sum(parts.values())
            for wall, value in parts.items():
                width = value / whole
                axes.barh(place, width, left=left, height=0.62, color=COLOURS.get(wall, FAINT), edgecolor="white")
                if width > 0.04 + 0.0085 * len(wall):
                    ink = INK if wall in ("latency", "capacity") or wall not in COLOURS else "white"
                    axes.annotate(f"{wall}\n{width:.0%}", (left + width / 2, place), ha="center", va="center", fontsize=7.5, color=ink)
                left += width
        axes.set_yticks(range(len(steps)), [name for name, _ in reversed(steps)])
        axes.set_xlim(0, 1)
        axes.xaxis.set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        return svg(figure, "shares")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A knob's effect on the goal, as a share: `down` and `up` by one notch, nothing where it does not turn or would not fit; the ends of
    their bands."""

    label: str
    down: float | None
    up: float | None
    contested: bool = False
    down_band: tuple[float, float] | None = None
    up_band: tuple[float, float] | None = None


def tornado(bars: Sequence[Bar], title: str) -> str:
    """What a notch of each knob does to the goal, the widest first, with its 80 % band as a line; to the right is better."""
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        shown = sorted(bars, key=lambda bar: max(abs(bar.up or 0), abs(bar.down or 0)))[-14:]
        figure, axes = canvas(12.6, max(2.2, 0.32 * len(shown) + 1.0))
        reach = max((abs(v) for bar in shown for v in (bar.up, bar.down) if v is not None), default=0.1)
        for place, bar in enumerate(shown):
            for value, ends, colour, line in ((bar.down, bar.down_band, FAINT, 0.24), (bar.up, bar.up_band, ACCENT, -0.24)):
                if value is not None and abs(value) >= LEAST_BAR:
                    axes.barh(place, value, height=0.62, color=colour, hatch="///" if bar.contested else None, edgecolor="white")
                    if ends is not None:
                        axes.plot([max(ends[0], -2 * reach), min(ends[1], 2 * reach)], [place + line] * 2, color=INK, linewidth=0.8)
                    words = f"{100 * value:+.0f} %" if abs(value) >= 0.01 else f"{100 * value:+.1f} %"
                    axes.annotate(words, (value, place), xytext=(4 if value >= 0 else -4, 0), textcoords="offset points", va="center",
                                  ha="left" if value >= 0 else "right", fontsize=8, color=SOFT)
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks(range(len(shown)), [bar.label for bar in shown])
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(-1.25 * reach, 1.25 * reach)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:+.0f} %"))
        axes.set_xlabel(f"change of: {title} (right is better)")
        handles = [Patch(color=ACCENT, label="one notch up"), Patch(color=FAINT, label="one notch down")]
        if any(bar.contested for bar in shown):
            handles.append(Patch(facecolor="white", edgecolor=SOFT, hatch="///", label="effect on quality contested"))
        axes.legend(handles=handles, loc="lower right")
        return svg(figure, "tornado")


def front(points: Sequence[tuple[float, float, str]], chosen: tuple[float, float] | None, axes_titles: tuple[str, str]) -> str:
    """Plans by cost (x, lower is better) and speed (y, higher is better): all in grey, those that nothing beats joined and named."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(12.6, 4.2)
        best = pareto(points)
        axes.plot([p[0] for p in points], [p[1] for p in points], linestyle="none", marker="o", markersize=3, color=FAINT)
        axes.plot([p[0] for p in best], [p[1] for p in best], color=ACCENT, linewidth=1.8, marker="o", markersize=4.5)
        for x, y, label in _apart(best):
            axes.annotate(label, (x, y), xytext=(7, -9), textcoords="offset points", fontsize=7.5, color=INK)
        axes.margins(x=0.08)
        if chosen is not None:
            axes.plot(*chosen, marker="D", markersize=7, color="white", markeredgecolor=INK, markeredgewidth=1.6, linestyle="none")
        axes.set(xlabel=axes_titles[0], ylabel=axes_titles[1])
        for axis, low, high in ((axes.xaxis, min(p[0] for p in points), max(p[0] for p in points)),
                                (axes.yaxis, min(p[1] for p in points), max(p[1] for p in points))):
            if high > 8 * low > 0:
                (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                axis.set_minor_locator(NullLocator())
                axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}" if v < 1000 else format_count(v)))
        return svg(figure, "front")


def _apart(best: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """The points of a front whose names do not fall on each other: a twelfth of the front apart in one direction or the other."""
    logs = [(np.log(x), np.log(y)) for x, y, _ in best]
    reach = [max(1e-9, max(p[i] for p in logs) - min(p[i] for p in logs)) for i in (0, 1)]
    kept: list[int] = []
    for index, point in enumerate(logs):
        if all(max(abs(point[i] - logs[other][i]) / reach[i] for i in (0, 1)) > 1 / 12 for other in kept):
            kept.append(index)
    return [best[index] for index in kept]


def pareto(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """The points that no other beats in both: cheaper and faster; from the cheapest to the fastest."""
    best: list[tuple[float, float, str]] = []
    for point in sorted(points, key=lambda p: (p[0], -p[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best


def _si(value: float) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _size(value: float) -> str:
    return f"{value:g}" if value < 1000 else f"{value / 1024:g}K" if value < 1 << 20 and value % 1024 == 0 else f"{value / (1 << 20):g}M" \
        if value % (1 << 20) == 0 else format_count(value)
