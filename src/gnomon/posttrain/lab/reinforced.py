"""Reinforcement in the lab: the experts, and the two runs that they are compared with at the same compute.

Read next: `gnomon/posttrain/rl.py`, the loop; `merged.py`, what becomes of the experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon.model import runs
from gnomon.model.transformer import Transformer
from gnomon.posttrain.effort import CellTau, TauConfig
from gnomon.posttrain.keeping import kept_folder
from gnomon.posttrain.lab.desk import Desk, history, totals, work
from gnomon.posttrain.lab.plan import expert_folder
from gnomon.posttrain.lab.recipe import CellConfig
from gnomon.posttrain.lab.words import Effort
from gnomon.posttrain.rl import RLConfig, Start, train

Cell = tuple[str, Effort]
MOST_ROUNDS = 8


def expert(desk: Desk) -> dict[str, Any]:
    """One expert, from the cold start or from an early checkpoint of its domain's max."""
    assert desk.job.cell is not None
    domain, effort = desk.job.cell
    if domain in desk.found("gate")["shut"]:
        return {"refused": True}
    own, cell = desk.recipe.domain(domain).cell(effort), (domain, effort)  # type: ignore[arg-type]
    model = runs.load_model(kept_folder(desk.root / expert_folder((domain, "max")), own.early))[0] if own.early else desk.cold_model()
    config = settings(desk.recipe.expert, own, stay=tuple(s for s in desk.job.settings.get("early", ()) if s))
    _train(desk, model, config, (cell,), desk.folder)  # type: ignore[arg-type]
    rows = history(desk.folder)
    return _told(desk, model, rows, (cell,)) | {"rollouts": sum(row["groups"] for row in rows) * config.pool.group_size}  # type: ignore[arg-type]


def settings(shared: RLConfig, own: CellConfig, stay: tuple[int, ...] = ()) -> RLConfig:
    """A cell's run: what all share, with its own steps, learning rate and tau."""
    rate = own.learning_rate or shared.learner.optimizer.learning_rate
    learner = replace(shared.learner, optimizer=replace(shared.learner.optimizer, learning_rate=rate))
    return replace(shared, steps=own.steps, learner=learner, tau=own.tau, keep=replace(shared.keep, stay=stay))


def _train(desk: Desk, model: Transformer, config: RLConfig, cells: Sequence[Cell], folder: Path) -> None:
    source = desk.tasks.problems(tuple(cells), desk.seed, "train")
    train(Start(model=model, source=source, budgets=desk.budgets(), seed=desk.draws, say=desk.say), config, folder)


def _told(desk: Desk, model: Transformer, rows: Sequence[Mapping[str, Any]], cells: Sequence[Cell]) -> dict[str, Any]:
    """What a job of reinforcement reports: its compute, its alarms, and how good it is."""
    return {**totals(rows), "largest_gap": max((row["gap"] for row in rows), default=0.0), "cells": desk.scores(model, tuple(cells))}


def spent(desk: Desk) -> tuple[int, dict[Cell, dict[str, Any]]]:
    """The compute of this run's experts and its student, and what each expert found. Teachers that the recipe names cost nothing here."""
    experts = {cell: desk.found(f"experts/{cell[0]}-{cell[1]}") for cell in desk.open_cells if desk.recipe.taught_by(cell) is None}
    return sum(each["work"] for each in experts.values()) + desk.found("student")["work"], experts


def mixed(desk: Desk) -> dict[str, Any]:
    """One run over all cells. Its steps are what the compute allows at the lengths that experts had; rounds at the last learning rate are
    added while the model's own lengths leave compute over."""
    whole, experts = spent(desk)
    recipe, cells, group = desk.recipe, desk.open_cells, desk.recipe.expert.pool.group_size
    student = desk.found("student")  # tells how long answers are, where all teachers are of other runs
    alike = [e["work"] / e["rollouts"] for e in experts.values()] or [
        student["work"] / student["steps"] / (recipe.student.pool.prompts * recipe.student.pool.group_size)]
    each_step = recipe.seesaw.prompts * group * sum(alike) / len(alike)
    model, used, folders = desk.cold_model(), 0, list[Path]()
    shared = replace(recipe.expert, pool=replace(recipe.expert.pool, prompts=recipe.seesaw.prompts))
    while used < recipe.seesaw.reach * whole and len(folders) < MOST_ROUNDS:
        steps, first = max(1, math.ceil((whole - used) / max(1.0, each_step))), not folders
        folders.append(desk.folder / f"round-{len(folders) + 1}")
        taus = tuple(CellTau(domain=d, effort=e, tau=_held(recipe.domain(d).cell(e).tau, first)) for d, e in cells)
        config = replace(shared, steps=steps, cells=taus)
        if not first:
            config = _held_rate(config)
        _train(desk, model, config, cells, folders[-1])
        rows = history(folders[-1])
        used, each_step = used + work(rows), work(rows) / len(rows)
    return _told(desk, model, history(*folders), cells) | {"equal": whole, "share": used / max(1, whole)}


def _held_rate(config: RLConfig) -> RLConfig:
    """A further round: at the learning rate that the one before it ended with."""
    made = config.learner
    optimizer = replace(made.optimizer, learning_rate=made.optimizer.learning_rate * made.schedule.final)
    return replace(config, learner=replace(made, optimizer=optimizer, schedule=replace(made.schedule, warmup=0.0, final=1.0)))


def _held(tau: TauConfig, first: bool) -> TauConfig:
    """Annealed in the first round, then held where it ended."""
    return tau if first else replace(tau, start=None)


def sequential(desk: Desk) -> dict[str, Any]:
    """One model, reinforced in one cell after the other, each for as many steps as make the compute equal: max, high and low of a domain,
    then the next domain. Where its answers are shorter than those of the experts were, rounds in the last cell take what is left."""
    whole, experts = spent(desk)
    reach = desk.recipe.seesaw.reach * whole
    model, used, each_step, folders = desk.cold_model(), 0, 1.0, list[Path]()
    order = sorted(experts, key=lambda cell: [each.name for each in desk.recipe.domains].index(cell[0]) * 3
                   + ("max", "high", "low").index(cell[1]))
    while len(folders) < len(order) or (order and used < reach and len(folders) < len(order) + MOST_ROUNDS):
        place = len(folders)
        cell, first = order[min(place, len(order) - 1)], place < len(order)
        left = sum(experts[other]["work"] for other in order[place:])
        share = max(0, whole - used) / max(1, left)
        steps = max(1, round(experts[cell]["steps"] * share) if first else math.ceil((whole - used) / each_step))
        folders.append(desk.folder / f"{place + 1}-{cell[0]}-{cell[1]}")
        own = desk.recipe.domain(cell[0]).cell(cell[1])
        config = settings(desk.recipe.expert, replace(own, steps=steps, tau=_held(own.tau, first)))
        _train(desk, model, config if first else _held_rate(config), (cell,), folders[-1])
        rows = history(folders[-1])
        used, each_step = used + work(rows), max(1.0, work(rows) / len(rows))
    return _told(desk, model, history(*folders), desk.open_cells) | {"equal": whole, "share": used / max(1, whole)}
