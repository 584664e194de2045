"""The figures of a run's report, as inline SVG: one function per question.

Read next: `report.py`, which puts them on the page.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from gnomon.train.canvas import ACCENT, FAINT, INK, STYLE, WARM, canvas, context_length, svg
from gnomon.train.evaluate import HeldOut
from gnomon.units import format_count

Rows = Sequence[dict[str, Any]]
"""Rows of `metrics.jsonl`."""

POINTS = 1500  # most points per curve: beyond that a page grows and shows nothing more


def _thin(rows: Rows) -> Rows:
    return rows[:: max(1, len(rows) // POINTS)]


def _smooth(values: np.ndarray) -> np.ndarray:
    """Exponential mean over about a fiftieth of the run but at least five steps, started without bias."""
    decay = 1.0 - 1.0 / max(5.0, len(values) / 50)
    mean, weight, out = 0.0, 0.0, np.empty(len(values))
    for index, value in enumerate(values):
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        out[index] = mean / weight
    return out


def _mark_stages(axes: Axes, rows: Rows) -> None:
    """A line where the context length changes, with the new length."""
    first = rows[0]["context"]
    changes = [(r["step"], r["context"]) for before, r in zip(rows, rows[1:], strict=False) if r["context"] != before["context"]]
    for step, context in [(rows[0]["step"], first), *changes] if changes else []:
        axes.axvline(step, color="#b9c2cc", linewidth=0.9, linestyle=":")
        _note(axes, f" {context_length(context)} ctx", (step, 1.0), va="bottom")


def _note(axes: Axes, text: str, place: tuple[float, float], **options: Any) -> None:
    """Small print at a data x and a share of the height."""
    axes.annotate(text, place, xycoords=("data", "axes fraction"), fontsize=8, color="#6b7783", **options)


def loss(rows: Rows) -> str:
    """Training loss by step, with held-out points where there are some."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(12.6, 3.6)
        steps, values = np.array([r["step"] for r in rows]), np.array([r["loss"] for r in rows])
        keep = slice(None, None, max(1, len(rows) // POINTS))
        axes.plot(steps[keep], values[keep], color=FAINT, linewidth=0.9, label="each step")
        axes.plot(steps[keep], _smooth(values)[keep], color=ACCENT, linewidth=2, label="smoothed")
        held = [(r["step"], r["held_out_loss"]) for r in rows if "held_out_loss" in r]
        if held:
            axes.plot(*zip(*held, strict=True), color=WARM, marker="o", markersize=4, linewidth=1.2, label="held out")
        axes.set(xlabel="optimiser step", ylabel="nats per token")
        axes.legend(loc="upper right")
        _mark_stages(axes, rows)
        return svg(figure, "loss")


def curve(rows: Rows, key: str, label: str, *, smooth: bool = False) -> str:
    """One metric by step."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas()
        steps, values = np.array([r["step"] for r in rows]), np.array([r[key] for r in rows], dtype=float)
        keep = slice(None, None, max(1, len(rows) // POINTS))
        axes.plot(steps[keep], values[keep], color=FAINT if smooth else ACCENT, linewidth=0.9 if smooth else 1.8)
        if smooth:
            axes.plot(steps[keep], _smooth(values)[keep], color=ACCENT, linewidth=1.8)
        axes.set(xlabel="optimiser step", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: format_count(v) if v >= 1000 else f"{v:g}"))
        _mark_stages(axes, rows)
        return svg(figure, key)


def balance(rows: Rows) -> str:
    """MaxVio of each layer with experts by step."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas()
        rows = _thin([r for r in rows if r["max_violation_by_layer"]])
        steps, layers = [r["step"] for r in rows], np.array([r["max_violation_by_layer"] for r in rows])
        colours = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.9, layers.shape[1]))
        for layer, colour in enumerate(colours):
            label = f"expert layer {layer + 1}" if layer in (0, layers.shape[1] - 1) else None
            axes.plot(steps, layers[:, layer], color=colour, linewidth=1.0, label=label)
        axes.set(xlabel="optimiser step", ylabel="MaxVio")
        axes.set_yscale("symlog", linthresh=0.5)
        axes.set_yticks([tick for tick in (0, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 20, 50) if tick <= 1.1 * layers.max()])
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.legend(loc="upper right")
        _mark_stages(axes, rows)
        return svg(figure, "balance")


def depth_reads(weights: Sequence[tuple[str, Sequence[float]]]) -> str:
    """What each sublayer reads: a row per read, a column per source, oldest first and the running sum last."""
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        widest = max(len(p) for _, p in weights)
        table = np.full((len(weights), widest), np.nan)
        for row, (_, p) in enumerate(weights):
            table[row, : len(p) - 1], table[row, -1] = p[:-1], p[-1]
        figure, axes = canvas(6.2, max(3.1, 0.17 * len(weights) + 0.9))
        image = axes.imshow(table, aspect="auto", cmap="magma_r", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xticks(range(widest), ["embedding", *(f"block {i}" for i in range(1, widest - 1)), "running sum"], rotation=30, ha="right")
        axes.set_yticks(range(len(weights)), [name for name, _ in weights], fontsize=7.5)
        if len(weights) * widest <= 400:
            for (row, column), value in np.ndenumerate(table):
                if not np.isnan(value):
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color="white" if value > 0.4 else INK)
        figure.colorbar(image, ax=axes, shrink=0.8, label="mean probability")
        return svg(figure, "depth")


def positions(results: Sequence[HeldOut], trained: int) -> str:
    """Held-out loss by position in the document, one curve per evaluated context length."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas()
        for index, result in enumerate(r for r in results if r.by_position):
            middle = [(low + high) / 2 for low, high, _, _ in result.by_position]
            colour = (ACCENT, WARM, "#4c8c4a", "#7b559c")[index % 4]
            label = f"documents of {context_length(result.context)} tokens"
            axes.plot(middle, [nats for _, _, nats, _ in result.by_position], marker="o", markersize=4, color=colour, label=label)
        axes.axvline(trained, color="#6b7783", linestyle=":", linewidth=1.2)
        _note(axes, " longest trained", (trained, 0.02), rotation=90, ha="right")
        axes.set(xlabel="position in the document", ylabel="nats per token")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: context_length(v)))
        axes.legend(loc="best")
        return svg(figure, "positions")


def distances(results: Sequence[HeldOut], trained: int) -> str:
    """Share of the pieces of evidence that are found by their distance in tokens, one curve per length of window."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas()
        asked = [result for result in results if result.distances]
        colours = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.9, max(1, len(asked))))
        for result, colour in zip(asked, colours, strict=False):
            middle = [(low + high) / 2 for low, high, _, _ in result.distances]
            axes.plot(middle, [100 * share for _, _, share, _ in result.distances], marker="o", markersize=4, color=colour,
                      label=f"windows of {context_length(result.context)}")
        axes.axvline(trained, color="#6b7783", linestyle=":", linewidth=1.2)
        axes.set(xlabel="tokens between evidence and answer", ylabel="% of pieces found", ylim=(-3, 103))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: context_length(v)))
        if asked:
            axes.legend(loc="best")
        return svg(figure, "distances")
