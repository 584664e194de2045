"""Parts of the lab that need no run: scores and their intervals, the coarse format, marks and digests, b0 that belongs to its weights."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gnomon.config import apply_overrides, from_dict, to_toml
from gnomon.errors import ConfigError, DataError, TrainingError
from gnomon.model.config import preset
from gnomon.model.transformer import Transformer
from gnomon.posttrain import command
from gnomon.posttrain.effort import Budgets, CellTau, TauConfig
from gnomon.posttrain.keeping import Shape, fingerprint
from gnomon.posttrain.lab import cold, plan, reinforced, report, tasks
from gnomon.posttrain.lab.cold import fake_two_bits
from gnomon.posttrain.lab.desk import Desk, alarms, last_round, work
from gnomon.posttrain.lab.findings import Findings
from gnomon.posttrain.lab.progress import progress
from gnomon.posttrain.lab.recipe import LabRecipe
from gnomon.posttrain.lab.scores import Scores, mean_score, ratio
from gnomon.posttrain.rl import RLConfig
from gnomon.train import checkpoint


def scores(within: str, right: str | None = None) -> Scores:
    return Scores(right=right or within, within=within, in_budget=1.0, tokens=5.0)


def test_scores_leave_out_what_was_not_graded() -> None:
    each = scores("10-0", "11-0")
    assert (each.count, each.accuracy, each.score) == (3, 2 / 3, 1 / 3)
    assert Scores.from_json(each.to_json()) == each
    assert Scores.of_multiples(right="110-", multiples=[0.5, 1.5, 0.1, 0.2], tokens=5.0, tau=1.0) == Scores(
        right="110-", within="100-", in_budget=0.75, tokens=5.0)
    low, high = each.interval()
    assert 0 < low < 1 / 3 < high < 1


def test_a_ratio_uses_that_both_met_the_same_problems() -> None:
    """Twins have a ratio of exactly one, with no doubt; strangers of the same scores have doubt."""
    letters = "1100" * 50
    assert ratio([scores(letters)], [scores(letters)]) == (1.0, 1.0, 1.0)
    middle, low, high = ratio([scores(letters)], [scores("0110" * 50)])
    assert middle == 1.0 and low < 0.95 and high > 1.05
    better = ratio([scores("1" * 200)], [scores(letters)])
    assert better[0] == 2.0 and better[1] > 1.5


def test_the_mean_over_cells_is_surer_than_each() -> None:
    cells = [scores("1100" * 25) for _ in range(9)]
    mean, low, high = mean_score(cells)
    assert mean == 0.5 and (high - low) < 0.45 * (cells[0].interval()[1] - cells[0].interval()[0])


def test_two_bits_have_four_levels_and_a_gradient_of_one() -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rounded = fake_two_bits(weight)
    for row in rounded.detach().reshape(-1, 32):
        levels = sorted({round(abs(value) / row.abs().min().item()) for value in row.tolist()})
        assert levels in ([1, 3], [1])
    assert (rounded.detach().sign() == weight.detach().sign()).all()
    (rounded * 2).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full_like(weight, 2.0))
    assert torch.isfinite(fake_two_bits(torch.zeros(1, 32))).all()


def test_a_changed_recipe_is_noticed_where_it_matters(tmp_path: Path) -> None:
    recipe = LabRecipe()
    jobs = plan.jobs(recipe)
    assert [name for name, job in jobs.items() if job.cell] == [f"experts/{d}-{e}" for e in ("max", "high", "low")
                                                               for d in ("general", "agents", "coding")]
    longer = plan.jobs(replace(recipe, student=replace(recipe.student, steps=7)))
    changed = {name for name in jobs if jobs[name].digest != longer[name].digest}
    assert changed == {"student", "export", "mixed", "sequential"}
    general = recipe.domains[0]
    tighter = replace(general, low=replace(general.low, tau=TauConfig(start=2.0, target=0.5)))
    other = plan.jobs(replace(recipe, domains=(tighter, *recipe.domains[1:])))
    assert [n for n, job in jobs.items() if job.stage in ("gate", "experts") and other[n].digest != job.digest] == ["experts/general-low"]
    plan.mark(tmp_path / "student", plan.BEGUN, {"digest": jobs["student"].digest, "settings": dict(jobs["student"].settings)})
    plan.check(tmp_path, jobs["student"])
    with pytest.raises(ConfigError, match=r"student was begun with other settings \('student' differ\)"):
        plan.check(tmp_path, longer["student"])
    fewer = plan.jobs(replace(recipe, domains=recipe.domains[:2]))
    hotter = plan.jobs(replace(recipe, expert=replace(recipe.expert, sampling=replace(recipe.expert.sampling, temperature=0.9))))
    assert len({each["quantisation"].digest for each in (jobs, fewer, hotter)}) == 3
    asked = jobs["quantisation"]
    known = {key: asked.settings[key] for key in ("quantisation", "evaluate")}
    plan.mark(tmp_path / asked.name, plan.BEGUN, {"digest": plan._digest(asked.name, known, asked.before), "settings": known})
    plan.check(tmp_path, asked)  # begun when less was noted
    assert all(jobs[before].name in list(jobs)[: list(jobs).index(name)] for name, job in jobs.items() for before in job.after)


def test_a_mark_is_whole_or_told(tmp_path: Path) -> None:
    assert plan.read(tmp_path, plan.DONE) is None
    (tmp_path / plan.DONE).write_text("{")
    with pytest.raises(DataError, match="remove the folder to do this part again"):
        plan.read(tmp_path, plan.DONE)


def test_compute_and_alarms_add_up() -> None:
    rows = [{"read_tokens": 10, "trained_tokens": 4, "alarm": "panic, gap"}, {"read_tokens": 1, "trained_tokens": 1, "teacher_tokens": 1}]
    assert work(rows) == 10 + 12 + 1 + 3 + 1
    assert alarms(rows) == {"panic": 1, "gap": 1}


def test_a_phase_goes_on_until_it_has_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds on new texts, each from the weights before, while the held-out loss is above what was asked; the last one is what counts."""
    recipe = from_dict(LabRecipe, {"cold": [{"texts": 3, "until": 0.1, "rounds": 3}, {}]})
    losses, seen = iter((0.5, 0.05, 0.5, 0.5, 0.5)), []

    def fit(model: Any, texts: Any, config: Any, folder: Path, *, seed: int, say: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "tokens": 7, "loss": 1.0, "held_out_loss": next(losses)}) + "\n")
        seen.append((folder.relative_to(tmp_path).as_posix(), seed, tuple(each.token_ids for each in texts)))

    monkeypatch.setattr(cold, "fit", fit)
    said: list[str] = []
    for number, root in enumerate(("one", "other")):
        job = plan.jobs(recipe)["cold/1"]
        desk = Desk(recipe=recipe, seed=0, root=tmp_path / root, job=job, tasks=tasks.opened(recipe.tasks), say=said.append)
        found = cold.phase(desk)
        assert (found["rounds"], found["tokens"]) == ((2, 14), (3, 21))[number]
    assert [name for name, *_ in seen] == [
        "one/cold/1", "one/cold/1/round-2", "other/cold/1", "other/cold/1/round-2", "other/cold/1/round-3"]
    assert len({each[1:] for each in seen[2:]}) == 3 and seen[0][1:] == seen[2][1:] and len(said) == 3
    assert last_round(tmp_path / "one/cold/1") == tmp_path / "one/cold/1/round-2" and last_round(tmp_path) == tmp_path
    with pytest.raises(ConfigError, match="held out to measure it"):
        from_dict(LabRecipe, {"cold": [{"until": 0.1, "train": {"held_out": 0.0}}]})


