"""Server-sent events as bytes: how every dialect's stream travels. Used by whatever serves a dialect."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gnomon.data.dialects.asked import Sent

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""JSON as answers are written: compact, characters kept."""


def as_bytes(events: Sequence[Sent]) -> bytes:
    """Events as they go over the wire; half a character, which is no text, becomes `?`."""
    parts = []
    for name, data in events:
        text = data if isinstance(data, str) else encode_json(data)
        parts.append(f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n")
    return "".join(parts).encode("utf-8", "replace")
