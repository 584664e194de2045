"""Deltas as blocks, for dialects whose answers are lists: one block is open at a time, and nothing comes between the pieces of a call.

Text that a model writes inside a call, where none belongs, waits until the call has ended. Used by `openai_responses.py` and
`anthropic.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.data.chat import CallArguments, CallEnded, CallStarted, Delta, ReasoningDelta, TextDelta

Kind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A block begins; `call` says which tool it calls."""

    kind: Kind
    call: CallStarted | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class More:
    """More of the open block: text, or JSON text of arguments."""

    kind: Kind
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed:
    """The open block ends with all of its text; a call that was cut off is not `whole`."""

    kind: Kind
    text: str
    whole: bool = True
    call: CallStarted | None = None


Step = Opened | More | Closed


class Blocks:
    """Turns deltas into steps."""

    def __init__(self) -> None:
        self._kind: Kind | None = None
        self._call: CallStarted | None = None
        self._parts: list[str] = []
        self._waiting: list[Delta] = []

    def add(self, delta: Delta) -> list[Step]:
        """The steps of one delta."""
        match delta:
            case ReasoningDelta() | TextDelta() if self._call is not None:
                self._waiting.append(delta)
                return []
            case ReasoningDelta(text=text):
                return self._more("reasoning", text)
            case TextDelta(text=text):
                return self._more("text", text)
            case CallStarted():
                steps = self.finish()
                self._kind, self._call = "call", delta
                return [*steps, Opened(kind="call", call=delta)]
            case CallArguments(json=text):
                return self._more("call", text)
            case CallEnded():
                return [*self._close(whole=True), *self._release()]

    def finish(self) -> list[Step]:
        """The steps that close what is open; a call that is still open was cut off."""
        return [*self._close(whole=self._call is None), *self._release(), *self._close(whole=True)]

    def _more(self, kind: Kind, text: str) -> list[Step]:
        steps: list[Step] = []
        if self._kind != kind:
            steps = [*self._close(whole=True), Opened(kind=kind)]
            self._kind = kind
        self._parts.append(text)
        return [*steps, More(kind=kind, text=text)]

    def _close(self, *, whole: bool) -> list[Step]:
        if self._kind is None:
            return []
        closed = Closed(kind=self._kind, text="".join(self._parts), whole=whole, call=self._call)
        self._kind, self._call, self._parts = None, None, []
        return [closed]

    def _release(self) -> list[Step]:
        waiting, self._waiting = self._waiting, []
        return [step for delta in waiting for step in self.add(delta)]