def test_one_cell_after_the_other_uses_the_compute_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that cost a third less than an expert's leave compute over: rounds in the last cell take it, at the rate where it ended."""
    recipe = from_dict(LabRecipe, {"domains": [{"name": "a", "low": {"tau": {"start": 2.0, "target": 0.5}}}], "cold": [{}]})
    experts = {cell: {"work": 900, "steps": 6} for cell in recipe.cells}
    ran: list[tuple[tuple[str, str], RLConfig]] = []
    monkeypatch.setattr(reinforced, "spent", lambda desk: (3 * 900 + 300, experts))
    monkeypatch.setattr(reinforced, "_train", lambda desk, model, config, cells, folder: ran.append((*cells, config)))
    monkeypatch.setattr(reinforced, "history", lambda *folders: [{"read_tokens": 100, "trained_tokens": 0}] * ran[-1][1].steps)
    monkeypatch.setattr(reinforced, "_told", lambda *told: {})
    desk: Any = SimpleNamespace(recipe=recipe, cold_model=lambda: None, folder=tmp_path, open_cells=recipe.cells)
    found = reinforced.sequential(desk)
    assert [cell[1] for cell, _ in ran[:3]] == ["max", "high", "low"] and {cell[1] for cell, _ in ran[3:]} == {"low"} and len(ran) > 3
    assert 0.97 <= found["share"] <= 1.0
    first, last = ran[2][1], ran[-1][1]
    assert (first.tau.start, last.tau.start, last.tau.target) == (2.0, None, 0.5)
    rates = [each.learner.optimizer.learning_rate for each in (first, last)]
    assert rates[1] == pytest.approx(rates[0] * first.learner.schedule.final) and last.learner.schedule.final == 1.0


def test_each_cell_has_its_own_tau() -> None:
    config = RLConfig(steps=10, cells=(CellTau(domain="a", effort="low", tau=TauConfig(start=2.0, target=1.0, anneal=1.0)),))
    assert config.bound and not RLConfig().bound
    tau = config.tau_at(5)
    assert tau.default == float("inf") and tau.cells == {("a", "low"): 1.5}


def cold_start(folder: Path, seed: int) -> Path:
    """A run folder with untrained weights."""
    model = Transformer(preset("lab", ("hidden_size=32", "num_hidden_layers=2"))).initialise(seed)
    folder.mkdir()
    (folder / "recipe.toml").write_text(to_toml(Shape(model=model.config)))
    checkpoint.save(folder, 0, {"seed": seed}, {"model": checkpoint.model_tensors(model)}, 1)
    return folder


