"""General tasks: eight labelled steps of arithmetic, and the digit that they come to.

Thought is pairs of a label and the digit reached there. A pair may leap over several steps: leaping saves words and costs certainty.
"""

from __future__ import annotations

import random
from typing import Any

from gnomon.agent.trajectory import Score
from gnomon.posttrain.lab.bench import Bench
from gnomon.posttrain.lab.domain import Effort, Line, Puzzle, Said, thinking
from gnomon.posttrain.lab.words import ANSWER, EOS, LABELS, OPERATORS, calculated, ids, words
from gnomon.posttrain.problem import Problem

STYLES = ((1, 0.25), (2, 0.25), (3, 0.1), (0, 0.1), (-1, 0.3))
"""Steps of a leap and how often demonstrations take it; 0 thinks nothing, -1 draws each leap anew."""


class Domain:
    """See the module."""

    name = "general"

    def puzzle(self, rng: random.Random) -> Puzzle:
        """A digit and eight steps."""
        state = rng.randrange(10)
        body, states = [str(state)], []
        for label in LABELS:
            operator, number = rng.choice(OPERATORS), rng.randrange(1, 10)
            state = calculated(state, operator, number)
            body += [label, operator, str(number)]
            states.append(str(state))
        return Puzzle(domain=self.name, kind="chain", body=tuple(body), hidden={"states": tuple(states)})

    def demonstrated(self, puzzle: Puzzle, effort: Effort, rng: random.Random) -> Line:
        """Leaps in one style of `STYLES`, then the digit."""
        said = Said(puzzle.prompt(effort))
        states: tuple[str, ...] = puzzle.hidden["states"]
        (style,) = rng.choices([style for style, _ in STYLES], [share for _, share in STYLES])
        place = -1
        while style != 0 and place < len(states) - 1:
            place = min(place + (style if style > 0 else rng.randrange(1, 4)), len(states) - 1)
            said.say(LABELS[place])
            said.say(states[place], 3.0)
        said.say("<answer>")
        said.say(states[-1], 3.0)
        said.say("<eos>")
        return said.line()

    def dense(self, rng: random.Random) -> Line:
        """Half of the time a running chain of single steps, else a chain with every state written out."""
        said = Said(ids("<bos> <dense>"))
        if rng.random() < 0.5:
            state = rng.randrange(10)
            said.say(str(state), 0.0)
            for _ in range(16):
                operator, number = rng.choice(OPERATORS), rng.randrange(1, 10)
                state = calculated(state, operator, number)
                said.say((operator, str(number), "="), 0.0)
                said.say(str(state))
            return said.line()
        puzzle = self.puzzle(rng)
        said.say((*puzzle.body, "<think>"), 0.0)
        for label, state_word in zip(LABELS, puzzle.hidden["states"], strict=True):
            said.say((label, state_word))
        return said.line()

    def problem(self, puzzle: Puzzle, effort: Effort, name: str, bench: Bench) -> Problem:
        """Graded on the digit after `<answer>`, and on there being nothing else; a budget counts what is thought."""
        answer = ids(("<answer>", puzzle.hidden["states"][-1], "<eos>"))

        def grade(sampled: tuple[int, ...], episode: Any) -> Score:
            found = sampled[thinking(sampled):]
            return Score(reward=float(found == answer), evidence=(f"said {' '.join(words(found))}, right is {' '.join(words(answer))}",))

        return Problem(id=name, prompt=puzzle.prompt(effort), domain=self.name, effort=effort, kind=puzzle.kind, grade=grade,
                       max_tokens=28, stop_ids=frozenset((EOS,)), think_end=ANSWER)
