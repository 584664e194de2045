"""One job of the lab, done. Runs in a worker process, or in the one that people started.

Every stage goes on inside itself by the checkpoints of its loop, so a killed job begins again where its last checkpoint stands.
Read next: `cold.py`, `reinforced.py`, `merged.py`, the stages themselves.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gnomon.posttrain.lab import cold, merged, plan, reinforced
from gnomon.posttrain.lab.desk import Desk
from gnomon.posttrain.lab.plan import Job
from gnomon.posttrain.lab.recipe import LabRecipe
from gnomon.posttrain.lab.tasks import Tasks

HEARTBEAT = 2.0
"""Seconds between two notes of the processor time that was used: so much at most is lost when a job is killed."""

STAGES: dict[str, Callable[[Desk], dict[str, Any]]] = {
    "cold start": cold.phase, "gate": cold.gate, "experts": reinforced.expert, "student": merged.student, "export": merged.export,
    "quantisation": cold.quantisation, "average": merged.average, "mixed": reinforced.mixed, "sequential": reinforced.sequential,
}


def do(recipe: LabRecipe, seed: int, root: Path, job: Job, tasks: Tasks, say: Callable[[str], None] = lambda _: None) -> None:
    """Do a job, or go on with it, and mark it done. Raises what its stage raises."""
    folder = root / job.name
    plan.check(root, job)
    plan.mark(folder, plan.BEGUN, {"digest": job.digest, "settings": dict(job.settings)})
    torch.set_num_threads(1)
    desk = Desk(recipe=recipe, seed=seed, root=root, job=job, tasks=tasks, say=say)
    with _metered(folder) as used:
        found = STAGES[job.name if job.stage == "see-saw" else job.stage](desk)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    plan.mark(folder, plan.DONE, {"digest": job.digest, "cpu_seconds": used()[0], "wall_seconds": used()[1], "peak_bytes": peak, **found})


@contextlib.contextmanager
def _metered(folder: Path) -> Iterator[Callable[[], tuple[float, float]]]:
    """Counts processor and wall seconds of a job over all its lives; gives a function that says them."""
    before = plan.read(folder, plan.METER) or {"cpu_seconds": 0.0, "wall_seconds": 0.0}
    cpu, wall, over = time.process_time(), time.monotonic(), threading.Event()

    def used() -> tuple[float, float]:
        return before["cpu_seconds"] + time.process_time() - cpu, before["wall_seconds"] + time.monotonic() - wall

    def note() -> None:
        plan.mark(folder, plan.METER, dict(zip(("cpu_seconds", "wall_seconds"), used(), strict=True)))

    def beat() -> None:
        while not over.wait(HEARTBEAT):
            with contextlib.suppress(OSError):  # a full disk is told by who needs it more
                note()

    thread = threading.Thread(target=beat, daemon=True, name="meter")
    thread.start()
    try:
        yield used
    finally:
        over.set()
        thread.join()
        note()
