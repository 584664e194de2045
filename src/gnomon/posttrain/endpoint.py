"""A server of OpenAI's API that is asked in token ids: our own, or vLLM's. Needs the extra `serve`.

Ids mean the same to both sides or nothing does, so the vocabulary is compared before anything is asked: by the fingerprint that the server
tells, by the one that the settings state, or by how the server encodes a few texts. Read next: `remote_teacher.py`, `remote.py`.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gnomon.config import setting
from gnomon.errors import ConfigError, PolicyError

if TYPE_CHECKING:
    import httpx

    from gnomon.data.tokenizer import Tokenizer

TRY_AGAIN = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
PAUSE, LONGEST_PAUSE = 0.25, 15.0
PROBES = ("The quick brown fox jumps over 13 lazy dogs.",
          "def f(x):\n\treturn {'a': x ** 2}  # ≤ π", "知识就是力量。 Straße, naïve, 🙂\n\n   end")
"""Texts whose encodings tell vocabularies apart: words, code, other scripts, spaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """A server that answers in token ids."""

    url: str = setting(doc="address of the API, with its /v1")
    model: str | None = setting(None, "name of the model there; none: the first that the server lists")
    server: Literal["gnomon", "vllm"] = setting("gnomon", "whose way of asking for ids and log-probabilities")
    key_variable: str | None = setting(None, "environment variable that holds the API key")
    tokenizer: str | None = setting(None, "fingerprint of its vocabulary, for a server that neither tells it nor answers /tokenize")
    timeout_seconds: float = setting(600.0, "how long an answer may take")
    retries: int = setting(4, "times that a request is sent again which the server could not take")
    at_once: int = setting(8, "requests under way at a time")

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"'url' is '{self.url}'; write the address of an API: http://127.0.0.1:8000/v1")
        if self.retries < 0 or self.at_once < 1 or self.timeout_seconds <= 0:
            raise ConfigError(f"'retries' {self.retries} must not be negative, 'at_once' {self.at_once} at least 1 and 'timeout_seconds' "
                              f"{self.timeout_seconds} positive")


class Endpoint:
    """Asks one server; may be used from several threads. `told` is its entry in the list of models.

    Raises `ConfigError` where a key is missing, `PolicyError` where the server does not answer.
    """

    def __init__(self, config: EndpointConfig, client: httpx.Client | None = None) -> None:
        self.config, self.url = config, config.url.rstrip("/")
        self.key = key_of(config)
        self._client = client or _client(config, self.key)
        weakref.finalize(self, self._client.close)  # connections that wait for the next request are closed with whoever would make it
        entries = self.get("/models").get("data")
        named = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
        chosen = [each for each in named if config.model in (None, each.get("id"))]
        if not chosen:
            raise ConfigError(f"{self.url} has {', '.join(str(each.get('id')) for each in named) or 'no model'}, not '{config.model}'; "
                              "name one of those as 'model'")
        self.told: Mapping[str, Any] = chosen[0]
        self.model = str(self.told.get("id"))

    def get(self, path: str) -> dict[str, Any]:
        """The JSON at a path of the API."""
        return self._send("GET", self.url + path, None)[0]

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, str]]:
        """The answer to a body, and its headers; `model` is added. Raises `PolicyError` when it cannot be had."""
        return self._send("POST", self.url + path, {"model": self.model, **body})

    def beside(self, path: str, body: Mapping[str, Any], *, retries: int | None = None) -> dict[str, Any]:
        """The answer of a route that stands beside /v1, such as /tokenize."""
        return self._send("POST", self.url.removesuffix("/v1") + path, body, retries)[0]

    def _send(self, method: str, url: str, body: Any, retries: int | None = None) -> tuple[dict[str, Any], Mapping[str, str]]:
        import httpx

        said, pause = "", PAUSE
        for attempt in range((self.config.retries if retries is None else retries) + 1):
            if attempt:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            try:
                answer = self._client.request(method, url, json=body)
                if answer.status_code == 200:
                    found = answer.json() if answer.content else {}
                    return (found if isinstance(found, dict) else {"value": found}), answer.headers
            except (httpx.HTTPError, ValueError) as error:  # ValueError: an answer that is no JSON
                said = f"{type(error).__name__}: {error}"
                continue
            said = f"status {answer.status_code}: {answer.text[:300]}"
            if answer.status_code not in TRY_AGAIN:
                break
        raise PolicyError(f"{url}: {said}")

    def check(self, tokenizer: Path | None) -> None:
        """Compare the vocabulary with that of a folder. Raises `ConfigError` where it is another, or where nothing tells which it is."""
        if tokenizer is None:
            raise ConfigError(f"{self.url} is asked in ids, and there is no tokenizer here to compare; put one into the run's folder")
        from gnomon.data.tokenizer import Tokenizer

        own = Tokenizer.load(tokenizer)
        size = self.told.get("vocab_size")
        if size is not None and size != own.vocab_size:
            raise ConfigError(f"{self.url} has 'vocab_size' {size}, {tokenizer} {own.vocab_size}; ids must mean the same to both")
        theirs = self.told.get("tokenizer_fingerprint") or self.config.tokenizer
        same = theirs == own.fingerprint if theirs is not None else self._encodes_as(own)
        if not same:
            raise ConfigError(f"{self.url} has another tokenizer than {tokenizer}; ids must mean the same to both")

    def _encodes_as(self, own: Tokenizer) -> bool:
        """Whether the server encodes a few texts as we do."""
        try:
            found = [self.beside("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False}, retries=0).get("tokens")
                     for text in PROBES]
        except PolicyError as error:
            raise ConfigError(f"{self.url} does not tell its vocabulary ({error}); state its fingerprint as 'tokenizer'") from None
        return found == [list(own.encode(text)) for text in PROBES]


def key_of(config: EndpointConfig) -> str:
    """The API key, empty where none is wanted. Raises `ConfigError` where the environment lacks it."""
    key = os.environ.get(config.key_variable, "") if config.key_variable else ""
    if config.key_variable and not key:
        raise ConfigError(f"'key_variable': the environment has no {config.key_variable}; export it, or leave the setting out")
    return key


def _client(config: EndpointConfig, key: str) -> httpx.Client:
    try:
        import httpx
    except ImportError:
        raise ConfigError("an endpoint needs httpx; install the extra: pip install 'gnomon[serve]'") from None
    return httpx.Client(timeout=config.timeout_seconds, headers={"authorization": f"Bearer {key}"} if key else {},
                        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64))
