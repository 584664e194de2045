"""The lab from the first job to the report: who works at what, what is shown meanwhile, and what a kill leaves.

Jobs whose predecessors are done go to processes of one thread each. A process that outlives the one that people see ends itself.
Read next: `plan.py`, `work.py`, `report.py`.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from gnomon import config as toml
from gnomon.errors import ConfigError, TrainingError
from gnomon.posttrain.lab import plan, report, tasks
from gnomon.posttrain.lab.plan import Job
from gnomon.posttrain.lab.progress import Display
from gnomon.posttrain.lab.recipe import LabRecipe
from gnomon.posttrain.lab.work import do

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
LOOK_SECONDS = 0.5
PATIENCE = 5.0
"""Seconds that a process which leaves waits for what it has open."""
SPOKEN = "spoken.log"

_open: dict[str, tasks.Tasks] = {}
"""The tasks that this process has open, by name."""


def run(recipe: LabRecipe, display: Display, only: plan.Stage | None = None) -> Path:
    """All seeds, one after the other, then the report; returns its path. `only` stops after a stage and what it needs.

    Raises `ConfigError` for a folder of other settings, and what jobs raise: the same command again goes on.
    """
    _check(recipe)
    try:
        recipe.run.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"'run' is '{recipe.run}', which is a file; name another folder") from None
    (recipe.run / "recipe.toml").write_text(toml.to_toml(recipe), encoding="utf-8")
    with _workers(recipe.workers) as executor:
        for seed in recipe.seeds:
            _seed(recipe, seed, _wanted(recipe, only), executor, display)
            path = report.write(recipe)
    return path


def _check(recipe: LabRecipe) -> None:
    """What can be told before anything is computed: do the tasks have these domains and ids?"""
    opened = _tasks(recipe.tasks)
    unknown = [each.name for each in recipe.domains if each.name not in opened.domains]
    if unknown:
        raise ConfigError(f"'domains' names {', '.join(unknown)}, but '{recipe.tasks}' has {', '.join(opened.domains)}")
    highest = max(max(opened.problems(((each.name, "max"),), 0, "gate").problem(0).prompt) for each in recipe.domains)
    if highest >= recipe.model.vocab_size:
        raise ConfigError(f"'model.vocab_size' is {recipe.model.vocab_size}, but the tasks have an id {highest}; raise it")
    for seed in recipe.seeds:
        for job in plan.jobs(recipe).values():
            plan.check(seed_folder(recipe, seed), job)


def seed_folder(recipe: LabRecipe, seed: int) -> Path:
    """Where a seed's jobs are."""
    return recipe.run / f"seed-{seed}"


def _wanted(recipe: LabRecipe, only: plan.Stage | None) -> dict[str, Job]:
    """All jobs, or those of a stage and all that they wait for."""
    every = plan.jobs(recipe)
    names = {name for name, job in every.items() if only is None or job.stage == only}
    while more := {before for name in names for before in every[name].after} - names:
        names |= more
    return {name: job for name, job in every.items() if name in names}


def _seed(recipe: LabRecipe, seed: int, jobs: dict[str, Job], executor: Executor | None, display: Display) -> None:
    root = seed_folder(recipe, seed)
    earlier = {name: found for name, job in jobs.items() if (found := plan.result(root, job)) is not None}
    done, running = set(earlier), dict[Future[None], str]()
    display.begins(seed, root, jobs, earlier, recipe.workers)
    while len(done) < len(jobs):
        begun = done | set(running.values())
        ready = [job for name, job in jobs.items() if name not in begun and done.issuperset(job.after)]
        for job in ready[: max(1, recipe.workers) - len(running)]:
            display.job_begins(job)
            running[_submit(executor, recipe, seed, root, job)] = job.name
        finished, _ = wait(running, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
        for future in finished:
            name = running.pop(future)
            _result(future, root / name)
            done.add(name)
            display.job_ends(jobs[name], plan.result(root, jobs[name]) or {}, _spoken(root / name))
        display.look()


def _submit(executor: Executor | None, recipe: LabRecipe, seed: int, root: Path, job: Job) -> Future[None]:
    future: Future[None] = Future()
    if executor is not None:
        try:
            return executor.submit(_job, recipe, seed, root, job)
        except BrokenProcessPool as error:  # a process of another job was killed just now
            future.set_exception(error)
            return future
    _job(recipe, seed, root, job)
    future.set_result(None)
    return future


def _result(future: Future[None], folder: Path) -> None:
    try:
        future.result()
    except BrokenProcessPool:
        raise TrainingError(f"a process of the lab was killed (memory?) while {folder} was worked at; the same command again goes on from "
                            "the last checkpoints") from None


def _job(recipe: LabRecipe, seed: int, root: Path, job: Job) -> None:
    """In a worker: one job; what it says goes to a file in its folder."""
    folder = root / job.name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / SPOKEN).open("a", encoding="utf-8") as file:
        def say(line: str) -> None:
            file.write(line + "\n")
            file.flush()

        do(recipe, seed, root, job, _tasks(recipe.tasks), say)


def _spoken(folder: Path) -> list[str]:
    path = folder / SPOKEN
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _tasks(name: str) -> tasks.Tasks:
    """The tasks, opened once in each process."""
    if name not in _open:
        _open[name] = tasks.opened(name)
    return _open[name]


@contextmanager
def _workers(count: int) -> Iterator[Executor | None]:
    """Processes of one thread; none for 0. Whatever ends the block ends them."""
    before, others = {name: os.environ.get(name) for name in ONE_THREAD}, set(multiprocessing.active_children())
    os.environ.update(ONE_THREAD)
    executor = ProcessPoolExecutor(max_workers=count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin,
                                   initargs=(os.getpid(),)) if count else None
    try:
        yield executor
    finally:
        if executor is not None:
            own = set(multiprocessing.active_children()) - others
            for process in own:  # before the executor lets them go: one that ends by itself meanwhile could not close what it has open
                process.terminate()
            for process in own:
                process.join()
            executor.shutdown(wait=False, cancel_futures=True)
        _close()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _close() -> None:
    for opened in _open.values():
        opened.close()
    _open.clear()


def _begin(parent: int) -> None:
    """In a worker, first: leave when told to, or when nobody is there to work for."""
    def leave(*_: object) -> None:
        closing = threading.Thread(target=_close, daemon=True)
        closing.start()
        closing.join(PATIENCE)  # what hangs goes with the process
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        leave()

    faulthandler.register(signal.SIGUSR1)  # where does it hang? kill -USR1 tells
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=watch, daemon=True, name="parent").start()
