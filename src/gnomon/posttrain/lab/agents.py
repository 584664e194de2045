"""Agent tasks: six boxes that can be looked into one at a time, and one of them to be removed.

A look is a call that the world answers; between calls the agent writes down the best box so far. The grade looks at which boxes are left.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from gnomon.agent.trajectory import Score
from gnomon.posttrain.lab.bench import Bench
from gnomon.posttrain.lab.domain import KINDS, Line, Puzzle, Said, wanted
from gnomon.posttrain.lab.words import DIGITS, EOM, EOS, LABELS, Effort, ids, words
from gnomon.posttrain.problem import Problem

BOXES = LABELS[:6]


class Domain:
    """See the module."""

    name = "agents"

    def puzzle(self, rng: random.Random) -> Puzzle:
        """Six boxes with different digits, and which of them should go: the biggest, the smallest, or that which holds a digit."""
        inside = dict(zip(BOXES, rng.sample(DIGITS, len(BOXES)), strict=True))
        kind = rng.choice(KINDS)
        asked, target = wanted(kind, inside, rng)
        return Puzzle(domain=self.name, kind=kind, body=asked, hidden={"inside": inside, "target": target})

    def demonstrated(self, puzzle: Puzzle, effort: Effort, rng: random.Random) -> Line:
        """So many looks from the first box on, by chance; then the best box of those seen goes, or one that was not seen."""
        said, inside, best = Said(puzzle.prompt(effort)), puzzle.hidden["inside"], ""
        seen = BOXES[: 6 if rng.random() < 0.4 else rng.randrange(1, 7)]
        for box in seen:
            said.say(("get", box, "<eom>"))
            said.say(inside[box], 0.0)
            best = said.judge(puzzle, inside, box, best)
            if best == puzzle.hidden["target"] and puzzle.kind == "holds":
                break
        said.say("del")
        if best:
            said.say(best, 3.0)
        else:
            said.say(rng.choice(BOXES[len(seen):]))
        said.say("<eom>")
        return said.line()

    def dense(self, rng: random.Random) -> Line:
        """Labelled digits, and after each the best so far; or, where one is looked for, whether it is that one."""
        said = Said(ids("<bos> <dense>"))
        for _ in range(2):
            inside = dict(zip(rng.sample(BOXES, len(BOXES)), rng.sample(DIGITS, len(BOXES)), strict=True))
            kind, best = rng.choice(KINDS), ""
            asked, target = wanted(kind, inside, rng)
            puzzle = Puzzle(domain=self.name, kind=kind, body=asked, hidden={"target": target})
            said.say((*asked, "<think>"), 0.0)
            for box, digit in inside.items():
                said.say((box, digit), 0.0)
                best = said.judge(puzzle, inside, box, best)
        return said.line()

    def problem(self, puzzle: Puzzle, effort: Effort, name: str, bench: Bench) -> Problem:
        """Graded on the boxes that are left; a budget counts all that the agent writes."""
        left = sorted(set(BOXES) - {puzzle.hidden["target"]})

        def grade(sampled: tuple[int, ...], episode: Any) -> Score:
            found = sorted(episode.boxes)
            return Score(reward=float(found == left), evidence=(f"left {' '.join(found)}, right is {' '.join(left)}",))

        return Problem(id=name, prompt=puzzle.prompt(effort), domain=self.name, effort=effort, kind=puzzle.kind, grade=grade,
                       max_tokens=64, stop_ids=frozenset((EOS,)), asks=frozenset((EOM,)), room=24,
                       begin=lambda state: World(puzzle.hidden["inside"], state))


class World:
    """The boxes of one attempt."""

    def __init__(self, inside: Mapping[str, str], state: Any = None) -> None:
        self.inside, self.boxes = inside, set(BOXES if state is None else state)

    def reply(self, sampled: tuple[int, ...]) -> tuple[int, ...] | None:
        """The digit of a box after a look; the end after a removal, and after what is no call."""
        call = words(sampled)[-3:-1]
        if call[:1] == ("get",) and call[1:] and call[1] in self.boxes:
            return ids((self.inside[call[1]],))
        if call[:1] == ("del",) and call[1:]:
            self.boxes.discard(call[1])
        return None

    def state(self) -> Any:
        """The boxes that are there."""
        return sorted(self.boxes)

    def close(self) -> None:
        """Holds nothing."""
