"""Patches in the form that Codex made known: `*** Begin Patch`, then files that are added, deleted or updated, then `*** End Patch`.

An update has hunks; a hunk begins with `@@`, which may name a line to look after, and has lines that stay (` `), go (`-`) and come (`+`). A
hunk holds no line numbers, so its place is found by its text: exactly first, then without spaces at line ends, then without any around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gnomon.agent.harness.fault import Fault

BEGIN, END = "*** Begin Patch", "*** End Patch"
Doing = Literal["add", "delete", "update"]
HEADS: dict[str, Doing] = {"*** Add File: ": "add", "*** Delete File: ": "delete", "*** Update File: ": "update"}
MOVE, LAST = "*** Move to: ", "*** End of File"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hunk:
    """Lines in place of others. `after` is a line that stands somewhere before them; `last` says that they end the file."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    after: str | None = None
    last: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What happens to one file. `content` is that of a new one; `to` is where an updated one goes."""

    kind: Doing
    path: str
    content: str = ""
    hunks: tuple[Hunk, ...] = ()
    to: str | None = None


def parsed(text: str) -> list[Change]:
    """The changes of a patch. Raises `Fault` naming the line that does not belong there."""
    lines = text.strip("\n").split("\n")
    while lines and not lines[0].strip():
        lines.pop(0)
    if not lines or lines[0].strip() != BEGIN or lines[-1].strip() != END:
        raise Fault(f"a patch begins with the line '{BEGIN}' and ends with the line '{END}'")
    body, changes = lines[1:-1], list[Change]()
    at = 0
    while at < len(body):
        head = next((head for head in HEADS if body[at].startswith(head)), None)
        if head is None:
            if not body[at].strip():
                at += 1
                continue
            raise Fault(f"line {at + 2} of the patch, {body[at][:80]!r}, names no file; write one of {', '.join(map(repr, HEADS))}")
        path = body[at][len(head) :].strip()
        stop = next((i for i in range(at + 1, len(body)) if body[i].startswith(tuple(HEADS))), len(body))
        changes.append(_change(HEADS[head], path, body[at + 1 : stop]))
        at = stop
    if not changes:
        raise Fault("the patch changes nothing")
    return changes


def _change(kind: Doing, path: str, lines: list[str]) -> Change:
    if not path:
        raise Fault("the patch names a file without a name")
    if kind == "add":
        wrong = [line for line in lines if not line.startswith("+") and line.strip()]
        if wrong:
            raise Fault(f"{path} is new, so each of its lines begins with '+'; this one does not: {wrong[0][:80]!r}")
        return Change(kind=kind, path=path, content="".join(line[1:] + "\n" for line in lines if line.startswith("+")))
    if kind == "delete":
        if any(line.strip() for line in lines):
            raise Fault(f"{path} is deleted, so nothing can follow its name")
        return Change(kind=kind, path=path)
    to = None
    if lines and lines[0].startswith(MOVE):
        to, lines = lines[0][len(MOVE) :].strip(), lines[1:]
    hunks = _hunks(path, lines)
    if not hunks and to is None:
        raise Fault(f"{path} is updated without a change")
    return Change(kind=kind, path=path, hunks=tuple(hunks), to=to)


def _hunks(path: str, lines: list[str]) -> list[Hunk]:
    found: list[Hunk] = []
    old, new, after, last = list[str](), list[str](), None, False

    def close() -> None:
        if old or new:
            found.append(Hunk(old=tuple(old), new=tuple(new), after=after, last=last))

    for line in lines:
        if line.startswith("@@"):
            close()
            old, new, after, last = [], [], line[2:].strip() or None, False
        elif line.strip() == LAST:
            last = True
        elif line[:1] in ("+", "-", " ") or not line:
            old += [line[1:]] if line[:1] != "+" else []
            new += [line[1:]] if line[:1] != "-" else []
        else:
            raise Fault(f"{path}: {line[:80]!r} begins with none of '+', '-', ' ' and '@@'")
    close()
    return found


def updated(change: Change, text: str) -> str:
    """A file after its hunks. Raises `Fault` for one whose lines are not there."""
    ends = text.endswith("\n") or not text
    lines = text.split("\n")
    if ends:
        lines.pop()
    at = 0
    for number, hunk in enumerate(change.hunks, 1):
        if hunk.after is not None:
            place = _found(lines, (hunk.after,), at, False)
            if place is None:
                raise Fault(f"{change.path}: hunk {number}: no line {hunk.after[:80]!r} from line {at + 1} on")
            at = place + 1
        if not hunk.old:
            place = len(lines) if hunk.after is None or hunk.last else at
        else:
            place = _found(lines, hunk.old, at, hunk.last)
        if place is None:
            raise Fault(f"{change.path}: hunk {number}: its lines do not stand in the file from line {at + 1} on; the first is "
                        f"{hunk.old[0][:80]!r}")
        lines[place : place + len(hunk.old)] = hunk.new
        at = place + len(hunk.new)
    return "\n".join(lines) + ("\n" if lines and (ends or change.hunks) else "")


def _found(lines: Sequence[str], wanted: Sequence[str], start: int, last: bool) -> int | None:
    """Where lines stand, from `start` on; with `last`, at the end of the file if they do."""
    for plain in (str, str.rstrip, str.strip):
        told, sought = [plain(line) for line in lines], [plain(line) for line in wanted]
        places = range(start, len(told) - len(sought) + 1)
        for place in ([len(told) - len(sought)] if last and len(sought) <= len(told) else []) + [*places]:
            if place >= start and told[place : place + len(sought)] == sought:
                return place
    return None
