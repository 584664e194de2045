"""Tables of sandboxes, backends and images for the terminal, and the same as JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.sandbox import owners, trees
from gnomon.sandbox.images import Image
from gnomon.sandbox.layers import Collected
from gnomon.sandbox.open import Verdict
from gnomon.sandbox.reaper import Swept
from gnomon.sandbox.registry import Record
from gnomon.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]


def say(text: str) -> None:
    """One plain line on standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show(table: Table, rows: Sequence[Row], as_json: bool) -> None:
    """A table, or its rows as JSON."""
    if as_json:
        say(json.dumps(rows, indent=2, default=lambda value: sorted(value) if isinstance(value, frozenset) else str(value)))
        return
    from rich.console import Console

    Console(highlight=False).print(table)


def row(record: Record, dead: str | None) -> Row:
    """What `ls` says of a sandbox."""
    left = None if record.deadline is None else max(0.0, record.deadline - owners.now())
    return {
        "id": record.id, "state": "dead" if dead else record.state, "age_seconds": round(record.age_seconds, 1),
        "seconds_left": None if left is None else round(left, 1), "memory_bytes": None if dead else memory(record), "image": record.image,
        "backend": record.backend, "owner_pid": record.owner.pid, "owner": dead or _name(record.owner.pid),
        "metadata": dict(record.metadata),
    }


def memory(record: Record) -> int | None:
    """Bytes that the processes of a sandbox take, shared ones in shares; `None` where the kernel tells nobody."""
    waiting = [pid for pid, start in record.traces.processes if owners.start_ticks(pid) == start]
    if not waiting:
        return None
    total, seen = 0, set(waiting)
    while waiting:
        pid = waiting.pop()
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
            for task in Path(f"/proc/{pid}/task").iterdir():
                below = {int(child) for child in (task / "children").read_text(encoding="ascii").split()} - seen
                seen |= below
                waiting += below
        except OSError:
            continue  # it has just ended, or is another user's
    return total or None


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    words = [Path(words[0]).name, *words[1:]] if words and words[0] else words
    return " ".join(words).strip()[:40]


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), title=title or None, title_justify="left")
    for column in columns:
        right = column in ("age", "left", "memory", "size", "layers")
        table.add_column(column, justify="right" if right else "left", overflow="fold" if column in ("id", "name") else "ellipsis")
    return table


def sandboxes(rows: Sequence[Row]) -> Table:
    """The table of `ls`."""
    table = _table("", "id", "state", "age", "left", "memory", "image", "backend", "owner")
    colours = {"running": "green", "paused": "yellow", "hibernated": "blue", "dead": "red"}
    for item in rows:
        colour = colours.get(item["state"], "default")
        left, used = item["seconds_left"], item["memory_bytes"]
        table.add_row(item["id"], f"[{colour}]{item['state']}[/]", format_seconds(item["age_seconds"]),
                      "–" if left is None else format_seconds(left), "–" if used is None else format_bytes(used), item["image"],
                      item["backend"], f"{item['owner_pid']} {item['owner']}")
    return table


def backends(verdicts: Sequence[Verdict]) -> Table:
    """The table of `probe`: those that work first, each with what it can do, what it does not hold, and what else there is to know."""
    from rich.markup import escape

    table = _table("", "backend", "here")
    table.columns[1].overflow = "fold"
    for verdict in sorted(verdicts, key=lambda verdict: verdict.capabilities is None):
        found = verdict.capabilities
        if found is None:
            table.add_row(verdict.name, f"[red]does not work[/]: {escape(verdict.reason.removeprefix(verdict.name + ': '))}")
            continue
        kept = [word for word, has in (("files", found.snapshot_files), ("memory", found.snapshot_memory)) if has]
        lines = [
            f"[green]works[/], {found.isolation} isolation; {'as an ordinary user' if found.rootless else 'as root'}",
            f"pauses: {', '.join(sorted(found.pause))}; snapshots: {', '.join(kept)}; forks: {'running' if found.live_fork else 'files'}; "
            f"network: {'allowlist' if found.network else 'none'}",
            *([f"does not hold: {', '.join(sorted(found.unenforced))}"] if found.unenforced else []),
            *(f"note: {escape(note)}" for note in found.notes),
        ]
        table.add_row(verdict.name, "\n".join(lines))
    return table


def image_row(image: Image) -> Row:
    """What `images` says of one."""
    made = image.snapshot.created_seconds if image.snapshot else None
    return {
        "name": image.name, "kind": "snapshot" if image.snapshot else "image", "layers": len(image.layers), "on_host": image.host,
        "bytes": sum(trees.measure(layer) for layer in image.layers if layer.is_dir()), "memory": image.memory is not None,
        "parent": image.snapshot.parent if image.snapshot else None, "age_seconds": None if made is None else round(time.time() - made, 1),
    }


def images(rows: Sequence[Row]) -> Table:
    """The table of `images`."""
    table = _table("", "name", "kind", "layers", "size", "age", "parent")
    table.add_row("host", "this machine's /usr", "–", "–", "–", "")
    for item in rows:
        kind = item["kind"] + (" with memory" if item["memory"] else "") + (" on host" if item["on_host"] else "")
        age = "–" if item["age_seconds"] is None else format_seconds(max(0.0, item["age_seconds"]))
        table.add_row(item["name"], kind, str(item["layers"]), format_bytes(item["bytes"]), age, item["parent"] or "")
    return table


def swept(done: Swept, collected: Collected) -> None:
    """What `gc` did."""
    for id, why in done.ended:
        say(f"ended {id}: {why}")
    say(f"{len(done.ended)} sandboxes ended; {collected.layers} layers, {collected.scratch} scratch folders and {collected.records} build "
        f"results removed, {format_bytes(collected.bytes)} given back")
