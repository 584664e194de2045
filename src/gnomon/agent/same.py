"""What counts as the same: an answer that a client sent back, and ids that were seen before.

Programs do not give an answer back to the letter: JSON is written anew, a blank line is lost. The words decide. Thinking that was left out,
another text or another argument is another message. Read next: `ledger.py`, `record.py`.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import Any

from gnomon.data.messages import Message, ToolCall

Words = tuple[Any, ...]


def words(message: Message) -> Words:
    """What an assistant said, to be compared and looked up: thinking and text without white space around them, calls by id, name and the
    values of their arguments."""
    return (message.name, (message.reasoning or "").strip(), message.text.strip(), message.images, tuple(map(_call, message.tool_calls)))


def unthought(said: Words) -> Words:
    """The same words without the thinking."""
    return (said[0], "", *said[2:])


def _call(call: ToolCall) -> tuple[str, str, str]:
    return call.id, call.name, canonical(call.arguments)


def canonical(text: str) -> str:
    """Arguments as JSON in one spelling: keys sorted, whole numbers without a fraction; what is no JSON stays as it is."""
    try:
        return json.dumps(_plain(json.loads(text)), sort_keys=True, ensure_ascii=False) if text.strip() else "{}"
    except (ValueError, RecursionError):
        return text


def _plain(value: Any) -> Any:
    """JSON knows one kind of number: programs write 1.0 back as 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


class Rolling:
    """A fingerprint of ids that grows with them."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.add(ids)

    def grown(self, ids: Sequence[int]) -> Rolling:
        """Another that has these ids too; this one stays."""
        longer = Rolling()
        longer._hash = self._hash.copy()
        longer.add(ids)
        return longer

    def add(self, ids: Sequence[int]) -> None:
        """More ids."""
        self._hash.update(array("Q", ids).tobytes())

    @property
    def digest(self) -> bytes:
        """The fingerprint so far, 16 bytes."""
        return self._hash.digest()
