"""A small office: mail, a calendar and files over several simulated days, in one SQLite database. Also the program by which agents use it.

Things happen at their minute: whoever acts sees only what was delivered by then. Every deed is kept in a journal; `replayed` does the
deeds of a journal again in a fresh office, so that a judge need not believe the database. `python3 office.py help` tells how it is used.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Iterable, Mapping
from typing import Any

DAY = 24 * 60
HELP = """office VERB key=value ...   (times are DAY-HH:MM, such as 2-14:30)

  now                                        the time, and what is new
  wait [until=TIME]                          let time pass until then, or until something arrives
  inbox [folder=inbox|sent|archive]          list mail
  read id=ID                                 read a mail
  send to=WHO subject=TEXT body=TEXT [reply=ID]
  archive id=ID
  calendar [day=N]                           list appointments
  book title=TEXT start=TIME end=TIME [with=WHO,WHO]
  move id=ID start=TIME end=TIME
  cancel id=ID
  files                                      list files
  open path=PATH                             show a file
  save path=PATH content=TEXT                write a file
"""
TABLES = """
CREATE TABLE clock (now INTEGER, until INTEGER);
CREATE TABLE mail (id TEXT PRIMARY KEY, folder TEXT, sender TEXT, recipient TEXT, subject TEXT, body TEXT, at INTEGER, reply TEXT,
                   seen INTEGER);
CREATE TABLE appointments (id TEXT PRIMARY KEY, title TEXT, start INTEGER, finish INTEGER, attendees TEXT);
CREATE TABLE files (path TEXT PRIMARY KEY, content TEXT);
CREATE TABLE coming (at INTEGER, kind TEXT, record TEXT);
CREATE TABLE journal (number INTEGER PRIMARY KEY AUTOINCREMENT, at INTEGER, verb TEXT, arguments TEXT);
"""
DEEDS = ("send", "archive", "book", "move", "cancel", "save")


class Refused(Exception):
    """A deed that cannot be done; the message says why."""


class Office:
    """An office in a database that is open."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database

    @classmethod
    def made(cls, database: sqlite3.Connection, start: Mapping[str, Any]) -> Office:
        """A new one. `start` has `now` and `until` in minutes, `files`, `coming`: a list of `{at, kind: mail | appointment, …}`."""
        database.executescript(TABLES)
        database.execute("INSERT INTO clock VALUES (?, ?)", (start["now"], start["until"]))
        database.executemany("INSERT INTO files VALUES (?, ?)", list(start["files"].items()))
        database.executemany("INSERT INTO coming VALUES (?, ?, ?)",
                             [(each["at"], each["kind"], json.dumps(each)) for each in start["coming"]])
        office = cls(database)
        office.advance(start["now"])
        return office

    @property
    def now(self) -> int:
        """The minute."""
        return int(self.database.execute("SELECT now FROM clock").fetchone()[0])

    def advance(self, to: int) -> int:
        """Let time pass; how many things were delivered."""
        until = self.database.execute("SELECT until FROM clock").fetchone()[0]
        to = max(self.now, min(to, until))
        arrived = self.database.execute("SELECT rowid, kind, record FROM coming WHERE at <= ? ORDER BY at, rowid", (to,)).fetchall()
        for row, kind, text in arrived:
            record = json.loads(text)
            if kind == "mail":
                self.database.execute("INSERT INTO mail VALUES (?, 'inbox', ?, 'me', ?, ?, ?, NULL, 0)", (
                    record["id"], record["sender"], record["subject"], record["body"], record["at"]))
            else:
                self.database.execute("INSERT INTO appointments VALUES (?, ?, ?, ?, ?)", (
                    record["id"], record["title"], record["start"], record["finish"], record["attendees"]))
            self.database.execute("DELETE FROM coming WHERE rowid = ?", (row,))
        self.database.execute("UPDATE clock SET now = ?", (to,))
        return len(arrived)

    def do(self, verb: str, given: Mapping[str, str]) -> str:
        """A deed, kept in the journal, which takes a minute; what to say about it. Raises `Refused`."""
        if self.now >= self.database.execute("SELECT until FROM clock").fetchone()[0]:
            raise Refused("the last day is over")
        said = getattr(self, f"_{verb}")(**{name: str(value) for name, value in given.items()})
        self.database.execute("INSERT INTO journal (at, verb, arguments) VALUES (?, ?, ?)", (self.now, verb, json.dumps(dict(given))))
        self.advance(self.now + 1)
        return said

    def _next(self, verb: str) -> int:
        return int(self.database.execute("SELECT count(*) FROM journal WHERE verb = ?", (verb,)).fetchone()[0]) + 1

    def _send(self, to: str, subject: str, body: str, reply: str = "") -> str:
        if reply and not self.database.execute("SELECT 1 FROM mail WHERE id = ?", (reply,)).fetchone():
            raise Refused(f"there is no mail {reply}")
        identity = f"sent-{self._next('send')}"
        self.database.execute("INSERT INTO mail VALUES (?, 'sent', 'me', ?, ?, ?, ?, ?, 1)", (identity, to, subject, body, self.now, reply))
        return f"sent as {identity}"

    def _archive(self, id: str) -> str:
        if not self.database.execute("UPDATE mail SET folder = 'archive' WHERE id = ? AND folder = 'inbox'", (id,)).rowcount:
            raise Refused(f"there is no mail {id} in the inbox")
        return f"archived {id}"

    def _book(self, title: str, start: str, end: str, **rest: str) -> str:
        if set(rest) - {"with"}:
            raise Refused(f"book takes title, start, end and with, not {', '.join(rest)}")
        first, last = _span(start, end)
        identity = f"booked-{self._next('book')}"
        self.database.execute("INSERT INTO appointments VALUES (?, ?, ?, ?, ?)", (identity, title, first, last, rest.get("with", "")))
        return f"booked as {identity}"

    def _move(self, id: str, start: str, end: str) -> str:
        first, last = _span(start, end)
        if not self.database.execute("UPDATE appointments SET start = ?, finish = ? WHERE id = ?", (first, last, id)).rowcount:
            raise Refused(f"there is no appointment {id}")
        return f"moved {id}"

    def _cancel(self, id: str) -> str:
        if not self.database.execute("DELETE FROM appointments WHERE id = ?", (id,)).rowcount:
            raise Refused(f"there is no appointment {id}")
        return f"cancelled {id}"

    def _save(self, path: str, content: str) -> str:
        self.database.execute("INSERT OR REPLACE INTO files VALUES (?, ?)", (path, content))
        return f"saved {path}"


