"""Reads a reply in K3's format, id by id: reasoning, answer, calls with typed arguments as JSON text.

Any ids are read. A tag that fits nowhere is text where it stands; a tag that fits further up closes what is open on the way. Either makes
the reply not `complete`, and nothing is lost. Text that only looks like a tag never was one: the brackets are ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from gnomon.data.chat import Delta, Reply
from gnomon.data.replies import Characters, ReplyWriter, token_bytes
from gnomon.data.tokenizer import Tokenizer

CHILDREN = {"message": ("think", "response", "tools"), "tools": ("call",), "call": ("argument", "json")}
ATTRIBUTES = {"call": ("tool", "index"), "argument": ("key", "type"), "json": ("type",)}
NEEDED = {"call": "tool", "argument": "key"}
TAG = re.compile(r'([a-z]+)((?: [a-z]+="[^"]*")*)')
ATTRIBUTE = re.compile(r' ([a-z]+)="([^"]*)"')


class XtmlMarkers(NamedTuple):
    """The ids that make structure."""

    open: int
    close: int
    sep: int
    end: int


class XtmlParser:
    """The parser of one reply; see `Parser` in `chat.py`. `taken` are ids of calls that the conversation has already."""

    def __init__(self, tokenizer: Tokenizer, markers: XtmlMarkers, *, thinking: bool, taken: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._markers = markers
        self._taken = set(taken)
        self._stops = (markers.end, tokenizer.document_end_id)
        self._writer = ReplyWriter()
        self._characters = Characters()
        self._channels = ["think" if thinking else "response"]
        self._expected = ["think", "response"] if thinking else ["response"]
        self._path = ["message", self._channels[0]]
        self._tag: list[int] = []      # the ids of a tag that has not ended yet
        self._form = ""                # how the current call gives its arguments: by `argument` tags or one `json` block
        self._value: list[str] | None = None  # a value that is no string, held back until it is whole
        self._sound = True
        self._ended = False
        self._reply: Reply | None = None

    def feed(self, token: int) -> list[Delta]:
        """What one more id adds."""
        marker = token in self._markers or not 0 <= token < len(self._tokenizer.ranks)
        if self._tag and token == self._markers.sep:
            tag, self._tag = [*self._tag, token], []
            if self._ended or not self._apply(tag):
                self._misplaced(tag)
        elif self._tag and not marker:
            self._tag.append(token)
        else:
            self._misplaced(self._tag)
            self._tag = []
            self._outside(token, marker)
        return self._writer.take()

    def finish(self) -> Reply:
        """The reply; what was still held back is its `tail`."""
        if self._reply is None:
            self._misplaced(self._tag)
            self._put(self._characters.flush())
            if self._value is not None:
                self._writer.arguments("".join(self._value))
            complete = self._sound and self._ended and not self._path and self._channels in (self._expected, [*self._expected, "tools"])
            self._reply = self._writer.reply(complete=complete, tail=self._writer.take())
        return self._reply

    def _outside(self, token: int, marker: bool) -> None:
        """An id that is part of no tag."""
        if token in self._stops and not self._ended:
            self._flush()
            self._ended = True
            self._sound &= token == self._markers.end
        elif token in (self._markers.open, self._markers.close):
            self._tag = [token]
        elif marker:
            self._misplaced([token])
        else:
            self._read([token])

    def _misplaced(self, ids: list[int]) -> None:
        """Structure without a proper place is text where it stands."""
        if ids:
            self._sound = False
            self._read(ids)

    def _read(self, ids: list[int]) -> None:
        self._put(self._characters.add(token_bytes(self._tokenizer, ids)))

    def _put(self, text: str) -> None:
        place = self._path[-1] if self._path and not self._ended else "message"
        if not text:
            return
        if place == "think":
            self._writer.reasoning(text)
        elif place == "json":
            self._writer.arguments(text)
        elif place == "argument" and self._value is not None:
            self._value.append(text)
        elif place == "argument":
            self._writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._sound &= place == "response"
            self._writer.text(text)

    def _apply(self, ids: list[int]) -> bool:
        """Follow a whole tag; False where it fits nowhere."""
        try:
            text = token_bytes(self._tokenizer, ids[1:-1]).decode()
        except UnicodeDecodeError:
            return False
        match = TAG.fullmatch(text)
        if match is None:
            return False
        name, attributes = match[1], ATTRIBUTE.findall(match[2])
        if ids[0] == self._markers.close:
            return not attributes and self._close(name)
        values = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in attributes}
        known = len(values) == len(attributes) and values.keys() <= set(ATTRIBUTES.get(name, ()))
        return known and (name not in NEEDED or NEEDED[name] in values) and self._open(name, values)

    def _open(self, name: str, values: dict[str, str]) -> bool:
        parents = [depth for depth, tag in enumerate(self._path) if name in CHILDREN.get(tag, ())]
        if not parents or (name == "argument" and self._form == "json") or (name == "json" and self._form):
            return False
        self._leave(parents[-1] + 1, asked=False)
        self._flush()
        self._path.append(name)
        if name == "call":
            self._form = ""
            self._writer.start_call(self._new_id(), values["tool"])
        elif name == "json":
            self._form = "json"
        elif name == "argument":
            self._value = None if values.get("type", "string") == "string" else []
            lead = ", " if self._form else "{"
            self._form = "argument"
            self._writer.arguments(f"{lead}{json.dumps(values['key'], ensure_ascii=False)}: {'' if self._value is not None else chr(34)}")
        else:
            self._channels.append(name)
        return True

    def _close(self, name: str) -> bool:
        if name not in self._path:
            return False
        self._leave(self._path.index(name) + 1, asked=False)
        self._leave(self._path.index(name), asked=True)
        return True

    def _leave(self, depth: int, *, asked: bool) -> None:
        """Close what is open, innermost first, down to `depth`; where nobody asked for it, the reply is not sound."""
        self._sound &= asked or len(self._path) == depth
        while len(self._path) > depth:
            self._flush()
            name = self._path.pop()
            if name == "argument":
                self._writer.arguments('"' if self._value is None else json_value("".join(self._value)))
                self._value = None
            elif name == "call":
                if self._form == "argument":
                    self._writer.arguments("}")
                self._writer.end_call()

    def _flush(self) -> None:
        self._put(self._characters.flush())

    def _new_id(self) -> str:
        number = len(self._taken)
        while f"call_{number}" in self._taken:
            number += 1
        self._taken.add(f"call_{number}")
        return f"call_{number}"


def json_value(text: str) -> str:
    """A value as it was sampled, if it is JSON; else the text as a JSON string, so that arguments stay JSON whatever was sampled."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
