"""Reinforcement learning on problems of a moment: it learns, it goes on after a kill, partial rollouts keep their spans."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon.agent.trajectory import Score
from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.config import preset
from gnomon.model.router import replayed
from gnomon.model.runs import load_model
from gnomon.model.transformer import Transformer
from gnomon.posttrain import rl
from gnomon.posttrain.effort import Budgets, TauConfig
from gnomon.posttrain.grading import Grading
from gnomon.posttrain.keeping import KeepConfig, kept_folder
from gnomon.posttrain.learner import Document, Learner, LearnerConfig, sampled_routes, stream, token_logprobs
from gnomon.posttrain.partial import Pool, PoolConfig
from gnomon.posttrain.policy import Sampler
from gnomon.posttrain.problem import Problem
from gnomon.posttrain.rl import RLConfig, SamplingConfig, Start
from gnomon.train import checkpoint
from gnomon.train.settings import MuonConfig

SHAPE = ("vocab_size=48", "hidden_size=32", "num_hidden_layers=2", "intermediate_size=32", "mixers.kda.num_heads=1",
         "mixers.kda.head_dim=16", "mixers.mla.num_attention_heads=1", "mixers.mla.q_lora_rank=none", "mixers.mla.kv_lora_rank=16",
         "mixers.mla.qk_nope_head_dim=16", "mixers.mla.qk_rope_head_dim=8", "mixers.mla.v_head_dim=16", "moe.num_experts=4",
         "moe.num_experts_per_token=2", "moe.moe_intermediate_size=32", "moe.num_shared_experts=1", "moe.routed_expert_hidden_size=32",
         "initializer_range=0.2")
FAST = LearnerConfig(optimizer=MuonConfig(learning_rate=0.01, matrices=False, weight_decay=0.0, clip_logits=None))


def low_ids(sampled: tuple[int, ...], world: Any) -> Score:
    """Right where the first id is below 24."""
    return Score(reward=float(sampled[0] < 24))


class Source:
    """Prompts of two ids; every fifth problem's grader fails where `broken`."""

    def __init__(self, *, broken: bool = False, salt: str = "") -> None:
        self.broken, self.salt = broken, salt

    def problem(self, index: int) -> Problem:
        def grade(sampled: tuple[int, ...], world: Any) -> Score:
            return Score(reward=None, error="lost") if self.broken and index % 5 == 0 else low_ids(sampled, world)

        return Problem(id=f"{self.salt}{index}", prompt=(2, 3 + index % 40), domain="general", effort="max", grade=grade, max_tokens=9,
                       stop_ids=frozenset(range(1, 12)))


def start(**changes: Any) -> Start:
    """Fresh weights."""
    return Start(**{"model": Transformer(preset("tiny", SHAPE)).initialise(5), "source": Source(), "seed": 3} | changes)


def config(**changes: Any) -> RLConfig:
    """A run of a moment."""
    return RLConfig(**{"steps": 6, "pool": PoolConfig(prompts=8, group_size=8), "learner": FAST, "sampling": SamplingConfig(slots=64,
                       cache_tokens=4096), "keep": KeepConfig(every=2)} | changes)


