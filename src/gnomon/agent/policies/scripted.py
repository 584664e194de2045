"""A policy that says what it was told to: a list of replies, or a function of the conversation. For tests, demonstrations and measuring.

With a chat format it also makes ids, as a model would have sampled the reply, and pretends log-probabilities; the ids of what it said
before are kept as for a model. Settings: `replies`, a list of texts, or of objects with `text`, `reasoning` and `calls` (`name`,
`arguments`).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.ledger import Ledger, spoken
from gnomon.agent.policy import Completion, Sampling, Spent
from gnomon.agent.trajectory import Span
from gnomon.data.chat import ChatFormat
from gnomon.data.messages import Conversation, Message, Text, ToolCall
from gnomon.errors import DataError, PolicyError

LOGPROB = -0.5  # no model was asked
Reply = Message | str
Script = Sequence[Reply] | Callable[[Conversation], Reply]


class ScriptedPolicy:
    """Says what a script says: the n-th reply of a list to the n-th call of a session, or what a function makes of a conversation.

    Calls of tools without an id get one that the conversation does not have. `delay_seconds` passes before each answer. Without `chat`
    there are no ids, and the words of a reply are counted in place of tokens. Raises `PolicyError` when a list has no more.
    """

    def __init__(self, script: Script, chat: ChatFormat | None = None, *, name: str = "scripted", delay_seconds: float = 0.0) -> None:
        self.name = name
        self.efforts = chat.efforts if chat is not None else None
        self._script = script
        self._delay = delay_seconds
        self._ledger = Ledger(chat) if chat is not None else None
        self._asked: Counter[str] = Counter()

    async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Completion:
        """The next reply; with ids, `max_tokens` cuts it as it would cut a model."""
        message = self._next(session, conversation)
        if self._delay:
            await asyncio.sleep(self._delay)
        if self._ledger is None:
            return Completion(message=_numbered(message, conversation), spent=Spent(output_tokens=_words(message)))
        prompt = self._ledger.prepare(session, conversation)
        ids = spoken(self._ledger.chat, message, prompt.opening, thinking=conversation.thinking)
        cut = sampling.max_tokens is not None and len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens] if cut else ids
        reply = self._ledger.took(session, prompt, ids)
        span = Span(token_ids=ids, logprobs=(LOGPROB,) * len(ids), loss_mask=(True,) * len(ids), policy_version=0)
        spent = Spent(prompt_tokens=len(prompt.token_ids), cached_tokens=prompt.known, output_tokens=len(ids))
        return Completion(message=reply.message, stop="length" if cut else "stop", prompt_ids=prompt.token_ids, sampled=span, spent=spent)

    def recall(self, session: str, context: Sequence[int], sampled: Sequence[int], message: Message) -> None:
        """Take up an answer that another process recorded; without a format there are no ids to keep."""
        if self._ledger is not None:
            self._ledger.recall(session, context, sampled, message)

    async def close(self, session: str) -> None:
        """Begin the list again for a session of this name."""
        del self._asked[session]
        if self._ledger is not None:
            self._ledger.forget(session)

    def _next(self, session: str, conversation: Conversation) -> Message:
        if callable(self._script):
            reply = self._script(conversation)
        else:
            place = self._asked[session]
            if place >= len(self._script):
                raise PolicyError(f"policy '{self.name}': its script has {len(self._script)} replies and was asked for one more")
            self._asked[session] += 1
            reply = self._script[place]
        return Message(role="assistant", content=(Text(text=reply),)) if isinstance(reply, str) else reply


def say(text: str = "", *calls: tuple[str, Mapping[str, Any]], reasoning: str | None = None) -> Message:
    """A reply: `say("Looking.", ("bash", {"command": "ls"}))`."""
    made = tuple(ToolCall(id="", name=name, arguments=json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls)
    return Message(role="assistant", content=(Text(text=text),) if text else (), reasoning=reasoning, tool_calls=made)


def opened(settings: Mapping[str, Any]) -> ScriptedPolicy:
    """The policy of a table: `replies`, `name`, `delay_seconds`. Raises `DataError` naming a wrong field."""
    fields = Fields(settings, "policy 'scripted'")
    replies = [_reply(row, fields, i) for i, row in enumerate(fields.rows("replies"))]
    if not replies:
        raise DataError("policy 'scripted': 'replies' is empty; give at least one text")
    policy = ScriptedPolicy(replies, name=fields.text("name", "scripted"), delay_seconds=fields.number("delay_seconds", 0.0))
    fields.done()
    return policy


def _reply(row: Any, fields: Fields, index: int) -> Reply:
    if isinstance(row, str):
        return row
    inner = Fields(row, "policy 'scripted'", fields.place(f"replies[{index}]"))
    calls = [(call.text("name"), call.table("arguments")) for call in inner.each("calls")]
    reply = say(inner.text("text", ""), *calls, reasoning=inner.maybe("reasoning", inner.text))
    inner.done()
    return reply


def _numbered(message: Message, conversation: Conversation) -> Message:
    """With ids for the calls that have none."""
    taken = {call.id for said in (*conversation.messages, message) for call in said.tool_calls if call.id}
    calls = []
    for call in message.tool_calls:
        number = len(taken)
        while not call.id and f"call_{number}" in taken:
            number += 1
        made = call.id or f"call_{number}"
        taken.add(made)
        calls.append(ToolCall(id=made, name=call.name, arguments=call.arguments))
    return Message(role="assistant", content=message.content, name=message.name, reasoning=message.reasoning, tool_calls=tuple(calls))


def _words(message: Message) -> int:
    return sum(len(text.split()) for text in (message.reasoning or "", message.text, *(call.arguments for call in message.tool_calls)))
