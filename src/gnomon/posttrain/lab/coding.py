"""Coding tasks: a program of six statements, one worked example with the value before and after each, and one statement whose operator
is wrong.

Thought runs the program: a line's label, what it really gives, whether that is what the example says; where it is not, the statement is
written with the other operators. The answer names the line and its operator. The grade repairs the program and runs it on inputs that
nobody has seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from gnomon.agent.trajectory import Score
from gnomon.posttrain.lab.bench import Bench, Program
from gnomon.posttrain.lab.domain import Line, Puzzle, Said, thinking
from gnomon.posttrain.lab.words import EOS, LABELS, OPERATORS, Effort, calculated, drawn_sum, ids, words
from gnomon.posttrain.problem import Problem

LINES = LABELS[:6]


class Domain:
    """See the module."""

    name = "coding"

    def puzzle(self, rng: random.Random) -> Puzzle:
        """A program, its example, and the wrong statement, which the example shows up."""
        while True:
            state = start = rng.randrange(10)
            right = [(rng.choice(OPERATORS), rng.randrange(1, 10)) for _ in LINES]
            states = []
            for operator, number in right:
                state = calculated(state, operator, number)
                states.append(state)
            place = rng.randrange(len(LINES))
            before = states[place - 1] if place else start
            operator, number = right[place]
            wrong = rng.choice([other for other in OPERATORS if other != operator])
            given = [calculated(before, each, number) for each in OPERATORS]
            if given.count(states[place]) == 1:  # exactly one operator fits the example
                break
        written = [(wrong if i == place else each, n) for i, (each, n) in enumerate(right)]
        body: list[str] = []
        for label, (each, n), entered, left in zip(LINES, written, (start, *states), states, strict=False):
            body += [label, str(entered), each, str(n), str(left)]
        return Puzzle(domain=self.name, kind="repair", body=tuple(body), hidden={
            "right": tuple(right), "written": tuple(written), "place": place, "states": tuple(states), "start": start})

    def demonstrated(self, puzzle: Puzzle, effort: Effort, rng: random.Random) -> Line:
        """So many lines checked from the first on, by chance; a wrong one that was not reached is guessed."""
        return self._shown(Said(puzzle.prompt(effort)), puzzle, rng, 6 if rng.random() < 0.4 else rng.randrange(0, 7))

    def dense(self, rng: random.Random) -> Line:
        """Statements with what an example says of each, mostly untrue; then each checked by its label, the other operators tried."""
        said = Said(ids("<bos> <dense>"))
        lines: dict[str, tuple[int, str, int, int]] = {}
        for label in rng.sample(LABELS, 5):
            left, operator, right = drawn_sum(rng)
            shown = calculated(left, operator if rng.random() < 0.25 else rng.choice(OPERATORS), right)
            lines[label] = left, operator, right, shown
            said.say((label, str(left), operator, str(right), str(shown)), 0.0)
        said.say("<think>", 0.0)
        for label in rng.sample(list(lines), len(lines)):
            said.say(label, 0.0)
            _tried(said, *lines[label], 1.0)
        return said.line()

    def _shown(self, said: Said, puzzle: Puzzle, rng: random.Random, checks: int) -> Line:
        hidden, found = puzzle.hidden, ""
        states = (hidden["start"], *hidden["states"])
        for i in range(checks):
            operator, number = hidden["written"][i]
            said.say(LINES[i])
            found = _tried(said, states[i], operator, number, states[i + 1], 3.0)
            if found:
                break
        said.say("<answer>")
        if found:
            said.say((LINES[hidden["place"]], found), 3.0)
        else:
            guess = rng.randrange(checks, len(LINES)) if checks < len(LINES) else len(LINES) - 1
            said.say((LINES[guess], rng.choice([each for each in OPERATORS if each != hidden["written"][guess][0]])))
        said.say("<eos>")
        return said.line()

    def problem(self, puzzle: Puzzle, effort: Effort, name: str, bench: Bench) -> Problem:
        """Graded by running the repaired program and the right one in a sandbox; a budget counts all that is written."""
        right = puzzle.hidden["right"]

        def grade(sampled: tuple[int, ...], episode: Any) -> Score | Future[Score]:
            program = repaired(puzzle.hidden["written"], words(sampled[thinking(sampled):]))
            if program is None:
                return Score(reward=0.0, evidence=("the answer names no line and operator",))
            return bench.judge(program, right, lambda found, expected: Score(
                reward=float(found == expected), evidence=(f"gives {found}, right is {expected}",)))

        return Problem(id=name, prompt=puzzle.prompt(effort), domain=self.name, effort=effort, kind=puzzle.kind, grade=grade,
                       max_tokens=44, stop_ids=frozenset((EOS,)))


def _tried(said: Said, left: int, operator: str, right: int, shown: int, weight: float) -> str:
    """Say what a statement gives and whether that is what is shown; where it is not, the statement with other operators until one fits.
    Returns that one, empty where the statement is right or none fits."""
    for place, each in enumerate((operator, *(other for other in OPERATORS if other != operator))):
        value = calculated(left, each, right)
        if place:
            said.say((str(left), each, str(right)))
        said.say((str(value), "yes" if value == shown else "no"), weight)
        if value == shown:
            return each if place else ""
    return ""


def repaired(written: Program, answer: Sequence[str]) -> Program | None:
    """The program with the line replaced that the answer names; None for what is no answer."""
    if len(answer) != 4 or answer[0] != "<answer>" or answer[1] not in LINES or answer[2] not in OPERATORS or answer[3] != "<eos>":
        return None
    place = LINES.index(answer[1])
    return tuple((answer[2], number) if i == place else (operator, number) for i, (operator, number) in enumerate(written))
