"""An attempt's visit to the gateway: whose secret it is, what it may ask, and how its last call went. Read next: `gateway_routes.py`."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from gnomon.agent.policy import Completion, Sampling
from gnomon.agent.record import Recorder
from gnomon.data.dialects.asked import Asked, Refused
from gnomon.data.messages import Conversation, Effort
from gnomon.errors import GnomonError, PolicyError

# What a request may not choose: a policy draws its answers as the attempt says. (`stop`, `max_tokens`, `seed` and the two below pass.)
NOT_PASSED = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "top_logprobs", "regex")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What one request may be: bytes of its body, seconds until it is there, seconds of silence before a stream says that it lives; and how
    many bytes the requests of one attempt that wait for answers may be, all together."""

    body_bytes: int = 64 << 20
    attempt_bytes: int = 256 << 20
    body_seconds: float = 60.0
    quiet_seconds: float = 10.0


class Visit:
    """One attempt's place at the gateway. `secret` is its key.

    `sampling` and `effort` are the attempt's: what they say stands in place of what the program asks. `failure` is what ended the last
    call, a spent budget for instance, and None after one that was answered: a program may hide it, its harness must not. `wake` is set
    whenever it is. `held` counts the bytes of its requests that are under way.
    """

    def __init__(self, recorder: Recorder, sampling: Sampling | None, effort: Effort | None) -> None:
        self.recorder = recorder
        self.secret = f"sk-gnomon-{secrets.token_hex(16)}"
        self.failure: GnomonError | None = None
        self.wake = asyncio.Event()
        self.held = 0
        self._sampling = sampling or Sampling()
        self._effort = effort

    async def answer(self, asked: Asked, key: str, again: bool) -> Completion:
        """The policy's answer to what a program asked. Raises `Refused` for what cannot be passed on, and what `Recorder` raises."""
        assert asked.conversation is not None
        conversation, sampling = self._mine(asked.conversation), self._drawn(asked)
        answered = False
        try:
            completion = await self.recorder.complete(conversation, sampling, key=key, again=again)
            self.failure, answered = None, True
        except GnomonError as error:
            self.failure, answered = error, True
            raise
        finally:
            if not answered:
                self.failure = PolicyError(f"policy '{self.recorder.policy.name}' failed in a way that nobody foresaw")
            if self.failure is not None:
                self.wake.set()
        return completion

    def count(self, asked: Asked) -> int:
        """The tokens of a conversation: as the policy counts them where it can, else a guess of four bytes to a token."""
        assert asked.conversation is not None
        conversation = self._mine(asked.conversation)
        counting = getattr(self.recorder.policy, "count", None)
        if counting is not None:
            return int(counting(conversation))
        said = [text for m in conversation.messages for text in (m.text, m.reasoning or "", *(call.arguments for call in m.tool_calls))]
        declared = [tool.description + str(tool.parameters) for tool in conversation.tools]
        return sum(len(text.encode("utf-8", "replace")) for text in (*said, *declared)) // 4 + 1

    def _mine(self, conversation: Conversation) -> Conversation:
        effort = self._effort if conversation.thinking else None
        return conversation if conversation.effort == effort else replace(conversation, effort=effort)

    def _drawn(self, asked: Asked) -> Sampling:
        """How an answer is drawn: as the attempt says, else as the program asks."""
        if asked.n != 1:
            raise Refused(f"'n' is {asked.n}; an attempt takes one answer at a time: leave it out", "n", "unsupported_value")
        for name in NOT_PASSED:
            value = getattr(asked, name)
            if value not in (None, (), 0):
                raise Refused(f"'{name}' is not passed on: the attempt decides how answers are drawn; leave it out", name,
                              "unsupported_value")
        mine = self._sampling
        return Sampling(
            max_tokens=min((n for n in (mine.max_tokens, asked.max_tokens) if n is not None), default=None),
            temperature=asked.temperature if mine.temperature is None else mine.temperature,
            top_p=asked.top_p if mine.top_p is None else mine.top_p, stop=mine.stop or asked.stop,
            seed=asked.seed if mine.seed is None else mine.seed)


class Visits:
    """Who is in. Secrets are looked up by digest, so that the time says nothing of how near a guess was."""

    def __init__(self) -> None:
        self._visits: dict[bytes, Visit] = {}

    def enter(self, visit: Visit) -> Visit:
        """Its secret is good from now on."""
        self._visits[_digest(visit.secret)] = visit
        return visit

    def leave(self, visit: Visit) -> None:
        """Its secret is worth nothing from now on; twice is no error."""
        self._visits.pop(_digest(visit.secret), None)

    def find(self, headers: Mapping[str, str]) -> Visit | None:
        """Whose request it is, by its headers; None for a stranger."""
        return next((found for key in _keys(headers) if (found := self._visits.get(_digest(key))) is not None), None)


def _keys(headers: Mapping[str, str]) -> Iterator[str]:
    """The API keys of a request: `Authorization: Bearer KEY`, `x-api-key: KEY`."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield given.strip()
    if "x-api-key" in headers:
        yield headers["x-api-key"]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
