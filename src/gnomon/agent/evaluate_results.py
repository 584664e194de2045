"""What an evaluation found: a row for each attempt, a summary for each column, differences between columns, all as JSON.

A column is a policy with a harness and an effort. Read next: `evaluate_intervals.py` for what the intervals mean, `evaluate_page.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

from gnomon.agent.evaluate_intervals import Interval, difference, interval
from gnomon.agent.trajectory import Trajectory

FORMAT = 1
MOST_DIFFERENCES = 4
"""Columns up to this many are all compared with each other; more are compared with the first alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Who attempts: a policy, a harness, an effort (`none`: nothing was said)."""

    policy: str
    harness: str
    effort: str = "none"

    @property
    def name(self) -> str:
        """One line for people."""
        return " · ".join((self.policy, self.harness, *((self.effort,) if self.effort != "none" else ())))

    def to_json(self) -> dict[str, str]:
        """All fields."""
        return {"policy": self.policy, "harness": self.harness, "effort": self.effort}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One attempt in figures. `reward` None is "not scored"; `error` then says why. `model_seconds` is the time that the policy took."""

    id: str
    column: Column
    task: str
    sample: int
    path: str
    page: str = ""
    reward: float | None = None
    error: str | None = None
    stop_reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    dollars: float = 0.0
    seconds: float = 0.0
    model_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        names = ("id", "task", "sample", "reward", "error", "stop_reason", "turns", "prompt_tokens", "cached_tokens", "output_tokens",
                 "dollars", "seconds", "model_seconds", "path", "page")
        return {**{name: getattr(self, name) for name in names}, "metrics": dict(self.metrics), "column": self.column.name}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Means over the attempts of a column that were scored: what one attempt costs."""

    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    turns: float = 0.0
    seconds: float = 0.0
    model_seconds: float = 0.0
    dollars: float = 0.0

    def to_json(self) -> dict[str, float]:
        """All fields."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A column in figures. `solved` is the share of attempts that reach the reward for it, by tasks; `some` and `every` are the shares of
    tasks that some, or all, of their scored attempts solve. `missing` are attempts that were planned and did not come to an end."""

    column: Column
    reward: Interval
    solved: Interval
    some: float | None
    every: float | None
    scored: int
    excluded: int
    missing: int
    cost: Cost
    stops: Mapping[str, int]
    errors: Mapping[str, int]
    rewards: Mapping[str, Sequence[float]]

    def to_json(self) -> dict[str, Any]:
        """All fields but the single rewards, which the attempts have."""
        return {"column": self.column.name, **self.column.to_json(), "reward": self.reward.to_json(), "solved": self.solved.to_json(),
                "solved_by_some": self.some, "solved_by_every": self.every, "scored": self.scored, "excluded": self.excluded,
                "missing": self.missing, "cost": self.cost.to_json(), "stop_reasons": dict(self.stops), "errors": dict(self.errors)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """All that is known. `tasks` are ids in order; `planned` is how many attempts there are to be."""

    columns: tuple[Summary, ...]
    rows: tuple[Row, ...]
    tasks: tuple[str, ...]
    planned: int
    notices: tuple[str, ...] = ()

    @property
    def differences(self) -> list[tuple[Column, Column, Interval]]:
        """How much better the second of two columns is, by the tasks that both have scored."""
        pairs = list(combinations(self.columns, 2))
        if len(self.columns) > MOST_DIFFERENCES:
            pairs = [pair for pair in pairs if pair[0] is self.columns[0]]
        return [(a.column, b.column, difference(a.rewards, b.rewards)) for a, b in pairs]

    def to_json(self) -> dict[str, Any]:
        """What `eval.json` holds beside the recipe."""
        return {"format": FORMAT, "planned": self.planned, "finished": len(self.rows), "columns": [each.to_json() for each in self.columns],
                "differences": [{"first": a.name, "second": b.name, **gain.to_json()} for a, b, gain in self.differences],
                "notices": list(self.notices), "tasks": list(self.tasks), "attempts": [row.to_json() for row in self.rows]}


def row(trajectory: Trajectory, column: Column, sample: int, path: str, page: str = "") -> Row:
    """An attempt that came to its end, in figures. Tokens are what the policy says of each answer."""
    score = trajectory.score
    costs = [cost for turn in trajectory.turns if isinstance(cost := turn.notes.get("spent"), Mapping)]
    sums = {name: sum(cost.get(name) or 0 for cost in costs) for name in ("prompt_tokens", "cached_tokens", "output_tokens", "dollars")}
    return Row(
        id=trajectory.id, column=column, task=trajectory.task_id, sample=sample, path=path, page=page,
        reward=score.reward if score else None, error=score.error if score else None, stop_reason=trajectory.stop_reason or "",
        metrics=dict(score.metrics) if score else {}, turns=len(trajectory.turns), prompt_tokens=int(sums["prompt_tokens"]),
        cached_tokens=int(sums["cached_tokens"]), output_tokens=int(sums["output_tokens"]) or trajectory.sampled_tokens,
        dollars=float(sums["dollars"]), seconds=sum(trajectory.seconds.values()),
        model_seconds=sum(turn.seconds or 0.0 for turn in trajectory.turns))


def summary(column: Column, rows: Sequence[Row], tasks: Sequence[str], planned: int, solved_at: float = 1.0) -> Summary:
    """A column from its rows; `planned` is how many there are to be."""
    rewards: dict[str, list[float]] = {task: [] for task in tasks}
    for each in rows:
        if each.reward is not None:
            rewards.setdefault(each.task, []).append(each.reward)
    solved = {task: [float(value >= solved_at - 1e-9) for value in values] for task, values in rewards.items()}
    judged = [values for values in solved.values() if values]
    scored = [each for each in rows if each.reward is not None]
    return Summary(
        column=column, reward=interval(rewards), solved=interval(solved),
        some=sum(max(values) for values in judged) / len(judged) if judged else None,
        every=sum(min(values) for values in judged) / len(judged) if judged else None,
        scored=len(scored), excluded=len(rows) - len(scored), missing=planned - len(rows), cost=_cost(scored),
        stops=Counter(each.stop_reason for each in rows), errors=Counter(each.error or "" for each in rows if each.reward is None),
        rewards=rewards)


def _cost(rows: Sequence[Row]) -> Cost:
    if not rows:
        return Cost()
    return Cost(**{name: sum(getattr(each, name) for each in rows) / len(rows) for name in Cost.__slots__})
