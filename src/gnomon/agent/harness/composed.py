"""A harness put together from the parts of a spec: prompts, tools, wire, context, skills, memory, agents.

Read next: `spec.py` for the parts, `tools/bash.py` for one of them.
"""

from __future__ import annotations

import posixpath
import re
from typing import get_args

from gnomon.agent.harness import context as contexts
from gnomon.agent.harness import wire as wires
from gnomon.agent.harness.context import Talk
from gnomon.agent.harness.desk import Desk, Model
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.loop import Loop
from gnomon.agent.harness.observation import bounded, clean
from gnomon.agent.harness.spec import HarnessSpec
from gnomon.agent.harness.tool import Bound
from gnomon.agent.task import Task
from gnomon.agent.trajectory import StopReason
from gnomon.data.messages import Effort, Message, Text
from gnomon.errors import ConfigError
from gnomon.extend import suggestion
from gnomon.sandbox.sandbox import Sandbox

PLACE = re.compile(r"\{(task|workdir|tools|skills|memory|instructions)\}")
INSTRUCTION_CHARACTERS = 20_000


class Composed:
    """The harness of a spec. Raises `ConfigError` where its parts do not fit, before anything runs."""

    def __init__(self, spec: HarnessSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.tools = [Bound(name, use) for name, use in spec.tools.items()]
        self.wire = wires.opened(spec.wire)
        self.context = contexts.opened(spec.context)
        if self.wire.always and not any(tool.main for tool in self.tools):
            raise ConfigError(f"harness '{self.name}': 'wire' is '{spec.wire.kind}', which needs a tool that takes text; 'tools' has none")
        for where, text in (("system", spec.system), ("task", spec.task)):
            for name in re.findall(r"\{([a-z_]+)\}", text):
                if not PLACE.fullmatch(f"{{{name}}}"):
                    raise ConfigError(f"harness '{self.name}': '{where}' names {{{name}}}; prompts know {PLACE.pattern[3:-3]}")

    async def run(self, task: Task, model: Model, box: Sandbox | None, *, effort: str | None = None) -> StopReason:
        """One attempt at a task; its turns are on `model`'s record.

        Raises `ConfigError` for an effort that there is not and for a task without the machine that the harness needs, what `model` raises
        (a spent budget among it), and `SandboxLost`, `SandboxTimeout` or `Unsupported` where the machine fails.
        """
        chosen = checked_effort(effort)
        if box is None and self.spec.machine == "required":
            raise ConfigError(f"task {task.id}: has no 'image', and the harness '{self.name}' needs a machine; give the task an image, "
                              "or choose another harness")
        desk = Desk(spec=self.spec, task=task, model=model, box=box, workdir=_workdir(task, box))
        try:
            return await self._agent(desk, task.prompt, chosen, task.system)
        finally:
            await desk.close()

    async def _agent(self, desk: Desk, request: str, effort: Effort | None, own: str | None) -> StopReason:
        tools = [tool for tool in self.tools if desk.box is not None or not tool.kind.machine]
        loop = Loop(tools, self.wire, self.context)
        places = await self._places(desk, tools, self.context.begin(desk, request))
        system = "\n\n".join(text for text in (_filled(self.spec.system, places).strip(), own) if text)
        if tools and "{tools}" not in self.spec.system and places["tools"]:
            system = "\n\n".join(text for text in (system, places["tools"]) if text)
        messages = [Message(role="system", content=(Text(text=clean(system)),))] if system else []
        messages.append(Message(role="user", content=(Text(text=clean(_filled(self.spec.task, places))),)))
        talk = Talk(messages=messages, tools=self.wire.declared(tools), effort=effort, thinking=self.spec.thinking)
        return await loop.run(talk, desk, self.spec.turns)

    async def _places(self, desk: Desk, tools: list[Bound], task: str) -> dict[str, str]:
        return {"task": task, "workdir": desk.workdir, "tools": self.wire.instructions(tools) if tools else "", "skills": "", "memory": "",
                "instructions": await self._instructions(desk)}

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
