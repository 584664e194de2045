"""Are these the right function calls? Settings: `expected`, a table for each, `{name: {argument: [accepted values]}}`; `functions`.

The calls are those of the last message, or the JSON list that it is: `[{"name": …, "arguments": {…}}]`. Their order is free. `""` among the
accepted values says that an argument may be left out; text is compared without case, spaces and punctuation, as the leaderboard does.
An empty `expected` wants an empty list: saying nothing is no answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.errors import DataError
from gnomon.sandbox.sandbox import Sandbox

MOST_CALLS = 32
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_IGNORED = re.compile(r"[ ,./\-_*^'\"]")


class Verifier:
    """Matches calls with patterns, one to one."""

    machine: Machine = "none"

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.expected = [*fields.rows("expected")]
        self.types = {each.get("name"): each.get("parameters", {}).get("properties", {}) for each in fields.rows("functions")}
        fields.done()
        for i, call in enumerate(self.expected):
            if not isinstance(call, Mapping) or len(call) != 1 or not all(isinstance(each, Mapping) for each in call.values()):
                raise DataError(f"'expected[{i}]': {call!r}; write {{name: {{argument: [accepted values]}}}}")

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """1 or 0."""
        calls = said(trajectory)
        if calls is None:
            return Score(reward=0.0, evidence=(f"no list of calls in {trajectory.answer()[:200]!r}",))
        if len(calls) != len(self.expected) or len(calls) > MOST_CALLS:
            return Score(reward=0.0, evidence=(f"{len(calls)} calls, wanted {len(self.expected)}",))
        fits = [[self._fits(call, wanted) for wanted in self.expected] for call in calls]
        right = matched(fits)
        return Score(reward=float(right), evidence=(f"calls: {json.dumps(calls)[:400]}",))

    def _fits(self, call: tuple[str, Mapping[str, Any]], expected: Mapping[str, Any]) -> bool:
        (name, wanted), = expected.items()
        arguments = call[1]
        if call[0] != name or not set(arguments) <= set(wanted):
            return False
        types = self.types.get(name, {})
        return all(_accepted(arguments[key], accepted, str(types.get(key, {}).get("type", ""))) if key in arguments else "" in accepted
                   for key, accepted in _alternatives(wanted).items())


def said(trajectory: Trajectory) -> list[tuple[str, Mapping[str, Any]]] | None:
    """The calls of the last message, or those that its text lists; None where it is no such list."""
    last = next((message for message in reversed(trajectory.messages()) if message.role == "assistant"), None)
    if last is None:
        return None
    try:
        if last.tool_calls:
            given: Any = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in last.tool_calls]
        else:
            fenced = _FENCE.findall(last.text)
            given = json.loads(fenced[-1] if fenced else last.text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, list) or not all(
            isinstance(each, dict) and isinstance(each.get("name"), str) and isinstance(each.get("arguments"), dict) for each in given):
        return None
    return [(each["name"], each["arguments"]) for each in given]


def matched(fits: Sequence[Sequence[bool]]) -> bool:
    """Whether each row can have a column of its own (augmenting paths)."""
    owner: dict[int, int] = {}

    def place(row: int, seen: set[int]) -> bool:
        for column, fit in enumerate(fits[row]):
            if fit and column not in seen:
                seen.add(column)
                if column not in owner or place(owner[column], seen):
                    owner[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(fits)))


def _accepted(value: Any, accepted: Sequence[Any], kind: str = "") -> bool:
    if kind == "integer" and (isinstance(value, bool) or not isinstance(value, int)) and not isinstance(value, str):
        return False
    return any(_same(value, each) for each in accepted)


def _same(value: Any, pattern: Any) -> bool:
    if isinstance(pattern, Mapping):
        return isinstance(value, Mapping) and set(value) <= set(pattern) and all(
            _accepted(value[key], accepted) if key in value else "" in accepted for key, accepted in _alternatives(pattern).items())
    if isinstance(pattern, list):
        return isinstance(value, list) and len(value) == len(pattern) and all(map(_same, value, pattern))
    if isinstance(pattern, str):
        return isinstance(value, str) and _plain(value) == _plain(pattern)
    if isinstance(pattern, bool) or isinstance(value, bool) or pattern is None:
        return value is pattern
    return isinstance(value, (int, float)) and isinstance(pattern, (int, float)) and value == pattern


def _alternatives(pattern: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """What a table accepts for each key; some rows have the one value itself instead of a list."""
    return {key: accepted if isinstance(accepted, list) and accepted else [accepted] for key, accepted in pattern.items()}


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).casefold()
