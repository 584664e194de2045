"""What a harness is made of, as data: a TOML file says each part, so that parts of one can be put together with parts of another.

A recipe is strict: an unknown key is an error that names it. `extends = "kimi-code"` begins with a preset; overrides are `a.b=c`.
Read next: `harness.py`, which opens one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gnomon import extend
from gnomon.agent.harness.observation import Keep
from gnomon.config import setting
from gnomon.errors import ConfigError, DataError

Json = Literal["string", "integer", "number", "boolean", "array", "object"]
JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument of a tool, as the policy sees it, and what our tool calls it."""

    to: str | None = setting(None, "the name that the kind of tool gives it; none: it may be given and does nothing")
    type: Json = setting("string", "its JSON type")
    doc: str = setting("", "what the policy reads about it")
    required: bool = setting(False, "whether a call without it is refused")
    choices: tuple[str, ...] = setting((), "the texts that it may be; empty: any")
    meanings: dict[str, str] = setting(factory=dict, doc="what the kind of tool calls a choice, where it has another word for it")
    scale: float = setting(1.0, "a number times this is what the tool gets: 0.001 makes seconds of milliseconds")
    schema: dict[str, Any] = setting(factory=dict, doc="more of its JSON Schema: `items` of a list, `properties` of an object")

    @property
    def json_schema(self) -> dict[str, Any]:
        """Its JSON Schema."""
        said = {"type": self.type} | ({"description": self.doc} if self.doc else {}) | ({"enum": [*self.choices]} if self.choices else {})
        return said | self.schema


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """One tool under the name that the policy calls it by."""

    kind: str = setting(doc="a file of `harness/tools`, or `your_pkg.module:Kind`")
    about: str = setting("", "what the policy reads about it; empty: what the kind says of itself")
    arguments: dict[str, Argument] = setting(factory=dict, doc="its arguments by the names that the policy gives; empty: those of the kind")
    fixed: dict[str, Any] = setting(factory=dict, doc="arguments of the kind that are always given, and that the policy does not see")
    settings: dict[str, Any] = setting(factory=dict, doc="settings of the kind")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part that is a kind with settings."""

    kind: str = setting(doc="a file of the part's folder, or `your_pkg.module:Way`")
    settings: dict[str, Any] = setting(factory=dict, doc="settings of the kind")

    def opened(self, package: str, field: str) -> Any:
        """The way of this part, found in a package of kinds. Raises `ConfigError` for an unknown kind, listing the choices, or a wrong
        setting of `field`."""
        kind = extend.find(package, self.kind, "Way")
        try:
            return kind(self.settings)
        except DataError as error:
            raise ConfigError(f"'{field}.settings': {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """How much of what a tool says the policy reads."""

    characters: int = setting(30_000, "at most this many characters of one result; what is cut is marked")
    keep: Keep = setting("ends", "which part of a long result is kept: `ends` or `start`")

    def __post_init__(self) -> None:
        if self.characters < 100:
            raise ConfigError(f"'characters': {self.characters}; a policy cannot work with less than 100")


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Notes that outlive a context: files, read into the prompt when an attempt begins. Without a machine they last for the attempt."""

    files: dict[str, str] = setting(factory=lambda: {"memory": "MEMORY.md"}, doc="what each is for, and where it lies")
    characters: int = setting(2200, "none may become longer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Agents:
    """Agents that an agent may call."""

    depth: int = setting(1, "how many levels below the first one")
    prompt: str = setting("You work on one part of a larger task for another agent. Do exactly what is asked, then answer with what you "
                          "found or did, in full: your last message is all that the other agent reads.", "what a called agent is told")
    turns: int = setting(50, "how many messages one may write")


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """How answers are drawn."""

    max_tokens: int | None = setting(None, "of one answer; none: the policy's choice")
    temperature: float | None = setting(None, "none: the policy's choice")
    top_p: float | None = setting(None, "none: the policy's choice")


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessSpec:
    """A whole harness. Prompts may name `{task}`, `{workdir}`, `{tools}`, `{skills}`, `{memory}` and `{instructions}`."""

    name: str = setting("", "what trajectories call it")
    manner: str = setting("", "whose manner it is, which version, and what of it was checked; for people")
    system: str = setting("", "the system prompt; what a task has of its own comes after it")
    task: str = setting("{task}", "the first message of the user")
    tools: dict[str, ToolUse] = setting(factory=dict, doc="the tools by name, in the order in which they are declared")
    wire: Part = setting(Part(kind="native"), "how calls are written: `native`, `fenced`, `tagged`")
    context: Part = setting(Part(kind="none"), "what is done when the history grows: `none`, `truncate`, `compact`, `recursive`")
    observations: Observations = setting(Observations(), "how much of a result is shown")
    skills: tuple[str, ...] = setting((), "folders of skills: one of `harness/skills`, or a path of the host")
    instructions: tuple[str, ...] = setting((), "files of the working directory that are read into the prompt, AGENTS.md for instance")
    memory: Memory | None = setting(None, "notes that are kept; none: no memory")
    agents: Agents = setting(Agents(), "how agents that are called work")
    sampling: Draws = setting(Draws(), "how answers are drawn")
    thinking: bool = setting(True, "whether the policy thinks before it answers")
    machine: Literal["optional", "required"] = setting("optional", "what a task without a machine is: a conversation, or an error")
    turns: int = setting(200, "how many messages the policy may write; a task's budget may allow less")
    patience: int = setting(3, "after this many messages in a row without a call that could be carried out, the attempt ends")
    calls_per_turn: int = setting(32, "calls beyond these in one message are not carried out")

    def __post_init__(self) -> None:
        for name in ("turns", "patience", "calls_per_turn"):
            if getattr(self, name) < 1:
                raise ConfigError(f"'{name}': {getattr(self, name)}; write 1 or more")
