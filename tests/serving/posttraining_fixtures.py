"""What the tests of remote post-training share: small networks, their run folders, and a server around one. Not a conftest: imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gnomon import config as toml
from gnomon.data.tokenizer import Tokenizer
from gnomon.model.config import preset
from gnomon.model.transformer import Transformer
from gnomon.posttrain.keeping import Shape
from gnomon.serve.assembly import service_of
from gnomon.serve.load import Loaded
from gnomon.serve.runner import runner_for
from gnomon.serve.server import Background
from gnomon.serve.settings import load
from gnomon.train import checkpoint

SHAPE = ("hidden_size=32", "num_hidden_layers=2", "intermediate_size=32", "mixers.kda.num_heads=1", "mixers.kda.head_dim=16",
         "mixers.mla.num_attention_heads=1", "mixers.mla.q_lora_rank=none", "mixers.mla.kv_lora_rank=16", "mixers.mla.qk_nope_head_dim=16",
         "mixers.mla.qk_rope_head_dim=8", "mixers.mla.v_head_dim=16", "moe.num_experts=4", "moe.num_experts_per_token=2",
         "moe.moe_intermediate_size=32", "moe.num_shared_experts=1", "moe.routed_expert_hidden_size=32", "initializer_range=0.2")


def network(vocabulary: int, seed: int = 0) -> Transformer:
    """Small and untrained, of so many ids."""
    return Transformer(preset("tiny", (*SHAPE, f"vocab_size={vocabulary}"))).initialise(seed)


def save(model: Transformer, folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """A run folder of these weights."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(toml.to_toml(Shape(model=model.config)))
    checkpoint.save(folder, 1, {}, {"model": checkpoint.model_tensors(model)}, 1)
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer")
    return folder


@contextmanager
def serving(model: Transformer, tokenizer: Tokenizer, *changes: str, keys: dict[str, str] | None = None) -> Iterator[str]:
    """The address of a server around a model, with its /v1."""
    loaded = Loaded(runner=runner_for(model.eval()), tokenizer=tokenizer, name="small", fingerprint="first")
    settings = load(None, ["log=none", "page=false", "drain_seconds=0", "cache.memory_bytes=67108864", *changes])
    with service_of(loaded, settings) as service, Background(service, keys) as url:
        yield f"{url}/v1"
