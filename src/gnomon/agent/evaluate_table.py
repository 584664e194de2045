"""An evaluation in the terminal: a table of columns with intervals and costs, then differences, then what is excluded and why."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gnomon.agent.evaluate_intervals import Interval
from gnomon.agent.evaluate_page import verdict
from gnomon.agent.evaluate_results import Results, Summary
from gnomon.units import format_count, format_dollars, format_seconds


def show(results: Results, console: Console) -> None:
    """Print all of it."""
    console.print(table(results))
    for first, second, gain in results.differences:
        if gain.mean is not None:
            gained = f"{gain.mean:+.3f}{_between(gain)}, {gain.tasks} tasks: {verdict(gain)}"
            console.print(Text(f"{second.name} against {first.name}: {gained}"))
    for each in results.columns:
        for text, count in sorted(each.errors.items(), key=lambda pair: -pair[1])[:3]:
            console.print(Text(f"excluded, {count} of {each.column.name}: {text[:300]}", style="yellow"))


def table(results: Results) -> Table:
    """A line for each column. Rewards are means over tasks, turns, tokens and time those of a scored attempt."""
    priced = any(each.cost.dollars for each in results.columns)
    made = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    made.add_column("policy · harness · effort", overflow="fold", min_width=18)
    for name in ("reward (95 %)", "solved", "scored", "turns", "written", "time", *(("cost",) if priced else ())):
        made.add_column(name, justify="right", no_wrap=True)
    for each in results.columns:
        made.add_row(*_line(each, priced))
    return made


def _line(each: Summary, priced: bool) -> list[Text]:
    cost, reward = each.cost, each.reward
    value = "none" if reward.mean is None else f"{reward.mean:.3f}{_between(reward, sign=False)}"
    texts = [each.column.name, value, "" if each.solved.mean is None else f"{each.solved.mean:.0%}",
             f"{each.scored} of {each.scored + each.excluded + each.missing}", f"{cost.turns:.1f}", format_count(cost.output_tokens),
             format_seconds(cost.seconds), *((format_dollars(cost.dollars),) if priced else ())]
    return [Text(text, style="bold" if place == 1 else "") for place, text in enumerate(texts)]


def _between(found: Interval, *, sign: bool = True) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" ({found.low:+.2f} to {found.high:+.2f})" if sign else f" ({found.low:.2f} to {found.high:.2f})"