def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without the clock."""
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


def test_it_learns_and_trainer_and_sampler_agree(tmp_path: Path) -> None:
    """Accuracy rises from chance, tokens are counted, the gap is that of fp32; the folder is one that other programs read."""
    rows = rl.train(start(), config(steps=8, keep=KeepConfig(every=8, stay=(3,))), tmp_path / "run")
    assert rows[0]["accuracy"] < 0.75 and rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.2
    assert all(row["gap"] < 1e-5 and row["largest_gap"] < 1e-4 and row["kept"] > 0.5 for row in rows)
    assert all(row["tokens"] == row["sampled_tokens"] and row["failed"] == 0 for row in rows)
    model, path = load_model(tmp_path / "run")
    assert path.name == "step-000008" and torch.isfinite(model.model.embed_tokens.weight).all()
    assert load_model(kept_folder(tmp_path / "run", 3))[1].name == "step-000003"


def test_a_run_that_was_killed_goes_on_the_same(tmp_path: Path) -> None:
    """Partial rollouts and all: unfinished ones come back from the checkpoint, and the metrics are the same."""
    partial = config(pool=PoolConfig(prompts=6, group_size=4, share=0.6), steps=6)
    whole = rl.train(start(), partial, tmp_path / "whole")
    assert any(row["carried"] for row in whole)
    rl.train(start(), replace(partial, steps=6, keep=KeepConfig(every=3, keep=9)), tmp_path / "cut")
    for later in (tmp_path / "cut" / "checkpoints").glob("step-000006"):  # as if it had died in step 5
        for file in later.iterdir():
            file.unlink()
        later.rmdir()
    again = rl.train(start(), replace(partial, keep=KeepConfig(every=3, keep=9)), tmp_path / "cut")
    assert [row["step"] for row in again] == [4, 5, 6] and told(again) == told(whole)[3:]
    lines = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match="seed 3, not 4"):
        rl.train(start(seed=4), partial, tmp_path / "cut")
    with pytest.raises(CheckpointError, match="its source now gives"):
        rl.train(start(source=Source(salt="other")), partial, tmp_path / "cut")


def test_a_folder_that_is_refused_stays_what_it_was(tmp_path: Path) -> None:
    """One of another seed, and one of another kind of training."""
    rl.train(start(), config(steps=1), tmp_path / "run")
    checkpoint.save(tmp_path / "other", 1, {"seed": 3}, {"model": {}}, 1)
    (tmp_path / "other" / "recipe.toml").write_text("seed = 3\n")
    before = (tmp_path / "run" / "recipe.toml").read_text()
    with pytest.raises(ConfigError, match="seed 3, not 4"):
        rl.train(start(seed=4), config(), tmp_path / "run")
    with pytest.raises(ConfigError, match="another kind of training"):
        rl.train(start(), config(), tmp_path / "other")
    assert (tmp_path / "run" / "recipe.toml").read_text() == before and (tmp_path / "other" / "recipe.toml").read_text() == "seed = 3\n"


def test_weights_that_were_to_stay_are_there_whenever_the_run_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies once the checkpoint is whole does not come to that step again, so the copy must stand before."""
    whole = checkpoint.save

    def dies(run: Path, step: int, *rest: Any) -> Path:
        made = whole(run, step, *rest)
        if run == tmp_path / "run":
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr(checkpoint, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        rl.train(start(), config(steps=2, keep=KeepConfig(every=1, stay=(1,))), tmp_path / "run")
    assert load_model(kept_folder(tmp_path / "run", 1))[1].name == "step-000001"


def test_partial_rollouts_span_versions() -> None:
    """Groups come whole; what is resumed keeps the spans of older weights; what is too old begins again."""
    net = Transformer(preset("tiny", SHAPE)).initialise(5)
    pool = Pool(Source(), PoolConfig(prompts=6, group_size=4, share=0.5, most_stale=2), 1)
    sampler, versions, dropped = Sampler(net, slots=8, cache_tokens=1024), set(), 0
    with Grading() as grading:
        for version in range(8):
            sampler.load(net, version)
            before = len(pool.waiting)
            made = pool.iterate(sampler, grading)
            assert made.groups and all(len(g.rollouts) == 4 for g in made.groups)
            assert all(r.score is not None and r.problem.id == g.problem.id for g in made.groups for r in g.rollouts)
            versions |= {len(set(r.versions)) for g in made.groups for r in g.rollouts}
            dropped += made.dropped
            assert before == 0 or made.steps > 0
            copy = Pool(Source(), pool.config, 1)
            copy.restore(json.loads(json.dumps(pool.state())))
            assert copy.state() == pool.state()
    assert 2 in versions


def test_what_the_machine_failed_at_is_in_neither_loss_nor_mean(tmp_path: Path) -> None:
    """Counted, and left out."""
    rows = rl.train(start(source=Source(broken=True)), config(steps=2), tmp_path / "run")
    assert rows[0]["failed"] == 16 and rows[0]["groups"] == 8 and rows[0]["tokens"] < rows[0]["sampled_tokens"]


def test_experts_are_chosen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With replay both updates send each token to the experts that the sampler sent it to, and the gradient still reaches the routers."""
    used: list[list[torch.Tensor | None]] = []

    def loss(*arguments: Any) -> torch.Tensor:
        used.append([router.forced for router in arguments[0].model.routers()])
        assert all(torch.equal(a, b) for a, b in zip(used[-1], sampled_routes(arguments[1].documents), strict=False) if a is not None)
        return whole(*arguments)

    whole = rl._loss
    monkeypatch.setattr(rl, "_loss", loss)
    begun, fast = start(), LearnerConfig(optimizer=MuonConfig(learning_rate=0.05, matrices=False, weight_decay=0.0, clip_logits=None))
    fresh = {name: p.clone() for name, p in begun.model.named_parameters()}
    kept = config(steps=1, learner=fast, replay="experts")
    rows = rl.train(begun, kept, tmp_path / "run")
    routers = begun.model.routers()
    assert len(used) == 2 and len(routers) > 0 and rows[0]["gap"] < 1e-5
    assert all(forced is not None for update in used for forced in update)
    assert all(router.forced is None and router.chosen is None for router in routers)
    assert all(not torch.equal(p, fresh[name]) for name, p in begun.model.named_parameters() if name.endswith("gate.weight"))
    again = rl.train(start(), replace(kept, replay=None), tmp_path / "other")
    assert not any(used[2]) and again[0]["gap"] == pytest.approx(rows[0]["gap"], abs=1e-6)
    assert again[0]["log_ratio"] != rows[0]["log_ratio"], "some token went elsewhere without"


def test_routes_are_those_that_were_chosen() -> None:
    """Replayed under the same weights they change nothing, under others they hold; other tokens are refused."""
    net = start().model
    made, document = Learner(net, FAST, 10), Document(token_ids=(3, 4, 5, 6, 7, 8), mask=(False, *(True,) * 5))
    routes, piece = made.routes_of([document, document]), stream([document, document])
    with torch.no_grad():
        alone = token_logprobs(net, piece)
        with replayed(net.routers(), routes):
            assert torch.allclose(token_logprobs(net, piece), alone, atol=1e-6)
        with replayed(net.routers(), [(ids + 1) % 4 for ids in routes]):
            assert (token_logprobs(net, piece) - alone).abs().max() > 1e-3
            with pytest.raises(ConfigError, match="10 tokens are to be chosen again, and 5 came"):
                token_logprobs(net, stream([document]))


def test_a_budget_shortens(tmp_path: Path) -> None:
    """Answers over tau b0 are -1 and counted; without a measured b0 nothing starts."""
    budgets = Budgets(tokens={("general", ""): 4.0})
    rows = rl.train(start(budgets=budgets), config(steps=8, tau=TauConfig(target=0.6)), tmp_path / "run")
    assert rows[0]["over_budget"] > 0.5 and rows[-1]["spent"] < rows[0]["spent"] - 0.5
    assert rows[-1]["over_budget"] < rows[0]["over_budget"]
    with pytest.raises(ConfigError, match="no b0 was measured"):
        rl.train(start(), config(tau=TauConfig(target=1.0)), tmp_path / "other")
    with pytest.raises(ConfigError, match=r"'pool.group_size' is 1"):
        config(pool=PoolConfig(group_size=1))
