"""Sampled tokens to pieces of an answer: deltas, log-probabilities beside them, stop strings, and when enough has been said.

A `Reader` follows one choice. Stop strings look at the answer's text alone: what the model thinks and what it passes to tools is not
cut. Read next: `service.py`.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gnomon.data.chat import CallEnded, Delta, Parser, ReasoningDelta, Reply, TextDelta
from gnomon.data.dialects.asked import Asked, Ending, Reason, TokenLogprob
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import DataError
from gnomon.serve.request import Sampled
from gnomon.serve.stops import StopStrings

UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """One piece of a choice, with the log-probabilities of the tokens that made it."""

    choice: int
    delta: Delta
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A choice is complete."""

    choice: int
    reply: Reply
    ending: Ending


class PlainText:
    """The parser of a plain completion: all tokens are text, reserved ones by their names; what stops the sequence is no text."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text: list[str] = []

    def feed(self, token: int) -> list[Delta]:
        """The characters that a token completes."""
        return [] if token in self._stop_ids else self._said(self._characters.decode(token_bytes(self._tokenizer, token)))

    def finish(self) -> Reply:
        """The whole text; half a character at its end comes out as U+FFFD."""
        tail = self._said(self._characters.decode(b"", final=True))
        return Reply(reasoning="", text="".join(self._text), tool_calls=(), complete=True, tail=tuple(tail))

    def _said(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._text.append(text)
        return [TextDelta(text=text)]


class Reader:
    """One choice while it is sampled. `done` says that no more tokens are needed; what comes after it is not counted."""

    def __init__(self, choice: int, parser: Parser, tokenizer: Tokenizer, asked: Asked) -> None:
        self._choice = choice
        self._parser = parser
        self._tokenizer = tokenizer
        self._plain = asked.conversation is None
        self._structure = frozenset() if self._plain else frozenset(tokenizer.special_ids.values())
        self._stops = StopStrings(asked.stop)
        self._first_call_only = not asked.parallel_calls
        self._with_logprobs = asked.top_logprobs is not None
        self._waiting: deque[tuple[TokenLogprob, int]] = deque()  # tokens whose text has not come out, and where their text begins
        self._read = 0      # characters of the answer that the parser gave
        self._released = 0  # those of them that came out
        self._text: list[str] = []
        self.done = False
        self.output_tokens = 0
        self.reasoning_tokens = 0

    def token(self, sampled: Sampled) -> list[Said]:
        """The pieces that one more token makes; a token may make none."""
        self.output_tokens += 1
        if self._with_logprobs:
            self._note(sampled)
        return self._pieces(self._parser.feed(sampled.id))

    def finish(self, reason: Reason | Literal["error"]) -> tuple[list[Said], Ended]:
        """The last pieces, and the end, for `reason` unless the reader itself had enough."""
        assert reason != "error"
        reply = self._parser.finish()
        if self.done:
            reason, pieces = "stop", []
        else:
            pieces = self._pieces(reply.tail)
            if free := self._stops.flush():
                pieces.append(self._release(free))
            if self._waiting and self._plain:  # who reads ids wants all of them: also the one that ended the text and has none itself
                pieces.append(Said(choice=self._choice, delta=TextDelta(text=""), logprobs=tuple(token for token, _ in self._waiting)))
                self._waiting.clear()
        calls = reply.tool_calls[:1] if self._first_call_only else reply.tool_calls
        if self._stops.matched is not None:
            calls = ()
        reply = replace(reply, text="".join(self._text), tool_calls=calls)
        return pieces, Ended(choice=self._choice, reply=reply, ending=Ending(reason=reason, stop_string=self._stops.matched))

    def echo(self, text: str, logprobs: Sequence[TokenLogprob]) -> Said:
        """The prompt, said again before its continuation."""
        return Said(choice=self._choice, delta=TextDelta(text=text), logprobs=tuple(logprobs))

    def _pieces(self, deltas: Sequence[Delta]) -> list[Said]:
        pieces = []
        for delta in deltas:
            if self.done:
                break
            if isinstance(delta, TextDelta):
                self._read += len(delta.text)
                if free := self._stops.feed(delta.text):
                    pieces.append(self._release(free))
                self.done = self._stops.matched is not None
            elif isinstance(delta, ReasoningDelta):
                self.reasoning_tokens = self.output_tokens
                pieces.append(Said(choice=self._choice, delta=delta, logprobs=self._thought()))
            else:
                if free := self._stops.flush():  # a call begins: the text before it can grow into no stop string any more
                    pieces.append(self._release(free))
                self._waiting.clear()
                pieces.append(Said(choice=self._choice, delta=delta))
                self.done = self._first_call_only and isinstance(delta, CallEnded)
        return pieces

    def _release(self, text: str) -> Said:
        self._released += len(text)
        self._text.append(text)
        logprobs = []
        while self._waiting and self._waiting[0][1] < self._released:
            logprobs.append(self._waiting.popleft()[0])
        return Said(choice=self._choice, delta=TextDelta(text=text), logprobs=tuple(logprobs))

    def _thought(self) -> tuple[TokenLogprob, ...]:
        tokens = tuple(replace(token, thinking=True) for token, _ in self._waiting)
        self._waiting.clear()
        return tokens

    def _note(self, sampled: Sampled) -> None:
        """Remember a token's log-probability until its text comes out. Markers and the names in tags have no text of their own."""
        if sampled.id in self._structure:
            while self._waiting and self._waiting[-1][1] >= self._read:
                self._waiting.pop()
            return
        top = tuple(shown(self._tokenizer, index, value) for index, value in sampled.top)
        self._waiting.append((shown(self._tokenizer, sampled.id, sampled.logprob, top), self._read))


def shown(tokenizer: Tokenizer, token: int, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    """A token with its bytes."""
    return TokenLogprob(id=token, raw=token_bytes(tokenizer, token), logprob=logprob, top=top)


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of one id; a model may have more rows than its vocabulary has tokens: U+FFFD."""
    try:
        return tokenizer.decode_bytes((token,))
    except DataError:
        return UNKNOWN
