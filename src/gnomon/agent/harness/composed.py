"""A harness put together from the parts of a spec: prompts, tools, wire, context, skills, memory, agents.

Read next: `spec.py` for the parts, `tools/bash.py` for one of them.
"""

from __future__ import annotations

import posixpath
import re
from typing import get_args

from gnomon.agent.harness import context as contexts
from gnomon.agent.harness import skills
from gnomon.agent.harness import wire as wires
from gnomon.agent.harness.context import Talk
from gnomon.agent.harness.desk import Desk, Model
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.loop import Loop
from gnomon.agent.harness.memory import recalled
from gnomon.agent.harness.observation import bounded, clean
from gnomon.agent.harness.spec import HarnessSpec, ToolUse
from gnomon.agent.harness.tool import Bound
from gnomon.agent.task import Task
from gnomon.agent.trajectory import StopReason
from gnomon.data.messages import Effort, Message, Text
from gnomon.errors import ConfigError
from gnomon.extend import suggestion
from gnomon.sandbox.sandbox import Sandbox

PLACES = ("task", "workdir", "tools", "skills", "memory", "instructions")
PLACE = re.compile(rf"\{{({'|'.join(PLACES)})\}}")
INSTRUCTION_CHARACTERS = 20_000
SUBMIT = "submit"  # the tool of tasks that have a public verifier


