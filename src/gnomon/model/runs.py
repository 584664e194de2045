"""What a run has saved, read back: its newest whole checkpoint, and the model in it.

`gnomon.train.checkpoint` writes what this module reads; it stands here because serving a run needs no training.
Read next: `gnomon/train/checkpoint.py`.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gnomon import config as toml
from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.config import PRESETS, ModelConfig
from gnomon.model.multimodal import TEXT, Eye, Multimodal
from gnomon.model.transformer import Transformer

STATE_FILE = "state.json"
EYE = "eye"  # the group of tower and projector
PARTIAL = ".partial"
TENSORS = ".safetensors"  # a group of whole tensors, where one rank wrote the checkpoint
ROWS = "rows"  # the folder of what each of several ranks held
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint that was read: JSON `state`, and named tensors by group ("model", "optimizer", "run", and "eye" of models that see)."""

    path: Path
    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


def folder_of(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [path for path in folder_of(run).glob("step-*") if not path.name.endswith(PARTIAL)]
    return sorted(found, key=lambda path: (len(path.name), path.name))  # step 1,000,000 comes after step 999,999


def latest(run: Path) -> Path | None:
    """The newest checkpoint of a run."""
    found = checkpoints(run)
    return found[-1] if found else None


def load(path: Path, device: torch.device | str = "cpu") -> Saved:
    """Read a checkpoint whole, whether one rank wrote it or several. Raises `CheckpointError` when a file is missing, cut or damaged."""
    state = read_state(path)
    try:
        groups = [name.removesuffix(TENSORS) for name in state["files"] if name.endswith(TENSORS)]
        tensors = {group: load_file(path / f"{group}{TENSORS}", device=str(device)) for group in groups}
        return Saved(path=path, state=state, tensors=tensors or _joined(path / ROWS, device))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}; remove it to use the one before") from None


def read_state(path: Path) -> dict[str, Any]:
    """The JSON of a checkpoint whose files are all there. Raises `CheckpointError` when one is missing or cut."""
    try:
        state: dict[str, Any] = json.loads((path / STATE_FILE).read_text())
        sizes = {name: (path / name).stat().st_size for name in state["files"]}
        wrong = [f"{name} has {sizes[name]} bytes instead of {size}" for name, size in state["files"].items() if sizes[name] != size]
        if state["format"] != FORMAT or wrong:
            raise CheckpointError(f"checkpoint {path} is damaged: {', '.join(wrong) or 'unknown format'}; remove it to use the one before")
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}; remove it to use the one before") from None
    return state


def _joined(folder: Path, device: torch.device | str) -> dict[str, dict[str, Tensor]]:
    """Whole tensors by group, out of the rows that several ranks wrote."""
    whole = {key: torch.empty(shape, dtype=dtype, device=device) for key, (shape, dtype) in stored_rows(folder).items()}
    load_rows(whole, folder)
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in whole.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor
    return groups


def stored_rows(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each whole tensor of which several ranks wrote rows, by its name there."""
    from torch.distributed import checkpoint  # slow to import, and most runs have one rank
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    listed = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: (tuple(found.size), found.properties.dtype) for name, found in listed.items() if isinstance(found, TensorStorageMetadata)}


def load_rows(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Read what several ranks wrote into tensors by their names there; each process for itself. Raises `ValueError` when it cannot."""
    from torch.distributed import checkpoint

    try:
        with warnings.catch_warnings():  # that one process reads alone is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            checkpoint.load(dict(tensors), checkpoint_id=folder, no_dist=True)
    except checkpoint.CheckpointException as error:  # no Exception, so nobody would see it who looks for one
        raise ValueError(str(error)) from None


def eye_tensors(eye: Eye) -> dict[str, Tensor]:
    """Tower and projector by their released names."""
    return {name: value for name, value in eye.state_dict().items() if not name.startswith(TEXT)}


def restore_eye(eye: Eye, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Copy saved tensors into tower and projector; complains as `restore_model`."""
    _restore(eye_tensors(eye), tensors, where)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, router biases among them."""
    return dict(model.state_dict())


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Copy saved tensors into a model; raises `CheckpointError` listing what is missing, unknown or misshapen, before copying."""
    _restore(model_tensors(model), tensors, where)


@torch.no_grad()
def _restore(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: Path) -> None:
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    misshapen = sorted(f"{n} {tuple(tensors[n].shape)} instead of {tuple(own[n].shape)}" for n in own.keys() & tensors.keys()
                       if own[n].shape != tensors[n].shape)
    if missing or unknown or misshapen:
        raise CheckpointError(f"{where} does not fit the model: missing {missing[:5]}, unknown {unknown[:5]}, misshapen {misshapen[:5]}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def load_model(run: Path, device: torch.device | str = "cpu") -> tuple[Transformer, Path]:
    """The text model of a run's newest checkpoint, ready to use, and that checkpoint's folder.

    Raises `ConfigError` when `run` does not exist, `CheckpointError` when it is no run folder or has no whole checkpoint.
    """
    model, saved = _text_model(run)
    return model.to(device).eval(), saved.path


def load_seeing(run: Path, device: torch.device | str = "cpu") -> tuple[Multimodal, Path]:
    """The model of a run that was trained on images, with tower and projector, as `load_model`.

    Raises `CheckpointError` for a run without them too.
    """
    model, saved = _text_model(run)
    if model.config.vision is None or EYE not in saved.tensors:
        raise CheckpointError(f"{run} was trained without a vision tower; load it as a text model")
    eye = Multimodal(model.config, model)
    restore_eye(eye, saved.tensors[EYE], saved.path)
    return eye.to(device).eval(), saved.path


def load_text_and_eye(run: Path, device: torch.device | str = "cpu") -> tuple[Transformer, Eye | None, Path]:
    """The text model, tower and projector where it has them, and the checkpoint's folder; complains as `load_model`."""
    model, saved = _text_model(run)
    if EYE not in saved.tensors:
        return model.to(device).eval(), None, saved.path
    eye = Eye(model.config)
    restore_eye(eye, saved.tensors[EYE], saved.path)
    return model.to(device).eval(), eye.to(device).eval(), saved.path


def _text_model(run: Path) -> tuple[Transformer, Saved]:
    if not run.is_dir():
        state = "is a file" if run.exists() else "does not exist"
        raise ConfigError(f"run folder '{run}' {state}; train one first, or check the path")
    recipe, path = run / "recipe.toml", latest(run)
    if not recipe.exists():
        raise CheckpointError(f"{run} is no run folder: {recipe.name} is missing; give the folder of a run that has trained")
    if path is None:
        raise CheckpointError(f"{run} has no checkpoint yet; let it train until the first one")
    model = Transformer(toml.from_dict(ModelConfig, toml.read_toml(recipe, PRESETS).get("model", {}), str(recipe)))
    saved = load(path)
    restore_model(model, saved.tensors["model"], path)
    return model, saved
