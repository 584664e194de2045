"""All that can be set about an evaluation: `recipes/eval.toml`, every field overridable as `a.b=c`. Read next: `evaluate.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gnomon import config
from gnomon.agent.harness.draw import Draw
from gnomon.config import setting
from gnomon.errors import ConfigError

EffortName = Literal["none", "low", "medium", "high", "max"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings:
    """Who answers."""

    kind: str = setting("endpoint", "a file of src/gnomon/agent/policies, or your_pkg.module:Class")
    serve: Path | None = setting(None, "run folder or checkpoint that `gnomon serve` serves while this lasts; gives `settings.url`")
    serving: dict[str, Any] = setting(factory=dict, doc="fields of recipes/serve.toml for that server")
    settings: dict[str, Any] = setting(factory=dict, doc="what the kind can be told; `url` and `model` for an endpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineSettings:
    """How long the parts of an attempt may take, in seconds."""

    install: float = setting(7200.0, "for what a harness installs before its first attempt, a program for instance")
    machine: float = setting(300.0, "until the sandbox is there, waiting for room on this host included")
    agent: float = setting(1800.0, "for the agent, where the task names no time")
    judge: float = setting(900.0, "for the verifier; one that takes longer gives no score")
    grace: float = setting(10.0, "for what was told to stop, before nobody waits for it")

    def __post_init__(self) -> None:
        for name in ("install", "machine", "agent", "judge", "grace"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"'{name}' is {getattr(self, name)}; use a positive number of seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetSettings:
    """What one attempt may use. A task's own budget holds where it is smaller; `none` leaves it to the task."""

    tokens: int | None = setting(None, "tokens that the policy writes")
    turns: int | None = setting(None, "answers of the policy")
    dollars: float | None = setting(None, "money, for policies with prices")

    def __post_init__(self) -> None:
        for name in ("tokens", "turns", "dollars"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"'{name}' is {value}; use a positive number, or none")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecipe:
    """Tasks × policies × harnesses × efforts, each attempted `samples` times."""

    folder: Path = setting(Path("runs/eval"), "where attempts, eval.json and the page go; what is there already is kept and gone on with")
    samples: int = setting(1, "attempts at each task in each column")
    concurrency: int = setting(4, "attempts at a time")
    efforts: tuple[EffortName, ...] = setting(("none",), "how much the policy is asked to think; none: nothing is said about it")
    harnesses: tuple[str, ...] = setting(("minimal",), "presets, programs, or files ending in .toml")
    held_out_mixes: int = setting(0, "so many mixes that training never draws, and `draw.held_out`, beside `harnesses`; 0: none of them")
    draw: Draw = setting(factory=Draw, doc="what training draws harnesses from, where `held_out_mixes` asks for what it never sees")
    solved_at: float = setting(1.0, "reward from which a task counts as solved")
    retries: int = setting(1, "how often an attempt that failed by the machine's fault is begun anew at once")
    give_up_after: int = setting(8, "so many failures of one policy in a row, none of them its own doing, end its column")
    backend: str = setting("auto", "sandbox backend: namespaces, gvisor, …")
    isolation: Literal["standard", "strong"] = setting("standard", "strong: another kernel, or nothing")
    tasks: tuple[dict[str, Any], ...] = setting((), "sources of tasks: `kind`, its settings, and `limit` or `match`")
    policies: dict[str, PolicySettings] = setting(factory=dict, doc="who answers, by the name that the table shows")
    deadlines: DeadlineSettings = setting(factory=DeadlineSettings, doc="how long the parts of an attempt may take")
    budget: BudgetSettings = setting(factory=BudgetSettings, doc="what one attempt may use")

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("concurrency", 1), ("retries", 0), ("give_up_after", 1), ("held_out_mixes", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"'{name}' is {getattr(self, name)}; use at least {least}")
        for name in ("tasks", "policies", "harnesses", "efforts"):
            if not getattr(self, name):
                raise ConfigError(f"'{name}' names none; recipes/eval.toml shows how")
        for name in ("harnesses", "efforts"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(f"'{name}' names one twice: {', '.join(values)}")


def load(path: Path, overrides: Sequence[str] = ()) -> EvalRecipe:
    """A recipe file with overrides. Raises `ConfigError` naming the field."""
    return config.load(EvalRecipe, path, overrides)
