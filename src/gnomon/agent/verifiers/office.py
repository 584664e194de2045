"""Was the work of an office done? Settings: `database`, its path in the machine; `start`, the office as it was; `rules`, what must hold.

The database is the agent's and is not believed: the deeds in its journal are done again in a fresh office, at their times, and the rules
look at that one. Rules, each `{"rule": kind, …}`: `sent` (`to`, last of all `body` as a whole, `after` in minutes), `quiet` (nothing was
ever sent `to`), `booked` (one appointment `with`, from `start` to `finish`), `gone` and `kept` (an appointment `id`), `file` (`path`,
`content`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from gnomon.agent.inside.office import Office, clock, replayed
from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.agent.verifiers.files import read
from gnomon.agent.verifiers.sqlite import asked
from gnomon.errors import DataError, VerifierError
from gnomon.sandbox.sandbox import Sandbox

KINDS = {"sent": ("to", "body", "after"), "quiet": ("to",), "booked": ("with", "start", "finish"), "gone": ("id",), "kept": ("id", "start"),
         "file": ("path", "content")}
LONGEST_JOURNAL = 10_000
MOST_ANSWERS = 2
"""The last one counts; sending whatever might be right is no answer."""


class Verifier:
    """Replays the agent's deeds and looks."""

    machine: Machine = "fork"

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.database, self.start, self.rules = fields.text("database"), fields.table("start"), [*fields.rows("rules")]
        fields.done()
        if not self.rules or not {"now", "until", "files", "coming"} <= set(self.start):
            raise DataError("'rules': give at least one, and 'start' with now, until, files and coming")
        for i, rule in enumerate(self.rules):
            kind = rule.get("rule") if isinstance(rule, Mapping) else None
            if kind not in KINDS or set(rule) != {"rule", *KINDS[kind]}:
                raise DataError(f"'rules[{i}]': {rule!r}; kinds and what they need: {KINDS}")

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """1 when all rules hold; `share` says how many do."""
        if sandbox is None:
            raise VerifierError("the office lies in a machine, and there is none")
        data, log = await read(sandbox, self.database), await read(sandbox, f"{self.database}-wal")
        if data is None:
            return Score(reward=0.0, evidence=(f"{self.database} is not there",))
        sql = f"SELECT at, verb, arguments FROM journal ORDER BY number LIMIT {LONGEST_JOURNAL}"
        journal = await asyncio.to_thread(asked, data, log, sql)
        if isinstance(journal, str):
            return Score(reward=0.0, evidence=(f"the journal cannot be read: {journal}",))
        wrong = await asyncio.to_thread(self._wrong, journal)
        share = 1 - len(wrong) / len(self.rules)
        metrics = {"share": share, "deeds": float(len(journal))}
        return Score(reward=float(not wrong), metrics=metrics, evidence=(*wrong,) or ("all was done",))

    def _wrong(self, journal: Iterable[tuple[Any, Any, Any]]) -> list[str]:
        """Which rules do not hold after the deeds of a journal; deeds that no database takes are the agent's fault."""
        try:
            office = replayed(self.start, journal)
            with contextlib.closing(office.database):
                return [why for rule in self.rules if (why := broken(office, rule))]
        except (sqlite3.Error, OverflowError) as error:
            return [f"the deeds cannot be done again: {error}"] * len(self.rules)


def broken(office: Office, rule: Mapping[str, Any]) -> str:
    """Why a rule does not hold; empty where it does."""
    query, kind = office.database.execute, rule["rule"]
    if kind in ("sent", "quiet"):
        sent = [(body, at) for to, body, at in query("SELECT recipient, body, at FROM mail WHERE folder = 'sent'")
                if rule["to"].casefold() in [each.strip().casefold() for each in str(to).split(",")]]
        if kind == "quiet":
            return f"something was sent to {rule['to']}" if sent else ""
        said = [str(body).strip().rstrip(".").casefold() for body, at in sent if at >= rule["after"]]
        wanted = str(rule["body"]).casefold()
        right = wanted in said[-1:] and len(set(said)) <= MOST_ANSWERS
        return "" if right else f"to {rule['to']} after {clock(rule['after'])}: {said[-3:]!r} was sent"
    if kind == "booked":
        found = [(start, finish) for start, finish, who in query("SELECT start, finish, attendees FROM appointments")
                 if rule["with"].casefold() in [each.strip().casefold() for each in str(who).split(",")]]
        return "" if found == [(rule["start"], rule["finish"])] else \
            f"with {rule['with']} there is {', '.join(clock(start) for start, _ in found[:3]) or 'no appointment'}"
    if kind in ("gone", "kept"):
        row = query("SELECT start FROM appointments WHERE id = ?", (rule["id"],)).fetchone()
        if kind == "gone":
            return f"appointment {rule['id']} is still there" if row else ""
        return "" if row == (rule["start"],) else f"appointment {rule['id']} is not where it was"
    row = query("SELECT content FROM files WHERE path = ?", (rule["path"],)).fetchone()
    return "" if row and str(row[0]).strip() == rule["content"].strip() else f"{rule['path']} does not say what it should"
