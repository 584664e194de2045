"""The figures of the lab's report, each as inline SVG for the page and as PNG for everything else. Read next: `report.py`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from gnomon.posttrain.lab.findings import Findings
from gnomon.posttrain.lab.plan import expert_folder
from gnomon.posttrain.lab.recipe import LabRecipe
from gnomon.posttrain.lab.words import EFFORTS
from gnomon.train.canvas import ACCENT, FAINT, INK, STYLE, WARM, svg

COLOURS = {"low": "#5b8c5a", "high": ACCENT, "max": WARM}
DPI = 110
TITLES = (
    ("gate", "Does thinking help the cold start?", "Accuracy by how much was thought, before any reinforcement."),
    ("curves", "Learning curves of the experts", "Above: the share that is right. Below: tokens that count. One line for each seed."),
    ("efforts", "Tokens and accuracy", "Filled: experts. Open: the student. Grey: the cold start. Bars are 95 % intervals."),
    ("matrix", "Student ÷ teacher", "Score of the student as a share of its teacher's, cell by cell, the mean over seeds."),
    ("divergence", "The student comes closer", "Reverse divergence from the teachers, nats per token."),
    ("seesaw", "One model for all cells", "Mean score over cells, with 95 % intervals, one bar for each seed."),
    ("quantisation", "Training under quantisation", "Held-out loss by how experts were trained and how they are served."),
)
Picture = tuple[str, bytes]
"""As SVG and as PNG."""


def figures(recipe: LabRecipe, found: Sequence[Findings]) -> dict[str, Picture]:
    """All figures that there is something to draw for, by name."""
    makers: dict[str, Callable[[LabRecipe, Sequence[Findings]], Figure | None]] = {
        "gate": _gate, "curves": _curves, "efforts": _efforts, "matrix": _matrix, "divergence": _divergence, "seesaw": _seesaw,
        "quantisation": _quantisation}
    made = {}
    with matplotlib.rc_context(STYLE):
        for name, maker in makers.items():
            figure = maker(recipe, found) if found else None
            if figure is not None:
                buffer = io.BytesIO()
                figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
                made[name] = (svg(figure, f"lab-{name}"), buffer.getvalue())
    return made


def _panels(columns: int, rows: int = 1, height: float = 3.0) -> tuple[Figure, Any]:
    figure = Figure(figsize=(12.6, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _around(values: Sequence[float], intervals: Sequence[Sequence[float]]) -> list[list[float]]:
    """How far each interval reaches below and above its value."""
    return [[max(0.0, value - low) for value, (low, _) in zip(values, intervals, strict=True)],
            [max(0.0, high - value) for value, (_, high) in zip(values, intervals, strict=True)]]


def _gate(recipe: LabRecipe, found: Sequence[Findings]) -> Figure | None:
    known = [each for each in found if "gate" in each.done]
    if not known:
        return None
    figure, axes = _panels(len(recipe.domains))
    for place, domain in enumerate(recipe.domains):
        for each in known:
            gate = next(g for g in each.done["gate"]["gates"] if g["domain"] == domain.name)
            at = [(b["first"] + b["last"]) / 2 for b in gate["bins"]]
            shares = [b["accuracy"] for b in gate["bins"]]
            errors = _around(shares, [b["interval"] for b in gate["bins"]])
            axes[0][place].errorbar(at, shares, yerr=errors, color=ACCENT if gate["opens"] else WARM, marker="o", capsize=3,
                                    label=f"seed {each.seed}: {gate['gain']:+.2f}{'' if gate['opens'] else ', shut'}")
        axes[0][place].set(title=domain.name, xlabel="tokens that count", ylim=(-0.02, 1.02), ylabel="" if place else "share right")
        axes[0][place].legend(loc="upper left")
    return figure


def _curves(recipe: LabRecipe, found: Sequence[Findings]) -> Figure | None:
    figure, axes = _panels(len(recipe.domains), 2, 2.6)
    drawn = False
    for place, domain in enumerate(recipe.domains):
        for each in found:
            for effort in EFFORTS:
                curve = each.curve(expert_folder((domain.name, effort)))
                for row, key in enumerate(("accuracy", "spent")):
                    if curve:
                        drawn = True
                        label = effort if each is found[0] else None
                        axes[row][place].plot(curve["step"], curve[key], color=COLOURS[effort], label=label, linewidth=1.4)
        axes[0][place].set(title=domain.name, ylim=(-0.02, 1.02), ylabel="" if place else "share right")
        axes[1][place].set(xlabel="step", ylabel="" if place else "tokens that count")
        axes[1][place].set_ylim(bottom=0)
        axes[0][place].legend(loc="lower right") if axes[0][place].get_legend_handles_labels()[1] else None
    return figure if drawn else None


def _efforts(recipe: LabRecipe, found: Sequence[Findings]) -> Figure | None:
    figure, axes = _panels(len(recipe.domains), height=3.4)
    drawn = False
    for place, domain in enumerate(recipe.domains):
        for each in found:
            for effort in EFFORTS:
                for name, look in (("gate", {"color": FAINT, "marker": "s"}), ("teacher", {"color": COLOURS[effort], "marker": "o"}),
                                   ("student", {"color": COLOURS[effort], "marker": "o", "markerfacecolor": "white"})):
                    scores = each.scores(name, (domain.name, effort))
                    if scores is not None:
                        drawn = True
                        label = effort if name == "teacher" and each is found[0] else None
                        errors = _around([scores.accuracy], [scores.interval("right")])
                        axes[0][place].errorbar([scores.tokens], [scores.accuracy], yerr=errors, capsize=3, linestyle="none", label=label,
                                                **look)
        axes[0][place].set(title=domain.name, xlabel="mean tokens that count", ylim=(-0.02, 1.02), ylabel="" if place else "share right")
        axes[0][place].set_xlim(left=0)
        axes[0][place].legend(loc="upper left") if axes[0][place].get_legend_handles_labels()[1] else None
    return figure if drawn else None


def _matrix(recipe: LabRecipe, found: Sequence[Findings]) -> Figure | None:
    matrices = [each.matrix for each in found]
    if not any(matrices):
        return None
    names = [each.name for each in recipe.domains]
    figure = Figure(figsize=(5.6, 0.9 + 0.8 * len(names)), layout="constrained")
    axes = figure.subplots()
    values = [[_mean([m[n, e][0] for m in matrices if (n, e) in m]) for e in EFFORTS] for n in names]
    axes.imshow([[0.0 if v is None else v for v in row] for row in values], cmap="RdYlGn", vmin=0.5, vmax=1.2, aspect="auto")
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            spread = [m[names[i], EFFORTS[j]][0] for m in matrices if (names[i], EFFORTS[j]) in m]
            text = "shut" if value is None else f"{value:.0%}" + (f"\n{min(spread):.0%}–{max(spread):.0%}" if len(spread) > 1 else "")
            axes.text(j, i, text, ha="center", va="center", color=INK)
    axes.set_xticks(range(len(EFFORTS)), EFFORTS)
    axes.set_yticks(range(len(names)), names)
    axes.grid(False)
    return figure


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _divergence(recipe: LabRecipe, found: Sequence[Findings]) -> Figure | None:
    curves = {each.seed: each.curve("student") for each in found}
    if not any(curves.values()):
        return None
    figure, axes = _panels(1, height=2.6)
    for seed, curve in curves.items():
        if curve:
            axes[0][0].plot(curve["step"], [max(value, 1e-4) for value in curve["kl"]], label=f"seed {seed}", linewidth=1.4)
    axes[0][0].axhline(0.06, color=WARM, linestyle="--", linewidth=1)
    axes[0][0].set(xlabel="step", ylabel="nats per token", yscale="log")
    axes[0][0].legend()
    return figure


def _seesaw(recipe: LabRecipe, found: Sequence[Findings]) -> Figure | None:
    tables = {each.seed: {row["name"]: row for row in each.seesaw} for each in found}
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    if len(names) < 3:
        return None
    figure, axes = _panels(1, height=3.0)
    width = 0.8 / len(tables)
    for offset, (seed, table) in enumerate(tables.items()):
        at = [place + (offset - (len(tables) - 1) / 2) * width for place, name in enumerate(names) if name in table]
        rows = [table[name] for name in names if name in table]
        means = [row["mean"] for row in rows]
        errors = _around(means, [row["interval"] for row in rows])
        axes[0][0].bar(at, means, width * 0.9, yerr=errors, capsize=3, label=f"seed {seed}", color=(ACCENT, FAINT, WARM)[offset % 3])
    axes[0][0].set_xticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names])
    axes[0][0].set_ylabel("mean score")
    axes[0][0].legend() if len(tables) > 1 else None
    return figure


def _quantisation(recipe: LabRecipe, found: Sequence[Findings]) -> Figure | None:
    known = [each for each in found if "quantisation" in each.done]
    if not known:
        return None
    figure, axes = _panels(1, height=2.8)
    labels = [f"{row['trained']} → {row['served']}" for row in known[0].done["quantisation"]["rows"]]
    for each in known:
        rows = each.done["quantisation"]["rows"]
        axes[0][0].plot(range(len(rows)), [row["loss"] for row in rows], marker="o", linestyle="none", label=f"seed {each.seed}")
    axes[0][0].set_xticks(range(len(labels)), labels)
    axes[0][0].set_ylabel("held-out loss")
    axes[0][0].legend()
    return figure
