"""The folder of a post-training run: checkpoints that hold everything, metrics, and what makes the folder servable.

A checkpoint has the weights, the optimiser, the pool with its unfinished rollouts, and whatever else the loop remembers as JSON; a run
that was killed goes on from the last one and does the same again. `recipe.toml` has the model's shape, so that `gnomon serve` and every
other reader of runs take the folder. Read next: `rl.py`, `distill.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gnomon import config as toml
from gnomon.config import setting
from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.transformer import Transformer
from gnomon.posttrain.learner import Learner
from gnomon.train import checkpoint
from gnomon.train.metrics import Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepConfig:
    """When state is saved."""

    every: int = setting(10, "steps between checkpoints")
    keep: int = setting(1, "checkpoints kept besides those that were asked to stay")
    stay: tuple[int, ...] = setting((), "steps whose checkpoints are copied to RUN/kept/step-N, to start other runs from")

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ConfigError(f"'every' {self.every} and 'keep' {self.keep} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """All that a reader of a run folder needs to build its model."""

    model: ModelConfig = setting(doc="shape of the model")


@dataclass(kw_only=True, slots=True, eq=False)
class Kept:
    """A run's folder and what goes into its checkpoints beside weights and optimiser: `state()` gives it, `restore(state)` takes it."""

    folder: Path
    config: KeepConfig
    learner: Learner
    seed: int
    memory: Mapping[str, Any] = field(default_factory=dict)  # name → object with state() and restore(state)
    recipe: str | None = None

    def begin(self) -> tuple[int, int]:
        """Make the folder, take over its newest checkpoint; returns the steps done and the metrics' length."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"run folder '{self.folder}' is a file; name another") from None
        path = checkpoint.latest(self.folder)
        if path is None:
            self._describe()
            return 0, 0
        saved = checkpoint.load(path)
        if "memory" not in saved.state:
            raise ConfigError(f"run folder '{self.folder}' is of another kind of training; name another folder")
        if saved.state["seed"] != self.seed:
            raise ConfigError(f"run folder '{self.folder}' was begun with seed {saved.state['seed']}, not {self.seed}; name another folder")
        checkpoint.restore_model(self.learner.model, saved.tensors["model"], path)
        self.learner.optimizer.load_state_dict(saved.tensors["optimizer"])
        if saved.state["memory"].keys() != self.memory.keys():
            raise CheckpointError(f"{path} remembers {sorted(saved.state['memory'])}, this run {sorted(self.memory)}; it is of another "
                                  "kind; name another folder")
        for name, part in self.memory.items():
            part.restore(saved.state["memory"][name])
        self._describe()  # last, so that a folder which is refused stays what it was
        return saved.state["step"], saved.state["metrics_bytes"]

    def _describe(self) -> None:
        (self.folder / "recipe.toml").write_text(self.recipe or toml.to_toml(Shape(model=self.learner.model.config)))

    def save(self, step: int, metrics: Metrics) -> None:
        """A checkpoint after `step` steps; `stay` also copies the weights to `kept/`."""
        memory = {name: part.state() for name, part in self.memory.items()}
        state = {"seed": self.seed, "memory": memory, "metrics_bytes": metrics.sync()}
        tensors = {"model": checkpoint.model_tensors(self.learner.model), "optimizer": self.learner.optimizer.state_dict()}
        if step in self.config.stay:  # first: a run that is killed in between does this step again, and this with it
            set_apart(kept_folder(self.folder, step), step, self.seed, self.learner.model)
        checkpoint.save(self.folder, step, state, tensors, self.config.keep)

    def due(self, step: int, total: int) -> bool:
        """Whether a checkpoint belongs after this many steps."""
        return step == total or step % self.config.every == 0 or step in self.config.stay

    @contextmanager
    def metrics(self, offset: int, step: int) -> Iterator[Metrics]:
        """The run's metrics, cut back to where the checkpoint was taken."""
        with Metrics(self.folder, offset, step) as opened:
            yield opened


def fingerprint(model: Transformer) -> str:
    """A name for a model's weights: the same for the same bits, and for no others."""
    digest = hashlib.sha256()
    for name, tensor in sorted(checkpoint.model_tensors(model).items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def set_apart(folder: Path, step: int, seed: int, model: Transformer) -> None:
    """Make a run folder of nothing but a model's weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(toml.to_toml(Shape(model=model.config)))
    checkpoint.save(folder, step, {"seed": seed}, {"model": checkpoint.model_tensors(model)}, 1)


def kept_folder(run: Path, step: int) -> Path:
    """Where the weights after a step of `stay` are: a run folder of its own."""
    return run / "kept" / f"step-{step}"
