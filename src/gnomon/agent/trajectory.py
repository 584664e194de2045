"""What happened: turns that only grow, every token once, with its log-probability and the weights that chose it (report §4.1, §5.3).

A turn stores what it *added*: messages, and the ids between the end of its parent and its own end. The turns from a root to a leaf, put
together, are exactly what the model saw, so nothing is ever encoded again. A branch is a turn whose parent is not the turn before it; a
context that was compacted, or a sub-agent, is a new root that names the turn it came from. `trajectory_file.py` keeps it on disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, Self

from gnomon.agent.fields import Fields
from gnomon.agent.message_json import message_from_json, message_to_json
from gnomon.data.messages import Message, Tool
from gnomon.errors import DataError, VerifierError

StopReason = Literal["finished", "budget", "deadline", "refused", "failed"]
"""`failed` is the machine's fault and excluded from statistics; the other ends are the policy's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive ids of one origin: given, or sampled by one version of the weights.

    `logprobs` [len(token_ids)] are those of sampling, empty for ids that were given; `loss_mask` [len(token_ids)] is true for what may be
    trained on, which must have been sampled; `policy_version` says by which weights.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    loss_mask: tuple[bool, ...] = ()
    policy_version: int | None = None

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if set(map(type, self.token_ids)) - {int} or min(self.token_ids, default=0) < 0:
            raise DataError("'token_ids': ids are whole numbers, 0 or more")
        for name in ("logprobs", "loss_mask"):
            if len(getattr(self, name)) not in (0, count):
                raise DataError(f"'{name}': {len(getattr(self, name))} for {count} ids; there is one for each, or none at all")
        if set(map(type, self.logprobs)) - {int, float} or not all(map(math.isfinite, self.logprobs)):
            raise DataError("'logprobs': must be finite numbers")
        if any(self.loss_mask) and (len(self.logprobs) != count or self.policy_version is None):
            raise DataError("'loss_mask': only what was sampled can be trained on; give its log-probabilities and the policy's version")

    @property
    def sampled(self) -> bool:
        """Whether the policy chose these ids."""
        return self.policy_version is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one step added. `parent` is the index of the turn that it continues, None for a new context.

    `origin` is, for a new context, the turn that it came from, and `purpose` why: `compaction` or `agent` (a sub-agent). `notes` is JSON.
    """

    messages: tuple[Message, ...]
    spans: tuple[Span, ...] = ()
    parent: int | None = None
    origin: int | None = None
    purpose: Literal["compaction", "agent"] | None = None
    seconds: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of its spans."""
        return tuple(chain.from_iterable(span.token_ids for span in self.spans))


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How good it was, and why. `reward` None is "not scored", which is not 0; `error` then says what failed, and statistics leave it out.

    Raises `VerifierError` for a reward or metric that is no finite number.
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    error: str | None = None

    def __post_init__(self) -> None:
        for name, value in [("reward", self.reward), *((f"metrics.{name}", value) for name, value in self.metrics.items())]:
            if name == "reward" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise VerifierError(f"'{name}': {value!r} is no finite number; a verifier that cannot tell must fail, not guess")
        if self.reward is not None and self.error is not None:
            raise VerifierError(f"'reward': {self.reward!r} beside the error {self.error!r}; a failed verifier gives no reward")

    @property
    def scored(self) -> bool:
        """Whether there is a reward."""
        return self.reward is not None

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {"reward": self.reward, "metrics": dict(self.metrics), "evidence": list(self.evidence), "error": self.error}

    @classmethod
    def from_json(cls, fields: Fields) -> Self:
        """What `to_json` wrote."""
        metrics = Fields(fields.table("metrics"), "score", "metrics")
        score = cls(reward=fields.maybe("reward", fields.number), metrics={name: metrics.number(name) for name in fields.table("metrics")},
                    evidence=tuple(map(str, fields.rows("evidence"))), error=fields.maybe("error", fields.text))
        fields.done()
        return score


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEnd:
    """How a step of a task with several ended: `turns` is how many the attempt had by then, in all."""

    name: str
    turns: int
    stop_reason: StopReason
    score: Score


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A root-to-leaf path as training takes it: parallel lists. Over all samples each sampled token is masked in at most once."""

    turns: tuple[int, ...]
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One attempt at one task. `turns` only grow: `appended` gives the longer trajectory and changes nothing.

    `steps` says how each step ended, of a task that has several. `seconds` says, once it has ended, how long its parts took: `machine`,
    `agent`, `judge`.
    """

    id: str
    task_id: str
    harness: str = ""
    model: str = ""
    effort: str | None = None
    group: str | None = None
    tools: tuple[Tool, ...] = ()
    turns: tuple[Turn, ...] = ()
    steps: tuple[StepEnd, ...] = ()
    score: Score | None = None
    stop_reason: StopReason | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def appended(self, turn: Turn) -> Trajectory:
        """With one turn more. Raises `DataError` where the turn continues one that is not there, or the trajectory has ended."""
        if self.stop_reason is not None:
            raise DataError(f"trajectory {self.id}: it ended ({self.stop_reason}); nothing can be added")
        for name in ("parent", "origin"):
            index = getattr(turn, name)
            if index is not None and not 0 <= index < len(self.turns):
                raise DataError(f"trajectory {self.id}: '{name}': turn {index} is not among the {len(self.turns)} so far")
        if turn.parent is not None and (turn.origin is not None or turn.purpose is not None):
            raise DataError(f"trajectory {self.id}: 'origin': only a turn without 'parent' begins a context of its own")
        return replace(self, turns=(*self.turns, turn))

    def path(self, index: int) -> tuple[int, ...]:
        """The turns from its root to a turn, itself included."""
        found: list[int] = []
        step: int | None = index
        while step is not None:
            found.append(step)
            step = self.turns[step].parent
        return tuple(reversed(found))

    def leaves(self) -> tuple[int, ...]:
        """The turns that none continues."""
        continued = {turn.parent for turn in self.turns}
        return tuple(i for i in range(len(self.turns)) if i not in continued)

    def messages(self, index: int | None = None) -> tuple[Message, ...]:
        """What the model had read and said at a turn, by default the last."""
        if not self.turns:
            return ()
        return tuple(m for i in self.path(len(self.turns) - 1 if index is None else index) for m in self.turns[i].messages)

    def token_ids(self, index: int) -> tuple[int, ...]:
        """All ids of the context up to the end of a turn."""
        return tuple(chain.from_iterable(span.token_ids for step in self.path(index) for span in self.turns[step].spans))

    def answer(self) -> str:
        """The text of the last message that the policy of the first context wrote; empty where there is none."""
        roots = [i for i in range(len(self.turns)) if self._main(i)]
        for i in reversed(roots):
            for message in reversed(self.turns[i].messages):
                if message.role == "assistant":
                    return message.text
        return ""

    def _main(self, index: int) -> bool:
        """Whether a turn belongs to the agent itself and not to one that it called, compacted contexts included."""
        root = self.turns[self.path(index)[0]]
        while root.purpose == "compaction" and root.origin is not None:
            root = self.turns[self.path(root.origin)[0]]
        return root.purpose != "agent"

    def samples(self) -> tuple[Sample, ...]:
        """One sample for each leaf; a turn that several share is trained on in the first and context in the others."""
        taken: set[int] = set()
        found = []
        for leaf in self.leaves():
            path = self.path(leaf)
            spans = [(i, span) for i in path for span in self.turns[i].spans]
            found.append(Sample(
                turns=path, token_ids=tuple(t for _, span in spans for t in span.token_ids),
                loss_mask=tuple(bool(span.loss_mask and span.loss_mask[k]) and i not in taken for i, span in spans for k in _each(span)),
                logprobs=tuple(span.logprobs[k] if span.logprobs else 0.0 for _, span in spans for k in _each(span)),
                policy_versions=tuple(span.policy_version for _, span in spans for _k in _each(span))))
            taken.update(path)
        return tuple(found)

    @property
    def sampled_tokens(self) -> int:
        """How many ids the policy chose, in all branches."""
        return sum(len(span.token_ids) for turn in self.turns for span in turn.spans if span.sampled)


