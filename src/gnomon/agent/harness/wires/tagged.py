"""Calls as JSON between tags in the text, as models of the Hermes family write them: `<tool_call>{"name": …}</tool_call>`.

Settings: `call` and `result`, the words of the tags (`tool_call` and `tool_response`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen, shown
from gnomon.agent.harness.tool import Bound
from gnomon.agent.harness.wire import Wish, said
from gnomon.data.messages import Message, Tool
from gnomon.errors import DataError

WORD = re.compile(r"[A-Za-z0-9_-]+")


class Way:
    """Objects between tags; a message without a tag is the last."""

    always = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "tagged")
        self.call, self.result = fields.text("call", "tool_call"), fields.text("result", "tool_response")
        fields.done()
        for name in ("call", "result"):
            if not WORD.fullmatch(getattr(self, name)):
                raise DataError(f"'{name}': {getattr(self, name)!r}; write one word of letters, digits, _ and -")

    def declared(self, tools: Sequence[Bound]) -> tuple[Tool, ...]:
        """None: they are described in words."""
        return ()

    def instructions(self, tools: Sequence[Bound]) -> str:
        """The tools as JSON, and how a call looks."""
        listed = "\n".join(json.dumps(tool.declared.declared, ensure_ascii=False) for tool in tools)
        return (f"You may call tools. They are, one JSON object a line:\n\n{listed}\n\nA call is an object between tags, and a message may "
                f"hold several:\n\n<{self.call}>\n{{\"name\": \"<tool>\", \"arguments\": {{…}}}}\n</{self.call}>\n\nResults come back "
                f"between <{self.result}> tags. A message without a call is your last.")

    def wishes(self, message: Message, tools: Sequence[Bound]) -> Sequence[Wish]:
        """The calls. Raises `Fault` for a tag that is not closed, or that holds no call."""
        found, opening, closing = [], f"<{self.call}>", f"</{self.call}>"
        for piece in message.text.split(opening)[1:]:
            body, closed, _ = piece.partition(closing)
            if not closed:
                raise Fault(f"{opening} without {closing}; nothing was done")
            try:
                value = json.loads(body)
            except (ValueError, RecursionError) as error:
                raise Fault(f"what stands in {opening} is no JSON ({str(error)[:200]}); nothing was done") from None
            if not isinstance(value, dict) or not isinstance(value.get("name"), str):
                raise Fault(f"{opening} holds {shown(value)}; it must be an object with 'name' and 'arguments'; nothing was done")
            arguments = value.get("arguments", {})
            found.append(Wish(name=value["name"], value=arguments if isinstance(arguments, dict) else {"": arguments}))
        return found

    def answers(self, wishes: Sequence[Wish], seen: Sequence[Seen]) -> tuple[Message, ...]:
        """One message with all results between tags."""
        return (said("\n".join(f"<{self.result}>\n{each.text}\n</{self.result}>" for each in seen)),)
