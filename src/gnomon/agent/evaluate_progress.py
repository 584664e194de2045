"""An evaluation while it runs: how many are done, the mean of each column so far, and who has been at it for longest.

In a terminal this moves; elsewhere there is a line for each attempt that ends. Read next: `evaluate_table.py`, the table at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gnomon.agent.evaluate import Planned
from gnomon.agent.evaluate_results import Column, Row
from gnomon.units import format_count, format_seconds

RUNNING = 6
"""At most so many running attempts are shown."""


def live(console: Console, shown: Callable[[], RenderableType], refresh_per_second: float) -> AbstractContextManager[object]:
    """What moves in a terminal while the block runs, and leaves it as it was; nothing elsewhere."""
    if not console.is_terminal:
        return nullcontext()
    return Live(get_renderable=shown, console=console, refresh_per_second=refresh_per_second, transient=True)


class Display:
    """A `Watch` for people; a context, so that the terminal is left as it was."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(TextColumn("attempts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
                                  TimeRemainingColumn(), console=console)
        self._bar = self._progress.add_task("attempts", total=None)
        self._rows: dict[Column, list[Row]] = {}
        self._running: dict[str, tuple[float, Planned]] = {}
        self._planned = self._done = 0
        self._live = live(console, self._shown, refresh_per_second=4)

    def __enter__(self) -> Self:
        """Begin to show."""
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the terminal as it was."""
        self._live.__exit__(kind, error, trace)

    def begins(self, planned: Sequence[Planned], finished: Sequence[Row]) -> None:
        """What there is to be, and what an earlier run finished."""
        self._planned, self._done = len(planned), len(finished)
        self._rows = {each.column: [] for each in planned}
        for row in finished:
            self._rows[row.column].append(row)
        self._progress.reset(self._bar, total=len(planned), completed=len(finished))
        kept = f", {len(finished)} of them finished earlier" if finished else ""
        self.console.print(Text(f"{len(planned)} attempts in {len(self._rows)} column{'s' * (len(self._rows) != 1)}{kept}"))

    def attempt_begins(self, planned: Planned) -> None:
        """One more runs."""
        self._running[planned.rollout.id] = (time.monotonic(), planned)

    def attempt_ends(self, planned: Planned, row: Row | None) -> None:
        """One less runs."""
        self._running.pop(planned.rollout.id, None)
        if row is None:
            return
        self._rows[planned.column].append(row)
        self._done += 1
        self._progress.advance(self._bar)
        if not self.console.is_terminal:
            said = "not scored: " + (row.error or "")[:200] if row.reward is None else f"reward {row.reward:g}"
            self.console.print(Text(f"{self._done}/{self._planned} {row.column.name}, {row.task}, attempt {row.sample}: {said} "
                                    f"({row.stop_reason}, {row.turns} turns, {format_seconds(row.seconds)})"), soft_wrap=True)

    def notice(self, text: str) -> None:
        """A line that stays."""
        self.console.print(Text(text, style="yellow"), soft_wrap=True)

    def _shown(self) -> RenderableType:
        means = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for name in ("policy · harness · effort", "reward so far", "scored", "excluded", "written"):
            means.add_column(name, justify="left" if not means.columns else "right")
        for column, rows in self._rows.items():
            rewards = [row.reward for row in rows if row.reward is not None]
            mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else ""
            means.add_row(Text(column.name), mean, str(len(rewards)), str(len(rows) - len(rewards)),
                          format_count(sum(row.output_tokens for row in rows)))
        now = time.monotonic()
        longest = sorted(self._running.values(), key=lambda pair: pair[0])
        lines = [Text(f"  {format_seconds(now - began):>8}  {each.rollout.task.id}  {each.column.name}", style="dim", no_wrap=True,
                      overflow="ellipsis") for began, each in longest[:RUNNING]]
        more = [Text(f"  and {len(longest) - RUNNING} more", style="dim")] if len(longest) > RUNNING else []
        return Group(means, *lines, *more, self._progress)
