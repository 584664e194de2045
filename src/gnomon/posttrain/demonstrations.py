"""Conversations to learn from: chat files, ATIF documents and our own trajectories, as ids and what each of them weighs.

A chat file has a JSON object per line with `messages` as OpenAI writes them (and `tools`, `reasoning_effort`). Messages are encoded by the
tokenizer's chat format; only what assistants wrote is learnt, without stand-ins for arguments that were no JSON. A trajectory that has
the ids that were sampled is learnt from as it is: nothing is encoded again; so is a line of `collecting.py`, which has `token_ids` and a
`loss_mask`. Read next: `sft.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon.agent import trajectory_file
from gnomon.agent.fields import parsed
from gnomon.agent.trajectory import Span, Trajectory
from gnomon.data.chat import ChatFormat, Encoded
from gnomon.data.dialects import openai_chat
from gnomon.data.dialects.fields import Fields
from gnomon.data.messages import Conversation, Message, Text, ToolCall
from gnomon.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A text: ids, and what the prediction of each weighs, 0 for what is only read."""

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def learnt(self) -> float:
        """The sum of its weights."""
        return sum(self.weights)


def read(paths: Sequence[Path], form: ChatFormat) -> Iterator[Example]:
    """The examples of some files in order, by what is in them: `.jsonl` chat files or trajectories, `.json` ATIF documents.

    Raises `DataError` naming file and line for what is none of these.
    """
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read ({error}); give chat files in JSON Lines, ATIF documents or trajectories") from None
        yield from _file(path, text, form)


def _file(path: Path, text: str, form: ChatFormat) -> Iterator[Example]:
    if path.suffix == ".json":
        yield from _record(parsed(text, str(path)), str(path), form)
        return
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    first = parsed(lines[0][1], f"{path}:{lines[0][0]}") if lines and '"kind"' in lines[0][1] else None
    if isinstance(first, Mapping) and first.get("kind") == "begin":
        yield from of_trajectory(trajectory_file.read(path), form)
        return
    for number, line in lines:
        yield from _record(parsed(line, f"{path}:{number}"), f"{path}:{number}", form)


def _record(record: Any, where: str, form: ChatFormat) -> Iterator[Example]:
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: expected an object, got {json.dumps(record)[:60]}")
    try:
        if str(record.get("schema_version", "")).startswith("ATIF"):
            for document in (record, *record.get("subagent_trajectories", ())):
                yield encoded(form.encode(_from_atif(document), generate=False))
        elif "token_ids" in record:
            yield _sampled(record)
        elif "messages" in record:
            yield encoded(form.encode(_from_chat(record), generate=False))
        else:
            raise DataError("has neither 'messages' nor 'token_ids' nor an ATIF 'schema_version'")
    except (ConfigError, DataError, KeyError, TypeError, AttributeError) as error:
        what = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{where}: {what}") from None


def _sampled(record: Mapping[str, Any]) -> Example:
    """Ids with a string of 0 and 1. Raises `DataError` for ids that are none, or flags that are not one for each."""
    ids, flags = Span(token_ids=tuple(record["token_ids"])).token_ids, str(record["loss_mask"])
    if len(flags) != len(ids) or flags.strip("01") or "1" not in flags or flags[:1] != "0":
        raise DataError(f"'loss_mask' has {len(flags)} flags for {len(ids)} ids; it is a string of 0 and 1, the first one 0")
    return Example(token_ids=ids, weights=tuple(float(flag) for flag in flags))


def encoded(what: Encoded) -> Example:
    """A conversation as an example. Raises `DataError` for one in which no assistant says anything."""
    if not any(what.learnt):
        raise DataError("no assistant says anything in it; there is nothing to learn")
    return Example(token_ids=what.tokens, weights=tuple(float(flag) for flag in what.learnt))


def of_trajectory(trajectory: Trajectory, form: ChatFormat) -> Iterator[Example]:
    """A trajectory's samples as they were sampled, or its messages where nobody kept ids."""
    samples = [sample for sample in trajectory.samples() if any(sample.loss_mask)]
    for sample in samples:
        yield Example(token_ids=sample.token_ids, weights=tuple(float(flag) for flag in sample.loss_mask))
    if not samples and trajectory.turns:
        conversation = Conversation(messages=trajectory.messages(), tools=trajectory.tools, effort=trajectory.effort)  # type: ignore[arg-type]
        yield encoded(form.encode(conversation, generate=False))


def _from_chat(record: Mapping[str, Any]) -> Conversation:
    fields = Fields({name: record[name] for name in ("messages", "tools", "reasoning_effort", "thinking") if name in record})
    thinking, effort = openai_chat.thought(fields)
    return Conversation(messages=openai_chat.messages(fields), tools=openai_chat.read_tools(fields, "tools"), thinking=thinking,
                        effort=effort)  # type: ignore[arg-type]


def _from_atif(document: Mapping[str, Any]) -> Conversation:
    """The messages of an ATIF document: steps of the system, the user and the agent, observations as answers of tools."""
    messages: list[Message] = []
    effort = None
    for step in document["steps"]:
        role = {"system": "system", "user": "user", "agent": "assistant"}[step["source"]]
        calls = tuple(ToolCall(id=call["tool_call_id"], name=call["function_name"], arguments=json.dumps(call["arguments"]))
                      for call in step.get("tool_calls") or ())
        effort = step.get("reasoning_effort") or effort
        if step.get("message") or calls or step.get("reasoning_content"):
            messages.append(Message(role=role, content=_texts(step.get("message")),  # type: ignore[arg-type]
                                    reasoning=step.get("reasoning_content"), tool_calls=calls))
        for result in (step.get("observation") or {}).get("results", ()):
            source = result.get("source_call_id")
            messages.append(Message(role="tool" if source else "user", content=_texts(result.get("content")), tool_call_id=source))
    definitions = document.get("agent", {}).get("tool_definitions")
    tools = openai_chat.read_tools(Fields({"tools": definitions}), "tools") if definitions else ()
    return Conversation(messages=tuple(messages), tools=tools, effort=effort if effort in ("low", "medium", "high", "max") else None)


def _texts(content: Any) -> tuple[Text, ...]:
    if isinstance(content, list):
        return tuple(Text(text=part["text"]) for part in content if part.get("type") == "text")
    return (Text(text=content),) if content else ()
