"""Which call each tool message answers: results are put in the order of their calls and take the calls' names (report App. F)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gnomon.data.messages import Message, ToolCall
from gnomon.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What the tag of a tool message states: the tool's name, and its place among the results since the assistant spoke, from 1."""

    tool: str
    index: int


def in_call_order(messages: Sequence[Message]) -> Iterator[tuple[Message, Result | None]]:
    """The messages, each run of tool messages in the order of the calls they answer, with what their tags state.

    A run in which some id matches no call of the assistant before it stays as it is; its messages are named by themselves, else by the
    call in the same place. Raises ConfigError for a result without any name.
    """
    calls: tuple[ToolCall, ...] = ()
    count = 0
    for is_result, run in groupby(messages, key=lambda message: message.role == "tool"):
        if not is_result:
            for message in run:
                if message.role == "assistant":
                    calls, count = message.tool_calls, 0
                yield message, None
            continue
        for message, name in _matched(list(run), calls):
            count += 1
            if name is None:
                name = message.name if message.name is not None else _name_by_place(calls, count, message)
            yield message, Result(tool=name, index=count)


def _matched(run: list[Message], calls: tuple[ToolCall, ...]) -> list[tuple[Message, str | None]]:
    places = {call.id: place for place, call in reversed(list(enumerate(calls)))}  # of equal ids the first counts
    found = [places.get(message.tool_call_id) if message.tool_call_id is not None else None for message in run]
    if None in found:
        return [(message, None) for message in run]
    matched = sorted(zip(found, run, strict=True), key=lambda pair: pair[0] or 0)
    return [(message, calls[place or 0].name) for place, message in matched]


def _name_by_place(calls: tuple[ToolCall, ...], count: int, message: Message) -> str:
    if count > len(calls):
        raise ConfigError(f"the tool message with tool_call_id = {message.tool_call_id!r} answers no call of the assistant message before "
                          "it; give it the id of a call, or the tool's name")
    return calls[count - 1].name
