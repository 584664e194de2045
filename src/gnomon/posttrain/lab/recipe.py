"""The recipe of `gnomon lab`: tasks, domains, teachers, and the settings of every stage in one file.

Read next: `recipes/lab.toml`, `plan.py`, which makes jobs of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gnomon import config as toml
from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.model.config import PRESETS, ModelConfig, preset
from gnomon.posttrain.distill import DistillConfig
from gnomon.posttrain.effort import TauConfig
from gnomon.posttrain.lab.words import EFFORTS, Effort
from gnomon.posttrain.rl import RLConfig
from gnomon.posttrain.sft import SFTConfig
from gnomon.posttrain.teachers import TeacherConfig

LEAST_PROBLEMS = 300
"""Problems of a cell below which a report says that its intervals are wide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseConfig:
    """One phase of the cold start."""

    texts: int = setting(20_000, "demonstrations that it learns from")
    dense: float = setting(0.0, "share of them that are small facts rather than whole solutions")
    shares: dict[str, float] = setting(factory=dict, doc="share of each domain in them; nothing: all alike")
    quantised: bool = setting(True, "train routed experts as they are served; false: full precision, as pre-training is")
    train: SFTConfig = setting(SFTConfig(epochs=1, batch_tokens=4096), "epochs, batches, optimiser")
    until: float | None = setting(None, "held-out loss that it should reach: while it has not, rounds on new texts follow; none: one round")
    rounds: int = setting(3, "rounds at most, the first one too; without 'until' there is one")

    def __post_init__(self) -> None:
        if self.texts < 1 or not 0 <= self.dense <= 1:
            raise ConfigError(f"'texts' {self.texts} must be at least 1 and 'dense' {self.dense} a share between 0 and 1")
        if self.shares and (min(self.shares.values()) < 0 or sum(self.shares.values()) <= 0):
            raise ConfigError(f"'shares' is {self.shares}; none may be negative, and one must be above 0")
        if self.rounds < 1 or (self.until is not None and (self.until <= 0 or not self.train.held_out)):
            raise ConfigError(f"'until' is {self.until} with 'rounds' {self.rounds} and 'train.held_out' {self.train.held_out}; a loss "
                              "to be reached is positive, some texts are held out to measure it, and there is at least one round")

    def short(self, last: Mapping[str, Any]) -> bool:
        """Whether a round whose last row of metrics this is has not learnt enough."""
        return self.until is not None and bool(last["held_out_loss"] > self.until)


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """Does thinking help? Asked before any reinforcement; the same rollouts give b0."""

    rollouts: int = setting(600, "rollouts of the cold start for each domain")
    shut: Literal["leave out", "stop"] = setting("leave out", "what becomes of a domain in which thinking does not help, or of the run")

    def __post_init__(self) -> None:
        if self.rollouts < 60:
            raise ConfigError(f"'rollouts' is {self.rollouts}; fewer than 60 tell nothing")


