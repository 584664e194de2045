"""The cold start in its phases, the gate before reinforcement, and training under quantisation against quantising afterwards.

Read next: `desk.py`; `gnomon/posttrain/sft.py`, `gate.py` and `effort.py`, which do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gnomon.kernels.mxfp import fake_mxfp4
from gnomon.model import runs
from gnomon.model.config import ModelConfig
from gnomon.model.experts import RoutedExperts
from gnomon.model.transformer import Transformer
from gnomon.posttrain import effort
from gnomon.posttrain import gate as gates
from gnomon.posttrain.demonstrations import Example
from gnomon.posttrain.keeping import fingerprint
from gnomon.posttrain.lab import scores
from gnomon.posttrain.lab.desk import Desk, history, last_round, round_folder
from gnomon.posttrain.lab.recipe import PhaseConfig
from gnomon.posttrain.lab.tasks import Cells
from gnomon.posttrain.learner import Learner, LearnerConfig
from gnomon.posttrain.policy import Sampler
from gnomon.posttrain.rollout import seed_of
from gnomon.posttrain.sft import fit, mean_loss, quantised

Arm = Literal["full", "mxfp4", "two bits"]
ARMS: tuple[Arm, ...] = get_args(Arm)
BLOCK = 32  # weights that share a scale


def phase(desk: Desk) -> dict[str, Any]:
    """One phase of the cold start, from the one before; rounds on new texts are added while it has not learnt enough."""
    number = desk.job.phase
    config = desk.recipe.cold[number]
    model, folders = _beginning(desk, number, _shape(desk.recipe.model, config.quantised)), list[Path]()
    while not folders or (len(folders) < config.rounds and config.short(history(folders[-1])[-1])):
        again = (len(folders),) if folders else ()
        folders.append(desk.folder / round_folder(len(folders) + 1))
        if again:
            desk.say(f"held-out loss above {config.until}: round {len(folders)} of at most {config.rounds}")
        texts = _texts(desk, config, number, again=again)
        fit(model, texts, config.train, folders[-1], seed=seed_of(desk.draws, *again) if again else desk.draws, say=desk.say)
    rows = history(*folders)
    return {"steps": len(rows), "tokens": sum(row["tokens"] for row in rows), "loss": rows[-1]["loss"], "rounds": len(folders)}


def _shape(model: ModelConfig, serves: bool) -> ModelConfig:
    """In full precision, or with experts as they are served."""
    return quantised(model, "mxfp4" if serves else "full", "mxfp8" if serves else "full")


def _beginning(desk: Desk, number: int, shape: ModelConfig) -> Transformer:
    """The weights that a phase begins with, in a shape of its own."""
    model = Transformer(shape).initialise(desk.seed)
    if number:
        before = last_round(desk.root / f"cold/{number}")
        model.load_state_dict(runs.load_model(before)[0].state_dict())
    return model


def _texts(desk: Desk, config: PhaseConfig, number: int, count: int | None = None, again: tuple[int, ...] = ()) -> list[Example]:
    seed = seed_of(desk.seed, 21, number, *again)
    lines = (desk.tasks.demonstration(i, seed, config.dense, config.shares) for i in range(count or config.texts))
    return [Example(token_ids=line.token_ids, weights=line.weights) for line in lines]


def gate(desk: Desk) -> dict[str, Any]:
    """Measure the gate and b0 on the cold start, shut domains out, and say how good the cold start is in every cell.

    Raises `TrainingError` where no domain's gate opens, or one does not and the recipe says to stop.
    """
    recipe, model, picture = desk.recipe, desk.cold_model(), desk.folder / "gate.svg"
    sampler = recipe.expert.sampling.here(model, 0)
    cells: Cells = tuple((each.name, "max") for each in recipe.domains)
    rollouts = scores.answers(recipe.expert.sampling, sampler, desk.tasks, cells, seed=desk.seed, split="gate", each=recipe.gate.rollouts)
    found = gates.by_domain((domain for domain, _ in cells), rollouts)
    picture.write_text(gates.picture(found), encoding="utf-8")
    shut = [each.domain for each in found if not each.opens]
    if recipe.gate.shut == "stop" or len(shut) == len(found):
        gates.require(found, picture)
    for domain in shut:
        desk.say(f"the gate of '{domain}' is shut: thinking does not help its cold start; it is left out ({picture})")
    budgets = effort.measure(rollouts, fingerprint(model))
    budgets.save(desk.folder / "budgets.json")
    return {"shut": shut, "gates": [_told(each) for each in found], "budgets": {"/".join(k): v for k, v in sorted(budgets.tokens.items())},
            "measured_on": budgets.measured_on, "cold": _cold(desk, sampler, budgets)}


def _cold(desk: Desk, sampler: Sampler, budgets: effort.Budgets) -> dict[str, Any]:
    """What the cold start does in every cell: right or not, and tokens as a multiple of b0, so that any tau can be asked for later."""
    recipe = desk.recipe
    rollouts = scores.answers(recipe.expert.sampling, sampler, desk.tasks, recipe.cells, seed=desk.seed, split="test",
                              each=recipe.evaluate.problems)
    found = scores.scored(rollouts, None, {})
    return {"/".join(cell): {"right": each.right, "tokens": each.tokens, "multiples": [
        round(r.spent / budgets.of(r), 6) for r in rollouts if r.problem.cell == cell]} for cell, each in found.items()}


def _told(found: gates.Gate) -> dict[str, Any]:
    bins = [{"first": b.first, "last": b.last, "count": b.count, "accuracy": b.accuracy, "interval": [b.low, b.high]} for b in found.bins]
    return {"domain": found.domain, "opens": found.opens, "gain": found.gain, "interval": [found.low, found.high], "bins": bins}


def quantisation(desk: Desk) -> dict[str, Any]:
    """The last phase again from the same weights and on the same texts, with experts in full precision, in MXFP4 and in two bits; then
    each result with its experts as trained, rounded to MXFP4, and rounded to two bits: losses on held-out texts and accuracies."""
    recipe, number = desk.recipe, len(desk.recipe.cold) - 1
    config = recipe.cold[number]
    texts = _texts(desk, config, number, recipe.quantisation.texts)
    held = [Example(token_ids=line.token_ids, weights=line.weights) for line in (
        desk.tasks.demonstration(i, seed_of(desk.seed, 22), 0.0, config.shares) for i in range(recipe.evaluate.held_out))]
    budgets, rows = effort.Budgets(tokens={}), []
    cells: Cells = tuple((each.name, "max") for each in recipe.domains)
    for arm in ARMS:
        model = _rounded(_beginning(desk, number, recipe.model), arm)
        fit(model, texts, config.train, desk.folder / arm_folder(arm), seed=desk.draws, say=desk.say)
        for served in dict.fromkeys((arm, "mxfp4", "two bits")):
            shown = _baked(model, served)
            loss = mean_loss(Learner(shown, LearnerConfig(), 1), held)
            found = scores.evaluated(recipe, shown, desk.tasks, cells, budgets, seed=desk.seed)
            rows.append({"trained": arm, "served": served, "loss": loss, "cells": found})
    return {"rows": rows}


def _rounded(model: Transformer, arm: Arm) -> Transformer:
    """The model with experts that act rounded, straight through; the parameters stay the masters."""
    roundings: dict[Arm, Callable[[Tensor], Tensor]] = {"mxfp4": fake_mxfp4, "two bits": fake_two_bits}
    for experts in _experts(model) if arm in roundings else ():
        experts.lookup = lambda own=experts, make=roundings[arm]: (make(own.w1), make(own.w3), make(own.w2))  # type: ignore[misc]
    return model


@torch.no_grad()
def _baked(model: Transformer, arm: Arm) -> Transformer:
    """A copy whose parameters are rounded: what a file would hold."""
    copy = Transformer(model.config)
    copy.load_state_dict(model.state_dict())
    for experts in _experts(copy):
        for weight in (experts.w1, experts.w3, experts.w2) if arm != "full" else ():
            weight.copy_(fake_mxfp4(weight) if arm == "mxfp4" else fake_two_bits(weight))
    return copy.eval()


def _experts(model: Transformer) -> Sequence[RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def fake_two_bits(weight: Tensor) -> Tensor:
    """Four levels, -3, -1, 1 and 3 times a scale that each block of 32 shares, with the identity as gradient: a format so coarse that it
    must be felt. The scale puts the mean magnitude of a block on the mean of its levels."""
    with torch.no_grad():
        blocks = weight.reshape(*weight.shape[:-1], -1, BLOCK)
        scale = (blocks.abs().mean(-1, keepdim=True) / 2).clamp(min=torch.finfo(weight.dtype).tiny)
        levels = 2 * torch.clamp((blocks / scale / 2).floor(), -2, 1) + 1
        rounded = (levels * scale).reshape(weight.shape)
    return weight + (rounded - weight).detach()


def arm_folder(arm: Arm) -> str:
    """Where a run of the comparison is, under the job's folder."""
    return arm.replace(" ", "-")
