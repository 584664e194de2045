"""Replicas of one server behind one address (report §5.4.3): which conversation belongs where, and who has room for it.

A conversation's states live in the replica that computed them, so all its turns must go there: consistent hashing over its beginning names
a primary and a secondary. The secondary takes over when the primary is down or full, and reads the conversation again; the others' keys
stay where they were. Nothing here does input or output. Read next: `fleet_router.py`.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

from gnomon.config import setting
from gnomon.errors import ConfigError

NAMED = ("prompt_cache_key", "session_id", "conversation", "user")
"""Fields in which a client may name its conversation, the most particular first."""
BEGINNING = 2048
"""Characters of a text, or ids, that tell conversations apart."""
BYTES_PER_TOKEN = 4
OUTPUT_TOKENS = 1024
"""Tokens of output that are counted where a client names no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSettings:
    """A fleet."""

    replicas: int = setting(2, "servers behind the router, each a process of its own with the whole model")
    tokens: int = setting(262_144, "tokens of prompts and outputs, estimated, that a replica may have in work; a larger one may run alone")
    points: int = setting(64, "points of a replica on the ring: more share the keys more evenly")
    body_bytes: int = setting(16 * 2**20, "size of a request's body; larger ones get 413")
    body_seconds: float = setting(30.0, "time in which a body must have arrived; later ones get 408")
    inside_bytes: int = setting(128 * 2**20, "bytes of all bodies that are inside at a time; others get 429")
    check_seconds: float = setting(1.0, "time between two looks at each replica's health")
    start_seconds: float = setting(600.0, "how long a replica may take until it answers for the first time")
    stop_seconds: float = setting(30.0, "how long running answers may go on after a request to stop")

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ConfigError(f"'{field.name}' is {getattr(self, field.name)}; use a positive number")


class Ring:
    """Consistent hashing: each name stands at many points of a circle, a key belongs to the next one. A name more or less moves its own
    share of the keys and no others."""

    def __init__(self, names: Iterable[str], points: int = 64):
        self.names = sorted(set(names))
        self._points = sorted((_place(f"{name} {i}"), name) for name in self.names for i in range(points))
        if not self._points:
            raise ConfigError("a ring without replicas has no place for anything; name at least one")

    def places(self, key: str) -> list[str]:
        """All names in the order in which a key goes to them: primary, secondary, the rest."""
        start = bisect.bisect(self._points, (_place(key), ""))
        order = dict.fromkeys(name for _, name in self._points[start:] + self._points[:start])
        return list(order)


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


@dataclass(slots=True)
class Place:
    """A replica as the router sees it. `used` counts the estimated tokens of what runs there."""

    name: str
    url: str
    budget: int
    healthy: bool = False
    used: int = 0
    running: int = 0
    answered: int = 0
    failed: int = 0

    def fits(self, tokens: int) -> bool:
        """Whether a request may go there: within the budget, or alone when it is larger than the whole of it."""
        return self.healthy and (self.running == 0 or self.used + tokens <= self.budget)

    def enter(self, tokens: int) -> None:
        """A request goes there."""
        self.used += tokens
        self.running += 1

    def leave(self, tokens: int) -> None:
        """It is over."""
        self.used -= tokens
        self.running -= 1


def key_of(body: Any) -> str:
    """What tells conversations apart in a request of any dialect: the name that the client gave, or the beginning, which later turns keep.

    The beginning is everything through the first message of a user, with tools; of a plain prompt its first characters or ids.
    """
    if not isinstance(body, Mapping):
        return ""
    for name in NAMED:
        if isinstance(body.get(name), str) and body[name]:
            return f"{name} {body[name]}"
    metadata = body.get("metadata")
    if isinstance(metadata, Mapping) and isinstance(metadata.get("user_id"), str):
        return f"user {metadata['user_id']}"
    parts: list[Any] = [body.get("tools"), body.get("system"), body.get("instructions")]
    for name in ("messages", "input", "prompt"):
        if body.get(name) is not None:
            parts.append(_beginning(body[name]))
    return json.dumps(parts, sort_keys=True, default=str)


def _beginning(value: Any) -> Any:
    if isinstance(value, str):
        return value[:BEGINNING]
    if not isinstance(value, Sequence):
        return value
    if any(isinstance(item, Mapping) for item in value):
        first = next((i for i, item in enumerate(value) if isinstance(item, Mapping) and item.get("role") == "user"), 0)
        return list(value[:first + 1])
    return [item[:BEGINNING] if isinstance(item, str) else item for item in value[:BEGINNING]]


def cost_of(body: Any, size: int) -> int:
    """About how many tokens a request takes: its bytes as text, and the output that it asks for."""
    asked = [body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")] if isinstance(body, Mapping) else []
    output = next((value for value in asked if isinstance(value, int) and value > 0), OUTPUT_TOKENS)
    count = body.get("n") if isinstance(body, Mapping) else None
    return size // BYTES_PER_TOKEN + output * (count if isinstance(count, int) and count > 0 else 1)
