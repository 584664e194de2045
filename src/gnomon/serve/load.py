"""A model ready to serve: from a run of ours, or from a checkpoint in a released layout. Read next: `engine.py`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gnomon import config as toml
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import ConfigError
from gnomon.model.huggingface import read_config
from gnomon.model.inference import InferenceModel, refuse
from gnomon.model.inference_weights import Weights
from gnomon.model.multimodal import Eye, load_eye
from gnomon.model.runs import EYE, ROWS, load_text_and_eye
from gnomon.model.weights import load_pretrained
from gnomon.serve.runner import Runner, TorchRunner

SAMPLES, SAMPLE_BYTES = 64, 4096
"""How many pieces of each weight file a fingerprint reads, and their size: a gigabyte takes a quarter of a megabyte."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loaded:
    """A model and its vocabulary; `fingerprint` names config, weights and their precision, for whatever keeps states on disk. `eye` is the
    tower with its projector, of models that see."""

    runner: Runner
    tokenizer: Tokenizer
    name: str
    fingerprint: str
    eye: Eye | None = None


def load(path: str | Path, weights: Weights = "stored") -> Loaded:
    """Load a run folder, or a folder with `config.json`. Packed experts stay packed with "stored".

    Raises `ConfigError` for a path that is neither, `CheckpointError` or `DataError` for what is missing or damaged in it.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        runner = _released(folder, weights)
        files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
        eye = None if runner.config.vision is None else load_eye(folder, runner.config, torch.float32)
        return replace(_loaded(folder, runner, Tokenizer.load(folder), weights, files), eye=eye)
    if (folder / "recipe.toml").is_file() or not folder.exists():
        return _run(folder, weights)
    raise ConfigError(f"'{folder}' is neither a run folder (no recipe.toml) nor a released checkpoint (no config.json)")


def _released(folder: Path, weights: Weights) -> Runner:
    if reason := refuse(read_config(folder / "config.json")):
        return _plain(folder, weights, reason)
    return InferenceModel.load(folder, weights)


def _plain(folder: Path, weights: Weights, reason: str) -> Runner:
    if weights not in ("stored", "fp32"):
        raise ConfigError(f"'weights' is {weights}, which needs the C++ library ({reason}); use stored or fp32")
    return TorchRunner(load_pretrained(folder))


def _run(folder: Path, weights: Weights) -> Loaded:
    model, eye, checkpoint = load_text_and_eye(folder)
    reason = refuse(model.config)
    if reason and weights not in ("stored", "fp32"):
        raise ConfigError(f"'weights' is {weights}, which needs the C++ library ({reason}); use stored or fp32")
    runner: Runner = TorchRunner(model) if reason else InferenceModel.from_transformer(model, weights)
    whole = [checkpoint / "model.safetensors", *([] if eye is None else [checkpoint / f"{EYE}.safetensors"])]
    files = whole if whole[0].exists() else sorted(file for file in (checkpoint / ROWS).iterdir() if file.name != ".metadata")
    loaded = _loaded(folder, runner, Tokenizer.load(folder / "tokenizer"), weights, files)
    return replace(loaded, eye=eye)


def _loaded(folder: Path, runner: Runner, tokenizer: Tokenizer, weights: Weights, files: list[Path]) -> Loaded:
    digest = hashlib.sha256(f"{toml.to_toml(runner.config)}\n{weights}\n{type(runner).__name__}\n{tokenizer.fingerprint}\n".encode())
    for file in files:
        digest.update(fingerprint(file).encode())
    return Loaded(runner=runner, tokenizer=tokenizer, name=folder.resolve().name, fingerprint=digest.hexdigest())


def fingerprint(file: Path) -> str:
    """A digest of a file's name, its size, its beginning (a safetensors header names every tensor), and pieces from all over it.

    It tells checkpoints of different training apart without reading them whole; it is no proof against somebody who edits between pieces.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(f"{file.name} {size}\n".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(16 * SAMPLE_BYTES))
        for index in range(SAMPLES):
            stream.seek(index * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
