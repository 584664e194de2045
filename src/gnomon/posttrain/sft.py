"""Supervised fine-tuning: read `fit` from top to bottom (report §4.1.1).

A step takes about `batch_tokens` ids of whole examples, laid end to end; its loss is the weighted mean of what is learnt. The order is a
function of the seed and the epoch, so a run that was killed goes on with the same losses. With `expert_weights` and `expert_inputs`
quantisation-aware training begins here, as in the report, and stays in the model's shape from then on.
Read next: `demonstrations.py`, `learner.py`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.transformer import Transformer
from gnomon.posttrain import learner
from gnomon.posttrain.demonstrations import Example
from gnomon.posttrain.keeping import KeepConfig, Kept, Setup
from gnomon.posttrain.learner import Document, Learner, LearnerConfig
from gnomon.posttrain.rollout import seed_of
from gnomon.train.schedule import Schedule
from gnomon.train.settings import MuonConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """A run of fine-tuning."""

    epochs: int = setting(2, "times that each example is seen")
    batch_tokens: int = setting(16_384, "ids of a step, about: examples stay whole")
    context: int = setting(8192, "longer examples are left out, and counted")
    held_out: float = setting(0.02, "share of the examples that is only evaluated on, after each epoch")
    learner: LearnerConfig = setting(LearnerConfig(optimizer=MuonConfig(learning_rate=2e-4, clip_logits=None),
                                                   schedule=Schedule(warmup=0.03)), "optimiser")
    keep: KeepConfig = setting(KeepConfig(every=100), "checkpoints")

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_tokens < 2 or self.context < 2:
            raise ConfigError(f"'epochs' {self.epochs} must be at least 1, 'batch_tokens' {self.batch_tokens} and 'context' {self.context} "
                              "at least 2")
        if not 0 <= self.held_out <= 0.5:
            raise ConfigError(f"'held_out' is {self.held_out}; it is a share between 0 and 0.5")


def fit(model: Transformer, examples: Sequence[Example], config: SFTConfig, folder: Path, *, seed: int = 0,
        say: Callable[[str], None] = lambda _: None, setup: Setup | None = None) -> list[dict[str, Any]]:
    """Train, or go on where the folder stands; returns the rows of metrics of the steps that this call took. Ranks share each batch.

    Raises `ConfigError` where no example is left to learn from, `TrainingError` for a gradient that is not finite.
    """
    trained, held = divided(examples, config, seed, say)
    plan = [batch for epoch in range(config.epochs) for batch in _batches(trained, config, seed, epoch)]
    ends = np.cumsum([len(list(_batches(trained, config, seed, epoch))) for epoch in range(config.epochs)]).tolist()
    setup = setup or Setup()
    made = Learner(model, config.learner, len(plan), setup.mesh)
    kept = Kept(folder=folder, config=config.keep, learner=made, seed=seed, recipe=setup.recipe,
                decides={"train": config, "data": _digest(examples), **setup.decides})
    done, offset = kept.begin()
    rows = []
    with kept.metrics(offset, done) as metrics:
        for step in range(done, len(plan)):
            began = time.perf_counter()
            row: dict[str, Any] = {"step": step + 1, "epoch": sum(end <= step for end in ends) + 1, "learning_rate": made.rate()}
            row |= _step(made, [trained[i] for i in plan[step]], config)
            if step + 1 in ends and held:
                row["held_out_loss"] = mean_loss(made, held)
                say(f"epoch {row['epoch']}: loss {row['loss']:.4f}, held out {row['held_out_loss']:.4f}")
            row["seconds"] = time.perf_counter() - began
            kept.note(metrics, row)
            rows.append(row)
            if kept.due(step + 1, len(plan)):
                kept.save(step + 1, metrics)
    return rows


def _digest(examples: Sequence[Example]) -> str:
    """A name for the examples, by what is in them."""
    digest = hashlib.sha256()
    for each in examples:
        digest.update(repr((each.token_ids, each.weights)).encode())
    return digest.hexdigest()[:16]


def divided(examples: Sequence[Example], config: SFTConfig, seed: int, say: Callable[[str], None]) -> tuple[list[Example], list[Example]]:
    """What is trained on and what is held out; too long examples and those that teach nothing are left out."""
    fitting = [each for each in examples if len(each.token_ids) <= config.context and each.learnt > 0]
    if len(fitting) < len(examples):
        say(f"{len(examples) - len(fitting)} of {len(examples)} examples are longer than {config.context} ids or teach nothing; left out")
    order = np.random.default_rng(seed_of(seed, 7)).permutation(len(fitting)).tolist()
    away = set(order[: round(config.held_out * len(fitting))])
    trained = [each for i, each in enumerate(fitting) if i not in away]
    if not trained:
        raise ConfigError(f"no example is left to learn from ({len(examples)} given); give more, or raise 'context' {config.context}")
    return trained, [fitting[i] for i in sorted(away)]


def _batches(examples: Sequence[Example], config: SFTConfig, seed: int, epoch: int) -> Iterator[list[int]]:
    order = np.random.default_rng(seed_of(seed, 8, epoch)).permutation(len(examples)).tolist()
    return learner.in_pieces(order, [len(examples[i].token_ids) for i in order], config.batch_tokens)


def _step(made: Learner, examples: Sequence[Example], config: SFTConfig) -> dict[str, Any]:
    total, own = sum(each.learnt for each in examples), made.share(examples)
    losses: list[float] = []

    def loss(piece: Sequence[Example]) -> Tensor:
        value = weighted_loss(made, piece) / total
        losses.append(value.item())
        return value

    norm = made.update(list(learner.in_pieces(own, [len(each.token_ids) for each in own], config.learner.micro_tokens)), loss)
    learnt = sum(weight > 0 for each in examples for weight in each.weights)
    return {"loss": made.total_of(sum(losses)), "gradient_norm": norm, "tokens": sum(len(each.token_ids) for each in examples),
            "learnt_tokens": learnt}


def weighted_loss(made: Learner, examples: Sequence[Example]) -> Tensor:
    """Summed cross-entropy, each token times its weight."""
    device = made.mesh.device
    laid = learner.stream([Document(token_ids=e.token_ids, mask=(False, *(w > 0 for w in e.weights[1:]))) for e in examples], device)
    weights = torch.tensor([w for e in examples for w in e.weights[1:] if w > 0], device=device)
    return -(weights * learner.token_logprobs(made.model, laid)).sum()


@torch.no_grad()
def mean_loss(made: Learner, examples: Sequence[Example]) -> float:
    """Weighted mean of the cross-entropy over examples, in nats; ranks share them."""
    own = made.share(examples)
    pieces = learner.in_pieces(own, [len(e.token_ids) for e in own], made.config.micro_tokens)
    return made.total_of(sum(weighted_loss(made, piece).item() for piece in pieces)) / sum(e.learnt for e in examples)


def quantised(config: ModelConfig, weights: Literal["full", "mxfp4"], inputs: Literal["full", "mxfp8"]) -> ModelConfig:
    """The shape with its experts trained as they will be served. Raises `ConfigError` for a model without experts."""
    if config.moe is None:
        if weights == inputs == "full":
            return config
        raise ConfigError("'expert_weights' and 'expert_inputs' are for models with experts; this one has none")
    return replace(config, moe=replace(config.moe, expert_weights=weights, expert_inputs=inputs))
