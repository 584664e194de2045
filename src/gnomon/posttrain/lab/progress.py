"""The lab while it runs: nine cells with what they have learnt so far, who works at what, and how long it may still take.

In a terminal this moves; elsewhere there is a line when a job begins or ends, and one a minute. Read next: `run.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gnomon.agent.evaluate_progress import live
from gnomon.posttrain.lab.plan import Job
from gnomon.units import format_count, format_seconds

QUIET_SECONDS = 60.0
TAIL_BYTES = 16_384
GUESS = {"cold start": 300.0, "gate": 30.0, "experts": 60.0, "student": 600.0, "export": 20.0, "see-saw": 900.0, "quantisation": 300.0}
"""Seconds of a job of which nothing is known yet."""


class Display:
    """What people see; a context, so that the terminal is left as it was."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._jobs: dict[str, Job] = {}
        self._done: dict[str, dict[str, Any]] = {}
        self._running: dict[str, float] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._root, self._seed, self._workers = Path(), 0, 1
        self._began = self._spoke = time.monotonic()
        self._live = live(console, self._shown, refresh_per_second=2)

    def __enter__(self) -> Self:
        """Begin to show."""
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the terminal as it was."""
        self._live.__exit__(kind, error, trace)

    def begins(self, seed: int, root: Path, jobs: Mapping[str, Job], done: Mapping[str, dict[str, Any]], workers: int) -> None:
        """A seed begins, or goes on."""
        self._seed, self._root, self._jobs, self._done, self._workers = seed, root, dict(jobs), dict(done), max(1, workers)
        self._running, self._rows, self._began = {}, {}, time.monotonic()
        kept = f", {len(done)} of them done earlier" if done else ""
        self.say(f"seed {seed}: {len(jobs)} jobs in {root}{kept}")

    def job_begins(self, job: Job) -> None:
        """A process takes a job."""
        self._running[job.name] = time.monotonic()
        if not self.console.is_terminal:
            self.say(f"{job.name} begins")

    def job_ends(self, job: Job, found: dict[str, Any], spoken: list[str]) -> None:
        """It is done."""
        self._running.pop(job.name, None)
        self._done[job.name] = found
        for line in spoken[-5:]:
            self.console.print(Text(f"  {job.name}: {line}", style="yellow"), soft_wrap=True)
        self.say(f"{job.name} is done in {format_seconds(found.get('cpu_seconds', 0.0))} of processor time{_outcome(found)}")

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(Text(line), soft_wrap=True)

    def look(self) -> None:
        """Read how far the running jobs are."""
        for name in self._running:
            self._rows[name] = progress(self._root / name)
        if not self.console.is_terminal and time.monotonic() - self._spoke > QUIET_SECONDS:
            self._spoke = time.monotonic()
            self.say(f"{', '.join(self._at_work(name) for name in self._running)}; about {format_seconds(self._left())} left")

    def _at_work(self, name: str) -> str:
        row, job = self._rows.get(name, {}), self._jobs[name]
        of = f" of {job.steps}" if job.steps else ""
        more = "".join(f", {label} {row[key]:.3g}" for key, label in (("accuracy", "accuracy"), ("kl", "divergence"), ("loss", "loss"))
                       if key in row)
        return f"{name} step {row.get('done', 0)}{of}{more}"

    def _left(self) -> float:
        """Seconds that may still pass: all that is left over the processes, or the longest chain of what waits for each other."""
        costs = {name: self._cost(job) for name, job in self._jobs.items()}
        ends: dict[str, float] = {}
        for name, job in self._jobs.items():  # each after those that it waits for
            ends[name] = costs[name] + max((ends[before] for before in job.after), default=0.0)
        return max(sum(costs.values()) / self._workers, max(ends.values(), default=0.0))

    def _cost(self, job: Job) -> float:
        if job.name in self._done:
            return 0.0
        done = [(self._jobs[name].stage, found["wall_seconds"]) for name, found in list(self._done.items())]
        known = [seconds for stage, seconds in done if stage == job.stage]
        whole = sum(known) / len(known) if known and job.stage != "cold start" else GUESS[job.stage]
        if job.stage == "see-saw" and job.name != "average":
            whole = sum(seconds for stage, seconds in done if stage in ("experts", "student")) or whole
        row = self._rows.get(job.name, {})
        if job.name in self._running and job.steps and row.get("done"):
            return max(0.0, (time.monotonic() - self._running[job.name])) / row["done"] * (job.steps - row["done"])
        begun = time.monotonic() - self._running[job.name] if job.name in self._running else 0.0
        return max(0.1 * whole, whole - begun)

    def _shown(self) -> RenderableType:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for name in ("cell", "expert", "accuracy", "in budget", "score", "tokens", "tau", "alarm"):
            table.add_column(name, justify="left" if name in ("cell", "expert", "alarm") else "right")
        for name, job in self._jobs.items():
            if job.cell is not None:
                table.add_row("/".join(job.cell), *self._cell(name, job))
        now = time.monotonic()
        lines = [Text(f"  {format_seconds(now - began):>8}  {self._at_work(name)}", style="dim", no_wrap=True, overflow="ellipsis")
                 for name, began in list(self._running.items())]
        tokens = sum(each.get("tokens", 0) for each in [*self._done.values(), *self._rows.values()])
        foot = (f"seed {self._seed}: {len(self._done)} of {len(self._jobs)} jobs, {format_count(tokens)} tokens, "
                f"{format_seconds(now - self._began)} so far, about {format_seconds(self._left())} left")
        return Group(table, *lines, Text(foot))

    def _cell(self, name: str, job: Job) -> tuple[str, ...]:
        if name in self._done:
            if self._done[name].get("refused"):
                return ("gate is shut", *[""] * 6)
            each = self._done[name]["cells"]["/".join(job.cell or ())]
            return ("done", f"{each['accuracy']:.2f}", f"{each['in_budget']:.2f}", f"{each['score']:.2f}", f"{each['tokens']:.1f}", "",
                    ", ".join(self._done[name]["alarms"]))
        row = self._rows.get(name)
        if name not in self._running or not row or "accuracy" not in row:
            return ("waits" if name not in self._running else "begins", *[""] * 6)
        tau = "" if row.get("tau") is None else f"{row['tau']:.2f}"
        return (f"{row['done']} of {job.steps}", f"{row['accuracy']:.2f}", f"{1 - row['over_budget']:.2f}", f"{row['score']:.2f}",
                f"{row['spent']:.1f}", tau, row.get("alarm", ""))


def _outcome(found: Mapping[str, Any]) -> str:
    cells = found.get("cells")
    if "shut" in found:
        return f": shut for {', '.join(found['shut'])}" if found["shut"] else ": open"
    if found.get("refused"):
        return ": its domain is left out"
    if not cells:
        return f", loss {found['loss']:.3f}" if "loss" in found else ""
    if len(cells) == 1:
        (each,) = cells.values()
        return f": accuracy {each['accuracy']:.2f}, within budget {each['score']:.2f}, {each['tokens']:.1f} tokens"
    return f": mean score {sum(each['score'] for each in cells.values()) / len(cells):.3f}"


def progress(folder: Path) -> dict[str, Any]:
    """How far a job is: the newest row of its newest run, `done` steps over all its runs, `tokens`."""
    newest: dict[str, Any] = {}
    done, tokens = 0, 0
    runs = [*folder.glob("metrics.jsonl"), *folder.glob("*/metrics.jsonl")]  # no deeper: checkpoints come and go while one looks
    for path in sorted(runs, key=lambda path: path.stat().st_mtime_ns):
        row = _last(path)
        if row:
            newest, done = row, done + row["step"]
            tokens += row.get("read_tokens", row.get("tokens", 0)) * row["step"]  # about: steps are alike
    return {**newest, "done": done, "tokens": tokens}


def _last(path: Path) -> dict[str, Any]:
    """The last whole row of a file of metrics."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        row: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):  # it is being written, or cut back
        return {}
    return row
