"""What experts did, kept for others to learn from: files that `gnomon sft` reads as they are, and traces for trainers of `verifiers`.

The report pools the trajectories of all experts for a further fine-tuning beside the distillation (§4.1). With `collect.last` the
rollouts of a run's last iterations are written, one file for each iteration, ids as they were sampled; naming the files of nine runs in
one recipe of `gnomon sft` is the pool. A file is written whole, so an iteration that is done again after a kill writes the same file
again. Read next: `rl.py`, `demonstrations.py`, which reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon import whole
from gnomon.agent.trajectory import StopReason, Trajectory, Turn
from gnomon.agent.verifiers_trace import to_trace
from gnomon.config import setting
from gnomon.data.messages import Message, Text
from gnomon.errors import ConfigError
from gnomon.posttrain.partial import Group
from gnomon.posttrain.rollout import Rollout, given

if TYPE_CHECKING:
    from gnomon.data.tokenizer import Tokenizer

FOLDER, TRACES = "collected", "traces"


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectConfig:
    """Which rollouts are kept for a further fine-tuning."""

    last: int = setting(0, "so many iterations at the end of the run; 0: none are kept")
    above: float = setting(0.0, "a rollout is kept when its reward is above this")
    traces: bool = setting(False, "write them in the shape of verifiers as well, whatever their reward")

    def __post_init__(self) -> None:
        if self.last < 0:
            raise ConfigError(f"'last' is {self.last}; it must not be negative")


def collect(groups: Sequence[Group], config: CollectConfig, run: Path, step: int, total: int) -> None:
    """Write the groups of a step (1-based) of a run, if it is one of the last."""
    if not config.last or step <= total - config.last:
        return
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    good = [each for each in rollouts if each.sampled and _reward(each) > config.above]
    _write(run / FOLDER / f"step-{step:06d}.jsonl", (record(each) for each in good))
    if config.traces:
        from gnomon.data.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(run / "tokenizer") if (run / "tokenizer").is_dir() else None
        said = [each for each in rollouts if each.sampled]
        _write(run / TRACES / f"step-{step:06d}.jsonl", (to_trace(trajectory(each, tokenizer)) for each in said))


def _write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole.write(path, "".join(json.dumps(each, allow_nan=False) + "\n" for each in records))


def _reward(rollout: Rollout) -> float:
    return -math.inf if rollout.score is None or rollout.score.reward is None else rollout.score.reward


def record(rollout: Rollout) -> dict[str, Any]:
    """A line of a file: ids, a string of 0 and 1 for what is learnt, and where it comes from."""
    return {"token_ids": list(rollout.token_ids), "loss_mask": "".join("01"[flag] for flag in rollout.mask),
            "problem": rollout.problem.id, "domain": rollout.problem.domain, "effort": rollout.problem.effort, "reward": _reward(rollout)}


def trajectory(rollout: Rollout, tokenizer: Tokenizer | None = None) -> Trajectory:
    """A rollout as agents keep theirs: a turn for each piece that was sampled, with what had been read before it. `tokenizer` makes words
    of ids; without one, the ids stand there as numbers."""
    made = Trajectory(id=f"{rollout.group}-{rollout.member}", task_id=rollout.problem.id, effort=rollout.problem.effort,
                      group=str(rollout.group), harness=str(rollout.notes.get("harness", "")), metadata={"domain": rollout.problem.domain})
    read, pending = list(rollout.problem.prompt), [given(rollout.problem.prompt)]
    for span in rollout.spans:
        pending.append(span)
        if not span.sampled:
            read += span.token_ids
            continue
        messages = (*([_said("user", read, tokenizer)] if read else []), _said("assistant", span.token_ids, tokenizer))
        made = made.appended(Turn(messages=messages, spans=tuple(pending), parent=len(made.turns) - 1 if made.turns else None))
        read, pending = [], []
    reason: StopReason = "failed" if rollout.score is not None and rollout.score.reward is None else (
        "budget" if rollout.end == "length" else "finished")
    return replace(made, score=rollout.score, stop_reason=reason)


def _said(role: Any, ids: Sequence[int], tokenizer: Tokenizer | None) -> Message:
    text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
    return Message(role=role, content=(Text(text=text),))
