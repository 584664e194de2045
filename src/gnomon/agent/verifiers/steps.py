"""What are several steps worth together? Each was judged when it ended; this makes one reward of theirs, as Harbor does.

Settings: `strategy`, `mean` of the steps that were attempted, or `final`, the last of them alone. A step that is not reached, because an
earlier one was not good enough, counts in neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.errors import VerifierError
from gnomon.sandbox.sandbox import Sandbox

STRATEGIES = ("mean", "final")


class Verifier:
    """Reads what the trajectory says of its steps. A step whose own verifier failed leaves the whole without reward."""

    machine: Machine = "none"

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.strategy = fields.text("strategy", "mean")
        fields.done()
        if self.strategy not in STRATEGIES:
            raise fields.wrong("strategy", self.strategy, " or ".join(STRATEGIES))

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """One score of the steps'. Raises `VerifierError` where one has no reward, or none was judged."""
        tables = []
        for step in trajectory.steps:
            if step.score.reward is None:
                raise VerifierError(f"step '{step.name}' has no score: {step.score.error}")
            tables.append({**step.score.metrics, "reward": step.score.reward})
        found = combined(tables, self.strategy)
        metrics = {name: value for name, value in found.items() if name != "reward"}
        metrics |= {f"step {step.name}": step.score.reward for step in trajectory.steps if step.score.reward is not None}
        evidence = [f"step '{step.name}' ({step.stop_reason}): {step.score.reward:g}; {'; '.join(step.score.evidence)}".rstrip("; \n")
                    for step in trajectory.steps]
        left = [step.name for step in task.steps[len(trajectory.steps):]]
        evidence += [f"not reached: {', '.join(left)}"] if left else []
        return Score(reward=found["reward"], metrics=metrics, evidence=tuple(evidence))


def combined(rewards: Sequence[Mapping[str, float]], strategy: str = "mean") -> dict[str, float]:
    """One set of rewards of several steps, as Harbor makes it: `final` is the last step's, `mean` of each key over the steps judged, where
    a key that one lacks counts 0. Raises `VerifierError` where nothing was judged."""
    if not rewards:
        raise VerifierError("no step was judged, so there is no reward")
    if strategy == "final":
        return dict(rewards[-1])
    names = sorted({name for each in rewards for name in each})
    return {name: sum(each.get(name, 0.0) for each in rewards) / len(rewards) for name in names}
