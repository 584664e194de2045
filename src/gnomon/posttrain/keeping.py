"""The folder of a post-training run: checkpoints that hold everything, metrics, and what makes the folder servable.

A checkpoint has the weights, the optimiser, the pool with its unfinished rollouts, and whatever else the loop remembers as JSON; a run
that was killed goes on from the last one and does the same again. It goes on with the settings that it was begun with: what decides results
stands in each checkpoint, and another value is refused by name. `recipe.toml` has the model's shape, so that `gnomon serve` and every
other reader of runs take the folder; the recipe itself stands beside it under the verb's name. Read next: `rl.py`, `distill.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gnomon import config as toml
from gnomon import whole
from gnomon.config import setting
from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.transformer import Transformer
from gnomon.parallel.mesh import Mesh
from gnomon.posttrain.learner import Learner
from gnomon.train import checkpoint
from gnomon.train.metrics import Metrics

ENDS = 1 << 16
"""Bytes at each end of a file by which it is told from others."""


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


NEUTRAL = frozenset(("keep", "collect", "largest_gap", "micro_tokens", "slots", "cache_tokens", "cache_share", "graders",
                     "grader_seconds", "world_seconds", "remote"))
"""Settings that decide what is written, how long it takes and what memory it needs, but no result: a run may go on with others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What is around a loop: the ranks that share its work, what its results depend on beside its own settings (`decides`, as plain JSON),
    and the recipe that people wrote, as the name and text of a file."""

    mesh: Mesh = field(default_factory=Mesh)
    decides: Mapping[str, Any] = field(default_factory=dict)
    recipe: tuple[str, str] | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class Kept:
    """A run's folder and what goes into its checkpoints beside weights and optimiser: `state()` gives it, `restore(state)` takes it."""

    folder: Path
    config: KeepConfig
    learner: Learner
    seed: int
    memory: Mapping[str, Any] = field(default_factory=dict)  # name → object with state() and restore(state)
    decides: Mapping[str, Any] = field(default_factory=dict)  # what results depend on, by the names that the recipe has for it
    recipe: tuple[str, str] | None = None

    def begin(self) -> tuple[int, int]:
        """Make the folder, take over its newest checkpoint; returns the steps done and the metrics' length."""
        mesh = self.learner.mesh
        if mesh.is_main:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise ConfigError(f"run folder '{self.folder}' is a file; name another") from None
        mesh.wait()
        path = checkpoint.latest(self.folder)
        if path is None:
            self._describe()
            return 0, 0
        saved = checkpoint.load(path)
        if "memory" not in saved.state:
            raise ConfigError(f"run folder '{self.folder}' is of another kind of training; name another folder")
        if saved.state["seed"] != self.seed:
            raise ConfigError(f"run folder '{self.folder}' was begun with seed {saved.state['seed']}, not {self.seed}; name another folder")
        if changed := self._changed(saved.state.get("decides")):
            raise ConfigError(f"run folder '{self.folder}' was begun with other settings ({'; '.join(changed)}); set them back to go on, "
                              f"or begin a run in another folder, with start_from={self.folder} to keep what was learnt")
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
        if self.learner.mesh.is_main:
            whole.write(self.folder / "recipe.toml", toml.to_toml(Shape(model=self.learner.model.config)))
            if self.recipe is not None:
                whole.write(self.folder / self.recipe[0], self.recipe[1])

    def _settings(self) -> dict[str, Any]:
        """All that decides results, one value to a dotted name."""
        return dict(_flat({**self.decides, "model": self.learner.model.config}))

    def _changed(self, before: Mapping[str, Any] | None) -> list[str]:
        """What is not as it was, in words; nothing is known of a checkpoint that says nothing of it."""
        if before is None:
            return []
        now = json.loads(json.dumps(self._settings()))
        return [f"{name}: {before.get(name, 'none')!r} → {now.get(name, 'none')!r}" for name in dict.fromkeys([*before, *now])
                if before.get(name) != now.get(name)]

    def save(self, step: int, metrics: Metrics | None) -> None:
        """A checkpoint after `step` steps; `stay` also copies the weights to `kept/`. The first rank writes, all have the same."""
        if metrics is None:
            return
        memory = {name: part.state() for name, part in self.memory.items()}
        state = {"seed": self.seed, "decides": self._settings(), "memory": memory, "metrics_bytes": metrics.sync()}
        tensors = {"model": checkpoint.model_tensors(self.learner.model), "optimizer": self.learner.optimizer.state_dict()}
        if step in self.config.stay:  # first: a run that is killed in between does this step again, and this with it
            set_apart(kept_folder(self.folder, step), step, self.seed, self.learner.model)
        checkpoint.save(self.folder, step, state, tensors, self.config.keep)

    def due(self, step: int, total: int) -> bool:
        """Whether a checkpoint belongs after this many steps."""
        return step == total or step % self.config.every == 0 or step in self.config.stay

    @contextmanager
    def metrics(self, offset: int, step: int) -> Iterator[Metrics | None]:
        """The run's metrics, cut back to where the checkpoint was taken; None on all ranks but the first."""
        with Metrics(self.folder, offset, step) if self.learner.mesh.is_main else nullcontext() as opened:
            yield opened

    def note(self, metrics: Metrics | None, row: Mapping[str, Any]) -> None:
        """A step is done: its row of metrics."""
        if metrics is not None:
            metrics.write(row)
        if self.learner.mesh.roll is not None:
            self.learner.mesh.roll.mark(row["step"])


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Settings as (dotted name, plain value), without those that decide nothing."""
    plain = toml.to_dict(value)
    if not isinstance(plain, (dict, list)):
        yield name, plain
        return
    for key, item in plain.items() if isinstance(plain, dict) else enumerate(plain):
        if key not in NEUTRAL:
            yield from _flat(item, f"{name}.{key}" if name else str(key))


def ends(folder: Path) -> str:
    """A name for a checkpoint by its files: their sizes, how they begin and how they end. Cheap for any size."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder)} {size}\n".encode())
            with path.open("rb") as file:
                for start in (0, max(0, size - ENDS)):
                    file.seek(start)
                    digest.update(file.read(ENDS))
    return digest.hexdigest()[:16]


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
    whole.write(folder / "recipe.toml", toml.to_toml(Shape(model=model.config)))
    checkpoint.save(folder, step, {"seed": seed}, {"model": checkpoint.model_tensors(model)}, 1)


def kept_folder(run: Path, step: int) -> Path:
    """Where the weights after a step of `stay` are: a run folder of its own."""
    return run / "kept" / f"step-{step}"