@dataclass(frozen=True, kw_only=True, slots=True)
class CellConfig:
    """One expert."""

    steps: int = setting(40, "steps of reinforcement")
    learning_rate: float | None = setting(None, "of its own; none: that of [expert]")
    early: int = setting(0, "high and low: the step of max whose weights it starts from; 0: the cold start")
    tau: TauConfig = setting(TauConfig(), "its budget as a multiple of b0; max has none")

    def __post_init__(self) -> None:
        if self.steps < 1 or self.early < 0:
            raise ConfigError(f"'steps' {self.steps} must be at least 1 and 'early' {self.early} not negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainConfig:
    """One domain and its three experts."""

    name: str = setting(doc="as the tasks call it")
    max: CellConfig = setting(CellConfig(), "effort max, trained first")
    high: CellConfig = setting(CellConfig(early=12, tau=TauConfig(start=2.0, target=1.2)), "effort high")
    low: CellConfig = setting(CellConfig(early=12, tau=TauConfig(start=2.0, target=0.7)), "effort low")

    def __post_init__(self) -> None:
        if self.max.early or self.max.tau.target is not None:
            raise ConfigError(f"domain '{self.name}': 'max' starts from the cold start without a budget; leave out 'early' and 'tau'")
        for effort in ("high", "low"):
            cell = self.cell(effort)
            if cell.tau.target is None:
                raise ConfigError(f"domain '{self.name}': '{effort}.tau.target' is missing; give its budget as a multiple of b0")
            if cell.early > self.max.steps:
                raise ConfigError(f"domain '{self.name}': '{effort}.early' is {cell.early}, but max has {self.max.steps} steps; "
                                  "name one of them")

    def cell(self, effort: Effort) -> CellConfig:
        """The settings of an effort's expert."""
        return {"max": self.max, "high": self.high, "low": self.low}[effort]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """How cells are evaluated: every model on the same problems, with the same random numbers."""

    problems: int = setting(400, "problems of each cell; below 300 intervals are wide")
    held_out: int = setting(600, "demonstrations that losses are measured on")

    def __post_init__(self) -> None:
        if self.problems < 2 or self.held_out < 2:
            raise ConfigError(f"'problems' {self.problems} and 'held_out' {self.held_out} must be at least 2")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeesawConfig:
    """What nine experts and a student are compared with, at the compute that all of them took together."""

    mixed: bool = setting(True, "one run of reinforcement over all cells")
    sequential: bool = setting(True, "one model, reinforced in one cell after the other")
    average: bool = setting(True, "the mean of the experts' weights; takes no compute")
    prompts: int = setting(36, "mixed: groups of an iteration, over all cells")
    reach: float = setting(0.97, "mixed: rounds are added until this share of the compute is used")

    def __post_init__(self) -> None:
        if self.prompts < 1 or not 0 < self.reach <= 1:
            raise ConfigError(f"'prompts' {self.prompts} must be at least 1 and 'reach' {self.reach} above 0 and at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantisationConfig:
    """Quantisation-aware training against quantisation afterwards: the last phase of the cold start again, three times."""

    texts: int = setting(8000, "demonstrations of each; 0: leave the comparison out")


@dataclass(frozen=True, kw_only=True, slots=True)
class LabRecipe:
    """A whole post-training."""

    run: Path = setting(Path("runs/lab"), "folder: seed-N/ for each seed, and the report over all of them")
    seeds: tuple[int, ...] = setting((1,), "each one decides every draw of a whole run")
    workers: int = setting(2, "processes of one thread each; 0: work in this process")
    tasks: str = setting("gnomon.posttrain.lab.tasks:Lab", "dotted path your_pkg.tasks:Tasks")
    model: ModelConfig = setting(factory=lambda: preset("lab"), doc="shape of all models")
    cold: tuple[PhaseConfig, ...] = setting((PhaseConfig(dense=1.0, quantised=False), PhaseConfig()), "phases of the cold start, in order")
    gate: GateConfig = setting(GateConfig(), "the question before reinforcement")
    expert: RLConfig = setting(RLConfig(), "what all experts share; steps, learning rate and tau are the cells' own")
    domains: tuple[DomainConfig, ...] = setting(tuple(DomainConfig(name=n) for n in ("general", "agents", "coding")), "domains, in order")
    teachers: tuple[TeacherConfig, ...] = setting((), "run folders that teach a cell instead of an expert of this run")
    student: DistillConfig = setting(DistillConfig(), "distillation")
    evaluate: EvaluateConfig = setting(EvaluateConfig(), "how cells are evaluated")
    seesaw: SeesawConfig = setting(SeesawConfig(), "comparators at equal compute")
    quantisation: QuantisationConfig = setting(QuantisationConfig(), "training under quantisation against quantising afterwards")

    def __post_init__(self) -> None:
        names = [each.name for each in self.domains]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"'domains' names {', '.join(names) or 'nothing'}; give each domain once")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ConfigError(f"'seeds' is {list(self.seeds)}; give different numbers, none negative")
        if not 0 <= self.workers <= 64:
            raise ConfigError(f"'workers' is {self.workers}; give the cores to use, or 0 to work in this process")
        if not self.cold:
            raise ConfigError("'cold' is empty; give at least one phase of the cold start")
        if not self.cold[-1].quantised:
            raise ConfigError("'cold' ends with a phase in full precision; the last one has 'quantised' true, since experts start from it")
        strange = sorted({name for each in self.cold for name in each.shares} - set(names))
        if strange:
            raise ConfigError(f"'cold.shares' names {', '.join(strange)}; domains are {', '.join(names)}")
        for teacher in self.teachers:
            if teacher.domain not in names or teacher.effort not in EFFORTS:
                raise ConfigError(f"'teachers' names {teacher.domain}/{teacher.effort}; cells are {', '.join(names)} at "
                                  f"{', '.join(EFFORTS)}")
            if teacher.run is None or teacher.adapter is not None:
                raise ConfigError(f"the lab's teacher of {teacher.domain}/{teacher.effort} must be a 'run': its weights are averaged")
        if self.expert.bound or self.expert.cells:
            raise ConfigError("'expert.tau' is set; budgets belong to the cells, as domains.low.tau and domains.high.tau")

    @property
    def cells(self) -> tuple[tuple[str, Effort], ...]:
        """All (domain, effort), in the order of reports."""
        return tuple((each.name, effort) for each in self.domains for effort in EFFORTS)

    def domain(self, name: str) -> DomainConfig:
        """A domain's settings."""
        return next(each for each in self.domains if each.name == name)

    def tau(self, cell: tuple[str, str]) -> float:
        """The tau that a cell is held to in the end; infinity for max."""
        return replace(self.domain(cell[0]).cell(cell[1]).tau, start=None).at(0, 1)  # type: ignore[arg-type]

    def taught_by(self, cell: tuple[str, str]) -> Path | None:
        """The folder that the recipe names for a cell's teacher, or None for an expert of this run."""
        return next((each.run for each in self.teachers if (each.domain, each.effort) == cell), None)


def load(path: Path, overrides: tuple[str, ...] = ()) -> LabRecipe:
    """Read a recipe of `gnomon lab`."""
    return toml.load(LabRecipe, path, overrides, PRESETS)
