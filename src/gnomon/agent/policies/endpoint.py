"""A policy behind an address: any server of OpenAI's API. Needs the extra `serve`.

With `tokens` it sends ids to `/v1/completions` and takes back ids with their log-probabilities, as `gnomon serve` and vLLM give them; a
server that gives none is an error, because ids that were made from text are not those that were sampled. Without, it speaks of messages to
`/v1/chat/completions`, and trajectories have no ids. So it does, too, where a conversation shows pictures: ids alone cannot. Read next:
`endpoint_chat.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.agent import endpoint_chat
from gnomon.agent.fields import Fields, parsed
from gnomon.agent.ledger import Ledger
from gnomon.agent.policy import Completion, ContextFull, Sampling, Spent
from gnomon.agent.trajectory import Span
from gnomon.data.chat import ChatFormat, chat_format
from gnomon.data.messages import Conversation, Message
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import ConfigError, DataError, PolicyError

if TYPE_CHECKING:
    import httpx

TRY_AGAIN = frozenset((408, 409, 429, 500, 502, 503, 504, 529))
MOST_BYTES = 256 << 20  # of an answer
VERSION = "x-gnomon-policy-version"
# What servers want to hear before they tell ids: ours tells them with log-probabilities.
SERVERS: Mapping[str, Mapping[str, Any]] = {
    "gnomon": {"logprobs": 0}, "vllm": {"logprobs": 0, "return_token_ids": True, "skip_special_tokens": False},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a model answers. `url` ends in `/v1`; `model` is its name there; `key` is sent as a bearer token.

    `server` says how ids are asked for: `gnomon` or `vllm`. `prices` are dollars per million tokens read and written. A call that the
    server could not take is tried `retries` times more. `policy_version` is noted with what is sampled. `extra` are more fields of bodies.
    """

    url: str
    model: str
    key: str = ""
    server: str = "gnomon"
    prices: tuple[float, float] = (0.0, 0.0)
    timeout_seconds: float = 600.0
    retries: int = 3
    policy_version: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise DataError(f"policy 'endpoint': 'url': {self.url!r}; write the address of an API: http://127.0.0.1:8000/v1")
        if self.server not in SERVERS:
            raise DataError(f"policy 'endpoint': 'server': {self.server!r}; it is one of {', '.join(SERVERS)}")


class EndpointPolicy:
    """A model at an `Endpoint`. With `chat`, the format of its tokenizer, it is asked in ids; without, in messages. `version` of the
    weights is noted with what is sampled; where a server says which one it has, that counts.

    Connections are kept until the last session is closed.
    """

    def __init__(self, endpoint: Endpoint, chat: ChatFormat | None = None) -> None:
        self.name = endpoint.model
        self.version = endpoint.policy_version
        self.efforts = chat.efforts if chat is not None else None
        self._endpoint = endpoint
        self._ledger = Ledger(chat) if chat is not None else None
        self._sessions: set[str] = set()
        self._client: httpx.AsyncClient | None = None

    async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Completion:
        """The model's answer. Raises `PolicyError` where the server cannot be reached or gives no answer that can be kept, `ContextFull`
        where it says that the context is too long."""
        self._sessions.add(session)
        if self._ledger is None or conversation.images:
            answer, _ = await self._ask("/chat/completions", endpoint_chat.body(conversation, sampling))
            message, stop, spent = endpoint_chat.read(answer, self._endpoint.url)
            return Completion(message=message, stop=stop, spent=self._priced(spent))
        return await self._sampled(self._ledger, session, conversation, sampling)

    def count(self, conversation: Conversation) -> int:
        """The tokens of a conversation; without a format, a guess of four bytes to a token."""
        if self._ledger is None:
            return sum(len(message.text.encode()) for message in conversation.messages) // 4 + 1
        return len(self._ledger.chat.encode(conversation, images=bool(conversation.images)).tokens)

    def recall(self, session: str, context: Sequence[int], sampled: Sequence[int], message: Message) -> None:
        """Take up an answer that another process recorded; without a format there are no ids to keep."""
        if self._ledger is not None:
            self._ledger.recall(session, context, sampled, message)

    async def close(self, session: str) -> None:
        """Forget a session."""
        self._sessions.discard(session)
        if self._ledger is not None:
            self._ledger.forget(session)
        if not self._sessions and self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    async def _sampled(self, ledger: Ledger, session: str, conversation: Conversation, sampling: Sampling) -> Completion:
        """An answer in ids."""
        prompt = await asyncio.to_thread(ledger.prepare, session, conversation)
        wanted: dict[str, Any] = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
                                  "seed": sampling.seed, "stop": list(sampling.stop) or None}
        if self._endpoint.server == "vllm":
            wanted["stop_token_ids"] = sorted(ledger.chat.stop_ids)
        body = {"prompt": list(prompt.token_ids), **SERVERS[self._endpoint.server], **{k: v for k, v in wanted.items() if v is not None}}
        answer, version = await self._ask("/completions", body)
        ids, logprobs, reason, cached = _tokens(answer, self._endpoint.url)
        if reason == "stop" and not sampling.stop and ids[-1] not in ledger.chat.stop_ids:
            raise PolicyError(f"{self._endpoint.url}: the id that ended the answer was not sent, so what was sampled is not whole")
        reply = ledger.took(session, prompt, ids)
        span = Span(token_ids=ids, logprobs=logprobs, loss_mask=(True,) * len(ids), policy_version=version)
        spent = Spent(prompt_tokens=len(prompt.token_ids), cached_tokens=cached, output_tokens=len(ids))
        return Completion(message=reply.message, stop="stop" if reason == "stop" else "length", prompt_ids=prompt.token_ids, sampled=span,
                          spent=self._priced(spent))

    def _priced(self, spent: Spent) -> Spent:
        reading, writing = self._endpoint.prices
        return replace(spent, dollars=(spent.prompt_tokens * reading + spent.output_tokens * writing) / 1e6)

    async def _ask(self, path: str, body: Mapping[str, Any]) -> tuple[Fields, int]:
        """The answer to a body, and the version of the weights that gave it; what may pass is tried again after a pause that doubles."""
        import httpx

        if self._client is None:
            headers = {"authorization": f"Bearer {self._endpoint.key}"} if self._endpoint.key else {}
            self._client = httpx.AsyncClient(timeout=self._endpoint.timeout_seconds, headers=headers)
        url = self._endpoint.url.rstrip("/") + path
        data = {"model": self._endpoint.model, **body, **self._endpoint.extra}
        for attempt in range(self._endpoint.retries + 1):
            if attempt:
                await asyncio.sleep(min(0.5 * 2 ** (attempt - 1), 30.0))
            try:
                answer = await self._client.post(url, json=data)
            except UnicodeEncodeError as error:
                raise DataError(f"half a surrogate pair cannot be sent to {url} ({error.reason}); leave it out") from None
            except httpx.HTTPError as error:
                said = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if answer.status_code == 200 and len(answer.content) <= MOST_BYTES:
                try:
                    return Fields(parsed(answer.content, url), url), self._version(answer.headers.get(VERSION, ""))
                except DataError as error:
                    raise PolicyError(str(error)) from None
            said = f"status {answer.status_code}: {answer.text[:500]}"
            if "context_length" in answer.text or answer.status_code == 413:
                raise ContextFull(f"{url}: {said}")
            if answer.status_code not in TRY_AGAIN:
                break
        raise PolicyError(f"{url}: {said}")

    def _version(self, told: str) -> int:
        """What a server says; a version that nobody gave it is 0, and says nothing."""
        return int(told) if told.isdigit() and told != "0" else self.version


