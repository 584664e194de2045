"""One attempt at one problem: spans of ids, given or sampled, each sampled one with its log-probability and the weights that chose it.

A rollout grows until it is finished; between two iterations it may rest unfinished, and on disk (report §4.1, partial rollouts).
Read next: `partial.py`, which keeps the unfinished ones; `policy.py`, which makes them grow.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnomon.agent.trajectory import Score, Span
from gnomon.posttrain.problem import Problem

End = Literal["stop", "length", "world", "failed"]
"""At a stop id; at the problem's `max_tokens`; because the world ended it; because the machine failed, which its score's error explains."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """`spans` follow the prompt. `end` None: not finished. `seed` decides every draw.

    `world` is the state of an unfinished one's episode, which has answered the first `heard` sampled ids. `group` numbers the group in the
    run, `member` the rollout in its group. `score` None: not graded yet. `experts` [ids, layers, k] are those that ids were sent to, each
    by the weights that read it first; None where nobody wrote them down, and short of ids that nobody has read.
    """

    problem: Problem
    group: int
    member: int
    seed: int
    spans: tuple[Span, ...] = ()
    end: End | None = None
    world: Any = None
    heard: int = 0
    score: Score | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    experts: NDArray[np.int16] | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and all that followed."""
        return (*self.problem.prompt, *(i for span in self.spans for i in span.token_ids))

    @property
    def sampled(self) -> tuple[int, ...]:
        """What the policy chose, in order."""
        return tuple(i for span in self.spans if span.sampled for i in span.token_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Those of `sampled`."""
        return tuple(p for span in self.spans if span.sampled for p in span.logprobs)

    @property
    def mask(self) -> tuple[bool, ...]:
        """For each of `token_ids`: whether the policy chose it."""
        return (*(False for _ in self.problem.prompt), *(span.sampled for span in self.spans for _ in span.token_ids))

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy's version of each of `sampled`."""
        return tuple(span.policy_version or 0 for span in self.spans if span.sampled for _ in span.token_ids)

    @property
    def spent(self) -> int:
        """T: what counts towards the budget."""
        return self.problem.spent(self.sampled)

    @property
    def oldest(self) -> int | None:
        """The lowest version of the weights that sampled part of it; None before anything was sampled."""
        return min((span.policy_version or 0 for span in self.spans if span.sampled and span.token_ids), default=None)

    def graded(self, score: Score) -> Rollout:
        """With its score."""
        return replace(self, score=score)

    def to_json(self) -> dict[str, Any]:
        """Everything but the problem, of which the number in the run is kept."""
        spans = [{"ids": list(s.token_ids), "logprobs": list(s.logprobs), "version": s.policy_version} for s in self.spans]
        score = None if self.score is None else self.score.to_json()
        experts = None if self.experts is None else {"shape": self.experts.shape, "ids": b64encode(self.experts.tobytes()).decode()}
        return {"group": self.group, "member": self.member, "seed": self.seed, "problem": self.problem.id, "spans": spans, "end": self.end,
                "world": self.world, "heard": self.heard, "score": score, "notes": dict(self.notes), "experts": experts}


def given(ids: tuple[int, ...]) -> Span:
    """A span that the policy had to read."""
    return Span(token_ids=ids)


def chosen(ids: tuple[int, ...], logprobs: tuple[float, ...], version: int) -> Span:
    """A span that the policy sampled; all of it may be trained on."""
    return Span(token_ids=ids, logprobs=logprobs, loss_mask=(True,) * len(ids), policy_version=version)


def from_json(record: Mapping[str, Any], problem: Problem) -> Rollout:
    """What `to_json` wrote. Raises `KeyError` or `DataError` for a record that is not one."""
    from gnomon.agent.fields import Fields

    spans = tuple(given(tuple(s["ids"])) if s["version"] is None else chosen(tuple(s["ids"]), tuple(s["logprobs"]), s["version"])
                  for s in record["spans"])
    score = None if record["score"] is None else Score.from_json(Fields(record["score"], "rollout", "score"))
    plain = {name: record[name] for name in ("group", "member", "seed", "end", "world", "heard", "notes")}
    kept = record.get("experts")
    experts = None if kept is None else np.frombuffer(b64decode(kept["ids"]), dtype=np.int16).reshape(kept["shape"])
    return Rollout(problem=problem, spans=spans, score=score, experts=experts, **plain)


def seed_of(*numbers: int) -> int:
    """A seed in [0, 2^63) that these numbers decide."""
    return int(np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)[0] >> np.uint64(1))
