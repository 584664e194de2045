"""Nine experts into one model: distilled, or averaged; and the student as a file that others can read.

Read next: `gnomon/posttrain/distill.py`, the loop; `gnomon/model/weights.py`, the file.
"""

from __future__ import annotations

from typing import Any

import torch

from gnomon.model import runs
from gnomon.model.inference import InferenceModel, refuse
from gnomon.model.transformer import Transformer
from gnomon.model.weights import load_pretrained, save_pretrained
from gnomon.posttrain import learner
from gnomon.posttrain.distill import distill
from gnomon.posttrain.keeping import set_apart
from gnomon.posttrain.lab import scores
from gnomon.posttrain.lab.desk import Desk, history, totals
from gnomon.posttrain.learner import Document
from gnomon.posttrain.rl import Start
from gnomon.posttrain.sft import quantised
from gnomon.posttrain.slots import PAGE_TOKENS
from gnomon.posttrain.teachers import Teachers

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
    return {**totals(rows), "divergence": sum(row["kl"] for row in last) / len(last), "divergences": divergence, "taught": _taught(desk),
            "cells": desk.scores(model, desk.open_cells)}


def _taught(desk: Desk) -> dict[str, Any]:
    """Scores of the teachers that the recipe names; experts have told theirs."""
    found: dict[str, Any] = {}
    for cell in desk.open_cells:
        run = desk.recipe.taught_by(cell)
        if run is not None:
            model = runs.load_model(run)[0]
            found |= desk.scores(model, (cell,))
    return found


def average(desk: Desk) -> dict[str, Any]:
    """The mean of all teachers' weights."""
    teachers = [runs.load_model(each.run)[0].state_dict() for each in desk.teachers() if each.run is not None]
    model = desk.cold_model()
    mean = {name: torch.stack([each[name].double() for each in teachers]).mean(0).to(tensor.dtype)
            for name, tensor in model.state_dict().items()}
    model.load_state_dict(mean)
    set_apart(desk.folder, 0, desk.seed, model)
    return {"work": 0, "cells": desk.scores(model, desk.open_cells)}


def export(desk: Desk) -> dict[str, Any]:
    """The student as a checkpoint in the released layout, experts packed; is its forward the trained one to the last bit, and what does a
    reader that leaves the inputs of experts unrounded get wrong? Its scores are those of the file, read by the engine."""
    recipe, folder = desk.recipe, desk.folder / "checkpoint"
    model = runs.load_model(desk.root / "student")[0]
    save_pretrained(model, folder)
    again = load_pretrained(folder)
    sampling = recipe.expert.sampling
    sampler = sampling.here(model, 0)
    rollouts = scores.answers(sampling, sampler, desk.tasks, desk.open_cells, seed=desk.seed, split="test", each=-(-TOLD // 9))
    documents = [learner.document(each) for each in rollouts if each.sampled]
    trained, filed = _logprobs(model, documents), _logprobs(again, documents)
    sampled = torch.cat([torch.tensor(each.logprobs) for each in documents])
    unrounded = Transformer(quantised(model.config, "full", "full")).eval()
    unrounded.load_state_dict(again.state_dict())
    if refuse(again.config) is None:
        sampler.runner = InferenceModel.load(folder)
        sampler.pool = sampler.runner.new_pool(sampler.slots, sampler.cache_tokens, PAGE_TOKENS)
    else:
        sampler.load(again, 0)
    found = desk.scores(again, desk.open_cells, sampler)
    return {"bits_equal": torch.equal(trained, filed), "sampler_gap": (sampled - trained).abs().max().item(),
            "unrounded_gap": (_logprobs(unrounded, documents) - trained).abs().mean().item(),
            "bytes": sum(file.stat().st_size for file in folder.iterdir()), "tokens_compared": len(trained), "cells": found}


@torch.no_grad()
def _logprobs(model: Transformer, documents: list[Document]) -> torch.Tensor:
    return learner.token_logprobs(model.eval(), learner.stream(documents)).double()
