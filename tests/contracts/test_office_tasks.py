"""The office: honest work fulfils every rule, doing nothing and writing into the database do not, and the future stays closed."""

import asyncio
import shlex
import sqlite3
from typing import Any

import pytest

from gnomon.agent import task_source
from gnomon.agent.inside import office
from gnomon.agent.task import Task
from gnomon.agent.trajectory import Trajectory
from gnomon.agent.verifiers.office import Verifier, broken
from gnomon.errors import DataError, SandboxError


class Disk:
    """A machine of which only files can be read."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        if path not in self.files:
            raise SandboxError(f"{path}: no such file")
        return self.files[path]


def made(**table: Any) -> list[Task]:
    return [*task_source.opened({"kind": "office", **table}).tasks()]


def opened(data: bytes) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.deserialize(data)
    return connection


def typed(task: Task, lines: list[str]) -> sqlite3.Connection:
    """The office after lines of a script, done in this process."""
    connection = opened(task.files["/office/office.db"])
    desk = office.Office(connection)
    for verb, *words in [shlex.split(line.partition(" >")[0])[2:] for line in lines if line.startswith("python3")]:
        given = dict(word.split("=", 1) for word in words)
        office.waited(desk, given) if verb == "wait" else desk.do(verb, given)
    connection.commit()
    return connection


def score(task: Task, connection: sqlite3.Connection) -> Any:
    disk: Any = Disk({"/office/office.db": connection.serialize()})
    return asyncio.run(Verifier(task.check.settings).score(task, Trajectory(id="t", task_id=task.id), disk))


def statements(script: str | None) -> list[str]:
    """A script's commands; a quoted text may have several lines."""
    whole, found = "", []
    for line in (script or "").splitlines():
        whole = f"{whole}\n{line}" if whole else line
        if whole.count("'") % 2 == 0:
            found.append(whole)
            whole = ""
    return found


@pytest.mark.parametrize("table", [{"days": 3}, {"days": 4}, {"days": 7, "stories": 10}, {"days": 5, "stories": 2}])
def test_honest_work_scores_1_and_nothing_0(table):
    tasks = made(count=6, seed=3, **table)
    assert tasks == made(count=6, seed=3, **table) and len({str(task.check.settings) for task in tasks}) == 6
    for task in tasks:
        assert score(task, typed(task, statements(task.solution.script))).reward == 1.0, task.solution.script
        nothing = score(task, opened(task.files["/office/office.db"]))
        assert nothing.reward == 0.0 and 0 <= nothing.metrics["share"] < 1
        assert "rules" not in task.shown().text.replace('"rules":', "")  # how many, not which


