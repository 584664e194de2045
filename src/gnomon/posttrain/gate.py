"""Before any reinforcement: does thinking help? Accuracy of the cold start by how much was thought, for each domain.

Reinforcement makes thinking longer only where longer thinking is more often right; where it is not, it takes the thinking away. So a
domain in which it does not help is refused, with the picture. Read next: `effort.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

from gnomon.agent.evaluate_intervals import Z_975, wilson
from gnomon.errors import TrainingError
from gnomon.posttrain.rollout import Rollout
from gnomon.train.canvas import ACCENT, STYLE, WARM, canvas, svg

BINS = 6
LEAST = 60
"""Fewest graded rollouts of a domain that say anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Rollouts that thought from `first` to `last` tokens: how many, how many of them right, and the 95 % interval of the share."""

    first: int
    last: int
    count: int
    right: int
    low: float
    high: float

    @property
    def accuracy(self) -> float:
        """Share that was right."""
        return self.right / self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """What a domain's cold start shows. `gain` is the accuracy of the longest third minus that of the shortest, with its 95 % interval."""

    domain: str
    bins: tuple[Bin, ...]
    gain: float
    low: float
    high: float

    @property
    def opens(self) -> bool:
        """Whether thinking helps beyond doubt."""
        return self.low > 0.0


def measured(domain: str, rollouts: Sequence[Rollout]) -> Gate:
    """The gate of a domain from graded rollouts of the cold start; what was not scored is left out.

    Raises `TrainingError` for fewer than `LEAST`, or where all thought for the same time: then nothing can be told.
    """
    scored = [(r.spent, r.score.reward) for r in rollouts if r.score is not None and r.score.reward is not None]
    pairs = sorted(scored, key=lambda pair: pair[0])  # by length alone: among equal ones, a cut must not prefer the right ones
    if len(pairs) < LEAST or pairs[0][0] == pairs[-1][0]:
        raise TrainingError(f"the gate of '{domain}': {len(pairs)} graded rollouts, thinking {pairs[0][0] if pairs else 0} to "
                            f"{pairs[-1][0] if pairs else 0} tokens, tell nothing; at least {LEAST} of different length are needed")
    third = len(pairs) // 3
    short, long = [reward > 0 for _, reward in pairs[:third]], [reward > 0 for _, reward in pairs[-third:]]
    gain = (sum(long) - sum(short)) / third
    width = Z_975 * math.sqrt(sum(_variance(sum(part), third) for part in (short, long)))
    return Gate(domain=domain, bins=_bins(pairs), gain=gain, low=gain - width, high=gain + width)


def _variance(right: int, count: int) -> float:
    """Variance of a share, with one success and one failure more than were seen, so that a sure thing keeps some doubt."""
    share = (right + 1) / (count + 2)
    return share * (1 - share) / count


def by_domain(domains: Iterable[str], rollouts: Sequence[Rollout]) -> list[Gate]:
    """The gate of each domain."""
    return [measured(domain, [each for each in rollouts if each.problem.domain == domain]) for domain in domains]


def _bins(pairs: Sequence[tuple[int, float | None]]) -> tuple[Bin, ...]:
    """At most `BINS` stretches of length with about equally many rollouts each; equal lengths stay together."""
    found, start = [], 0
    while start < len(pairs):
        stop = min(len(pairs), start + math.ceil(len(pairs) / BINS))
        while stop < len(pairs) and pairs[stop][0] == pairs[stop - 1][0]:
            stop += 1
        right = sum(1 for _, reward in pairs[start:stop] if reward is not None and reward > 0)
        low, high = wilson(right / (stop - start), stop - start)
        found.append(Bin(first=pairs[start][0], last=pairs[stop - 1][0], count=stop - start, right=right, low=low, high=high))
        start = stop
    return tuple(found)


def picture(gates: Sequence[Gate]) -> str:
    """Accuracy by thinking of every domain, as inline SVG."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(12.6, 3.2)
        for gate, colour in zip(gates, (ACCENT, WARM, "#5b8c5a", "#8a6fb0"), strict=False):
            at = [(each.first + each.last) / 2 for each in gate.bins]
            shares = [each.accuracy for each in gate.bins]
            around = [[share - each.low for share, each in zip(shares, gate.bins, strict=True)],
                      [each.high - share for share, each in zip(shares, gate.bins, strict=True)]]
            axes.errorbar(at, shares, yerr=around, color=colour, marker="o", linewidth=2, capsize=3,
                          label=f"{gate.domain}: {gate.gain:+.2f} from the shortest to the longest third")
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("tokens that count")
        axes.set_ylabel("share right")
        axes.legend(loc="upper left")
        return svg(figure, "gate")


def require(gates: Sequence[Gate], drawn: Path | None = None) -> None:
    """Raises `TrainingError` for a domain in which thinking does not help, with what was measured and where it is `drawn`."""
    closed = [gate for gate in gates if not gate.opens]
    if closed:
        shares = {gate.domain: ", ".join(f"{b.first}–{b.last} tokens {b.accuracy:.2f}" for b in gate.bins) for gate in closed}
        what = "; ".join(f"'{domain}': {text}" for domain, text in shares.items())
        raise TrainingError(f"thinking does not help the cold start in {what}; reinforcement would remove it. Train the cold start longer, "
                            f"show longer solutions more often, or choose other tasks{f'. The picture: {drawn}' if drawn else ''}")