def _tokens(answer: Fields, url: str) -> tuple[tuple[int, ...], tuple[float, ...], str, int]:
    """Ids, log-probabilities, why it ended, and how much of the prompt was cached."""
    try:
        choice = answer.each("choices")[0]
        table = choice.inner("logprobs")
        ids = tuple(choice.rows("token_ids") or table.rows("token_ids"))
        logprobs = tuple(table.rows("token_logprobs"))
        reason = choice.text("finish_reason")
        usage = answer.inner("usage") if answer.has("usage") else Fields({}, url)
        details = usage.inner("prompt_tokens_details") if usage.has("prompt_tokens_details") else usage
        cached = details.whole("cached_tokens", 0)
        Span(token_ids=ids, logprobs=logprobs)  # whole numbers, finite numbers, as many of the one as of the other
    except (DataError, IndexError) as error:
        raise PolicyError(f"{url}: no ids with log-probabilities ({error}); ask a server that gives them, or say tokens = false") from None
    if not ids or len(ids) != len(logprobs):
        raise PolicyError(f"{url}: {len(ids)} ids and {len(logprobs)} log-probabilities; ask a server that gives both")
    return ids, tuple(map(float, logprobs)), reason, cached


def opened(settings: Mapping[str, Any]) -> EndpointPolicy:
    """The policy of a table: `url`, `model`, `key_variable` (which environment variable has the key), `tokens` with `tokenizer` (a folder)
    and `chat_format`, `server`, `price_read`, `price_written`, `timeout_seconds`, `retries`, `policy_version`, `extra`."""
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise ConfigError("policy 'endpoint' needs httpx; install the extra: pip install 'gnomon[serve]'") from None
    fields = Fields(settings, "policy 'endpoint'")
    variable = fields.maybe("key_variable", fields.text)
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"policy 'endpoint': 'key_variable': the environment has no {variable}; export it, or leave the setting out")
    endpoint = Endpoint(
        url=fields.text("url"), model=fields.text("model"), key=os.environ.get(variable, "") if variable else "",
        server=fields.text("server", "gnomon"), prices=(fields.number("price_read", 0.0), fields.number("price_written", 0.0)),
        timeout_seconds=fields.number("timeout_seconds", 600.0), retries=fields.whole("retries", 3),
        policy_version=fields.whole("policy_version", 0), extra=fields.table("extra"))
    tokens, folder = fields.flag("tokens", False), fields.maybe("tokenizer", fields.text)
    named = fields.maybe("chat_format", fields.text)
    fields.done()
    if tokens and folder is None:
        raise DataError("policy 'endpoint': 'tokens' needs 'tokenizer', the folder of the model's tokenizer")
    return EndpointPolicy(endpoint, chat_format(Tokenizer.load(Path(str(folder))), named) if tokens else None)