class Composed:
    """The harness of a spec. Raises `ConfigError` where its parts do not fit, before anything runs."""

    def __init__(self, spec: HarnessSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.tools = [Bound(name, use) for name, use in spec.tools.items()]
        self.skills = skills.loaded(spec.skills)
        self.wire = wires.opened(spec.wire)
        self.context = contexts.opened(spec.context)
        if self.wire.always and not any(tool.main for tool in self.tools):
            raise ConfigError(f"harness '{self.name}': 'wire' is '{spec.wire.kind}', which needs a tool that takes text; 'tools' has none")
        kinds = {use.kind for use in spec.tools.values()}
        if "memory" in kinds and spec.memory is None:
            raise ConfigError(f"harness '{self.name}': 'tools' has one for notes, and 'memory' does not say where they are kept")
        if spec.context.kind == "recursive" and "python" not in kinds:
            raise ConfigError(f"harness '{self.name}': 'context' is 'recursive', which needs a tool of the kind 'python'")
        if kinds & {"skill", "skills"} and not spec.skills:
            raise ConfigError(f"harness '{self.name}': 'tools' has one for skills, and 'skills' names none")
        for where, text in (("system", spec.system), ("task", spec.task), ("agents.prompt", spec.agents.prompt)):
            for name in re.findall(r"\{([a-z_]+)\}", text):
                if not PLACE.fullmatch(f"{{{name}}}"):
                    raise ConfigError(f"harness '{self.name}': '{where}' names {{{name}}}; prompts know {', '.join(PLACES)}")

    async def run(self, task: Task, model: Model, box: Sandbox | None, *, effort: str | None = None) -> StopReason:
        """One attempt at a task; its turns are on `model`'s record.

        Raises `ConfigError` for an effort that there is not and for a task without the machine that the harness needs, what `model` raises
        (a spent budget among it), and `SandboxLost`, `SandboxTimeout` or `Unsupported` where the machine fails.
        """
        chosen = checked_effort(effort)
        if box is None and self.spec.machine == "required":
            raise ConfigError(f"task {task.id}: has no 'image', and the harness '{self.name}' needs a machine; give the task an image, "
                              "or choose another harness")
        desk = Desk(spec=self.spec, task=task, model=model, box=box, workdir=_workdir(task, box), skills=self.skills)
        reason, _ = await self._agent(desk, task.prompt, chosen)
        return reason

    async def _agent(self, desk: Desk, request: str, effort: Effort | None) -> tuple[StopReason, str]:
        """One agent to its end: why it ended, and what it said last."""
        below = desk.depth > 0
        if desk.depth < self.spec.agents.depth:
            desk.ask = lambda prompt, context: self._called(desk, prompt, context, effort)
        tools = [tool for tool in self.tools if desk.box is not None or not tool.kind.machine]
        tools = [tool for tool in tools if desk.ask is not None or self.spec.tools[tool.name].kind != "agent"]
        if desk.model.diagnosis is not None and not below and SUBMIT not in self.spec.tools:
            tools.append(Bound(SUBMIT, ToolUse(kind="submit")))
        try:
            places = await self._places(desk, tools, request if below else self.context.begin(desk, request))
            system = self._system(desk, places)
            messages = [Message(role="system", content=(Text(text=clean(system)),))] if system else []
            words = Text(text=clean(request if below else _filled(self.spec.task, places)))
            messages.append(Message(role="user", content=(words,) if below else (*desk.task.images, words)))
            talk = Talk(messages=messages, tools=self.wire.declared(tools), effort=effort, thinking=self.spec.thinking,
                        purpose="agent" if below else None)
            turns = self.spec.agents.turns if below else self.spec.turns
            reason = await Loop(tools, self.wire, self.context).run(talk, desk, turns)
        finally:
            await desk.close()
        return reason, next((message.text for message in reversed(talk.messages) if message.role == "assistant"), "")

    async def _called(self, caller: Desk, prompt: str, context: str, effort: Effort | None) -> str:
        """What an agent answers that another one called: the same machine and notes, everything else its own."""
        desk = Desk(spec=self.spec, task=caller.task, model=caller.model, box=caller.box, workdir=caller.workdir, skills=self.skills,
                    depth=caller.depth + 1, notes=caller.notes)
        reason, said = await self._agent(desk, f"{prompt}\n\n{context}" if context else prompt, effort)
        return said if reason == "finished" else f"[The agent did not finish: {reason}. It said last:]\n{said}"

    def _system(self, desk: Desk, places: dict[str, str]) -> str:
        """The system prompt: the spec's or that of a called agent, how calls are written, and what the task has of its own."""
        said = self.spec.agents.prompt if desk.depth else self.spec.system
        parts = [_filled(said, places).strip(), places["tools"] if "{tools}" not in said else "", desk.task.system or ""]
        return "\n\n".join(part for part in parts if part)

    async def _places(self, desk: Desk, tools: list[Bound], task: str) -> dict[str, str]:
        listed = "\n".join(f"- {skill.name}: {skill.about}" for skill in self.skills.values())
        return {"task": task, "workdir": desk.workdir, "tools": self.wire.instructions(tools) if tools else "",
                "skills": listed or "(none)", "memory": await recalled(desk) or "(none)", "instructions": await self._instructions(desk)}

    async def _instructions(self, desk: Desk) -> str:
        """What the files that address agents say, where the working directory has them."""
        found = []
        for name in self.spec.instructions if desk.box is not None else ():
            try:
                text = await desk.text(name)
            except Fault:
                continue
            found.append(f"{name} says:\n\n{bounded(text.strip(), INSTRUCTION_CHARACTERS)}")
        return "\n\n".join(found)


def _filled(text: str, places: dict[str, str]) -> str:
    """A prompt with its places filled, in one pass: what stands in a place is never read as one."""
    return PLACE.sub(lambda found: places[found[1]], text)


def _workdir(task: Task, box: Sandbox | None) -> str:
    return posixpath.normpath(task.workdir or (box.spec.workdir if box is not None else "/"))


def checked_effort(effort: str | None) -> Effort | None:
    """The effort, or None. Raises `ConfigError` for a word that is none."""
    efforts = get_args(Effort)
    if effort is not None and effort not in efforts:
        raise ConfigError(f"'effort': {effort!r}{suggestion(str(effort), list(efforts))}; it is one of {', '.join(efforts)}")
    return effort  # type: ignore[return-value]
