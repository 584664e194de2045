"""What a domain of the lab is: problems, honest demonstrations of mixed length, a world that answers, a grade of what is left at the end.

Demonstrations have their length from chance, never from the effort that the prompt states: how long to think is left to reinforcement
learning. Each domain also has dense lines, on which the skills are learnt that thinking stands on. Read next: `general.py`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gnomon.posttrain.lab.bench import Bench
from gnomon.posttrain.lab.words import ANSWER, BOS, Effort, ids
from gnomon.posttrain.problem import Problem

KINDS = ("biggest", "smallest", "holds")
"""What may be asked of labelled digits: the label of the biggest, of the smallest, or of a digit that is named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Puzzle:
    """One problem. `body` are the words between the tags and the model's first; `kind` groups problems that need alike much;
    `hidden` is what only the world and the grade know."""

    domain: str
    kind: str
    body: tuple[str, ...]
    hidden: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, effort: Effort) -> tuple[int, ...]:
        """The ids that a rollout begins with; the effort is stated in them."""
        return (BOS, *ids((self.domain, effort, *self.body, "<think>")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A text to learn from: ids, and for each how much its prediction weighs, 0 for what a prompt or the world says."""

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]


class Said:
    """A line while it is written."""

    def __init__(self, given: Sequence[int] = ()) -> None:
        self.token_ids, self.weights = list(given), [0.0] * len(given)

    def say(self, text: str | Sequence[str], weight: float = 1.0) -> None:
        """Words that the model should learn to write; `weight` 0: words that it is told."""
        new = ids(text)
        self.token_ids += new
        self.weights += [weight] * len(new)

    def judge(self, puzzle: Puzzle, values: Mapping[str, str], new: str, best: str) -> str:
        """Say what `new` is worth beside the `best` so far (empty: none yet): the better of the two with its digit, or, where one is
        looked for, whether it is that one. Returns the best then."""
        if puzzle.kind == "holds":
            found = new == puzzle.hidden["target"]
            self.say("yes" if found else "no", 3.0)
            return new if found else best
        if not best or better(puzzle.kind, values[new], values[best]):
            best = new
        self.say((best, values[best]), 3.0)
        return best

    def line(self) -> Line:
        """What was written."""
        return Line(token_ids=tuple(self.token_ids), weights=tuple(self.weights))


class Domain(Protocol):
    """One of the lab's domains."""

    name: str

    def puzzle(self, rng: random.Random) -> Puzzle:
        """A problem from chance."""
        ...

    def demonstrated(self, puzzle: Puzzle, effort: Effort, rng: random.Random) -> Line:
        """Prompt and a solution in a style from chance."""
        ...

    def dense(self, rng: random.Random) -> Line:
        """A line of small facts, each of them supervised."""
        ...

    def problem(self, puzzle: Puzzle, effort: Effort, name: str, bench: Bench) -> Problem:
        """The puzzle as rollouts take it; `bench` runs programs where the domain has any."""
        ...


def thinking(sampled: Sequence[int]) -> int:
    """How many ids were thought before the answer begins; all where it never does."""
    return list(sampled).index(ANSWER) if ANSWER in sampled else len(sampled)


def better(kind: str, new: str, old: str) -> bool:
    """Whether a digit is to be preferred."""
    return int(new) > int(old) if kind == "biggest" else int(new) < int(old)


def wanted(kind: str, values: Mapping[str, str], rng: random.Random) -> tuple[tuple[str, ...], str]:
    """The words that ask for one of some labelled digits, and its label."""
    if kind == "holds":
        target = rng.choice(list(values))
        return (kind, values[target]), target
    return (kind,), (max if kind == "biggest" else min)(values, key=lambda label: int(values[label]))