def _each(span: Span) -> range:
    return range(len(span.token_ids))


def turn_to_json(turn: Turn) -> dict[str, Any]:
    """A turn; what is empty is left out. The mask is a string of 0 and 1."""
    spans = [{"token_ids": list(span.token_ids), "logprobs": list(span.logprobs), "policy_version": span.policy_version,
              "loss_mask": "".join("01"[flag] for flag in span.loss_mask)} for span in turn.spans]
    record = {"messages": [message_to_json(message) for message in turn.messages], "parent": turn.parent, "origin": turn.origin,
              "purpose": turn.purpose, "seconds": turn.seconds, "notes": dict(turn.notes),
              "spans": [{name: value for name, value in span.items() if value not in (None, [], "")} for span in spans]}
    return {name: value for name, value in record.items() if value is not None and value not in ([], {})}


def turn_from_json(fields: Fields) -> Turn:
    """What `turn_to_json` wrote. Raises `DataError` naming the place."""
    purpose = fields.maybe("purpose", fields.text)
    if purpose not in (None, "compaction", "agent"):
        raise fields.wrong("purpose", purpose, "compaction or agent")
    turn = Turn(messages=tuple(message_from_json(each) for each in fields.each("messages")),
                spans=tuple(_span(each) for each in fields.each("spans")), parent=fields.maybe("parent", fields.whole),
                origin=fields.maybe("origin", fields.whole), purpose=purpose,  # type: ignore[arg-type]
                seconds=fields.maybe("seconds", fields.number), notes=fields.table("notes"))
    fields.done()
    return turn


def _span(fields: Fields) -> Span:
    mask: str = fields.text("loss_mask", "")
    if mask.strip("01"):
        raise fields.wrong("loss_mask", mask, "a string of 0 and 1")
    ids: Sequence[Any] = fields.rows("token_ids")
    span = Span(token_ids=tuple(ids), logprobs=tuple(fields.rows("logprobs")), loss_mask=tuple(flag == "1" for flag in mask),
                policy_version=fields.maybe("policy_version", fields.whole))
    fields.done()
    return span
