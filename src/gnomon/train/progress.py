"""The live view of a run: a bar with loss, tokens per second, MaxVio and the time that is left."""

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SMOOTHING = 0.9  # of the loss that is shown; what is recorded is not smoothed


class Display:
    """A progress bar on stderr, or nothing when `show` is false. Use it as a context manager."""

    def __init__(self, steps: int, *, show: bool) -> None:
        columns = (BarColumn(bar_width=12), TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[line]}"),
                   TimeRemainingColumn(), TextColumn("left"))
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not show, speed_estimate_period=120)
        self._show, self._steps = show, steps
        self._task: Any = None
        self._loss: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """Print one line above the bar."""
        if self._show:
            self._progress.console.print(line, highlight=False, markup=False)

    def start(self, done: int) -> None:
        """Show the bar, `done` steps along."""
        self._progress.start()
        self._task = self._progress.add_task("training", total=self._steps, completed=done, line="")
        if done:
            self.say(f"resuming after step {done}")

    def step(self, row: Mapping[str, Any]) -> None:
        """One step's metrics."""
        self._loss = row["loss"] if self._loss is None else SMOOTHING * self._loss + (1 - SMOOTHING) * row["loss"]
        line = f"loss {self._loss:.3f} {row['tokens_per_second']:,.0f} tok/s MaxVio {row['max_violation']:.2f} ctx {row['context']}"
        self._progress.update(self._task, completed=row["step"], line=line)
