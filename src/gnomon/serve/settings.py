"""All that can be set about a server: `recipes/serve.toml`, every field overridable as `a.b=c`.

What the engine and the cache can be told stands in their own files; here it is a table of each. Read next: `command.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gnomon import config
from gnomon.config import setting
from gnomon.data.messages import Effort
from gnomon.errors import ConfigError
from gnomon.model.inference_weights import Weights
from gnomon.serve.cache_settings import CacheSettings
from gnomon.serve.engine import EngineSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSettings:
    """One class of requests."""

    tokens: int = setting(doc="tokens (prompts and outputs) that may be in work at a time; one larger request may run alone")
    queue: int = setting(doc="requests that may wait; the next one gets 429 with Retry-After")
    wait_seconds: float = setting(doc="how long one may wait before it gets 429")

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("queue", 0), ("wait_seconds", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"'{name}' is {getattr(self, name)}; use at least {least}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionSettings:
    """Who may enter. Each class has a budget of its own, so that none can starve another."""

    long_prompt_tokens: int = setting(4096, "an interactive request with a longer prompt belongs to the class `long`")
    interactive: LaneSettings = setting(factory=lambda: LaneSettings(tokens=262_144, queue=256, wait_seconds=30), doc="short prompts")
    long: LaneSettings = setting(factory=lambda: LaneSettings(tokens=262_144, queue=32, wait_seconds=120), doc="long prompts")
    batch: LaneSettings = setting(factory=lambda: LaneSettings(tokens=131_072, queue=1024, wait_seconds=600),
                                  doc="requests with priority `batch`")


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitSettings:
    """What one request may take."""

    body_bytes: int = setting(16 * 2**20, "size of a request's body; larger ones get 413")
    max_tokens: int = setting(4096, "tokens of output where the client names no limit")
    request_seconds: float = setting(600.0, "time after which an answer is cut (finish reason `length`, stop reason `deadline`)")
    body_seconds: float = setting(30.0, "time a client may take to send its body; slower ones get 408")
    head_seconds: float = setting(30.0, "time a client may take to send the head of a request; slower ones are cut off")
    inside_bytes: int = setting(128 * 2**20, "bodies of all requests that are inside, waiting ones included; one too many gets 429")
    connections: int = setting(1024, "connections at a time; one too many is told 503 and closed")

    def __post_init__(self) -> None:
        for name in ("body_bytes", "max_tokens", "request_seconds", "body_seconds", "head_seconds", "connections"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"'{name}' is {getattr(self, name)}; use a positive number")
        if self.inside_bytes < self.body_bytes:
            raise ConfigError(f"'inside_bytes' is {self.inside_bytes}; use at least 'body_bytes', which is {self.body_bytes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DefaultSettings:
    """What holds where a client does not say."""

    temperature: float = setting(1.0, "0 takes the likeliest token")
    top_p: float = setting(1.0, "share of the probability to draw from, in (0, 1]")
    top_k: int = setting(0, "number of tokens to draw from; 0: all")
    min_p: float = setting(0.0, "leave out tokens below this share of the likeliest one's probability")
    repetition_penalty: float = setting(1.0, "divides the scores of tokens seen before; 1: off")
    effort: Effort | Literal["format"] | None = setting(
        "format", "how much to think: low, high, max; format: what the released tokenizer says (K3: max); none: the model is told nothing")


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessSettings:
    """Who may ask. Keys are never written in a recipe: they come from a file or from the environment variable GNOMON_API_KEYS."""

    keys_file: Path | None = setting(None, "file with one `name:key` or `key` per line; with keys, requests without one get 401")
    without_keys: bool = setting(False, "allow an address other machines can reach although there are no keys")
    origins: tuple[str, ...] = setting((), "web pages that may send requests, as https://chat.example.org, beside this server's own")
    metrics: bool = setting(True, "answer /metrics, which needs no key")
    admins: tuple[str, ...] = setting((), "names of the keys that may exchange the weights")
    reload_folders: tuple[Path, ...] = setting((), "folders whose checkpoints POST /admin/reload may take; empty: there is no such route")

    def __post_init__(self) -> None:
        if self.reload_folders and not self.admins:
            raise ConfigError("'reload_folders' names folders and 'admins' no key; name the key that may exchange the weights")


@dataclass(frozen=True, kw_only=True, slots=True)
class SightSettings:
    """What a model that sees may look at. Images always come as base64; anything else must be allowed here."""

    folders: tuple[Path, ...] = setting((), "folders whose files clients may name as file:///…; empty: none")
    hosts: tuple[str, ...] = setting((), "hosts of the web that images may be fetched from, redirects excluded; empty: nothing is fetched")
    images: int = setting(32, "images in one request at most")
    pixels: int = setting(1 << 25, "pixels of an image at most, before it is scaled down")
    file_bytes: int = setting(16 * 2**20, "size of a file or download at most")
    memory_bytes: int = setting(256 * 2**20, "for what was seen lately, so that a picture of a long conversation is looked at once")

    def __post_init__(self) -> None:
        for name in ("images", "pixels", "file_bytes", "memory_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"'{name}' is {getattr(self, name)}; use a positive number")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """A server."""

    host: str = setting("127.0.0.1", "address to listen on; other than loopback needs API keys")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    name: str | None = setting(None, "name of the model for clients; none: the folder's")
    weights: Weights = setting("stored", "weights in memory: stored (as in the files), fp32, bf16, mxfp4 (experts encoded, the rest bf16)")
    chat_format: str | None = setting(None, "xtml, kimi_linear or pkg.module:Format; none: the one whose markers the tokenizer names")
    reuse: bool = setting(True, "keep prefixes, so that a conversation that goes on, forks or is tried again computes only what is new")
    page: bool = setting(True, "answer / with the chat page")
    log: Literal["json", "text", "none"] = setting("json", "a line on stderr for each request")
    drain_seconds: float = setting(30.0, "how long running answers may go on after a request to stop")
    limits: LimitSettings = setting(factory=LimitSettings, doc="what one request may take")
    defaults: DefaultSettings = setting(factory=DefaultSettings, doc="what holds where a client does not say")
    admission: AdmissionSettings = setting(factory=AdmissionSettings, doc="who may enter, and who waits")
    access: AccessSettings = setting(factory=AccessSettings, doc="who may ask")
    sight: SightSettings = setting(factory=SightSettings, doc="which images a model that sees may look at")
    engine: EngineSettings = setting(factory=EngineSettings, doc="how the engine runs")
    cache: CacheSettings = setting(factory=CacheSettings, doc="memory, and how prefixes are kept in it")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"'port' is {self.port}; use 1 to 65535, or 0 for a free one")
        if self.drain_seconds < 0:
            raise ConfigError(f"'drain_seconds' is {self.drain_seconds}; use 0 or a positive number")


def load(path: Path | None, overrides: Sequence[str] = ()) -> ServeSettings:
    """The settings of a recipe, or the defaults, with overrides applied. Raises `ConfigError` naming the key."""
    if path is None:
        return config.from_dict(ServeSettings, config.apply_overrides({}, overrides), "serve")
    return config.load(ServeSettings, path, overrides)
