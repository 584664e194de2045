"""Trajectories as ATIF 1.8, Harbor's interchange format, tokens and log-probabilities included.

Each context is one ATIF document: the first is the root, the others are embedded in `subagent_trajectories`. Turns that a document shares
with an earlier one are marked `is_copied_context` and carry no tokens, so that nothing is trained on twice.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from gnomon.agent.trajectory import Trajectory, Turn
from gnomon.data.messages import Message, Text, ToolCall
from gnomon.errors import DataError

VERSION = "ATIF-v1.8"


def to_atif(trajectory: Trajectory, version: str = "1") -> dict[str, Any]:
    """The document, ready for `json.dumps`. `version` is that of the harness. Raises `DataError` for a trajectory without turns."""
    if not trajectory.turns:
        raise DataError(f"trajectory {trajectory.id}: has no turns, and ATIF has no empty trajectories")
    seen: set[int] = set()
    documents = []
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        documents.append(_document(trajectory, path, seen, version))
        seen.update(path)
    root, *others = documents
    if others:
        root["subagent_trajectories"] = others
    sampled = trajectory.sampled_tokens
    root["final_metrics"] = {"total_completion_tokens": sampled, "total_steps": len(root["steps"])}
    root["extra"] = {"task_id": trajectory.task_id, "stop_reason": trajectory.stop_reason,
                     "score": trajectory.score.to_json() if trajectory.score else None}
    return root


def _document(trajectory: Trajectory, path: Sequence[int], seen: set[int], version: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    before: list[int] = []
    for index in path:
        turn = trajectory.turns[index]
        _steps(turn, steps, before, copied=index in seen, effort=trajectory.effort)
        before.extend(turn.token_ids)
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    agent: dict[str, Any] = {"name": trajectory.harness or "gnomon", "version": version}
    if trajectory.model:
        agent["model_name"] = trajectory.model
    if trajectory.tools:
        agent["tool_definitions"] = [dict(tool.declared) for tool in trajectory.tools]
    first = trajectory.turns[path[0]]
    extra = {"turns": list(path), **({"purpose": first.purpose, "origin": first.origin} if first.purpose else {})}
    return {"schema_version": VERSION, "session_id": trajectory.id, "trajectory_id": f"{trajectory.id}/{path[-1]}", "agent": agent,
            "steps": steps or [{"step_id": 1, "source": "system", "message": ""}], "extra": extra}


def _steps(turn: Turn, steps: list[dict[str, Any]], before: Sequence[int], *, copied: bool, effort: str | None) -> None:
    """The steps of a turn, added to those before; results of tools go to the step that called them."""
    made: list[dict[str, Any]] = []
    for message in turn.messages:
        caller = _caller(steps, message) if message.role == "tool" else None
        if caller is not None:
            result = {"source_call_id": message.tool_call_id, "content": _content(message)}
            caller.setdefault("observation", {"results": []})["results"].append(result)
            continue
        step: dict[str, Any] = {"source": "agent" if message.role == "assistant" else "system" if message.role == "system" else "user",
                                "message": _content(message)}
        if message.role == "tool":  # a result that nobody asked for, as free text
            step["extra"] = {"tool_call_id": message.tool_call_id}
        if message.role == "assistant":
            step.update(_said(message, effort))
        if copied:
            step["is_copied_context"] = True
        made.append(step)
        steps.append(step)
    last = next((step for step in reversed(made) if step["source"] == "agent"), None)
    if last is not None and not copied and any(span.sampled for span in turn.spans):
        last["metrics"], last["llm_call_count"] = _metrics(turn, before), 1


def _metrics(turn: Turn, before: Sequence[int]) -> dict[str, Any]:
    """Tokens of the turn: what the model read, from the beginning of the context to the first id it chose, then what it chose."""
    first = next(i for i, span in enumerate(turn.spans) if span.sampled)
    last = max(i for i, span in enumerate(turn.spans) if span.sampled)
    prompt = [*before, *(t for span in turn.spans[:first] for t in span.token_ids)]
    chosen = turn.spans[first:last + 1]
    ids = [t for span in chosen for t in span.token_ids]
    metrics: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "prompt_token_ids": prompt,
                               "completion_token_ids": ids}
    if all(len(span.logprobs) == len(span.token_ids) for span in chosen):
        metrics["logprobs"] = [value for span in chosen for value in span.logprobs]
    metrics["extra"] = {"policy_versions": [span.policy_version for span in chosen for _ in span.token_ids],
                        "loss_mask": [bool(span.loss_mask and span.loss_mask[k]) for span in chosen for k in range(len(span.token_ids))]}
    return metrics


def _said(message: Message, effort: str | None) -> dict[str, Any]:
    step: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
    if message.reasoning is not None:
        step["reasoning_content"] = message.reasoning
    if message.tool_calls:
        step["tool_calls"] = [_call(call) for call in message.tool_calls]
    return step


def _call(call: ToolCall) -> dict[str, Any]:
    """A call; ATIF wants an object, so arguments that are none are kept as text beside an empty one."""
    made: dict[str, Any] = {"tool_call_id": call.id, "function_name": call.name}
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        return {**made, "arguments": arguments}
    return {**made, "arguments": {}, "extra": {"arguments_text": call.arguments}}


def _caller(steps: Sequence[dict[str, Any]], message: Message) -> dict[str, Any] | None:
    """The latest step that made the call which a message answers."""
    for step in reversed(steps):
        if any(call["tool_call_id"] == message.tool_call_id for call in step.get("tool_calls", ())):
            return step
    return None


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Text as it is; with images a list of parts, their bytes in a data URL."""
    if not message.images:
        return message.text
    return [{"type": "text", "text": part.text} if isinstance(part, Text) else
            {"type": "image", "source": {"media_type": part.media_type, "path":
             f"data:{part.media_type};base64,{base64.b64encode(part.data).decode('ascii')}"}} for part in message.content]
