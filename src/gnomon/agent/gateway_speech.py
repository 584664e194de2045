"""An answer in a dialect's words, whole or as events. What a policy gives is whole; a stream says the same in one go."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gnomon.agent.policy import Completion
from gnomon.agent.record import BudgetSpent
from gnomon.data.chat import CallArguments, CallEnded, CallStarted, Delta, ReasoningDelta, Reply, TextDelta
from gnomon.data.dialects import anthropic, openai_chat, openai_responses
from gnomon.data.dialects.asked import Asked, Choice, Cost, Dialect, Ending, Head, Refused, Sent
from gnomon.errors import CapacityError, ConfigError, DataError, GnomonError, PolicyError

PATHS: Mapping[str, Dialect] = MappingProxyType({
    "/v1/chat/completions": openai_chat, "/v1/responses": openai_responses, "/v1/messages": anthropic,
})
COUNT = "/v1/messages/count_tokens"
FULL = "the prompt is too long: it exceeds the context length of the policy; send less"


class Turned(GnomonError):
    """A request that is turned away before anybody reads what it asks: no key, too large, too slow."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def dialect_of(path: str) -> Dialect:
    """The dialect that a path speaks; errors elsewhere have OpenAI's shape."""
    return anthropic if path.startswith("/v1/messages") else PATHS.get(path, openai_chat)


def read(dialect: Dialect, body: Any) -> Asked:
    """What a body asks. An effort is the attempt's business: what a program says of it, in words that may be its own, is left out, except
    that there is to be no thinking. Raises `Refused`."""
    if isinstance(body, dict):
        body = dict(body)
        for place, name in (("", "reasoning_effort"), ("reasoning", "effort"), ("output_config", "effort")):
            table = body.get(place) if place else body
            if isinstance(table, dict) and table.get(name) not in (None, "none"):
                table = {key: value for key, value in table.items() if key != name}
                body = body | {place: table} if place else table
                if place == "output_config" and "thinking" not in body:
                    body["thinking"] = {"type": "enabled"}  # in that API, to name an effort is to ask for thinking
    return dialect.read(body)


def said(dialect: Dialect, asked: Asked, completion: Completion) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    reply, ending = _reply(asked, completion), _ending(completion)
    return dialect.whole(asked, _head(asked), [Choice(index=0, reply=reply, ending=ending)], _cost(completion))


def streamed(dialect: Dialect, asked: Asked, completion: Completion) -> list[Sent]:
    """All events of an answer."""
    reply, cost = _reply(asked, completion), _cost(completion)
    stream = dialect.stream(asked, _head(asked))
    events = list(stream.start(cost))
    for delta in _deltas(reply):
        events += stream.delta(0, delta)
    return [*events, *stream.finish(0, reply, _ending(completion)), *stream.end(cost)]


def failed(dialect: Dialect, error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of an error. What the gateway's or the policy's own fault is, is told without its inside, which may name addresses
    and say what a server behind them said; a spent budget has a status after which no client tries again."""
    text = str(error)
    match error:
        case Turned(status=status, code=code):
            return status, dialect.error(status, text, None, code)
        case Refused(field=field, code=code):
            return 400, dialect.error(400, text, field, code)
        case BudgetSpent(limit=limit):
            return 403, dialect.error(403, text, None, f"budget_{limit}")
        case CapacityError():
            return 400, dialect.error(400, FULL, None, "context_length_exceeded")
        case ConfigError() | DataError():
            return 400, dialect.error(400, text, None, "invalid_value")
        case PolicyError():
            return 502, dialect.error(502, "the policy did not answer; whoever runs the attempt is told why", None, "policy_failed")
        case GnomonError():
            return 500, dialect.error(500, text, None, "server_error")
        case _:
            return 500, dialect.error(500, f"the gateway failed ({type(error).__name__})", None, "server_error")


def models(names: list[str]) -> dict[str, Any]:
    """The list of models, with the fields of OpenAI's list and of Anthropic's."""
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "gnomon", "type": "model", "display_name": name,
             "created_at": "1970-01-01T00:00:00Z"} for name in names]
    return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def _reply(asked: Asked, completion: Completion) -> Reply:
    """What the program is told. One that takes a single call at a time is told the first."""
    message = completion.message
    calls = message.tool_calls if asked.parallel_calls else message.tool_calls[:1]
    return Reply(reasoning=message.reasoning or "", text=message.text, tool_calls=calls, complete=completion.stop == "stop")


def _deltas(reply: Reply) -> list[Delta]:
    deltas: list[Delta] = [ReasoningDelta(text=reply.reasoning)] if reply.reasoning else []
    deltas += [TextDelta(text=reply.text)] if reply.text else []
    for index, call in enumerate(reply.tool_calls):
        deltas += [CallStarted(index=index, id=call.id, name=call.name), CallArguments(index=index, json=call.arguments)]
        deltas += [CallEnded(index=index)] if reply.complete or index + 1 < len(reply.tool_calls) else []
    return deltas


def _ending(completion: Completion) -> Ending:
    return Ending(reason=completion.stop)


def _head(asked: Asked) -> Head:
    return Head(id=secrets.token_hex(12), created=int(time.time()), model=asked.model or "gnomon")


def _cost(completion: Completion) -> Cost:
    spent = completion.spent
    return Cost(prompt_tokens=spent.prompt_tokens, cached_tokens=spent.cached_tokens, output_tokens=spent.output_tokens)
