"""Grading beside the sampling: threads that judge what has finished while the rest is still being sampled.

A grader that fails or hangs is the machine's fault and not the policy's: its rollout gets a score without a reward, which leaves it out of
loss and statistics, and the run goes on. Read next: `partial.py`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from gnomon.agent.trajectory import Score
from gnomon.errors import ConfigError, GnomonError, VerifierError
from gnomon.posttrain.problem import Episode
from gnomon.posttrain.rollout import Rollout

FAILURES = (GnomonError, ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What a grader may raise: it is somebody else's program, and its mistakes are not the run's."""

UNJUDGED = Score(reward=None, error="the problem has no grader; its group is judged as a whole, or not at all")

TICK = 1.0
"""Seconds between two looks at the clock. No look counts for more: a process that was stopped for an hour has waited for one of them."""

Key = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Job:
    """One rollout to judge; `started` is None while it waits for a thread, `waited` are the seconds that it was waited for since then.
    `promised`: its grader gave a future, and no thread is held. `given_up`: it hangs, and another thread is there for the rest."""

    rollout: Rollout
    world: Episode | None
    result: Future[Score]
    started: float | None = None
    waited: float = 0.0
    promised: bool = False
    given_up: bool = False


class Grading:
    """A pool of threads that grade. Use it as a context manager: at the end nothing is waited for."""

    def __init__(self, threads: int = 2, timeout_seconds: float = 60.0) -> None:
        if threads < 1 or timeout_seconds <= 0:
            raise ConfigError(f"'threads' {threads} must be at least 1 and 'timeout_seconds' {timeout_seconds} positive")
        self.timeout_seconds = timeout_seconds
        self._todo: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._jobs: dict[Key, _Job] = {}
        self._threads = 0
        for _ in range(threads):
            self._add_thread()

    def submit(self, rollout: Rollout, world: Episode | None) -> None:
        """Judge a finished rollout soon; its world is closed afterwards."""
        job = _Job(rollout, world, Future())
        self._jobs[rollout.group, rollout.member] = job
        if rollout.score is not None:  # nothing is left to judge
            job.result.set_result(rollout.score)
            _close(job)
        else:
            self._todo.put(job)

    def collect(self) -> list[Rollout]:
        """All that were submitted since the last call, graded, by group and member. Waits; one that hangs is given up."""
        jobs, self._jobs = self._jobs, {}
        return [job.rollout.graded(self._score(job, jobs.values())) for _, job in sorted(jobs.items(), key=lambda pair: pair[0])]

    def _score(self, job: _Job, jobs: Collection[_Job]) -> Score:
        passed = 0.0
        while not job.result.done() and not job.given_up:
            seconds, began = self._relieve(jobs, passed), time.monotonic()
            _wait(job.result, min(seconds, TICK))
            passed = min(TICK, time.monotonic() - began)
        if job.given_up:
            return Score(reward=None, error=f"the grader of problem {job.rollout.problem.id} ran past {self.timeout_seconds:g} s")
        error = job.result.exception()
        if error is not None:
            return Score(reward=None, error=f"the grader of problem {job.rollout.problem.id} failed: {type(error).__name__}: {error}")
        return job.result.result()

    def _relieve(self, jobs: Collection[_Job], passed: float) -> float:
        """Replace the threads of all jobs that hang: one that waits may have none left. `passed` are the seconds since the last look.
        Returns the seconds until the next may hang."""
        soonest = self.timeout_seconds
        for job in jobs:
            if job.started is None or job.result.done() or job.given_up:
                continue
            job.waited += min(passed, time.monotonic() - job.started)
            left = self.timeout_seconds - job.waited
            if left <= 0:
                job.given_up = True
                if not job.promised:
                    self._add_thread()
            else:
                soonest = min(soonest, left)
        return soonest

    def _add_thread(self) -> None:
        self._threads += 1
        threading.Thread(target=_work, args=(self._todo,), daemon=True, name="grader").start()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Tell the threads to end."""
        for _ in range(self._threads):
            self._todo.put(None)


class Ungraded:
    """In the place of `Grading` where nobody asks for rewards: distillation."""

    def __init__(self) -> None:
        self._finished: list[Rollout] = []

    def submit(self, rollout: Rollout, world: Episode | None) -> None:
        """Take it as it is; its world is closed."""
        if world is not None:
            world.close()
        self._finished.append(rollout)

    def collect(self) -> list[Rollout]:
        """All since the last call, by group and member."""
        finished, self._finished = self._finished, []
        return sorted(finished, key=lambda r: (r.group, r.member))


def _wait(result: Future[Score], seconds: float) -> None:
    done = threading.Event()
    result.add_done_callback(lambda _: done.set())
    done.wait(seconds)


def _work(todo: queue.SimpleQueue[_Job | None]) -> None:
    while (job := todo.get()) is not None:
        job.started = time.monotonic()
        try:
            grade = job.rollout.problem.grade
            score = UNJUDGED if grade is None else grade(job.rollout.sampled, job.world)
            if isinstance(score, Future):
                job.promised = True
                score.add_done_callback(partial(_kept, job))
                continue
            job.result.set_result(score)
        except FAILURES as error:
            job.result.set_exception(error)
        finally:
            if not job.promised:
                if not job.result.done():  # something that ends the thread, such as SystemExit
                    job.result.set_exception(VerifierError("the grader ended its thread"))
                _close(job)


def _kept(job: _Job, promise: Future[Score]) -> None:
    """The score that was promised is there, or the reason why there is none."""
    error = CancelledError("it was called off") if promise.cancelled() else promise.exception()
    if error is not None:
        job.result.set_exception(error)
    else:
        job.result.set_result(promise.result())
    _close(job)


def _close(job: _Job) -> None:
    """Close its world; one that cannot be closed must not end the thread that others wait for."""
    if job.world is not None:
        with suppress(*FAILURES):
            job.world.close()
