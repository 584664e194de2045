"""Exact, atomic checkpoints: what a run is, whole or not there.

A checkpoint is a folder `RUN/checkpoints/step-NNNNNN/`. It is written beside its place, forced to disk and renamed, so that a kill or a
full disk leaves the previous one whole. `state.json` lists the other files with their sizes; what does not match is refused. One rank
writes whole tensors as safetensors, which is here; several write what each holds, which is in `checkpoint_rows.py`.
Reading is in `gnomon.model.runs`. Read next: `loop.py`.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gnomon import config as toml
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import CheckpointError
from gnomon.model.config import PRESETS
from gnomon.model.runs import (
    FORMAT,
    PARTIAL,
    STATE_FILE,
    TENSORS,
    checkpoints,
    folder_of,
    latest,
    load,
    load_model,
    model_tensors,
    restore_model,
)
from gnomon.model.transformer import Transformer
from gnomon.train.recipe import TrainRecipe

__all__ = ["checkpoints", "folder_of", "latest", "load", "load_run", "model_tensors", "places", "read_recipe", "restore_model", "save",
           "written"]


def save(run: Path, step: int, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]], keep: int) -> Path:
    """Write a checkpoint and remove all but the `keep` newest. Raises `CheckpointError` when it cannot be written whole."""
    with written(run, step, state, keep) as partial:
        for group, named in tensors.items():
            _write_tensors(partial / f"{group}{TENSORS}", named)
    return places(run, step)[0]


def places(run: Path, step: int) -> tuple[Path, Path]:
    """Where the checkpoint of a step stands, and where it is until it is whole."""
    folder = folder_of(run)
    return folder / f"step-{step:06d}", folder / f"step-{step:06d}{PARTIAL}"


@contextmanager
def written(run: Path, step: int, state: Mapping[str, Any], keep: int, *failures: type[BaseException]) -> Iterator[Path]:
    """A folder to write a checkpoint's tensors in; whole and in its place afterwards, or gone.

    Raises `CheckpointError` for what `save` may meet, and for `failures` of another way to write.
    """
    folder, (target, partial), previous = folder_of(run), places(run, step), latest(run)
    expected: tuple[type[BaseException], ...] = (OSError, SafetensorError, *failures)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(stale)
        partial.mkdir()
        yield partial
        sizes = {str(file.relative_to(partial)): file.stat().st_size for file in sorted(partial.rglob("*")) if file.is_file()}
        _write_bytes(partial / STATE_FILE, json.dumps({"format": FORMAT, "step": step, "files": sizes, **state}, indent=1).encode())
        _sync(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        _sync(folder)
    except expected as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = f"the previous one, {previous}, is whole" if previous else "there is no earlier one"
        raise CheckpointError(f"checkpoint of step {step} could not be written to {folder}: {error}; {kept}; "
                              "free space and start the same command again") from error
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)


def _write_tensors(path: Path, named: Mapping[str, Tensor]) -> None:
    save_file({name: t.detach().cpu().contiguous() for name, t in named.items()}, path)
    _sync(path)


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
    model, _ = load_model(Path(run), device)
    return model, Tokenizer.load(Path(run) / "tokenizer"), read_recipe(Path(run))
