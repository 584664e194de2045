"""Was it done within a budget? Settings: `check`, who judges the work; `tokens`, `turns`, `seconds`, any of them; `over`, -1 by default.

An attempt that used more than one of them gets `over` even where the work is right (report §4.1.2): the reward is replaced, nothing is
cut off. `tokens` counts what the model wrote in all contexts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.task import Check, Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, opened, settings
from gnomon.errors import DataError, VerifierError
from gnomon.sandbox.sandbox import Sandbox


class Verifier:
    """Asks the other verifier, then counts."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.inner = opened(Check.from_json(fields.inner("check")), "settings.check")
        self.limits = {"tokens": fields.maybe("tokens", lambda name: float(fields.whole(name, least=1))),
                       "turns": fields.maybe("turns", lambda name: float(fields.whole(name, least=1))),
                       "seconds": fields.maybe("seconds", fields.number)}
        self.over = fields.number("over", -1.0)
        fields.done()
        if all(limit is None for limit in self.limits.values()):
            raise DataError("'tokens', 'turns' or 'seconds': set at least one, or use the inner check alone")
        self.machine: Machine = self.inner.machine

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """The inner score, or `over`. Raises `VerifierError` where a budget is set for what the trajectory does not say."""
        used = used_by(trajectory)
        exceeded = []
        for name, limit in self.limits.items():
            if limit is None:
                continue
            if used[name] is None:
                raise VerifierError(f"'{name}' has a budget and the trajectory does not say how much it used")
            if used[name] > limit:  # type: ignore[operator]
                exceeded.append(f"{name}: {used[name]:g} of {limit:g}")
        score = await self.inner.score(task, trajectory, sandbox)
        if not score.scored:
            return score
        metrics = {**score.metrics, **{f"used_{name}": value for name, value in used.items() if value is not None}}
        if not exceeded:
            return Score(reward=score.reward, metrics=metrics, evidence=score.evidence)
        metrics["within_budget_it_had"] = float(score.reward or 0.0)
        return Score(reward=self.over, metrics=metrics, evidence=(f"over budget: {'; '.join(exceeded)}", *score.evidence))


def used_by(trajectory: Trajectory) -> dict[str, float | None]:
    """What an attempt used: tokens by its spans, or by what the policy says it cost; None where neither is known."""
    said = [turn for turn in trajectory.turns if any(message.role == "assistant" for message in turn.messages)]
    spent = [turn.notes["spent"].get("output_tokens", 0) for turn in said if isinstance(turn.notes.get("spent"), Mapping)]
    tokens: float | None = float(trajectory.sampled_tokens) if trajectory.sampled_tokens else None
    if tokens is None and len(spent) == len(said):
        tokens = float(sum(spent))
    seconds = [turn.seconds for turn in said if turn.seconds is not None]
    return {"tokens": tokens, "turns": float(len(said)), "seconds": sum(seconds) if len(seconds) == len(said) else None}
