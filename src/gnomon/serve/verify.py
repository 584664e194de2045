"""`gnomon verify`: is what a server answers from its cache what it would have answered without one?

A hybrid model keeps two kinds of memory, and whoever restores half of one, or one of another moment, does not crash: the text is simply
wrong. So each thing that caches, batches and schedulers may do is an *equivalence* here: run both sides, compare log-probabilities token
by token, give a verdict. A check never knows what is verified: an engine in this process (`verify_engine.py`) or a URL
(`verify_remote.py`) is a `Subject`. Read next: `verify_checks.py` for the equivalences that any subject can be held to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from rich.table import Table

from gnomon.errors import GnomonError

Prompt = tuple[int, ...] | str
"""Ids for an engine, text for a URL; both join with `+`."""
Token = int | str
Status = Literal["pass", "fail", "not applicable"]
BROKEN = (GnomonError, AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""What a broken subject may raise instead of answering; it fails the check and not the program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One request: continue `prompt` by `tokens`, greedily or with a `seed` at temperature 1. `boundaries` are ends of turns within it."""

    prompt: Prompt
    tokens: int = 6
    seed: int | None = None
    cached: bool = True
    salt: str = ""
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came: tokens, the log-probabilities of the likeliest ones (the sampled one included) at each, how much of the prompt was cached
    (`None`: not said)."""

    tokens: tuple[Token, ...]
    top: tuple[Mapping[Token, float], ...]
    cached: int | None = None


class Subject(Protocol):
    """What is verified. `bound` is the largest difference of log-probabilities that passes; `block` the tokens of a cache's grid."""

    name: str
    bound: float
    block: int
    seeds: bool
    salts: bool

    def text(self, tokens: int, seed: int) -> Prompt:
        """Some content of about so many tokens; the same seed, the same content."""
        ...

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        """All of them at the same time."""
        ...

    def reference(self, ask: Ask) -> Answer:
        """The same request alone, on a cache that knows nothing."""
        ...

    def said(self, answer: Answer) -> Prompt:
        """The tokens of an answer as part of a next prompt."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check found: the worst difference, what it was about, and why it fails (`failed`) or does not apply (`inapplicable`)."""

    worst: float | None = None
    note: str = ""
    failed: bool = False
    inapplicable: bool = False
    bound: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """An equivalence: `run` does both sides; `bound` replaces the subject's."""

    name: str
    shows: str
    run: Callable[[], Finding]
    bound: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A check and what became of it."""

    name: str
    shows: str
    status: Status
    worst: float | None
    bound: float | None
    seconds: float
    note: str


def joined(*parts: Prompt) -> Prompt:
    """Prompts end to end, all ids or all text."""
    if isinstance(parts[0], str):
        return "".join(part for part in parts if isinstance(part, str))
    return tuple(token for part in parts if not isinstance(part, str) for token in part)


def skipped(why: str) -> Finding:
    """A check that says nothing about this subject."""
    return Finding(note=why, inapplicable=True)


def difference(ours: Answer, theirs: Answer) -> float:
    """The largest difference of log-probabilities up to the first token that differs, which counts by how clear the other choice was.

    Infinite where the lengths differ, where nothing can be compared, and for what is not a number.
    """
    if len(ours.tokens) != len(theirs.tokens):
        return math.inf
    worst = 0.0
    for x, y, a, b in zip(ours.tokens, theirs.tokens, ours.top, theirs.top, strict=True):
        shared = a.keys() & b.keys()
        found = [abs(a[token] - b[token]) for token in shared]
        if x != y:
            found.append(max(a[x] - a.get(y, -math.inf), b[y] - b.get(x, -math.inf)))
        if not shared or any(math.isnan(value) for value in found):
            return math.inf
        worst = max(worst, *found)
        if x != y:
            break
    return worst


def worst_of(subject: Subject, asks: Sequence[Ask], answers: Sequence[Answer]) -> float:
    """The largest difference between answers and their references."""
    return max((difference(answer, subject.reference(ask)) for ask, answer in zip(asks, answers, strict=True)), default=0.0)


def verify(checks: Iterable[Check], progress: Callable[[str], None] = lambda name: None) -> list[Verdict]:
    """Run checks; what a subject raises fails its check and nothing else."""
    verdicts = []
    for check in checks:
        progress(check.name)
        start = time.perf_counter()
        try:
            finding = check.run()
        except BROKEN as error:
            finding = Finding(note=f"{type(error).__name__}: {error}"[:300], failed=True)
        verdicts.append(_verdict(check, finding, time.perf_counter() - start))
    return verdicts


def _verdict(check: Check, finding: Finding, seconds: float) -> Verdict:
    bound = check.bound if finding.bound is None else finding.bound
    status: Status = "pass"
    if finding.inapplicable:
        status = "not applicable"
    elif finding.failed or finding.worst is None or not finding.worst <= bound:
        status = "fail"
    return Verdict(name=check.name, shows=check.shows, status=status, worst=finding.worst,
                   bound=None if finding.inapplicable or finding.worst is None else bound, seconds=seconds, note=finding.note)


def passed(verdicts: Iterable[Verdict]) -> bool:
    """Whether nothing failed."""
    return all(verdict.status != "fail" for verdict in verdicts)


def table(name: str, verdicts: Sequence[Verdict]) -> Table:
    """The verdicts for people."""
    failed = [verdict.name for verdict in verdicts if verdict.status == "fail"]
    applied = sum(verdict.status == "pass" for verdict in verdicts)
    title = f"{name}: {'FAILED: ' + ', '.join(failed) if failed else f'{applied} checks passed'}"
    shown = Table(title=title, title_justify="left")
    for heading, justify in (("check", "left"), ("what it shows", "left"), ("worst", "right"), ("bound", "right"), ("verdict", "left"),
                             ("s", "right")):
        shown.add_column(heading, justify=justify)  # type: ignore[arg-type]
    colours = {"pass": "green", "fail": "bold red", "not applicable": "dim"}
    for verdict in verdicts:
        about = verdict.shows + (f"\n[dim]{verdict.note}[/dim]" if verdict.note else "")
        shown.add_row(verdict.name, about, _number(verdict.worst), _number(verdict.bound),
                      f"[{colours[verdict.status]}]{verdict.status}[/]", f"{verdict.seconds:.1f}")
    return shown


def as_dict(name: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The verdicts for programs; a difference that is infinite is the string "inf"."""
    rows = [asdict(verdict) for verdict in verdicts]
    for row in rows:
        for key in ("worst", "bound"):
            if row[key] is not None and not math.isfinite(row[key]):
                row[key] = "inf"
    return {"subject": name, "passed": passed(verdicts), "checks": rows}


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"
