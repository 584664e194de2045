"""General tasks: six labelled sums, and which of them comes to the most, to the least, or to a given digit.

Thought takes the sums one after another: a label, what it comes to, then the best so far, or whether it is the one. Whoever stops early
answers with the best of what was seen, or guesses.
"""

from __future__ import annotations

import random
from typing import Any

from gnomon.agent.trajectory import Score
from gnomon.posttrain.lab.bench import Bench
from gnomon.posttrain.lab.domain import KINDS, Line, Puzzle, Said, thinking, wanted
from gnomon.posttrain.lab.words import ANSWER, DIGITS, EOS, LABELS, Effort, calculated, drawn_sum, ids, words
from gnomon.posttrain.problem import Problem

SUMS = LABELS[:6]


class Domain:
    """See the module."""

    name = "general"

    def puzzle(self, rng: random.Random) -> Puzzle:
        """Six sums that come to different digits, and which one is asked for."""
        values = dict(zip(SUMS, rng.sample(DIGITS, len(SUMS)), strict=True))
        body: list[str] = []
        for label, value in values.items():
            while True:
                left, operator, right = drawn_sum(rng)
                if calculated(left, operator, right) == int(value):
                    break
            body += [label, str(left), operator, str(right)]
        kind = rng.choice(KINDS)
        asked, target = wanted(kind, values, rng)
        return Puzzle(domain=self.name, kind=kind, body=(*asked, *body), hidden={"values": values, "target": target})

    def demonstrated(self, puzzle: Puzzle, effort: Effort, rng: random.Random) -> Line:
        """So many sums worked out from the first on, by chance."""
        said, values, best = Said(puzzle.prompt(effort)), puzzle.hidden["values"], ""
        seen = SUMS[: 6 if rng.random() < 0.4 else rng.randrange(0, 7)]
        for label in seen:
            said.say(label)
            said.say(values[label], 3.0)
            best = said.judge(puzzle, values, label, best)
            if best == puzzle.hidden["target"] and puzzle.kind == "holds":
                break
        said.say("<answer>")
        if best:
            said.say(best, 3.0)
        else:
            said.say(rng.choice(SUMS[len(seen):] or SUMS))
        said.say("<eos>")
        return said.line()

    def dense(self, rng: random.Random) -> Line:
        """Sums as such, digits to be remembered by their label, or sums by their label: what thinking is made of."""
        said = Said(ids("<bos> <dense>"))
        share = rng.random()
        if share < 0.45:
            for _ in range(16):
                left, operator, right = drawn_sum(rng)
                said.say((str(left), operator, str(right)), 0.0)
                said.say(str(calculated(left, operator, right)))
            return said.line()
        labels = rng.sample(LABELS, 8 if share < 0.65 else 6)
        values: dict[str, str] = {}
        for label in labels:
            left, operator, right = drawn_sum(rng)
            values[label] = str(calculated(left, operator, right))
            said.say((label, values[label]) if share < 0.65 else (label, str(left), operator, str(right)), 0.0)
        said.say("<think>", 0.0)
        for label in (*rng.sample(labels, len(labels)), *rng.sample(labels, len(labels))):
            said.say(label, 0.0)
            said.say(values[label])
        return said.line()

    def problem(self, puzzle: Puzzle, effort: Effort, name: str, bench: Bench) -> Problem:
        """Graded on the label after `<answer>`, and on there being nothing else; a budget counts what is thought."""
        answer = ids(("<answer>", puzzle.hidden["target"], "<eos>"))

        def grade(sampled: tuple[int, ...], episode: Any) -> Score:
            found = sampled[thinking(sampled):]
            return Score(reward=float(found == answer), evidence=(f"said {' '.join(words(found))}, right is {' '.join(words(answer))}",))

        return Problem(id=name, prompt=puzzle.prompt(effort), domain=self.name, effort=effort, kind=puzzle.kind, grade=grade,
                       max_tokens=40, stop_ids=frozenset((EOS,)), think_end=ANSWER)
