"""Python code in an interpreter that stays. Settings: `seconds` (120) for one call, `keeps` (true): whether variables last; `queries` (64):
how often in all the code of an attempt may ask the policy by `llm_query`, 0 for never.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.interpreter import Interpreter
from gnomon.agent.harness.observation import Seen, clean
from gnomon.agent.harness.spec import Argument
from gnomon.data.messages import Conversation, Message, Text
from gnomon.errors import DataError


class Kind:
    """Runs code; its last expression is shown as by an interpreter. `context` is the task's text where the context is a variable."""

    about = "Run Python code. Variables last from call to call; the value of the last expression is shown."
    main = "code"
    machine = True
    arguments: Mapping[str, Argument] = {"code": Argument(doc="The code", required=True)}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        fields = Fields(settings, "python")
        self.seconds, self.keeps, self.queries = fields.number("seconds", 120.0), fields.flag("keeps", True), fields.whole("queries", 64)
        fields.done()
        if self.seconds <= 0:
            raise DataError(f"'seconds': {self.seconds:g}; write a number above 0")

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """What the code printed."""
        variables = {}
        known = desk.state.get("interpreter") if self.keeps else None
        if not isinstance(known, Interpreter):
            known = await Interpreter.start(desk)
            desk.closing.append(known.close)
            variables = {"context": desk.state["context"]} if "context" in desk.state else {}
        desk.state["interpreter"] = None
        try:
            text, ok = await known.run(given["code"], variables, self.seconds, lambda prompts: self._asked(desk, prompts))
        except BaseException:
            await known.close()
            raise
        if self.keeps:
            desk.state["interpreter"] = known
        else:
            await known.close()
        return Seen(text=text.rstrip("\n") or "The code printed nothing.", error=not ok)

    async def _asked(self, desk: Desk, prompts: list[str]) -> list[str]:
        """The policy's answers, each in a context of its own. Raises `Fault` beyond the number that is allowed."""
        done = desk.state.get("queries", 0)
        if done + len(prompts) > self.queries:
            raise Fault(f"{self.queries} questions are allowed in an attempt, and {done} were asked")
        desk.state["queries"] = done + len(prompts)
        answers = []
        for prompt in prompts:
            message = Message(role="user", content=(Text(text=clean(prompt)),))
            asked = Conversation(messages=(message,), thinking=desk.spec.thinking)
            completion = await desk.model.complete(asked, desk.sampling, purpose="agent")
            answers.append(clean(completion.message.text))
        return answers