def replayed(start: Mapping[str, Any], journal: Iterable[tuple[Any, Any, Any]]) -> Office:
    """A fresh office after the deeds of a journal, rows of minute, verb and arguments as JSON; what cannot have happened is passed over."""
    office = Office.made(sqlite3.connect(":memory:"), start)
    for at, verb, text in journal:
        if not isinstance(at, int) or at < office.now or verb not in DEEDS or not isinstance(text, str):
            continue
        office.advance(at)
        try:
            given = json.loads(text)
            if isinstance(given, dict):
                office.do(verb, given)
        except (Refused, TypeError, ValueError, RecursionError):
            continue
    office.advance(start["until"])
    return office


def minute(text: str) -> int:
    """`DAY-HH:MM` as minutes; day 1 begins at 0. Raises `Refused`."""
    day, _, time = text.partition("-")
    hour, _, rest = time.partition(":")
    if not (day.isdecimal() and hour.isdecimal() and rest.isdecimal() and day.isascii() and 0 < int(day) < 1000 and int(hour) < 24
            and int(rest) < 60):
        raise Refused(f"{text!r} is no time; write DAY-HH:MM, such as 2-14:30")
    return (int(day) - 1) * DAY + int(hour) * 60 + int(rest)


def clock(at: int) -> str:
    """Minutes as `DAY-HH:MM`."""
    return f"{at // DAY + 1}-{at % DAY // 60:02d}:{at % 60:02d}"


def _span(start: str, end: str) -> tuple[int, int]:
    first, last = minute(start), minute(end)
    if last <= first:
        raise Refused(f"{end} is not after {start}")
    return first, last


def shown(office: Office, verb: str, given: Mapping[str, str]) -> str:
    """What a verb that changes nothing says. Raises `Refused`."""
    query = office.database.execute
    if verb == "now":
        new = query("SELECT count(*) FROM mail WHERE folder = 'inbox' AND NOT seen").fetchone()[0]
        return f"{clock(office.now)}, {new} unread"
    if verb == "inbox":
        rows = query("SELECT id, at, CASE folder WHEN 'sent' THEN recipient ELSE sender END, subject, seen FROM mail WHERE folder = ? "
                     "ORDER BY at, rowid", (given.get("folder", "inbox"),)).fetchall()
        return "\n".join(f"{id}  {clock(at)}  {who}  {subject}{'' if seen else '  (unread)'}"
                         for id, at, who, subject, seen in rows) or "no mail"
    if verb == "read":
        row = query("SELECT sender, recipient, at, subject, body FROM mail WHERE id = ?", (given.get("id", ""),)).fetchone()
        if row is None:
            raise Refused(f"there is no mail {given.get('id', '')}")
        query("UPDATE mail SET seen = 1 WHERE id = ?", (given["id"],))
        return f"From: {row[0]}\nTo: {row[1]}\nAt: {clock(row[2])}\nSubject: {row[3]}\n\n{row[4]}"
    if verb == "calendar":
        rows = query("SELECT id, start, finish, title, attendees FROM appointments ORDER BY start, rowid").fetchall()
        rows = [row for row in rows if "day" not in given or str(row[1] // DAY + 1) == given["day"]]
        return "\n".join(f"{id}  {clock(start)} to {clock(end)}  {title}{'  with ' + who if who else ''}"
                         for id, start, end, title, who in rows) or "nothing"
    if verb == "files":
        return "\n".join(path for path, in query("SELECT path FROM files ORDER BY path")) or "no files"
    if verb == "open":
        row = query("SELECT content FROM files WHERE path = ?", (given.get("path", ""),)).fetchone()
        if row is None:
            raise Refused(f"there is no file {given.get('path', '')}")
        return str(row[0])
    return HELP


def waited(office: Office, given: Mapping[str, str]) -> str:
    """Time passes, until a time or until something arrives."""
    if "until" in given:
        to = minute(given["until"])
        if to < office.now:
            raise Refused(f"{given['until']} has passed; it is {clock(office.now)}")
    else:
        row = office.database.execute("SELECT min(at) FROM coming").fetchone()
        to = row[0] if row[0] is not None else office.database.execute("SELECT until FROM clock").fetchone()[0]
    arrived = office.advance(to)
    return f"{clock(office.now)}; {arrived} new"


def main(words: list[str]) -> int:
    """The program; the status is 1 for what was refused. The database lies beside it."""
    verb, *rest = words or ["help"]
    database = os.path.join(os.path.dirname(os.path.abspath(__file__)), "office.db")
    given = {name: value for name, _, value in (word.partition("=") for word in rest)}
    connection = sqlite3.connect(database)
    try:
        with connection:
            office = Office(connection)
            said = office.do(verb, given) if verb in DEEDS else waited(office, given) if verb == "wait" else shown(office, verb, given)
    except (Refused, TypeError) as error:
        sys.stderr.write(f"refused: {error}\n")
        return 1
    finally:
        connection.close()
    sys.stdout.write(f"{said}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
