"""Everything that a client may ask, in no dialect's words, and what a dialect needs to answer.

A dialect is a module with `read(body)`, `whole(…)`, `error(…)` and a class `Stream`; see `Dialect`. `serve/service.py` works with
these types alone, so an API of another shape is one more module. Read next: `openai_chat.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from gnomon.data.chat import Delta, Reply
from gnomon.data.messages import Conversation
from gnomon.errors import ConfigError

Reason = Literal["stop", "length", "deadline", "cancelled"]


class Refused(ConfigError):
    """A request cannot be served as it was asked: `field` is the place in the body, `code` a word for programs."""

    def __init__(self, message: str, field: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request. Either `conversation` is given, or `prompts`: texts or token ids to continue as they are.

    None is "not said": the service's own settings decide. `stop` cuts the answer's text, never the thinking; `stop_token_ids` end the
    sequence itself, beside those of the vocabulary unless `ignore_eos`. `first_draw` numbers the first draw of `seed`, for a sequence that
    goes on with what was sampled before. `top_logprobs` None wants no
    log-probabilities, 0 those of the sampled tokens alone. `session` names what belongs together, for a router. `parallel_calls` False
    ends the reply after its first call. `regex` binds the answer to a regular expression. `echo` repeats the prompt before the
    continuation, and with log-probabilities gives those of the prompt too.
    """

    model: str | None
    conversation: Conversation | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    first_draw: int = 0
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    top_logprobs: int | None = None
    echo: bool = False
    parallel_calls: bool = True
    regex: str | None = None
    session: str | None = None
    salt: str = ""
    cache: bool = True
    priority: Literal["interactive", "batch"] = "interactive"
    deadline_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What names an answer: its id without a dialect's prefix, the second it was made, the model's name."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """A token with its log-probability; `raw` are its bytes, which need not be whole characters. `top` are the likeliest alternatives;
    `thinking` says that it belongs to the reasoning. `logprob` None: the first token of a prompt, which nothing predicts."""

    id: int
    raw: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()
    thinking: bool = False

    @property
    def text(self) -> str:
        """The bytes as text; what is not UTF-8 becomes U+FFFD."""
        return self.raw.decode("utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Why a choice ended. `stop_string` is the one that cut it."""

    reason: Reason
    stop_string: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a request took. `cached_tokens` of the prompt were not computed again; `cache_note` says why not more.

    `output_tokens` counts all choices, thinking included; `reasoning_tokens` of them were thought.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cache_note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One finished answer of a request that was not streamed."""

    index: int
    reply: Reply
    ending: Ending
    logprobs: tuple[TokenLogprob, ...] = ()


class Sent(NamedTuple):
    """One server-sent event: its name where the dialect names events, and its data: an object, or a word such as `[DONE]`."""

    name: str | None
    data: Mapping[str, Any] | str


class Stream(Protocol):
    """Turns what happens into a dialect's events: `start`, then pieces of any choice, `finish` once for each choice, `end` once."""

    def start(self, cost: Cost) -> list[Sent]:
        """The events before the first piece; `cost` is what is known then: the prompt, and what of it was cached."""

    def delta(self, choice: int, delta: Delta, logprobs: Sequence[TokenLogprob] = ()) -> list[Sent]:
        """The events of one piece of a choice; `logprobs` are those of the tokens that made it, if they were asked for."""

    def finish(self, choice: int, reply: Reply, ending: Ending) -> list[Sent]:
        """The events that close a choice."""

    def end(self, cost: Cost) -> list[Sent]:
        """The events that close the answer."""


class Dialect(Protocol):
    """What a dialect's module offers."""

    def read(self, body: Mapping[str, Any]) -> Asked:
        """What the body asks. Raises `Refused` naming field, value and remedy."""

    def stream(self, asked: Asked, head: Head) -> Stream:
        """The stream of one answer."""

    def whole(self, asked: Asked, head: Head, choices: Sequence[Choice], cost: Cost) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def error(self, status: int, message: str, field: str | None = None, code: str | None = None, /) -> dict[str, Any]:
        """The body of an error; in a stream it is the data of the last event."""
