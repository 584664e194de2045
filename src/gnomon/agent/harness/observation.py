"""What a policy gets to read: bounded, marked where something was cut, and always text that a chat format can write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Keep = Literal["ends", "start"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What came of a call. `error` says that it failed; `done` that the attempt ends with it."""

    text: str
    error: bool = False
    done: bool = False


def clean(text: str) -> str:
    """Text without what is no Unicode: half a surrogate pair, which JSON can smuggle in."""
    return text.encode("utf-8", "replace").decode("utf-8")


def bounded(text: str, characters: int, keep: Keep = "ends") -> str:
    """At most `characters` of a text, and a mark that says how many are missing: between both ends, or after the start."""
    text = clean(text)
    missing = len(text) - characters
    if missing <= 0:
        return text
    mark = f"\n[… {missing} characters are cut here …]\n"
    if keep == "start":
        return text[:characters] + mark
    head = characters - characters // 2
    return text[:head] + mark + text[len(text) - characters // 2 :]


def shown(value: object, characters: int = 80) -> str:
    """A wrong value as it is written in complaints: short."""
    text = clean(repr(value))
    return text if len(text) <= characters else text[:characters] + " …"
