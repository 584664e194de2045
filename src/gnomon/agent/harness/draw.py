"""Which harness a group of attempts gets: one for all of its members, drawn from a seed, none that is kept for evaluation (§4.2.1).

A draw is a preset, or a mix: commands from one, files from another, prompts from a third. Nothing depends on the order of groups or on the
machine: the same seed and group give the same harness anywhere. A mix is kept for evaluation by what it is, so no seed ever trains on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gnomon.agent.harness import harness
from gnomon.agent.harness.spec import HarnessSpec, Part, ToolUse
from gnomon.config import setting, to_dict
from gnomon.errors import ConfigError

T = TypeVar("T")
FAMILIES: Mapping[str, frozenset[str]] = {
    "commands": frozenset(("bash", "process")), "files": frozenset(("read", "write", "edit", "edits", "apply_patch", "patch", "ls")),
    "search": frozenset(("glob", "grep", "search")), "lists": frozenset(("plan", "tracker")),
    "others": frozenset(("skill", "skills", "memory", "agent", "python")),
}
"""Kinds of tools that belong together: a mix takes each of these from one harness."""

NEEDED = ("commands", "files")
WIRES = ("native", "native", "native", "tagged")
TRIES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """What is drawn from. `harnesses` and `held_out` are names or files, as `harness.opened` takes them."""

    harnesses: tuple[str, ...] = setting(("kimi-code", "claude-code", "codex", "openclaw", "hermes", "bash"), "what training may draw")
    held_out: tuple[str, ...] = setting(("minimal",), "what only evaluation sees")
    mixes: float = setting(0.5, "the share of groups whose harness is a mix")
    held_out_mixes: float = setting(0.1, "the share of all mixes that only evaluation sees")
    seed: int = setting(0, "another seed gives other draws, and keeps the same mixes for evaluation")

    def __post_init__(self) -> None:
        for name in ("mixes", "held_out_mixes"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"'{name}': {getattr(self, name)}; write a share from 0 to 1")
        if self.held_out_mixes == 1 and self.mixes > 0:
            raise ConfigError("'held_out_mixes': 1 leaves no mix for training; write less, or 'mixes' 0")
        if both := sorted(set(self.harnesses) & set(self.held_out)):
            raise ConfigError(f"'held_out': '{both[0]}' is also in 'harnesses'; training would see it")
        if not self.harnesses:
            raise ConfigError("'harnesses': is empty; name at least one")


class Sampler:
    """Draws harnesses. Raises `ConfigError` for one that does not exist."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self._trained = [harness.spec(name) for name in draw.harnesses]
        self._kept = [harness.spec(name) for name in draw.held_out]

    def drawn(self, group: str, *, machine: bool = True) -> HarnessSpec:
        """The harness of a group. `machine` False leaves out what needs one. Raises `ConfigError` where nothing is left."""
        dice = Dice(f"{self.draw.seed}\0{group}")
        specs = _usable(self._trained, machine)
        if not specs:
            raise ConfigError("'harnesses': each of them needs a machine, and the task has none; name one that does not")
        if dice.share() >= self.draw.mixes:
            return dice.pick(specs)
        return self._mix(dice, specs, kept=False) or dice.pick(specs)

    def held_out(self, mixes: int = 0, *, machine: bool = True) -> tuple[HarnessSpec, ...]:
        """What evaluation sees and training never does: the harnesses that are kept, and up to so many of the mixes that are."""
        found, dice = _usable(self._kept, machine), Dice("held out")
        for _ in range(mixes if self.draw.held_out_mixes > 0 else 0):
            mix = self._mix(dice, _usable(self._trained, machine), kept=True)
            if mix is not None and mix.name not in {spec.name for spec in found}:
                found.append(mix)
        return tuple(found)

    def _mix(self, dice: Dice, specs: list[HarnessSpec], kept: bool) -> HarnessSpec | None:
        """A mix that is, or is not, kept for evaluation; None where there is none among many."""
        plain = [spec for spec in specs if spec.wire.kind == "native" and spec.context.kind != "recursive"]
        for _ in range(TRIES if len(plain) > 1 else 0):
            mix = mixed(plain, dice)
            if (int(mix.name.removeprefix("mix-"), 16) % 10_000 < self.draw.held_out_mixes * 10_000) == kept:
                return mix
        return None


def _usable(specs: Sequence[HarnessSpec], machine: bool) -> list[HarnessSpec]:
    return [spec for spec in specs if machine or spec.machine == "optional"]


def mixed(specs: Sequence[HarnessSpec], dice: Dice) -> HarnessSpec:
    """Parts of several put together; its name says what it is, and nothing of how it was drawn."""
    tools: dict[str, ToolUse] = {}
    giver = {}
    for family, kinds in FAMILIES.items():
        for spec in dice.shuffled(specs):
            part = {name: use for name, use in spec.tools.items() if use.kind in kinds}
            if (part or family not in NEEDED) and not set(part) & set(tools):
                tools |= part
                giver[family] = spec
                break
    prompt, bounds, context = dice.pick(specs), dice.pick(specs), dice.pick(specs)
    others = giver["others"]
    mix = replace(prompt, name="", manner="", tools=tools, wire=Part(kind=dice.pick(WIRES)), context=context.context,
                  observations=bounds.observations, skills=others.skills, memory=others.memory or prompt.memory, agents=others.agents)
    digest = hashlib.sha256(json.dumps(to_dict(mix), sort_keys=True).encode()).hexdigest()[:12]
    told = ", ".join(f"{family} of {spec.name}" for family, spec in giver.items())
    return replace(mix, name=f"mix-{digest}", manner=f"{told}; prompts of {prompt.name}, context of {context.name}")


class Dice:
    """Choices that follow from a text alone, on every machine and in every version of Python."""

    def __init__(self, seed: str) -> None:
        self._seed, self._count = seed, 0

    def share(self) -> float:
        """A number from 0 up to 1."""
        self._count += 1
        digest = hashlib.sha256(f"{self._seed}\0{self._count}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / (1 << 48)

    def pick(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[int(self.share() * len(options))]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """All of them, in an order."""
        return [option for _, _, option in sorted((self.share(), i, option) for i, option in enumerate(options))]