def test_half_of_the_work_is_not_enough():
    [task] = made(count=1, seed=4)
    lines = statements(task.solution.script)
    assert score(task, typed(task, lines[: len(lines) // 2])).reward == 0.0


def test_a_database_that_was_written_by_hand_is_not_believed():
    [task] = made(count=1, seed=5)
    done = typed(task, statements(task.solution.script))
    done.execute("DELETE FROM journal")
    done.commit()
    assert score(task, done).reward == 0.0  # the rows are right and nobody did anything
    early = opened(task.files["/office/office.db"])
    everything = typed(task, statements(task.solution.script)).execute("SELECT verb, arguments FROM journal ORDER BY number").fetchall()
    early.executemany("INSERT INTO journal (at, verb, arguments) VALUES (480, ?, ?)", everything)
    early.commit()
    assert score(task, early).reward == 0.0  # answers before the questions


@pytest.mark.parametrize("journal", [
    [("x", "send", "{}")], [(500, "drop", "{}")], [(500, "send", "[]")], [(500, "send", "{")], [(500, "send", '{"to": 1}')],
    [(500, None, None)],
    [(500, "book", '{"title": "x", "start": "99999-00:00", "end": "1-00:00"}')], [(500, "send", '{"self": 1}')],
    [(500, "cancel", '{"id": 99999999999999999999999}')], [(500, "read", '{"id": 99999999999999999999999}')],
])
def test_a_journal_of_nonsense_is_nothing(journal):
    [task] = made(count=1)
    connection = opened(task.files["/office/office.db"])
    connection.executemany("INSERT INTO journal (at, verb, arguments) VALUES (?, ?, ?)", journal)
    connection.commit()
    assert score(task, connection).reward == 0.0


def test_damaged_and_missing_databases_are_the_agents_doing():
    [task] = made(count=1)
    for files in ({}, {"/office/office.db": b"junk" * 999}):
        disk: Any = Disk(files)
        assert asyncio.run(Verifier(task.check.settings).score(task, Trajectory(id="t", task_id="t"), disk)).reward == 0.0


def test_what_is_to_come_is_not_shown():
    [task] = made(count=1, seed=1, days=4)
    connection = opened(task.files["/office/office.db"])
    desk = office.Office(connection)
    before = office.shown(desk, "inbox", {})
    assert office.waited(desk, {}) != "" and office.shown(desk, "inbox", {}) != before
    assert office.clock(desk.now) != "1-08:00" and len(office.shown(desk, "inbox", {}).splitlines()) == 1
    for verb, given, says in [("read", {"id": "m99"}, "no mail m99"), ("open", {"path": "x"}, "no file x")]:
        with pytest.raises(office.Refused, match=says):
            office.shown(desk, verb, given)
    for verb, given, says in [("archive", {"id": "m99"}, "no mail"),
                              ("move", {"id": "x", "start": "2-10:00", "end": "2-11:00"}, "no appointment"),
                              ("book", {"title": "t", "start": "2-11:00", "end": "2-10:00"}, "is not after"),
                              ("book", {"title": "t", "start": "soon", "end": "2-10:00"}, "is no time"),
                              ("cancel", {"id": "x"}, "no appointment")]:
        with pytest.raises(office.Refused, match=says):
            desk.do(verb, given)
    with pytest.raises(office.Refused, match="has passed"):
        office.waited(desk, {"until": "1-07:00"})
    office.waited(desk, {"until": "4-23:00"})
    with pytest.raises(office.Refused, match="last day is over"):
        desk.do("send", {"to": "a", "subject": "b", "body": "c"})
    assert connection.execute("SELECT count(*) FROM coming").fetchone() == (0,)


def test_whatever_might_be_right_is_no_answer():
    start = {"now": 480, "until": 4000, "files": {}, "coming": []}
    rule = {"rule": "sent", "to": "a@x", "body": "7", "after": 0}

    def sent(*bodies: str) -> str:
        desk = office.replayed(start, [(500 + n, "send", f'{{"to": "b@x, A@x", "subject": "", "body": "{body}"}}')
                                       for n, body in enumerate(bodies)])
        return broken(desk, rule)

    assert not sent("7") and not sent("6", "7.") and sent("7", "6") and sent("5", "6", "7") and sent("It is 7") and sent()


def test_rules_are_read_strictly():
    [task] = made(count=1)
    for rule in ("x", {"rule": "sent"}, {"rule": "loud", "to": "x"}, {"rule": "quiet", "to": "x", "more": 1}):
        with pytest.raises(DataError, match=r"'rules\[0\]'"):
            Verifier({**task.check.settings, "rules": [rule]})
    with pytest.raises(DataError, match="at least one"):
        Verifier({**task.check.settings, "rules": []})
    with pytest.raises(DataError, match="at most"):
        made(days=99)


def test_the_program_runs_by_itself(tmp_path, capsys, monkeypatch):
    [task] = made(count=1)
    (tmp_path / "office.db").write_bytes(task.files["/office/office.db"])
    monkeypatch.setattr(office, "__file__", str(tmp_path / "office.py"))
    assert office.main(["now"]) == 0 and "1-08:00, 0 unread" in capsys.readouterr().out
    assert office.main(["help"]) == 0 and office.main([]) == 0 and "calendar" in capsys.readouterr().out
    assert office.main(["send", "to=x"]) == 1 and "missing" in capsys.readouterr().err
    assert office.main(["send", "to=x", "subject=s", "body=b"]) == 0 and office.main(["inbox", "folder=sent"]) == 0
    assert "sent-1  1-08:00  x  s" in capsys.readouterr().out
