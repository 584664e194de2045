"""What the parsers of all formats share: ids to characters without halves, and a reply that grows by deltas."""

from __future__ import annotations

import codecs

from gnomon.data.chat import CallArguments, CallEnded, CallStarted, Delta, ReasoningDelta, Reply, TextDelta
from gnomon.data.messages import ToolCall
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import DataError

UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


def token_bytes(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    """The bytes of `ids`, a reserved id as its name; an id outside the vocabulary (a model may have more rows) is U+FFFD."""
    try:
        return tokenizer.decode_bytes(ids)
    except DataError:
        return b"".join(tokenizer.decode_bytes([i]) if 0 <= i < tokenizer.vocab_size else UNKNOWN for i in ids)


class Characters:
    """UTF-8 bytes in any pieces to text: characters come out whole, bytes that are no character come out as U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, data: bytes) -> str:
        """The characters that `data` completes."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left of a character that was never completed."""
        return self._decoder.decode(b"", final=True)


class ReplyWriter:
    """A reply under construction. Each method adds to it and to the deltas that `take` returns."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []

    def reasoning(self, text: str) -> None:
        """Add to the reasoning."""
        if text:
            self._reasoning.append(text)
            self._deltas.append(ReasoningDelta(text=text))

    def text(self, text: str) -> None:
        """Add to the answer."""
        if text:
            self._text.append(text)
            self._deltas.append(TextDelta(text=text))

    def start_call(self, call_id: str, name: str) -> None:
        """Begin a call."""
        self._deltas.append(CallStarted(index=len(self._calls), id=call_id, name=name))
        self._calls.append((call_id, name, []))

    def arguments(self, json_text: str) -> None:
        """Add to the arguments of the latest call."""
        if json_text:
            self._calls[-1][2].append(json_text)
            self._deltas.append(CallArguments(index=len(self._calls) - 1, json=json_text))

    def end_call(self) -> None:
        """Close the latest call; without a word of arguments it gets an empty object."""
        if not "".join(self._calls[-1][2]).strip():
            self.arguments("{}")
        self._deltas.append(CallEnded(index=len(self._calls) - 1))

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return len(self._calls)

    def take(self) -> list[Delta]:
        """The deltas since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def reply(self, *, complete: bool, tail: list[Delta]) -> Reply:
        """The reply so far."""
        calls = tuple(ToolCall(id=call_id, name=name, arguments="".join(parts)) for call_id, name, parts in self._calls)
        return Reply(reasoning="".join(self._reasoning), text="".join(self._text), tool_calls=calls, complete=complete, tail=tuple(tail))
