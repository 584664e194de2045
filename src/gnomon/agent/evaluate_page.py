"""An evaluation as pages that need no network: a table with intervals, a matrix of tasks and columns, and a page for each attempt.

`index.html` links to `pages/`; `pages.js` tells each page its neighbours. Everything that an agent wrote is text and never markup.
Read next: `evaluate_reading.py`, the page of one attempt.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

from gnomon import whole
from gnomon.agent import evaluate_lengths, evaluate_reading
from gnomon.agent.evaluate_intervals import Interval
from gnomon.agent.evaluate_reading import PAGE, escaped, look, shown
from gnomon.agent.evaluate_results import Results, Row, Summary
from gnomon.agent.task import Task
from gnomon.agent.trajectory import Trajectory
from gnomon.units import format_count, format_dollars, format_seconds

WIDTH, PAD = 190, 8  # of the plot of an interval, in pixels


def write_attempt(folder: Path, page: Path, row: Row, trajectory: Trajectory, task: Task) -> None:
    """The page of one attempt."""
    _put(folder / page, evaluate_reading.page(row, trajectory, task, "../" * (len(page.parts) - 1)))


def write(folder: Path, results: Results) -> Path:
    """`index.html` and `pages.js`; returns the former's path."""
    listed = [{"page": row.page, "task": row.task, "look": look(row.reward, row.error), "text": shown(row.reward),
               "title": f"{row.task} · {row.column.name} · {row.sample}"} for row in _ordered(results)]
    text = json.dumps(listed).replace("<", "\\u003c")
    _put(folder / "pages.js", f"window.ATTEMPTS = {text};\n")
    body = [f"<h1>Evaluation {escaped(folder.name)}</h1>", f"<p class=soft>{_words(results)}</p>", _tiles(results),
            *(f'<div class="card problem">{escaped(text)}</div>' for text in results.notices), "<h2>Columns</h2>", _columns(results),
            *_differences(results), *evaluate_lengths.section(results), *_errors(results), "<h2>Tasks</h2>", _matrix(results)]
    _put(folder / "index.html", PAGE.format(title=escaped(f"Evaluation {folder.name}"), root="", page="index.html", bar="",
                                            body="\n".join(body), script=evaluate_reading.script(), style=evaluate_reading.style()))
    return folder / "index.html"


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole.write(path, text.encode("utf-8", "replace"))


def _ordered(results: Results) -> list[Row]:
    place = {task: i for i, task in enumerate(results.tasks)}
    column = {each.column: i for i, each in enumerate(results.columns)}
    return sorted(results.rows, key=lambda row: (place.get(row.task, len(place)), column[row.column], row.sample))


def _words(results: Results) -> str:
    tasks, columns = len(results.tasks), len(results.columns)
    return (f"{tasks} task{'s' * (tasks != 1)}, {columns} column{'s' * (columns != 1)}. Intervals are of 95 % with the task as the unit. "
            "What failed by no fault of the policy has no score and is in no mean.")


def _tiles(results: Results) -> str:
    rows = results.rows
    excluded = sum(row.reward is None for row in rows)
    pairs = [("attempts finished", f"{len(rows):,} of {results.planned:,}"), ("scored", f"{len(rows) - excluded:,}"),
             ("excluded", f"{excluded:,}"), ("tokens written", format_count(sum(row.output_tokens for row in rows))),
             ("tokens read", format_count(sum(row.prompt_tokens for row in rows))),
             ("time of attempts", format_seconds(sum(row.seconds for row in rows)))]
    dollars = sum(row.dollars for row in rows)
    pairs += [("cost", format_dollars(dollars))] if dollars else []
    return '<div class="tiles">' + "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in pairs) + "</div>"


def _columns(results: Results) -> str:
    bounds = _bounds([each.reward for each in results.columns])
    several = any(each.scored > each.reward.tasks for each in results.columns)
    heads = ["policy · harness · effort", "reward", "95 % interval", _axis(bounds), "solved", *(["by some", "by every"] if several else []),
             "scored", "turns", "written", "read", "time"]
    priced = any(each.cost.dollars for each in results.columns)
    head = "".join(f"<th>{name}</th>" for name in [*heads, *(["cost"] if priced else [])])
    lines = "".join(f"<tr>{''.join(_cells(each, bounds, several, priced))}</tr>" for each in results.columns)
    return f'<div class="card"><table><tr>{head}</tr>{lines}</table></div>'


def _cells(each: Summary, bounds: tuple[float, float], several: bool, priced: bool) -> list[str]:
    cost, reward = each.cost, each.reward
    between = f"{reward.low:.2f} to {reward.high:.2f}" if reward.low is not None and reward.high is not None else "one task: none"
    return [f"<td>{value}</td>" for value in (
        escaped(each.column.name), "" if reward.mean is None else f"<b>{reward.mean:.3f}</b>", between if reward.mean is not None else "",
        _plot(reward, bounds), _share(each.solved.mean), *((_share(each.some), _share(each.every)) if several else ()),
        f"{each.scored:,} of {each.scored + each.excluded + each.missing:,}", f"{cost.turns:.1f}", format_count(cost.output_tokens),
        format_count(cost.prompt_tokens), format_seconds(cost.seconds), *((format_dollars(cost.dollars),) if priced else ()))]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _bounds(intervals: Sequence[Interval]) -> tuple[float, float]:
    values = [v for each in intervals for v in (each.mean, each.low, each.high) if v is not None]
    return min([0.0, *values]), max([1.0, *values])


