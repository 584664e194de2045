"""What a policy is trained on, in tokens: a prompt, perhaps a world that answers back, and a grade at the end.

This is the seam between the loops (`rl.py`, `distill.py`) and whatever makes problems (`lab/`, your own module): the loops never see
text. A problem is a pure function of its `id`: whoever made it can make it again, so that a run that was killed finds it.
Read next: `rollout.py`, what happened; `policy.py`, who answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from gnomon.agent.trajectory import Score
from gnomon.errors import ConfigError

Grader = Callable[[tuple[int, ...], Any], "Score | Future[Score]"]
"""(all sampled ids in order, the open `Episode` or None) → reward, or what will be one. Runs in a thread of its own, which a future sets
free at once; `Score(reward=None, error=...)` says that the machine failed, not the policy, and keeps the rollout out of loss and
statistics."""


class Episode(Protocol):
    """The world of one rollout. It is asked after each sampled id of `Problem.asks`."""

    def reply(self, sampled: tuple[int, ...]) -> tuple[int, ...] | None:
        """What the world says to the ids sampled since its last reply (the asking id included): ids that the policy must read, perhaps
        none, and then goes on; None ends the rollout."""
        ...

    def state(self) -> Any:
        """All that `Problem.begin` needs to go on from here, as plain JSON. Asked between two replies, for a rollout that is put aside."""
        ...

    def close(self) -> None:
        """Give back what it holds. Called once: after grading, or when the rollout was put aside."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """One thing to solve.

    `kind` names the class of problems that share a token budget b0 within a domain. A rollout ends at a sampled id of `stop_ids` (kept in
    the answer), when the world says so, or after `max_tokens` sampled ids, which is the policy's failure to stop. `think_end` is the id
    that ends the thinking: only what was sampled before it counts towards the budget (general tasks); None counts everything that was
    sampled (agent tasks). `grade` None: nothing can tell how good an answer is but others of its group (`tournament.py`). `held_out`: it is
    scored and not learnt from. `begin(state)` opens the world, anew for None. `room` bounds the ids that the world says in all.
    """

    id: str
    prompt: tuple[int, ...]
    domain: str
    effort: str
    grade: Grader | None
    kind: str = ""
    max_tokens: int = 128
    stop_ids: frozenset[int] = frozenset()
    think_end: int | None = None
    begin: Callable[[Any], Episode] | None = None
    asks: frozenset[int] = frozenset()
    room: int = 0
    held_out: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError(f"problem {self.id}: 'prompt' is empty; give at least one id")
        if self.max_tokens < 1 or self.room < 0:
            raise ConfigError(f"problem {self.id}: 'max_tokens' {self.max_tokens} must be at least 1 and 'room' {self.room} not negative")
        if self.asks and self.begin is None:
            raise ConfigError(f"problem {self.id}: 'asks' needs a world; give 'begin'")

    @property
    def cell(self) -> tuple[str, str]:
        """(domain, effort): which teacher, which budget."""
        return self.domain, self.effort

    @property
    def capacity(self) -> int:
        """Most ids that a rollout of it can have, prompt included."""
        return len(self.prompt) + self.max_tokens + self.room

    def spent(self, sampled: Sequence[int]) -> int:
        """T of the report's budget rule: the sampled ids that count."""
        if self.think_end is None or self.think_end not in sampled:
            return len(sampled)
        return tuple(sampled).index(self.think_end)


class ProblemSource(Protocol):
    """An endless supply of problems by number: the same number gives the same problem, in any order of asking."""

    def problem(self, index: int) -> Problem:
        """Problem `index`, 0 or more."""
        ...
