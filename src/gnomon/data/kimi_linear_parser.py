"""Reads a reply in Kimi-Linear's format, id by id: text, then a section of calls. Any ids are read; see `Parser` in `chat.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gnomon.data.chat import Delta, Reply
from gnomon.data.replies import Characters, ReplyWriter, token_bytes
from gnomon.data.tokenizer import Tokenizer

CALL_MARKERS = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)
HEADER = re.compile(r"\s*((?:functions\.)?(.+?)(?::\d+)?)\s*", re.DOTALL)


class KimiLinearParser:
    """The parser of one reply. `markers` are the ids of `CALL_MARKERS`, -1 where the vocabulary lacks one."""

    def __init__(self, tokenizer: Tokenizer, markers: Sequence[int], *, end: int) -> None:
        self._tokenizer = tokenizer
        self._section, self._section_end, self._begin, self._argument, self._call_end = markers
        self._end = end
        self._stops = (end, tokenizer.document_end_id)
        self._writer = ReplyWriter()
        self._characters = Characters()
        self._place = "text"  # → section → header → arguments → section → after
        self._header: list[int] = []
        self._sound = True
        self._ended = False
        self._reply: Reply | None = None

    def feed(self, token: int) -> list[Delta]:
        """What one more id adds."""
        ordinary = 0 <= token < len(self._tokenizer.ranks)
        if self._place == "header" and ordinary:
            self._header.append(token)
        elif self._place == "header" and token == self._argument and self._start_call():
            pass
        else:
            self._drop_header()
            if ordinary or not self._move(token):
                self._sound &= ordinary
                self._put(self._characters.add(token_bytes(self._tokenizer, [token])))
        return self._writer.take()

    def finish(self) -> Reply:
        """The reply; what was still held back is its `tail`."""
        if self._reply is None:
            self._drop_header()
            self._flush()
            complete = self._sound and self._ended and self._place in ("text", "after")
            self._reply = self._writer.reply(complete=complete, tail=self._writer.take())
        return self._reply

    def _move(self, token: int) -> bool:
        """Follow a marker; False where it fits nowhere."""
        if self._ended:
            return False
        steps = {("text", self._section): "section", ("section", self._begin): "header", ("section", self._section_end): "after",
                 ("arguments", self._call_end): "section"}
        place = steps.get((self._place, token))
        if place is None and token not in self._stops:
            return False
        self._flush()
        if self._place == "arguments" and place is not None:
            self._writer.end_call()
        self._place = place or self._place
        self._header = [token] if place == "header" else []
        if place is None:
            self._ended = True
            self._sound &= token == self._end
        return True

    def _start_call(self) -> bool:
        """Read the header of a call, `functions.NAME:NUMBER`; False where it names nothing."""
        match = HEADER.fullmatch(token_bytes(self._tokenizer, self._header[1:]).decode(errors="replace"))
        if match is None or not match[2].strip():
            return False
        self._writer.start_call(match[1], match[2])
        self._header, self._place = [], "arguments"
        return True

    def _drop_header(self) -> None:
        """A header that leads to no arguments is text."""
        if self._header:
            self._sound = False
            self._place = "section"
            self._put(self._characters.add(token_bytes(self._tokenizer, self._header)))
            self._header = []

    def _put(self, text: str) -> None:
        if self._place == "arguments" and not self._ended:
            self._writer.arguments(text)
        else:
            self._sound &= not text or (self._place == "text" and not self._ended)
            self._writer.text(text)

    def _flush(self) -> None:
        self._put(self._characters.flush())
