"""Rewards by length of the text, where tasks say how long theirs is: a picture of lines, and a table with the near and the far half.

Verifiers give `length`, `found_near` and `found_far` as metrics (`verifiers/scattered.py`). Read next: `evaluate_page.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

from gnomon.agent.evaluate_reading import escaped
from gnomon.agent.evaluate_results import Results, Row
from gnomon.units import format_count

WIDTH, HEIGHT, LEFT, BELOW = 560, 220, 46, 34
COLOURS = ("#2563a8", "#c2571a", "#3f8f3f", "#7b559c", "#8a6d1b", "#b03060")

Lengths = dict[str, dict[int, list[Row]]]
"""Scored attempts by column and length."""


def by_length(results: Results) -> Lengths:
    """The attempts that have a length, in the order of the columns; nothing where none has."""
    found: Lengths = {}
    for each in results.columns:
        rows: dict[int, list[Row]] = defaultdict(list)
        for row in results.rows:
            if row.column == each.column and row.reward is not None and "length" in row.metrics:
                rows[int(row.metrics["length"])].append(row)
        if rows:
            found[each.column.name] = dict(sorted(rows.items()))
    return found


def section(results: Results) -> list[str]:
    """HTML: a heading, the picture, the table; nothing where no task has a length."""
    found = by_length(results)
    return ["<h2>By length</h2>", f'<div class="card">{_picture(found)}</div>', _table(found)] if found else []


def _picture(found: Lengths) -> str:
    lengths = sorted({length for rows in found.values() for length in rows})
    low, high = math.log2(lengths[0]), math.log2(lengths[-1])
    inner = WIDTH - LEFT - 16

    def place(length: int, share: float) -> tuple[float, float]:
        along = (math.log2(length) - low) / (high - low) if high > low else 0.5
        return LEFT + along * inner, 12 + (1 - share) * (HEIGHT - BELOW - 12)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 18 * len(found)}" width="{WIDTH}" role="img" font-size="11" fill="currentColor">']
    for share in (0.0, 0.5, 1.0):
        y = place(lengths[0], share)[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" stroke-opacity="0.15"/>'
                     f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    parts += [f'<text x="{place(each, 0)[0]:.1f}" y="{HEIGHT - BELOW + 18}" text-anchor="middle">{format_count(each)}</text>'
              for each in lengths]
    for index, (name, rows) in enumerate(found.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = [place(length, _mean(each, "reward") or 0.0) for length, each in rows.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        parts.append(f'<text x="{LEFT}" y="{HEIGHT + 18 * index + 8}" fill="{colour}">{escaped(name)}</text>')
    return "".join([*parts, "</svg>"])


def _table(found: Lengths) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("column", "characters", "tasks", "all found", "near half", "far half"))
    lines = []
    for name, rows in found.items():
        for length, each in rows.items():
            shares = [_mean(each, what) for what in ("reward", "found_near", "found_far")]
            cells = [escaped(name), f"{length:,}", str(len({row.task for row in each})),
                     *("" if share is None else f"{share:.0%}" for share in shares)]
            lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _mean(rows: Sequence[Row], what: str) -> float | None:
    values = [row.reward if what == "reward" else row.metrics.get(what) for row in rows]
    known = [value for value in values if value is not None]
    return mean(known) if known else None
