"""Conversations as bodies of OpenAI's chat completions, and answers read back: for policies that are asked in messages."""

from __future__ import annotations

import base64
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.policy import Sampling, Spent, Stop
from gnomon.data.messages import Conversation, Message, Text, ToolCall
from gnomon.errors import DataError, PolicyError


def body(conversation: Conversation, sampling: Sampling) -> dict[str, Any]:
    """The body of a request, without the model's name. Thinking goes back as `reasoning_content`, the name at servers that think; a
    conversation without thinking says so as the API of these models does, and nothing otherwise."""
    chosen: dict[str, Any] = {
        "messages": [_message(message) for message in conversation.messages],
        "tools": [dict(tool.declared) for tool in conversation.tools] or None, "reasoning_effort": conversation.effort,
        "thinking": None if conversation.thinking else {"type": "disabled"},
        "tool_choice": _choice(conversation.tool_choice), "response_format": _format(conversation),
        "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def read(answer: Fields, url: str) -> tuple[Message, Stop, Spent]:
    """What an answer says. Raises `PolicyError` for one that is none."""
    try:
        choice = answer.each("choices")[0]
        said = choice.inner("message")
        calls = []
        for call in said.each("tool_calls"):
            function = call.inner("function")
            calls.append(ToolCall(id=call.text("id"), name=function.text("name"), arguments=function.text("arguments", "")))
        text = said.maybe("content", said.text)
        reasoning = said.maybe("reasoning_content", said.text) or said.maybe("reasoning", said.text)
        content = (Text(text=text),) if text else ()
        message = Message(role="assistant", content=content, reasoning=reasoning or None, tool_calls=tuple(calls))
        usage = answer.inner("usage") if answer.has("usage") else Fields({}, url)
        details = usage.inner("prompt_tokens_details") if usage.has("prompt_tokens_details") else Fields({}, url)
        spent = Spent(prompt_tokens=usage.whole("prompt_tokens", 0), cached_tokens=details.whole("cached_tokens", 0),
                      output_tokens=usage.whole("completion_tokens", 0))
        return message, "length" if choice.text("finish_reason", "stop") == "length" else "stop", spent
    except (DataError, IndexError) as error:
        raise PolicyError(f"{url}: no answer of chat completions ({error})") from None


def _message(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": _content(message), "name": message.name,
                             "reasoning_content": message.reasoning, "tool_call_id": message.tool_call_id}
    if message.tool_calls:
        entry["tool_calls"] = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                               for call in message.tool_calls]
    if message.tools:
        entry["tools"] = [dict(tool.declared) for tool in message.tools]
    return {name: value for name, value in entry.items() if value is not None}


def _content(message: Message) -> Any:
    if all(isinstance(part, Text) for part in message.content):
        return message.text if message.content or message.role != "assistant" else None
    return [{"type": "text", "text": part.text} if isinstance(part, Text) else
            {"type": "image_url", "image_url": {"url": f"data:{part.media_type};base64,{base64.b64encode(part.data).decode('ascii')}"}}
            for part in message.content]


def _choice(choice: str) -> Any:
    if choice in ("auto", "none", "required"):
        return None if choice == "auto" else choice
    return {"type": "function", "function": {"name": choice}}


def _format(conversation: Conversation) -> Any:
    wanted = conversation.response_format
    if wanted is None or wanted.kind == "json_object":
        return None if wanted is None else {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(wanted.schema or {})}}
