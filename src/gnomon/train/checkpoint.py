"""Exact, atomic checkpoints: what a run is, whole or not there.

A checkpoint is a folder `RUN/checkpoints/step-NNNNNN/`. It is written beside its place, forced to disk and renamed, so that a kill or a
full disk leaves the previous one whole. `state.json` lists the other files with their sizes; what does not match is refused. One rank
writes whole tensors as safetensors. Several write their rows through torch's distributed checkpoints, and read the rows that they need.
Reading is in `gnomon.model.runs`. Read next: `loop.py`.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gnomon import config as toml
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import CheckpointError
from gnomon.model.config import PRESETS
from gnomon.model.runs import (
    FORMAT,
    PARTIAL,
    ROWS,
    STATE_FILE,
    TENSORS,
    checkpoints,
    folder_of,
    latest,
    load,
    load_model,
    load_rows,
    model_tensors,
    read_state,
    restore_model,
)
from gnomon.model.transformer import Transformer
from gnomon.parallel.mesh import Mesh
from gnomon.parallel.rows import Rows
from gnomon.train.recipe import TrainRecipe

__all__ = [
    "checkpoints", "fill", "folder_of", "latest", "load", "load_run", "model_tensors", "read_recipe", "restore_model", "save", "save_rows",
]


def save(run: Path, step: int, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]], keep: int) -> Path:
    """Write a checkpoint and remove all but the `keep` newest. Raises `CheckpointError` when it cannot be written whole."""
    with _written(run, step, state, keep) as partial:
        for group, named in tensors.items():
            _write_tensors(partial / f"{group}{TENSORS}", named)
    return folder_of(run) / f"step-{step:06d}"


def save_rows(run: Path, step: int, state: Mapping[str, Any], held: Mapping[str, Mapping[str, Rows]], keep: int, mesh: Mesh) -> None:
    """The same by several ranks, each of which writes rows that it holds; nobody has a whole tensor that was not whole before.

    All ranks must call, and see one folder. Rows that several hold are written by one of them.
    """
    with _written(run, step, state, keep) if mesh.is_main else nullcontext(folder_of(run) / f"step-{step:06d}{PARTIAL}") as partial:
        mesh.wait()
        named = {f"{group}/{name}": rows for group, some in held.items() for name, rows in some.items() if group != "run" or mesh.is_main}
        dcp.save(named, storage_writer=dcp.FileSystemWriter(partial / ROWS))


@contextmanager
def _written(run: Path, step: int, state: Mapping[str, Any], keep: int) -> Iterator[Path]:
    """A folder to write a checkpoint's tensors in; whole and in its place afterwards, or gone."""
    folder = folder_of(run)
    target, partial = folder / f"step-{step:06d}", folder / f"step-{step:06d}{PARTIAL}"
    previous = latest(run)
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
    except (OSError, SafetensorError, dcp.CheckpointException) as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = f"the previous one, {previous}, is whole" if previous else "there is no earlier one"
        raise CheckpointError(f"checkpoint of step {step} could not be written to {folder}: {error}; {kept}; "
                              "free space and start the same command again") from error
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)


def fill(path: Path, held: Mapping[str, Mapping[str, Rows]]) -> dict[str, Any]:
    """Read into the rows that a rank holds, whoever wrote them under whatever mesh; returns the checkpoint's `state`.

    Raises `CheckpointError` for a damaged checkpoint, and for tensors that are missing or have another shape, before any is changed.
    """
    state = read_state(path)
    try:
        if f"model{TENSORS}" in state["files"]:
            _fill_from_whole(path, held)
        else:
            listed = dcp.FileSystemReader(path / ROWS).read_metadata().state_dict_metadata
            there = {name: tuple(found.size) for name, found in listed.items() if isinstance(found, TensorStorageMetadata)}
            named = {f"{group}/{name}": rows for group, some in held.items() for name, rows in some.items()}
            _check_fits(path, named, there)
            load_rows(named, path / ROWS)
    except (OSError, ValueError, KeyError, SafetensorError, dcp.CheckpointException) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}; remove it to use the one before") from None
    return state


def _fill_from_whole(path: Path, held: Mapping[str, Mapping[str, Rows]]) -> None:
    """From files of whole tensors, of which only these rows are read."""
    for group, some in held.items():
        with safe_open(path / f"{group}{TENSORS}", "pt") as file:
            there = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _check_fits(path, some, there)
            for name, rows in some.items():
                stop = rows.start + len(rows.local) if rows.local.ndim else 0
                rows.local.copy_(file.get_slice(name)[rows.start : stop] if rows.local.ndim else file.get_tensor(name))


def _check_fits(path: Path, held: Mapping[str, Rows], there: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(held.keys() - there.keys())
    misshapen = sorted(f"{name} {there[name]} instead of {tuple(rows.size())}" for name, rows in held.items()
                       if name in there and there[name] != tuple(rows.size()))
    if missing or misshapen:
        raise CheckpointError(f"{path} does not fit the model: missing {missing[:5]}, misshapen {misshapen[:5]}")


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