def _place(value: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return PAD + (value - low) / (high - low) * (WIDTH - 2 * PAD)


def _axis(bounds: tuple[float, float]) -> str:
    ends = "".join(f'<text x="{_place(v, bounds):.1f}" y="12" text-anchor="middle" fill="currentColor" font-size="12">{v:g}</text>'
                   for v in sorted({bounds[0], bounds[1], *((0.0, 1.0) if bounds != (0.0, 1.0) else ())}))
    return f'<svg width="{WIDTH}" height="15" role="img" aria-label="axis">{ends}</svg>'


def _plot(reward: Interval, bounds: tuple[float, float]) -> str:
    if reward.mean is None:
        return ""
    grid = "".join(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="20" stroke="var(--line)"/>' for x in (_place(v, bounds) for v in bounds))
    band = ""
    if reward.low is not None and reward.high is not None:
        low, high = _place(reward.low, bounds), _place(reward.high, bounds)
        band = f'<line x1="{low:.1f}" x2="{high:.1f}" y1="10" y2="10" stroke="var(--accent)" stroke-width="2"/>' + "".join(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="6" y2="14" stroke="var(--accent)" stroke-width="2"/>' for x in (low, high))
    return (f'<svg class="plot" width="{WIDTH}" height="20" role="img" aria-label="interval">{grid}{band}'
            f'<circle cx="{_place(reward.mean, bounds):.1f}" cy="10" r="4.5" fill="var(--accent)"/></svg>')


def _differences(results: Results) -> list[str]:
    found = [(a, b, gain) for a, b, gain in results.differences if gain.mean is not None]
    if not found:
        return []
    lines = "".join(f"<tr><td>{escaped(b.name)}</td><td class=left>{escaped(a.name)}</td><td><b>{gain.mean:+.3f}</b></td>"
                    f"<td>{_between(gain)}</td><td>{gain.tasks:,}</td><td class=left>{verdict(gain)}</td></tr>" for a, b, gain in found)
    return ["<h2>Differences</h2>", "<div class=card><p class='soft small'>Task by task, over those that both have scored: how hard a "
            "task is cancels.</p><table><tr><th>column</th><th class=left>compared with</th><th>reward</th><th>95 % interval</th>"
            f"<th>tasks</th><th class=left></th></tr>{lines}</table></div>"]


def _between(gain: Interval) -> str:
    return "" if gain.low is None or gain.high is None else f"{gain.low:+.2f} to {gain.high:+.2f}"


def verdict(gain: Interval) -> str:
    """What a difference says, in words."""
    if gain.low is None or gain.high is None:
        return "one task says nothing about others"
    if gain.low == gain.high == 0:
        return "the same on every task"
    return "better" if gain.low > 0 else "worse" if gain.high < 0 else "may be chance"


def _errors(results: Results) -> list[str]:
    lines = "".join(f"<tr><td>{escaped(each.column.name)}</td><td>{count:,}</td><td class='left wrap'>{escaped(text)}</td></tr>"
                    for each in results.columns for text, count in sorted(each.errors.items(), key=lambda pair: -pair[1]))
    if not lines:
        return []
    return ["<h2>Excluded</h2>", "<div class='card problem'><p class='soft small'>Not scored: the machine, the endpoint, the harness or "
            "the verifier failed. The same command again begins them anew.</p><table><tr><th>column</th><th>attempts</th>"
            f"<th class=left>why</th></tr>{lines}</table></div>"]


def _matrix(results: Results) -> str:
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in _ordered(results):
        cells.setdefault((row.task, row.column.name), []).append(row)
    head = "".join(f"<th>{escaped(each.column.name)}</th>" for each in results.columns)
    lines = []
    for task in results.tasks:
        found = [cells.get((task, each.column.name), []) for each in results.columns]
        rewards = {row.reward for rows in found for row in rows if row.reward is not None}
        columns = "".join(f'<td><div class="cells">{"".join(map(_cell, rows)) or "<span class=soft>–</span>"}</div></td>' for rows in found)
        name, unequal = escaped(task), " data-unequal=1" if len(rewards) > 1 else ""
        lines.append(f'<tr data-task="{name}"{unequal}><td>{name}</td>{columns}</tr>')
    return ('<p><input id=search type=search placeholder="find a task" aria-label="find a task">'
            '<label><input id=unequal type=checkbox> only tasks whose rewards differ</label></p>'
            f'<div class="card"><table class="matrix"><tr><th>task</th>{head}</tr>{"".join(lines)}</table></div>')


def _cell(row: Row) -> str:
    title = f"{row.stop_reason} · {row.turns} turns · {format_seconds(row.seconds)}" + (f" · {row.error}" if row.error else "")
    return (f'<a class="cell {look(row.reward, row.error)}" href="{html.escape(row.page)}" title="{escaped(title[:300])}">'
            f"{shown(row.reward)}</a>")