def test_b0_belongs_to_its_weights_and_the_gate_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "journeys"))
    one, other = cold_start(tmp_path / "one", 1), cold_start(tmp_path / "other", 2)
    model = command.starting(one)[0]
    assert fingerprint(model) == fingerprint(command.starting(one)[0]) != fingerprint(command.starting(other)[0])
    Budgets(tokens={("walks", ""): 6.0}, measured_on=fingerprint(model)).save(tmp_path / "b0.json")
    recipe = tmp_path / "rl.toml"
    recipe.write_text(f'run = "{tmp_path}/rl"\nstart_from = "{other}"\nproblems = "long_answers:OneCell"\nbudgets = "{tmp_path}/b0.json"\n'
                      "train = {steps = 1, pool = {prompts = 2, group_size = 2}, tau = {target = 1.0}}\n")
    parser = argparse.ArgumentParser()
    command.declare(parser)
    with pytest.raises(ConfigError, match=r"name the checkpoint that it was measured on as 'cold_start'"):
        command.rl(parser.parse_args([str(recipe)]))
    command.rl(parser.parse_args([str(recipe), f"cold_start={one}", "gate=60"]))
    assert (tmp_path / "rl" / "gate.svg").stat().st_size > 1000
    with pytest.raises(TrainingError, match=r"thinking does not help the cold start in 'walks'.*The picture: "):
        command.rl(parser.parse_args([str(recipe), f"cold_start={one}", "gate=60", "problems=long_answers:Hopeless", f"run={tmp_path}/no"]))
    assert (tmp_path / "no" / "gate.svg").exists()


def test_shares_of_strangers_are_refused() -> None:
    table = apply_overrides({}, ('cold=[{shares={cooking=1.0}}]',), None)
    with pytest.raises(ConfigError, match=r"'cold\.shares' names cooking; domains are general, agents, coding"):
        from_dict(LabRecipe, table, "x")


def found_by(root: Path, recipe: LabRecipe, share: float, shut: tuple[str, ...] = (), teacher: str = "1") -> Findings:
    """What a run found whose teachers, student and comparators answer always alike, and whose cold start is never right."""
    def cells(letter: str) -> dict[str, object]:
        return {"/".join(cell): scores(letter * 400).to_json() for cell in recipe.cells if cell[0] not in shut}

    cold = {"/".join(cell): {"right": "0" * 400, "multiples": [0.1] * 400, "tokens": 5.0} for cell in recipe.cells}
    for name, job in plan.jobs(recipe).items():
        own = cells("0" if job.stage == "see-saw" else teacher if job.stage == "experts" else "1")
        plan.mark(root / name, plan.DONE, {
            "digest": job.digest, "cells": own, "share": share, "divergence": 0.01, "cold": cold, "shut": list(shut), "gates": [],
            "bits_equal": True, "sampler_gap": 0.0, "unrounded_gap": 0.0, "tokens_compared": 7, "cpu_seconds": 1.0, "wall_seconds": 1.0,
            "peak_bytes": 1})
    return Findings(recipe, 1, root)


def test_a_promise_is_no_smaller_where_there_are_fewer_cells(tmp_path: Path) -> None:
    def told(found: Findings, what: str) -> tuple[str, str, bool | None]:
        return next((each.asked, each.found, each.met) for each in found.claims if each.what.startswith(what))

    whole = found_by(tmp_path / "whole", LabRecipe(), share=1.0)
    assert told(whole, "experts above") == ("8 of 9", "9 of 9", True)
    assert told(whole, "mixed")[2] and not told(found_by(tmp_path / "less", LabRecipe(), share=0.9), "mixed")[2]
    one = found_by(tmp_path / "one", LabRecipe(domains=LabRecipe().domains[:1]), share=1.0)
    assert told(one, "experts above") == ("3 of 3", "3 of 3", True)
    left = found_by(tmp_path / "left", LabRecipe(), share=1.0, shut=("coding",))
    assert told(left, "experts above") == ("8 of 9", "6 of 6, 3 left out", False)
    assert told(left, "efforts of coding")[2] is False
    poor = found_by(tmp_path / "poor", LabRecipe(), share=1.0, teacher="0")
    assert told(poor, "student's score") == ("≥ 95 %", "no teacher has a score", False)


def test_a_report_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="where no seed has begun"):
        report.write(replace(LabRecipe(), run=tmp_path / "none"))


def test_progress_is_that_of_the_newest_run(tmp_path: Path) -> None:
    for at, (name, loss) in enumerate([("5-agents-high", 0.3), ("9-coding-low", 0.2)]):
        (tmp_path / name).mkdir()
        metrics = tmp_path / name / "metrics.jsonl"
        metrics.write_text(json.dumps({"step": 4, "loss": loss, "tokens": 10}) + "\n")
        os.utime(metrics, (at, at))
    assert progress(tmp_path) == {"step": 4, "loss": 0.2, "tokens": 80, "done": 8}
