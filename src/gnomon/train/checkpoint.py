"""Exact, atomic checkpoints: what a run is, in safetensors and JSON, whole or not there.

A checkpoint is a folder `RUN/checkpoints/step-NNNNNN/`. It is written beside its place, forced to disk and renamed, so that a kill or a
full disk leaves the previous one whole. `state.json` lists the other files with their sizes; what does not match is refused.
Read next: `loop.py`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gnomon import config as toml
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.config import PRESETS
from gnomon.model.transformer import Transformer
from gnomon.train.recipe import TrainRecipe

STATE_FILE = "state.json"
PARTIAL = ".partial"
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint that was read: JSON `state`, and named tensors by group ("model", "optimizer", "run")."""

    path: Path
    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


def folder_of(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def save(run: Path, step: int, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]], keep: int) -> Path:
    """Write a checkpoint and remove all but the `keep` newest. Raises `CheckpointError` when it cannot be written whole."""
    folder = folder_of(run)
    target, partial = folder / f"step-{step:06d}", folder / f"step-{step:06d}{PARTIAL}"
    previous = latest(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(stale)
        partial.mkdir()
        sizes = {f"{group}.safetensors": _write_tensors(partial / f"{group}.safetensors", named) for group, named in tensors.items()}
        _write_bytes(partial / STATE_FILE, json.dumps({"format": FORMAT, "step": step, "files": sizes, **state}, indent=1).encode())
        _sync(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = f"the previous one, {previous}, is whole" if previous else "there is no earlier one"
        raise CheckpointError(f"checkpoint of step {step} could not be written to {folder}: {error}; {kept}; "
                              "free space and start the same command again") from error
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return target


def _write_tensors(path: Path, named: Mapping[str, Tensor]) -> int:
    save_file({name: t.detach().cpu().contiguous() for name, t in named.items()}, path)
    _sync(path)
    return path.stat().st_size


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Force a file's data, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [path for path in folder_of(run).glob("step-*") if not path.name.endswith(PARTIAL)]
    return sorted(found, key=lambda path: (len(path.name), path.name))  # step 1,000,000 comes after step 999,999


def latest(run: Path) -> Path | None:
    """The newest checkpoint of a run."""
    found = checkpoints(run)
    return found[-1] if found else None


def load(path: Path, device: torch.device | str = "cpu") -> Saved:
    """Read a checkpoint. Raises `CheckpointError` when a file is missing, cut or damaged."""
    try:
        state = json.loads((path / STATE_FILE).read_text())
        sizes = {name: (path / name).stat().st_size for name in state["files"]}
        wrong = [f"{name} has {sizes[name]} bytes instead of {size}" for name, size in state["files"].items() if sizes[name] != size]
        if state["format"] != FORMAT or wrong:
            raise CheckpointError(f"checkpoint {path} is damaged: {', '.join(wrong) or 'unknown format'}; remove it to use the one before")
        tensors = {name.removesuffix(".safetensors"): load_file(path / name, device=str(device)) for name in sizes}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}; remove it to use the one before") from None
    return Saved(path=path, state=state, tensors=tensors)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, router biases among them."""
    return dict(model.state_dict())


@torch.no_grad()
def restore_model(model: nn.Module, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Copy saved tensors into a model; raises `CheckpointError` listing what is missing, unknown or misshapen, before copying."""
    own = model_tensors(model)
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    misshapen = sorted(f"{n} {tuple(tensors[n].shape)} instead of {tuple(own[n].shape)}" for n in own.keys() & tensors.keys()
                       if own[n].shape != tensors[n].shape)
    if missing or unknown or misshapen:
        raise CheckpointError(f"{where} does not fit the model: missing {missing[:5]}, unknown {unknown[:5]}, misshapen {misshapen[:5]}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def read_recipe(run: Path) -> TrainRecipe:
    """The resolved recipe of a run folder, with `run` set to where the folder is now."""
    path = run / "recipe.toml"
    if not path.exists():
        raise CheckpointError(f"{run} is no run folder: {path.name} is missing; give the folder of a run that has trained")
    return toml.load(TrainRecipe, path, (f"run={json.dumps(str(run))}",), PRESETS)


def load_run(run: Path | str, device: torch.device | str = "cpu") -> tuple[Transformer, Tokenizer, TrainRecipe]:
    """The model of a run's newest checkpoint, ready to use, with the run's tokenizer and recipe.

    Raises `CheckpointError` when there is no whole checkpoint, `ConfigError` when `run` does not exist.
    """
    run = Path(run)
    if not run.is_dir():
        state = "is a file" if run.exists() else "does not exist"
        raise ConfigError(f"run folder '{run}' {state}; train one first, or check the path")
    recipe, path = read_recipe(run), latest(run)
    if path is None:
        raise CheckpointError(f"{run} has no checkpoint yet; let it train until the first one")
    model = Transformer(recipe.model)
    restore_model(model, load(path).tensors["model"], path)
    return model.to(device).eval(), Tokenizer.load(run / "tokenizer"), recipe
