"""Models ready to serve: from a run, from a released checkpoint, with and without the C++ library; what a fingerprint tells apart."""

import shutil
from dataclasses import dataclass

import pytest
import torch
from inference_models import config, model

from gnomon import config as toml
from gnomon.data.tokenizer import train_tokenizer
from gnomon.errors import CheckpointError, ConfigError, DataError
from gnomon.kernels import native, operator
from gnomon.model.config import ModelConfig
from gnomon.model.inference import InferenceModel
from gnomon.model.weights import save_pretrained
from gnomon.serve.engine import Engine
from gnomon.serve.load import load
from gnomon.serve.request import Request, Sampled, Sampling
from gnomon.serve.runner import TorchRunner
from gnomon.train import checkpoint


@dataclass(frozen=True)
class Recipe:
    model: ModelConfig


@pytest.fixture(scope="module")
def parts():
    """A model and a tokenizer that fit each other."""
    tokenizer = train_tokenizer(["some words and 123 numbers, again and again; " * 50], 300)
    return model(config(vocab_size=tokenizer.vocab_size)), tokenizer


@pytest.fixture
def run(tmp_path, parts):
    """A run folder with one checkpoint."""
    network, tokenizer = parts
    folder = tmp_path / "my run"
    checkpoint.save(folder, 7, {}, {"model": network.state_dict()}, keep=1)
    (folder / "recipe.toml").write_text(toml.to_toml(Recipe(network.config)))
    tokenizer.save(folder / "tokenizer")
    return folder


@pytest.fixture
def released(tmp_path, parts):
    """A released checkpoint with packed experts."""
    save_pretrained(parts[0], tmp_path / "released", tokenizer=parts[1])
    return tmp_path / "released"


def greedy(runner):
    engine, ids = Engine(runner), []
    engine.submit(Request(id="a", prompt=(5, 6, 7), sampling=Sampling(temperature=0.0, max_tokens=5)))
    while not engine.idle:
        ids += [event.id for _, event in engine.step() if isinstance(event, Sampled)]
    return ids


@pytest.mark.parametrize("kind", ["run", "released"])
def test_a_folder_becomes_a_runner_a_vocabulary_and_a_name(kind, request, monkeypatch):
    folder = request.getfixturevalue(kind)
    monkeypatch.setenv(operator.FORCE, "reference")
    slow = load(folder)
    assert isinstance(slow.runner, TorchRunner) and slow.name == folder.name and slow.tokenizer.vocab_size == 300
    with pytest.raises(ConfigError, match="'weights' is mxfp4, which needs the C"):
        load(folder, "mxfp4")
    monkeypatch.delenv(operator.FORCE)
    if native.unavailable() is None:
        fast = load(folder)
        assert isinstance(fast.runner, InferenceModel) and fast.fingerprint != slow.fingerprint
        if kind == "run":
            assert greedy(fast.runner) == greedy(slow.runner)


def test_fingerprints_tell_models_apart_and_equal_ones_together(run, released, parts, tmp_path):
    first = load(run)
    assert load(run).fingerprint == first.fingerprint
    shutil.copytree(run, tmp_path / "copy")
    assert load(tmp_path / "copy").fingerprint == first.fingerprint
    assert load(released).fingerprint != first.fingerprint
    if native.unavailable() is None:
        assert load(run, "bf16").fingerprint != first.fingerprint
    state = {name: x.clone() for name, x in parts[0].state_dict().items()}
    state["lm_head.weight"] += 1e-3
    checkpoint.save(run, 8, {}, {"model": state}, keep=1)
    assert load(run).fingerprint != first.fingerprint


def test_what_is_missing_is_named(run, released, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a run folder"):
        load(tmp_path / "empty")
    (released / "tokenizer.json").unlink()
    (released / "tiktoken.model").unlink()
    with pytest.raises(DataError, match="no tokenizer"):
        load(released)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        load(run)


def test_a_transformer_in_bf16_runs(parts):
    network = model(parts[0].config).to(torch.bfloat16)
    assert len(greedy(TorchRunner(network))) == 5
