"""Trajectories in the shape of a `verifiers` v1 trace, which trainers of that family read: a graph of messages, each with what it added.

Field names and their meaning are those of `verifiers` 0.4 (trace version 1). A node's ids, put together from a root to a leaf, are what the
model saw. Spans say where a turn's given ids end and not where each message does, so all ids of a turn stand with the message that was
sampled; a message that was given has none of its own.
"""

from __future__ import annotations

import base64
from typing import Any

from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory, Turn
from gnomon.data.messages import Message, Text, Tool
from gnomon.errors import DataError

VERSION = 1


def to_trace(trajectory: Trajectory, task: Task | None = None, *, started: float = 0.0) -> dict[str, Any]:
    """The trace, ready for `json.dumps`. `started` is seconds since 1970; nodes are stamped from there by the seconds of their turns.

    Raises `DataError` for a trajectory without turns, or whose task is another.
    """
    if not trajectory.turns:
        raise DataError(f"trajectory {trajectory.id}: has no turns, so there is no trace")
    if task is not None and task.id != trajectory.task_id:
        raise DataError(f"trajectory {trajectory.id}: is of task {trajectory.task_id}, not of {task.id}")
    nodes: list[dict[str, Any]] = []
    last: dict[int, int] = {}
    at = started
    for index, turn in enumerate(trajectory.turns):
        at += turn.seconds or 0.0
        _add(nodes, turn, last, trajectory.tools, at)
        last[index] = len(nodes) - 1
    errors = [{"type": "VerifierError", "message": trajectory.score.error}] if trajectory.score and trajectory.score.error else []
    failed = trajectory.stop_reason == "failed" or bool(errors)
    return {
        "version": VERSION, "id": trajectory.id, "task": _task(trajectory, task),
        "agent": {"config": {"model": trajectory.model or None, "harness": {"id": trajectory.harness or None}}, "name": "agent",
                  "trainable": True},
        "tools": [_tool(tool) for tool in trajectory.tools], "nodes": nodes, **_scores(trajectory.score),
        "info": {"effort": trajectory.effort, "group": trajectory.group,
                 "evidence": list(trajectory.score.evidence) if trajectory.score else []},
        "is_completed": trajectory.stop_reason is not None, "ok": trajectory.stop_reason is not None and not failed,
        "stop_condition": trajectory.stop_reason, "is_timeout": trajectory.stop_reason == "deadline", "errors": errors,
        "timing": {"start": started}}


def _add(nodes: list[dict[str, Any]], turn: Turn, last: dict[int, int], tools: tuple[Tool, ...], at: float) -> None:
    """The nodes of a turn; `last` is the last node of each turn so far."""
    if not turn.messages:
        raise DataError("a turn has no messages, and a trace has no node without one")
    parent = last[turn.parent] if turn.parent is not None else None
    chosen = [span for span in turn.spans if span.sampled]
    for number, message in enumerate(turn.messages):
        final = number == len(turn.messages) - 1
        node: dict[str, Any] = {"parent": parent, "message": _message(message), "timestamp": at,
                                "sampled": final and message.role == "assistant" and (bool(chosen) or "spent" in turn.notes)}
        if parent is None and tools:
            node["tools"] = [_tool(tool) for tool in tools]
        if parent is None and turn.origin is not None:
            node["semantic_parents"] = [{"node": last[turn.origin], "type": turn.purpose or "context"}]
        if final and turn.spans:
            mask = [bool(span.loss_mask and span.loss_mask[k]) for span in turn.spans for k in range(len(span.token_ids))]
            logprobs = [span.logprobs[k] if span.logprobs else 0.0 for span in turn.spans for k in range(len(span.token_ids))]
            node.update(token_ids=list(turn.token_ids), mask=mask, logprobs=[value for value, flag in zip(logprobs, mask) if flag])
        nodes.append(node)
        parent = len(nodes) - 1


def _scores(score: Score | None) -> dict[str, Any]:
    """Rewards and metrics; what was not scored is null and not 0."""
    reward = None if score is None or score.reward is None else {"score": score.reward, "weight": 1.0}
    return {"rewards": {"reward": reward}, "metrics": dict(score.metrics) if score else {}}


def _task(trajectory: Trajectory, task: Task | None) -> dict[str, Any]:
    data: dict[str, Any] = {"id": trajectory.task_id, "name": trajectory.task_id}
    if task is not None:
        data.update(prompt=task.prompt, system_prompt=task.system, image=task.image, workdir=task.workdir)
    return {"type": "gnomon", "data": {name: value for name, value in data.items() if value is not None}, "key": trajectory.task_id}


def _tool(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}


def _message(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.role == "assistant":
        made["content"] = message.text or None
        if message.reasoning is not None:
            made["reasoning_content"] = message.reasoning
        if message.tool_calls:
            made["tool_calls"] = [{"id": call.id, "type": "function", "name": call.name, "arguments": call.arguments}
                                  for call in message.tool_calls]
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id or ""
    return made


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Text as it is; with images a list of parts, their bytes in a data URL."""
    if not message.images:
        return message.text
    return [{"type": "text", "text": part.text} if isinstance(part, Text) else
            {"type": "image_url", "image_url": {"url": f"data:{part.media_type};base64,{base64.b64encode(part.data).decode('ascii')}"}}
            for part in message.content]
