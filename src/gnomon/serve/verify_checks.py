"""The equivalences that any server can be held to, through requests alone: each asks in a way that tempts a cache, and compares with the
same request on a cache that knows nothing (report §5.4.1). Read next: `verify_engine.py` for what only an engine at hand can be asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from gnomon.serve.verify import Answer, Ask, Check, Finding, Prompt, Subject, joined, skipped, worst_of

LONG = 24
"""Tokens of an answer that other requests go on from."""


def _cut(prompt: Prompt, length: int) -> Prompt:
    return prompt[:length]


def _finding(subject: Subject, asks: Sequence[Ask], answers: Sequence[Answer], reuse: Sequence[Answer] | None = None) -> Finding:
    """The worst difference; where nothing of the answers in `reuse` was cached, there was nothing to be seen."""
    reused = answers if reuse is None else reuse
    counts = [answer.cached for answer in reused if answer.cached is not None]
    worst = worst_of(subject, asks, answers)
    if counts and not any(counts):
        return Finding(worst=worst, note="nothing was reused: a cache that never hits shows nothing", failed=True)
    note = f"{len(asks)} answers" + (f", {sum(counts)} tokens reused" if counts else "; the server does not say what it reused")
    return Finding(worst=worst, note=note)


def repeat(subject: Subject) -> Finding:
    """The same request again and again, other work in between: regenerating an answer."""
    ask = Ask(prompt=subject.text(3 * subject.block + 11, 1), tokens=LONG)
    other = Ask(prompt=subject.text(2 * subject.block + 5, 2))
    answers = [subject.ask([one])[0] for one in (ask, ask, other, ask, other, ask)]
    return _finding(subject, [ask, ask, other, ask, other, ask], answers)


def resume(subject: Subject) -> Finding:
    """A prompt that goes on from what was computed before: at a block's end, amid a block, at an end of turn, at the end of an answer."""
    block = subject.block
    base, asks, answers = subject.text(5 * block, 3), list[Ask](), list[Answer]()
    size = len(base) // 5
    ends = (2 * size, 3 * size - 1, 3 * size + 1, 4 * size + size // 2)  # a block's end, one token before, one after, amid a block
    for seed, length in enumerate(ends, 4):
        prefix, tail = _cut(base, length), subject.text(block // 2 + 3, 10 * seed)
        subject.ask([Ask(prompt=prefix, tokens=1, boundaries=(length,))])
        asks.append(Ask(prompt=joined(prefix, tail), boundaries=(length,)))
        answers += subject.ask(asks[-1:])
    start = Ask(prompt=subject.text(block + 9, 5), tokens=LONG + block // 2)
    begun = subject.ask([start])[0]
    asks += [start, Ask(prompt=joined(start.prompt, subject.said(begun), subject.text(block // 3, 6)))]
    answers += [begun, *subject.ask(asks[-1:])]
    return _finding(subject, asks, answers, answers[:4])


def fork(subject: Subject) -> Finding:
    """Branches from one past, one after another and together, and back to the first: leaving a branch takes nothing from another."""
    base = subject.text(3 * subject.block + subject.block // 2, 20)
    branches = [Ask(prompt=joined(base, subject.text(17 + 9 * i, 21 + i)), tokens=LONG) for i in range(4)]
    asks = [*branches[:2], branches[0], branches[1]]
    answers = [subject.ask([ask])[0] for ask in asks]
    asks += branches
    answers += subject.ask(branches)
    if subject.seeds:
        drawn = [Ask(prompt=joined(base, subject.text(5, 29)), tokens=LONG, seed=seed) for seed in range(4)]
        asks += drawn
        answers += subject.ask(drawn)
    return _finding(subject, asks, answers)


def edited(subject: Subject) -> Finding:
    """Histories that clients edit: thinking stripped from a past turn, a turn changed, the last turn taken back."""
    block = subject.block
    system, first, thought, reply, second = (subject.text(n, 30 + i) for i, n in enumerate((block + 13, 21, 2 * block // 3, 31, 19)))
    other = subject.text(23, 39)
    turn = len(joined(system, first))
    whole = Ask(prompt=joined(system, first, thought, reply, second), boundaries=(len(system), turn))
    stripped = Ask(prompt=joined(system, first, reply, second), boundaries=(len(system), turn))
    changed = Ask(prompt=joined(system, other, thought, reply, second), boundaries=(len(system),))
    shorter = Ask(prompt=joined(system, first), boundaries=(len(system), turn))
    asks = [whole, stripped, changed, shorter, whole, changed, stripped]
    return _finding(subject, asks, [subject.ask([ask])[0] for ask in asks])


def batch(subject: Subject) -> Finding:
    """Prompts of all lengths together, each as if it were alone."""
    asks = [Ask(prompt=subject.text(length, 50 + length), tokens=LONG, cached=False)
            for length in (1, 7, subject.block - 1, subject.block, subject.block + 1, 2 * subject.block + 30, 33, 90)]
    worst = worst_of(subject, asks, subject.ask(asks))
    return Finding(worst=worst, note=f"{len(asks)} requests at the same time")


def salts(subject: Subject) -> Finding:
    """What was computed under one salt is not used under another."""
    if not subject.salts:
        return skipped("the server has no salt")
    prompt = subject.text(3 * subject.block, 60)
    asks = [Ask(prompt=prompt, salt=salt) for salt in ("a", "a", "b")]
    answers = [subject.ask([ask])[0] for ask in asks]
    if answers[2].cached is None:
        return skipped("the server does not say what it reused")
    return Finding(worst=worst_of(subject, asks, answers), failed=bool(answers[2].cached),
                   note=f"{answers[2].cached} tokens of another's salt were reused, {answers[1].cached} of the same")


def interleavings(subject: Subject, operations: int, seed: int) -> Finding:
    """Any sequence of new conversations, next turns, forks, regenerations and edits, some at the same time."""
    draw = random.Random(seed)
    block = subject.block
    systems = [subject.text(block + 7, 70), subject.text(2 * block + 1, 71)]
    known: list[Ask] = []
    asks, answers = list[Ask](), list[Answer]()
    while len(asks) < operations:
        chosen = [_operation(subject, draw, systems, known) for _ in range(min(draw.randint(1, 3), operations - len(asks)))]
        got = subject.ask(chosen)
        asks += chosen
        answers += got
        for ask, answer in zip(chosen, got, strict=True):
            longer = joined(ask.prompt, subject.said(answer))
            if len(longer) < 8 * len(systems[0]):
                known.append(Ask(prompt=longer))
    return _finding(subject, asks, answers)


def _operation(subject: Subject, draw: random.Random, systems: list[Prompt], known: list[Ask]) -> Ask:
    """One request that follows from those before."""
    tail, tokens = subject.text(draw.randint(1, subject.block), draw.randint(1000, 9999)), draw.choice((1, 2, 5))
    kind = draw.choice(("new", "next", "next", "fork", "again", "edit")) if known else "new"
    if kind == "new":
        system = draw.choice(systems)
        return Ask(prompt=joined(system, tail), tokens=tokens, boundaries=(len(system),))
    past = draw.choice(known).prompt
    if kind == "next":
        return Ask(prompt=joined(past, tail), tokens=tokens, boundaries=(len(past),))
    if kind == "again":
        return Ask(prompt=past, tokens=tokens)
    cut = draw.randint(1, len(past))
    rest = past[cut + draw.randint(1, 20):] if kind == "edit" else past[:0]
    return Ask(prompt=joined(_cut(past, cut), tail, rest), tokens=tokens)


def speculation(subject: Subject) -> Finding:
    """Drafting ≡ greedy."""
    del subject
    return skipped("nothing drafts here yet")


SHARED: dict[str, tuple[Callable[[Subject], Finding], str]] = {
    "resume": (resume, "resume from every kind of boundary ≡ fresh prefill"),
    "regenerate": (repeat, "the same request again ≡ the first time"),
    "fork": (fork, "branches of one past, together and in turn ≡ each alone"),
    "edited": (edited, "thinking stripped, a turn changed, a turn taken back ≡ fresh"),
    "batch": (batch, "batch of many ≡ batch of one"),
    "salt": (salts, "nothing is reused across salts"),
    "speculation": (speculation, "drafting ≡ greedy"),
}
"""The checks without settings, by name, with what each shows."""


def shared_checks(subject: Subject, operations: int = 60, seed: int = 0) -> list[Check]:
    """All checks of this page, for one subject."""
    checks = [Check(name=name, shows=shows, run=partial(run, subject), bound=subject.bound) for name, (run, shows) in SHARED.items()]
    shows = f"cached ≡ uncached over {operations} operations, some at the same time"
    return [*checks, Check(name="interleavings", shows=shows, run=lambda: interleavings(subject, operations, seed), bound=subject.bound)]
