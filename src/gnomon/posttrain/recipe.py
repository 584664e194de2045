"""Recipes of post-training: `gnomon sft`, `gnomon rl`, `gnomon distill`, one TOML file each.

`problems` is a dotted path `your_pkg.tasks:Source` to a class that is called without arguments and gives problems by number
(`problem.py`); its folder must be importable. Read next: `command.py`, which runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gnomon import config as toml
from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.model.config import PRESETS
from gnomon.parallel.axes import Axes
from gnomon.posttrain.agentic import AgentsConfig
from gnomon.posttrain.distill import DistillConfig
from gnomon.posttrain.rl import RLConfig
from gnomon.posttrain.sft import SFTConfig
from gnomon.posttrain.teachers import TeacherConfig
from gnomon.posttrain.tournament import TournamentConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTRecipe:
    """Fine-tuning on conversations."""

    run: Path = setting(Path("runs/sft"), "folder of the run")
    seed: int = setting(0, "decides what is held out and the order of the examples")
    start_from: Path = setting(doc="run folder, or a checkpoint in a released layout, whose weights and tokenizer are taken")
    data: tuple[str, ...] = setting(doc="files and globs: chat files (.jsonl), ATIF documents (.json), trajectories (.jsonl)")
    chat_format: str | None = setting(None, "xtml or kimi_linear; none: the one whose markers the tokenizer names")
    expert_weights: Literal["full", "mxfp4"] = setting("mxfp4", "mxfp4: routed experts are trained as MXFP4 stores them")
    expert_inputs: Literal["full", "mxfp8"] = setting("mxfp8", "mxfp8: what routed experts multiply is rounded to MXFP8")
    train: SFTConfig = setting(SFTConfig(), "epochs, batches, optimiser")
    mesh: Axes = setting(Axes(), "torchrun's ranks; only copies of the model (data), each with a share of the rollouts or examples")

    def __post_init__(self) -> None:
        _require_copies(self.mesh)
        if not self.data:
            raise ConfigError("'data' is empty; name files of conversations")


@dataclass(frozen=True, kw_only=True, slots=True)
class RLRecipe:
    """Reinforcement learning in one cell."""

    run: Path = setting(Path("runs/rl"), "folder of the run")
    seed: int = setting(0, "decides every draw")
    start_from: Path = setting(doc="run folder whose weights are taken")
    problems: str | None = setting(None, "dotted path your_pkg.tasks:Source")
    agents: AgentsConfig | None = setting(None, "in the place of problems: tasks that agents attempt; needs train.sampling.remote")
    tournament: TournamentConfig | None = setting(None, "judges answers to problems without a grader within their group; none: off")
    budgets: Path | None = setting(None, "file of b0, measured on the cold start if it is not there yet; none: no budget binds")
    budget_rollouts: int = setting(300, "rollouts of the cold start that b0 is measured on")
    cold_start: Path | None = setting(None, "run folder that b0 belongs to; none: start_from")
    gate: int = setting(0, "above 0: first ask so many rollouts of the cold start whether thinking helps; refuse where not")
    train: RLConfig = setting(RLConfig(), "steps, pool, objective, effort")
    mesh: Axes = setting(Axes(), "torchrun's ranks; only copies of the model (data), each with a share of the rollouts or examples")

    def __post_init__(self) -> None:
        _require_copies(self.mesh)
        if self.budget_rollouts < 1 or self.gate < 0:
            raise ConfigError(f"'budget_rollouts' {self.budget_rollouts} must be at least 1 and 'gate' {self.gate} not negative")
        if (self.problems is None) == (self.agents is None):
            raise ConfigError(f"the recipe has {'neither' if self.agents is None else 'both'} 'problems' and 'agents'; give one of them")
        if self.agents is not None and self.train.sampling.remote is None:
            raise ConfigError("'agents' are answered by servers; name them in 'train.sampling.remote'")


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillRecipe:
    """Several teachers into one student."""

    run: Path = setting(Path("runs/distill"), "folder of the run")
    seed: int = setting(0, "decides every draw")
    start_from: Path = setting(doc="run folder of the student's cold start")
    problems: str = setting(doc="dotted path your_pkg.tasks:Source; each problem says its domain and effort")
    teachers: tuple[TeacherConfig, ...] = setting(doc="one run folder for each (domain, effort)")
    train: DistillConfig = setting(DistillConfig(), "steps, pool, mode")
    mesh: Axes = setting(Axes(), "torchrun's ranks; only copies of the model (data), each with a share of the rollouts or examples")

    def __post_init__(self) -> None:
        _require_copies(self.mesh)


def _require_copies(mesh: Axes) -> None:
    """Raises `ConfigError` for ranks that would not have the whole model."""
    for name in ("expert", "context", "pipeline"):
        if getattr(mesh, name) > 1:
            raise ConfigError(f"'mesh.{name}' is {getattr(mesh, name)}; in post-training each rank has the whole model, since it samples "
                              "from it; leave it at 1, and ranks share rollouts or examples")
    if mesh.zero:
        raise ConfigError(f"'mesh.zero' is {mesh.zero}; in post-training each rank keeps all states of the optimiser; leave it at 0")


def load(path: Path, overrides: tuple[str, ...] = ()) -> SFTRecipe | RLRecipe | DistillRecipe:
    """Read a recipe of any of the three verbs, by what is in it."""
    table = toml.read_toml(path, PRESETS)
    if "problems" not in table and "agents" not in table:
        return load_sft(path, overrides)
    return load_distill(path, overrides) if "teachers" in table else load_rl(path, overrides)


def load_sft(path: Path, overrides: tuple[str, ...] = ()) -> SFTRecipe:
    """Read a recipe of `gnomon sft`."""
    return toml.load(SFTRecipe, path, overrides, PRESETS)


def load_rl(path: Path, overrides: tuple[str, ...] = ()) -> RLRecipe:
    """Read a recipe of `gnomon rl`."""
    return toml.load(RLRecipe, path, overrides, PRESETS)


def load_distill(path: Path, overrides: tuple[str, ...] = ()) -> DistillRecipe:
    """Read a recipe of `gnomon distill`."""
    return toml.load(DistillRecipe, path, overrides, PRESETS)
