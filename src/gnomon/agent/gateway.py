"""The gateway: programs that speak OpenAI's or Anthropic's API reach a policy through it, unchanged, and every answer goes on record.

Each attempt has a secret, which its program presents as an API key; it picks the recorder. The gateway listens on this machine's loopback
and on a Unix socket that only this user can reach: as `Network(proxy=gateway.socket)` it is the only way out of a sandbox, and appears
inside as `INSIDE`. Needs the extra `serve`. Read next: `gateway_routes.py`, `gateway_speech.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from gnomon.agent.policy import Completion, Sampling
from gnomon.agent.record import Recorder
from gnomon.data.dialects.asked import Asked, Refused
from gnomon.data.messages import Conversation, Effort
from gnomon.errors import ConfigError, GnomonError, PolicyError

INSIDE = "http://127.0.0.1:3128"
"""Where a sandbox reaches its proxy; a program inside takes it for the API's address."""

BACKLOG = 512
START_SECONDS = 60.0
# What a request may not choose: a policy draws its answers as the attempt says. (`stop`, `max_tokens`, `seed` and the two below pass.)
NOT_PASSED = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "top_logprobs", "regex")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What one request may be: bytes of its body, seconds until it is there, seconds of silence before a stream says that it lives."""

    body_bytes: int = 64 << 20
    body_seconds: float = 60.0
    quiet_seconds: float = 10.0


class Visit:
    """One attempt's place at the gateway. `secret` is its key.

    `sampling` and `effort` are the attempt's: what they say stands in place of what the program asks. `failure` is what ended the last
    call, a spent budget for instance, and None after one that was answered: a program may hide it, its harness must not. `wake` is set
    whenever it is.
    """

    def __init__(self, recorder: Recorder, sampling: Sampling | None, effort: Effort | None) -> None:
        self.recorder = recorder
        self.secret = f"sk-gnomon-{secrets.token_hex(16)}"
        self.failure: GnomonError | None = None
        self.wake = asyncio.Event()
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


class Gateway:
    """Listens while it is open: `async with Gateway() as gateway: visit = gateway.admit(recorder)`.

    `url` is for programs on this machine, `socket` for sandboxes. Serves any number of attempts at a time; those that have left are
    strangers. Raises `ConfigError` where the extra `serve` is not installed.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.url = ""
        self.socket = Path()
        self._visits: dict[bytes, Visit] = {}
        self._open = contextlib.AsyncExitStack()

    def admit(self, recorder: Recorder, *, sampling: Sampling | None = None, effort: Effort | None = None) -> Visit:
        """Let an attempt in, under a secret of its own."""
        visit = Visit(recorder, sampling, effort)
        self._visits[_digest(visit.secret)] = visit
        return visit

    def leave(self, visit: Visit) -> None:
        """Its secret is worth nothing from now on; twice is no error."""
        self._visits.pop(_digest(visit.secret), None)

    def visit(self, secret: str) -> Visit | None:
        """Whose secret it is. Looked up by digest, so that the time says nothing of how near a guess was."""
        return self._visits.get(_digest(secret))

    async def __aenter__(self) -> Self:
        """Listen."""
        try:
            from gnomon.agent.gateway_routes import server
        except ImportError as error:
            raise ConfigError(f"the gateway needs {error.name}; install the extra: pip install 'gnomon[serve]'") from None
        async with contextlib.AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gnomon-", ignore_cleanup_errors=True))
            self.socket = Path(folder) / "gateway.sock"
            tcp, local = stack.enter_context(socket.socket()), stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                tcp.bind(("127.0.0.1", 0))
                local.bind(str(self.socket))
            except OSError as error:
                raise ConfigError(f"the gateway cannot listen ({error}); give TMPDIR a short path to a folder of yours") from None
            os.chmod(self.socket, 0o600)
            for each in (tcp, local):
                each.listen(BACKLOG)
            self.url = f"http://127.0.0.1:{tcp.getsockname()[1]}"
            serving = server(self)
            running = asyncio.create_task(serving.serve(sockets=[tcp, local]))
            stack.push_async_callback(_ended, serving, running)
            async with asyncio.timeout(START_SECONDS):
                while not serving.started:
                    if running.done():
                        raise ConfigError("the gateway did not start")
                    await asyncio.sleep(0.001)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Stop listening; requests under way are cut."""
        await self._open.aclose()
        self._visits.clear()


async def _ended(serving: Any, running: asyncio.Task[None]) -> None:
    serving.should_exit = serving.force_exit = True
    await asyncio.gather(running, return_exceptions=True)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def keys(headers: Any) -> Iterator[str]:
    """The API keys of a request: `Authorization: Bearer KEY`, `x-api-key: KEY`."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield given.strip()
    if "x-api-key" in headers:
        yield headers["x-api-key"]
