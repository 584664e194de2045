"""Nine experts into one model: distilled, or averaged; and the student as a file that others can read.

Read next: `gnomon/posttrain/distill.py`, the loop; `gnomon/model/weights.py`, the file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gnomon import config as toml
from gnomon.model import runs
from gnomon.model.config import ModelConfig
from gnomon.model.inference import InferenceModel, refuse
from gnomon.model.transformer import Transformer
from gnomon.model.weights import load_pretrained, save_pretrained
from gnomon.posttrain import learner
from gnomon.posttrain.distill import distill
from gnomon.posttrain.keeping import Shape
from gnomon.posttrain.lab import scores
from gnomon.posttrain.lab.desk import Desk, alarms, history, work
from gnomon.posttrain.learner import Document
from gnomon.posttrain.policy import PAGE_TOKENS
from gnomon.posttrain.rl import Start
from gnomon.posttrain.teachers import Teachers
from gnomon.train import checkpoint

TAIL = 10
"""Last steps whose divergence is the final one."""
TOLD = 64
"""Answers on which the file is compared with the model."""


def student(desk: Desk) -> dict[str, Any]:
    """The cold start, taught by the expert of each prompt's cell."""
    config, model = desk.recipe.student, desk.cold_model()
    teachers = Teachers(desk.teachers(), model.config, temperature=config.sampling.temperature)
    source = desk.tasks.problems(desk.open_cells, desk.seed, "train")
    distill(Start(model=model, source=source, seed=desk.draws, say=desk.say), teachers, config, desk.folder)
    rows = history(desk.folder)
    last = rows[-TAIL:]
    seen = {"/".join(cell): [row[f"kl/{'/'.join(cell)}"] for row in last if f"kl/{'/'.join(cell)}" in row] for cell in desk.open_cells}
    divergence = {cell: sum(part) / len(part) for cell, part in seen.items() if part}  # a step may lack a cell
    return {"steps": len(rows), "work": work(rows), "tokens": sum(row["read_tokens"] for row in rows), "alarms": alarms(rows),
            "divergence": sum(row["kl"] for row in last) / len(last), "divergences": divergence, "taught": _taught(desk),
            "cells": scores.evaluated(desk.recipe, model, desk.tasks, desk.open_cells, desk.budgets(), seed=desk.seed)}


def _taught(desk: Desk) -> dict[str, Any]:
    """Scores of the teachers that the recipe names; experts have told theirs."""
    found: dict[str, Any] = {}
    for cell in desk.open_cells:
        run = desk.recipe.taught_by(cell)
        if run is not None:
            model = runs.load_model(run)[0]
            found |= scores.evaluated(desk.recipe, model, desk.tasks, (cell,), desk.budgets(), seed=desk.seed)
    return found


def average(desk: Desk) -> dict[str, Any]:
    """The mean of all teachers' weights."""
    teachers = [runs.load_model(each.run)[0].state_dict() for each in desk.teachers()]
    model = desk.cold_model()
    mean = {name: torch.stack([each[name].double() for each in teachers]).mean(0).to(tensor.dtype)
            for name, tensor in model.state_dict().items()}
    model.load_state_dict(mean)
    desk.folder.mkdir(parents=True, exist_ok=True)
    (desk.folder / "recipe.toml").write_text(toml.to_toml(Shape(model=model.config)))
    checkpoint.save(desk.folder, 0, {"seed": desk.seed}, {"model": checkpoint.model_tensors(model)}, 1)
    return {"work": 0, "cells": scores.evaluated(desk.recipe, model, desk.tasks, desk.open_cells, desk.budgets(), seed=desk.seed)}


def export(desk: Desk) -> dict[str, Any]:
    """The student as a checkpoint in the released layout, experts packed; is its forward the trained one to the last bit, and what does a
    reader that leaves the inputs of experts unrounded get wrong? Its scores are those of the file, read by the engine."""
    recipe, folder = desk.recipe, desk.folder / "checkpoint"
    model = runs.load_model(desk.root / "student")[0]
    save_pretrained(model, folder)
    again = load_pretrained(folder)
    sampling = recipe.expert.sampling
    sampler = sampling.sampler(model, 0)
    rollouts = scores.answers(sampling, sampler, desk.tasks, desk.open_cells, seed=desk.seed, split="test", each=-(-TOLD // 9))
    documents = [learner.document(each) for each in rollouts if each.sampled]
    trained, filed = _logprobs(model, documents), _logprobs(again, documents)
    sampled = torch.cat([torch.tensor(each.logprobs) for each in documents])
    unrounded = Transformer(_plain(model)).eval()
    unrounded.load_state_dict(again.state_dict())
    if refuse(again.config) is None:
        sampler.runner = InferenceModel.load(folder)
        sampler.pool = sampler.runner.new_pool(sampler.slots, sampler.cache_tokens, PAGE_TOKENS)
    else:
        sampler.load(again, 0)
    found = scores.evaluated(recipe, again, desk.tasks, desk.open_cells, desk.budgets(), seed=desk.seed, sampler=sampler)
    return {"bits_equal": torch.equal(trained, filed), "sampler_gap": (sampled - trained).abs().max().item(),
            "unrounded_gap": (_logprobs(unrounded, documents) - trained).abs().mean().item(),
            "bytes": sum(file.stat().st_size for file in folder.iterdir()), "tokens_compared": len(trained), "cells": found}


@torch.no_grad()
def _logprobs(model: Transformer, documents: list[Document]) -> torch.Tensor:
    return learner.token_logprobs(model.eval(), learner.stream(documents)).double()


def _plain(model: Transformer) -> ModelConfig:
    config = model.config
    return config if config.moe is None else replace(config, moe=replace(config.moe, expert_weights="full", expert_inputs="full"))
