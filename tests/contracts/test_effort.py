"""Budgets of effort, and graders that fail or hang."""

import math
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnomon.agent.trajectory import Score
from gnomon.errors import ConfigError, DataError, SandboxError, VerifierError
from gnomon.posttrain import effort
from gnomon.posttrain.effort import Budgets, TauConfig
from gnomon.posttrain.grading import Grading
from gnomon.posttrain.problem import Grader, Problem
from gnomon.posttrain.rollout import Rollout, chosen
from gnomon.posttrain.watch import Watch


def graded(tokens: int, reward: float | None, *, kind: str = "sum", grade: Grader | None = None, number: int = 0) -> Rollout:
    """A finished rollout of that many tokens."""
    problem = Problem(id=f"p{number}", prompt=(1,), domain="general", effort="low", kind=kind,
                      grade=grade or (lambda ids, world: Score(reward=1)))
    score = None if reward is None else Score(reward=reward)
    return Rollout(problem=problem, group=number, member=0, seed=0, spans=(chosen((5,) * tokens, (-1.0,) * tokens, 0),), end="stop",
                   score=score)


def test_a_budget_is_the_mean_of_the_cold_start(tmp_path: Path) -> None:
    """By domain and kind; kept with the checkpoint it was measured on; a class without one is named."""
    found = effort.measure([graded(4, 1), graded(8, 0), graded(20, 1, kind="sort")], "abc")
    assert found.tokens == {("general", "sum"): 6.0, ("general", "sort"): 20.0}
    found.save(tmp_path / "budgets.json")
    assert Budgets.load(tmp_path / "budgets.json") == found
    with pytest.raises(ConfigError, match=r"kind 'other'.*general/sort, general/sum"):
        found.of(graded(1, 1, kind="other"))
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(DataError, match="no table of budgets"):
        Budgets.load(tmp_path / "bad.json")


def test_beyond_the_budget_the_reward_is_minus_one() -> None:
    """Right or not, and exactly beyond; a machine's failure is no reward at all."""
    budgets = effort.measure([graded(10, 1)])
    assert effort.reward(graded(15, 1.0), budgets, 1.5) == 1.0
    assert effort.reward(graded(16, 1.0), budgets, 1.5) == -1.0 == effort.reward(graded(16, 0.0), budgets, 1.5)
    assert effort.reward(graded(99, 1.0), budgets, math.inf) == 1.0 == effort.reward(graded(99, 1.0), None, 1.0)
    assert math.isnan(effort.reward(replace(graded(1, None), score=Score(reward=None, error="lost")), budgets, 1.0))


def test_tau_comes_down_in_a_line() -> None:
    """From start to target over its share of the steps."""
    tau = TauConfig(start=2.0, target=1.0, anneal=0.5)
    assert [tau.at(step, 20) for step in (0, 5, 10, 19)] == [2.0, 1.5, 1.0, 1.0]
    assert TauConfig().at(3, 10) == math.inf and TauConfig(target=0.7).at(0, 10) == 0.7
    with pytest.raises(ConfigError, match="without a 'target'"):
        TauConfig(start=1.0)


def test_graders_that_fail_or_hang_are_the_machines_fault() -> None:
    """Their rollouts get no reward, and the thread that is stuck is replaced."""
    forever = threading.Event()

    def hangs(ids: tuple[int, ...], world: Any) -> Score:
        forever.wait(120)
        return Score(reward=1.0)

    def fails(ids: tuple[int, ...], world: Any) -> Score:
        raise VerifierError("no")

    def ends(ids: tuple[int, ...], world: Any) -> Score:
        return Score(reward=math.nan)

    with Grading(1, timeout_seconds=0.3) as grading:
        for number, grade in enumerate((hangs, fails, ends, lambda ids, world: Score(reward=float(len(ids))))):
            grading.submit(graded(3, None, grade=grade, number=number), None)
        scores = [rollout.score for rollout in grading.collect()]
        forever.set()
    errors = [score.error or "" for score in scores if score]
    assert "ran past 0.3 s" in errors[0] and "VerifierError: no" in errors[1] and "no finite number" in errors[2]
    assert scores[3] == Score(reward=3.0) and grading.collect() == []


def test_a_promised_score_holds_no_thread() -> None:
    """One thread judges the next while a promise is open; one that is broken, called off or never kept is the machine's fault."""
    promises = [Future[Score]() for _ in range(4)]
    closed: list[int] = []

    class World:
        def __init__(self, number: int) -> None:
            self.number = number

        def close(self) -> None:
            closed.append(self.number)

    def keeps_all(ids: tuple[int, ...], world: Any) -> Score:
        assert closed == [], "a world is open for as long as its score is"
        promises[0].set_result(Score(reward=0.5))
        promises[1].set_exception(VerifierError("broken"))
        promises[2].cancel()
        return Score(reward=1.0)

    with Grading(1, timeout_seconds=1.0) as grading:
        for number, promise in enumerate(promises):
            grading.submit(graded(3, None, grade=lambda ids, world, promise=promise: promise, number=number), World(number))
        grading.submit(graded(3, None, grade=keeps_all, number=4), World(4))
        scores = [rollout.score or Score(reward=None) for rollout in grading.collect()]
        threads = grading._threads
    assert [score.reward for score in scores] == [0.5, None, None, None, 1.0]
    errors = [score.error or "" for score in scores]
    assert "VerifierError: broken" in errors[1] and "called off" in errors[2] and "ran past 1 s" in errors[3]
    assert sorted(closed) == [0, 1, 2, 4] and threads == 1


def test_one_that_waits_behind_others_that_hang_is_graded() -> None:
    """Whatever its place in the order in which scores are collected."""
    forever = threading.Event()

    def hangs(ids: tuple[int, ...], world: Any) -> Score:
        forever.wait(600)
        return Score(reward=1.0)

    done: list[Rollout] = []
    with Grading(1, timeout_seconds=0.3) as grading:
        grading.submit(graded(3, None, grade=hangs, number=9), None)
        grading.submit(graded(3, None, number=1), None)
        thread = threading.Thread(target=lambda: done.extend(grading.collect()), daemon=True)
        thread.start()
        thread.join(60)
        forever.set()
    assert [each.score.reward for each in done if each.score] == [1, None]


def test_a_world_that_cannot_be_closed_leaves_the_others_their_grader() -> None:
    """Its own rollout is graded too."""
    class Stuck:
        def close(self) -> None:
            raise SandboxError("lost")

    done: list[Rollout] = []
    with Grading(1, timeout_seconds=60) as grading:
        for number in range(2):
            grading.submit(graded(3, None, number=number), Stuck())  # type: ignore[arg-type]
        thread = threading.Thread(target=lambda: done.extend(grading.collect()), daemon=True)
        thread.start()
        thread.join(60)
    assert [each.score.reward for each in done if each.score] == [1, 1]


def test_alarms() -> None:
    """Said when they begin to last, kept through a resume."""
    said: list[str] = []
    watch = Watch(1e-3)
    row = {"step": 1, "over_budget": 0.6, "signal": 0.05, "gap": 0.0}
    assert watch.look(row, said.append) == {} == watch.look(row, said.append)
    again = Watch(1e-3)
    again.restore(watch.state())
    assert again.look(row, said.append) == {"alarm": "panic, collapse"} and len(said) == 2
    assert again.look(row | {"over_budget": 0.0}, said.append) == {"alarm": "collapse"} and len(said) == 2
    assert again.look(row | {"over_budget": 0.0, "signal": 1.0, "gap": 0.1}, said.append) == {"alarm": "gap"}
    assert "differ by 0.1" in said[-1]
