"""A small run that every training journey starts from: real text, all mechanisms on, seconds on one core."""

import argparse
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving_fixtures import chat, scripted, server_url, service, the_engine, the_url, vocabulary

from gnomon import config as toml
from gnomon.train.recipe import TrainRecipe

__all__ = ["chat", "scripted", "server_url", "service", "the_engine", "the_url", "vocabulary"]

MODEL = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "layer_pattern": ["kda", "mla"], "intermediate_size": 96,
    "attn_res_block_size": 2,
    "mixers": {
        "kda": {"num_heads": 2, "head_dim": 16},
        "mla": {"num_attention_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                "v_head_dim": 16},
    },
    "moe": {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 32, "num_shared_experts": 1,
            "routed_expert_hidden_size": 32},
}


@pytest.fixture
def few() -> dict[str, Any]:
    """Changes that make the small run one of two steps, for runs over several ranks."""
    return {"batch_tokens": 512, "stages": [{"context": 64, "steps": 1}, {"context": 128, "steps": 1}], "micro_batch_tokens": 128,
            "model": {"num_hidden_layers": 4, "attn_res_block_size": 1}, "evaluate": {"tokens": 128, "contexts": [64]},
            "checkpoint": {"every_steps": 1, "keep": 9}}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two modules of the standard library as a corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    for module in (argparse, textwrap):
        source = Path(module.__file__).read_text(encoding="utf-8")
        (folder / f"{module.__name__}.py").write_text(source, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer that all small runs share."""
    from gnomon.data.corpus import documents
    from gnomon.data.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer((document.text for document in documents(text)), MODEL["vocab_size"]).save(folder)
    return folder


@pytest.fixture(scope="session")
def recipe_in(text: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainRecipe]:
    """`recipe_in(folder, seed=1, …)` is a small run there; keyword arguments replace or merge into its table."""
    shards = tmp_path_factory.mktemp("shards")

    def make(run: Path, **changes: Any) -> TrainRecipe:
        table = {
            "run": str(run), "model": MODEL, "batch_tokens": 1024, "device": "cpu",
            "data": {"sources": [{"paths": [str(text)]}], "tokenizer": str(tokenizer_folder), "held_out": 0.1, "cache": str(shards)},
            "stages": [{"context": 128, "steps": 4}, {"context": 256, "steps": 2, "long_exponent": 0.5}],
            "optimizer": {"learning_rate": 1e-2}, "evaluate": {"tokens": 512}, "checkpoint": {"every_steps": 2, "every_seconds": 0},
        }
        return toml.from_dict(TrainRecipe, toml.merge(table, changes))

    return make


@pytest.fixture
def recipe(recipe_in: Callable[..., TrainRecipe], tmp_path: Path) -> Callable[..., TrainRecipe]:
    """`recipe("name", …)` is a small run in the test's own folder."""
    return lambda run="run", **changes: recipe_in(tmp_path / run, **changes)


@pytest.fixture(scope="session")
def base(recipe_in: Callable[..., TrainRecipe], tmp_path_factory: pytest.TempPathFactory) -> TrainRecipe:
    """The small run as it is, trained once for all tests; they must not write into its folder."""
    import torch

    from gnomon.train.loop import train

    torch.set_num_threads(1)
    trained = recipe_in(tmp_path_factory.mktemp("base") / "run")
    train(trained, quiet=True)
    return trained


@pytest.fixture(scope="session")
def rows() -> Callable[[TrainRecipe], list[dict[str, Any]]]:
    """The metrics of a run, without what depends on the clock."""

    def read(recipe: TrainRecipe) -> list[dict[str, Any]]:
        lines = (recipe.run / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]

    return read
