"""Worlds that answer while rollouts are sampled: all that are asked in one step answer one after the other, each within its time.

A world that cannot be opened, fails, or does not answer in time is the machine's fault and not the policy's: its rollout ends without a
reward, which leaves it out of loss and statistics, and the others go on. Read next: `policy.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gnomon.posttrain.grading import FAILURES, TICK
from gnomon.posttrain.problem import Episode

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """What became of a world, in words."""

    error: str


@dataclass(slots=True, eq=False)
class _Batch(Generic[T]):
    """Questions for one thread, and what came of those that are done, in their order. Once it is given up nothing is asked any more."""

    questions: list[Callable[[], T]]
    answers: list[T | Failed] = field(default_factory=list)
    given_up: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Ask all; what a world raises is its answer."""
        for question in self.questions:
            with self.lock:
                if self.given_up:
                    return
            try:
                answer: T | Failed = question()
            except FAILURES as error:
                answer = Failed(error=f"its world failed: {type(error).__name__}: {error}")
            with self.lock:
                if self.given_up:
                    return
                self.answers.append(answer)
                if len(self.answers) == len(self.questions):
                    self.over.set()

    def wait(self, seconds: float) -> None:
        """Return when all are done, or when one has taken longer than `seconds` and the rest is given up."""
        done, waited = 0, 0.0
        while not self.over.is_set():
            began = time.monotonic()
            self.over.wait(min(TICK, seconds))
            waited += min(TICK, time.monotonic() - began)
            with self.lock:
                if len(self.answers) > done:
                    done, waited = len(self.answers), 0.0
                elif waited >= seconds and not self.over.is_set():
                    self.given_up = True
                    return


def answers(questions: Sequence[Callable[[], T]], seconds: float) -> list[T | Failed]:
    """What each question brings. One that takes longer than `seconds` is given up with the thread it runs in; the rest get another."""
    found: list[T | Failed] = []
    while len(found) < len(questions):
        batch = _Batch(list(questions[len(found) :]))
        threading.Thread(target=batch.run, daemon=True, name="worlds").start()
        batch.wait(seconds)
        found += batch.answers
        if batch.given_up:
            found.append(Failed(error=f"its world did not answer for {seconds:g} s"))
    return found


def opened(begin: Callable[[], Episode]) -> Episode | Failed:
    """An open world, or why there is none."""
    try:
        return begin()
    except FAILURES as error:
        return Failed(error=f"its world could not be opened: {type(error).__name__}: {error}")


def closed(world: Episode | None) -> None:
    """Give back what a world holds; one that cannot be closed must not end the run."""
    if world is not None:
        with suppress(*FAILURES):
            world.close()
