"""Who answers: a policy takes a conversation and gives the next message, with the ids and log-probabilities that it was sampled with.

The world speaks messages; a policy that knows tokens says which it was given and which it chose, so that nothing is encoded a second time.
Read next: `record.py`, the only way by which harnesses and programs reach a policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, runtime_checkable

from gnomon import extend
from gnomon.agent.trajectory import Span
from gnomon.data.messages import Conversation, Effort, Message
from gnomon.errors import CapacityError

KINDS = "gnomon.agent.policies"
Stop = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one answer is drawn; None leaves the choice to the policy. `stop` are strings that end it, `seed` makes it repeatable."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What one answer cost: tokens read, those of them that a cache knew, tokens written, and money where the policy has a price."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    dollars: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One answer. `message` is the assistant's; `stop` is `length` where a limit cut it.

    A policy that knows ids says all of them: `prompt_ids` is what the model read, from its first id on, and `sampled` what it then chose,
    with log-probabilities. What of it is new, and which turn it continues, is the record's to find (`record.py`).
    """

    message: Message
    stop: Stop = "stop"
    prompt_ids: tuple[int, ...] = ()
    sampled: Span | None = None
    spent: Spent = field(default_factory=Spent)


class ContextFull(CapacityError):
    """A conversation is longer than the policy can read: the attempt has used all the context that there is."""


class Policy(Protocol):
    """Anything that answers. Raises `PolicyError` where it cannot be reached or answers nonsense, `ConfigError` for what it cannot do."""

    name: str

    async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Completion:
        """The next assistant message. Calls with one `session` belong to one rollout: what was sampled there keeps its ids."""
        ...

    async def close(self, session: str) -> None:
        """Forget a session; one that is not known is no error."""
        ...


@runtime_checkable
class KnowsEfforts(Protocol):
    """A policy that knows how much it can be told to think, so that another word is refused before it is asked. `efforts` None: only its
    server knows."""

    efforts: tuple[Effort, ...] | None


@runtime_checkable
class Recalls(Protocol):
    """A policy that keeps the ids of what was sampled, and can be told of those that another process recorded."""

    def recall(self, session: str, context: Sequence[int], sampled: Sequence[int], message: Message) -> None:
        """An answer of this session: the ids read before it, those sampled, and what they say."""
        ...


def opened(kind: str, settings: Mapping[str, Any] | None = None) -> Policy:
    """The policy that `kind` stands for, a file of `policies/` or `your_pkg.module:function`, with its settings, which are JSON.

    Raises `ConfigError` for an unknown kind, listing the choices, or `DataError` naming a wrong setting.
    """
    return cast(Policy, extend.find(KINDS, kind, "opened")(dict(settings or {})))
