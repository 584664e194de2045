"""Any OpenAI-compatible URL with log-probabilities as a subject: gnomon's own server, llama.cpp's, vLLM's, SGLang's.

Plain completions where the server has them, so that a prompt is the text that was sent; else a chat of one user message. A server cannot be
looked into, so its reference is the same request sent with whatever keeps its cache out (`cache_salt` or `cache_prompt`, where it takes
one), or else the first time that it sees a text. Two runs of one request already differ by rounding where batches form; the bound is
`tolerance`, or ten times what a repeated uncached request differs by, if that is more. Read next: `verify_command.py`.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx

from gnomon.errors import ConfigError, DataError
from gnomon.serve.verify import Answer, Ask, Prompt, Token, difference

TOLERANCE = 0.02
"""Difference of log-probabilities that batches of another shape may make on a server that computes with 16 bits."""
TOP = 5
"""Alternatives that every server gives."""
AT_ONCE = 16
TOKENS_PER_WORD = 1.5
NOISE = 10
"""How many times its own noise a server may differ by."""
WAYS = ("cache_salt cache_prompt", "cache_salt", "cache_prompt", "")
"""What may keep a cache out, tried in this order until a server takes it."""
WORDS = ("river", "stone", "under", "seven", "light", "paper", "garden", "north", "copper", "window", "letter", "silver", "morning")


class RemoteSubject:
    """A server at `url` (…/v1). Raises `ConfigError` where it cannot be reached or gives no log-probabilities."""

    seeds = False

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, tolerance: float = TOLERANCE, client: Any = None):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = client or httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=600)
        self.name, self.block = url, 64
        self.run = uuid.uuid4().hex[:8]  # so that texts are new to a server that was verified before
        self._numbers = itertools.count()
        self._references: dict[Ask, Answer] = {}
        self.model = model or self._first_model()
        self.chat = False
        self.chat = not self._takes("completions")
        self.way = next(way for way in WAYS if self._allows(way))
        self.salts = self.way == "cache_salt"  # a server that refuses what it does not know, and knows this
        self.noise = self._noise()
        self.bound = max(tolerance, NOISE * self.noise)

    @property
    def described(self) -> str:
        """How it is asked, for the title of a table."""
        kept_out = f"the cache is kept out with {self.way.replace(' ', ' and ')}" if self.way else "references are first sights"
        return f"{self.name} ({'chat' if self.chat else 'completions'}; {kept_out}; its own noise is {self.noise:.1e})"

    def text(self, tokens: int, seed: int) -> str:
        """Words, about so many tokens; other words for each run of the program."""
        draw = random.Random(f"{self.run} {seed}")
        count = max(1, round(tokens / TOKENS_PER_WORD))
        return "".join(f"{draw.choice(WORDS)}{draw.choice((' ', ' ', ' ', ', ', '. ', chr(10)))}" for _ in range(count))

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        """All of them at the same time, each on a connection of its own."""
        for ask in asks:
            if not self.way:
                self.reference(ask)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._one, asks))

    def reference(self, ask: Ask) -> Answer:
        """The request with the cache kept out, or its first sight; what was answered before is remembered."""
        key = replace(ask, boundaries=(), cached=False)
        if key not in self._references:
            self._references[key] = self._one(key)
        return self._references[key]

    def said(self, answer: Answer) -> Prompt:
        """The answer's text."""
        return "".join(str(token) for token in answer.tokens)

    def _first_model(self) -> str:
        try:
            answer = self.client.get("/models")
            return str(answer.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.name} does not list its models ({error}); give the address of an OpenAI-compatible API, "
                              "with its /v1, or name the model with --model") from None

    def _takes(self, path: str) -> bool:
        answer = self.client.post(f"/{path}", json=self._body(Ask(prompt="a", tokens=1)))
        return answer.status_code == 200

    def _allows(self, way: str) -> bool:
        self.way = way
        return self._post(Ask(prompt=self.text(9, 1), tokens=1, cached=False)).status_code == 200 or not way

    def _noise(self) -> float:
        """What the same uncached request differs by from itself; with no way to keep the cache out, nothing is known."""
        if not self.way:
            return 0.0
        ask = Ask(prompt=self.text(2 * self.block, 2), cached=False)
        first, second = self._one(ask), self._one(ask)
        return difference(first, second)

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": ask.tokens, "temperature": 0.0}
        if self.chat:
            body |= {"messages": [{"role": "user", "content": ask.prompt}], "logprobs": True, "top_logprobs": TOP}
        else:
            body |= {"prompt": ask.prompt, "logprobs": TOP}
        if ask.cached and ask.salt:
            body["cache_salt"] = f"{self.run}-{ask.salt}"
        if not ask.cached:
            body |= {"cache_salt": f"{self.run}-{next(self._numbers)}"} if "cache_salt" in self.way else {}
            body |= {"cache_prompt": False} if "cache_prompt" in self.way else {}
        return body

    def _post(self, ask: Ask) -> httpx.Response:
        try:
            return self.client.post("/chat/completions" if self.chat else "/completions", json=self._body(ask))
        except httpx.HTTPError as error:
            raise ConfigError(f"{self.name} did not answer: {type(error).__name__} {error}") from None

    def _one(self, ask: Ask) -> Answer:
        response = self._post(ask)
        if response.status_code != 200:
            raise ConfigError(f"{self.name} answered {response.status_code}: {response.text[:300]}")
        try:
            body = response.json()
            choice = body["choices"][0]
            said = choice.get("text", (choice.get("message") or {}).get("content"))
            # an end at once, or part of a character, of which llama.cpp says nothing: nothing that could be compared
            silent = choice.get("logprobs") is None and said is not None and not said.strip("\ufffd")
            tokens, top = ((), ()) if silent else (_chat if self.chat else _completion)(choice["logprobs"])
            details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
            return Answer(tokens=tokens, top=top, cached=details.get("cached_tokens"))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"{self.name} gives no log-probabilities that can be read ({type(error).__name__}: {error}); "
                            "verification needs them") from None


Read = tuple[tuple[Token, ...], tuple[Mapping[Token, float], ...]]


def _completion(logprobs: Mapping[str, Any]) -> Read:
    """Tokens and alternatives of a plain completion, in either of the two forms that servers use."""
    if "content" in logprobs and logprobs["content"] is not None:
        return _chat(logprobs)
    tokens = tuple(str(token) for token in logprobs["tokens"])
    tables = logprobs.get("top_logprobs") or [{} for _ in tokens]
    own = logprobs["token_logprobs"]
    return tokens, tuple({**{str(k): float(v) for k, v in (table or {}).items()}, token: float(value)}
                         for token, value, table in zip(tokens, own, tables, strict=True))


def _chat(logprobs: Mapping[str, Any]) -> Read:
    """Tokens and alternatives of a chat completion."""
    entries = logprobs["content"]
    every = [[*(entry.get("top_logprobs") or []), entry] for entry in entries]
    return (tuple(str(entry["token"]) for entry in entries),
            tuple({str(one["token"]): float(one["logprob"]) for one in ones} for ones in every))
