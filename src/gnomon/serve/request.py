"""What goes into the engine and what comes out: a request in tokens, events as they are sampled, and how much of it was known already.

The engine knows tokens only; text, messages and tools are the API's. Read next: `engine.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import ConfigError

Priority = Literal["interactive", "batch"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
Reason = Literal["stop", "length", "cancelled", "deadline", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """What the output must match: a JSON Schema as JSON text, a regular expression, or a grammar in Lark's notation, in which `<[7]>` is
    the reserved id 7.

    With `after`, tokens are free until these ids have been sampled (the model thinks first), and constrained from there. Where the first
    of them is a reserved id, it is the only one that may interrupt the thinking, and the others follow it. With `closes`, these ids follow
    what matched, then a stop id; without, the output ends where the grammar does.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""
    after: tuple[int, ...] = ()
    closes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn, and when to stop. Temperature 0 is greedy.

    The same seed and request give the same tokens whatever else runs: the draw at step i depends on `(seed, first_draw + i)` alone.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    first_draw: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        ranges = {
            "max_tokens": self.max_tokens >= 1, "temperature": 0 <= self.temperature < math.inf, "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= 0, "min_p": 0 <= self.min_p <= 1, "repetition_penalty": 0 < self.repetition_penalty < math.inf,
            "presence_penalty": -2 <= self.presence_penalty <= 2, "frequency_penalty": -2 <= self.frequency_penalty <= 2,
            "seed": 0 <= self.seed < 2**63, "first_draw": 0 <= self.first_draw < 2**63,
            "top_logprobs": self.top_logprobs is None or 0 <= self.top_logprobs <= 20,
        }
        for name, fits in ranges.items():
            if not fits:
                raise ConfigError(f"'{name}' is {getattr(self, name)}; {LIMITS[name]}")


LIMITS = {
    "max_tokens": "ask for at least 1", "temperature": "use 0 for greedy or a positive number", "top_p": "it must be in (0, 1]",
    "top_k": "use 0 for no limit or a positive number", "min_p": "it must be in [0, 1]", "repetition_penalty": "it must be positive",
    "presence_penalty": "it must be in [-2, 2]", "frequency_penalty": "it must be in [-2, 2]",
    "seed": "use a number from 0 to 2^63 - 1", "first_draw": "use a number from 0 to 2^63 - 1", "top_logprobs": "it must be from 0 to 20",
}


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """An image in a prompt: what the model sees instead of embeddings, `vectors` [N, D] fp32, from position `start` on.

    The prompt has ids from the vocabulary's size on at these positions; they come from the image's content, so that the prefix cache and
    forks tell images apart by it.
    """

    start: int
    vectors: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence to continue. `images` stand at positions of the prompt, in order.

    `boundaries` are lengths of prefixes that others may share (ends of turns), where the cache prefers its checkpoints; `salt` keeps
    prefixes apart that must not be shared; `cache` False neither reads nor writes the prefix cache.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    boundaries: tuple[int, ...] = ()
    priority: Priority = "interactive"
    deadline_seconds: float | None = None
    salt: str = ""
    cache: bool = True
    prompt_logprobs: bool = False
    images: tuple[Seen, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A request has its memory and begins, before its first token: what of its prompt was cached, and why not more.

    It lets an API say so before a long answer ends; a source of events may leave it out, `Finished` has the same and more.
    """

    cached_tokens: int
    cache_note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One token of the output, with its log-probability under the model's own distribution (temperature 1, no penalties) and the
    likeliest alternatives if they were asked for."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a request cost. `cached_tokens` of the prompt were not computed; `cache_note` says why not more."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cache_note: str
    queue_seconds: float
    first_token_seconds: float | None
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The last event of a request. `prompt_logprobs` [len(prompt) - 1] where they were asked for; `error` with reason `error`."""

    reason: Reason
    usage: Usage
    stop_string: str | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    error: str | None = None


Event = Started | Sampled | Finished
