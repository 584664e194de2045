"""Several teachers into one student: routing, the memory of one, what the student becomes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnomon import config as toml
from gnomon.agent.trajectory import Score
from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.config import ModelConfig, preset
from gnomon.model.runs import load_model
from gnomon.model.transformer import Transformer
from gnomon.posttrain import distill
from gnomon.posttrain.distill import Cells, DistillConfig
from gnomon.posttrain.keeping import KeepConfig, Shape
from gnomon.posttrain.learner import Document, Learner, LearnerConfig, stream, token_logprobs
from gnomon.posttrain.partial import PoolConfig
from gnomon.posttrain.problem import Problem
from gnomon.posttrain.rl import SamplingConfig, Start
from gnomon.posttrain.teachers import Cell, Teachers, routed
from gnomon.train import checkpoint
from gnomon.train.settings import MuonConfig

SHAPE = ("vocab_size=40", "hidden_size=32", "num_hidden_layers=2", "intermediate_size=32", "mixers.kda.num_heads=1",
         "mixers.kda.head_dim=16", "mixers.mla.num_attention_heads=1", "mixers.mla.q_lora_rank=none", "mixers.mla.kv_lora_rank=16",
         "mixers.mla.qk_nope_head_dim=16", "mixers.mla.qk_rope_head_dim=8", "mixers.mla.v_head_dim=16", "moe.num_experts=4",
         "moe.num_experts_per_token=2", "moe.moe_intermediate_size=32", "moe.num_shared_experts=1", "moe.routed_expert_hidden_size=32",
         "initializer_range=0.2")
CELLS = (("general", "low"), ("general", "max"), ("agents", "max"))
FAST = LearnerConfig(optimizer=MuonConfig(learning_rate=0.006, matrices=False, weight_decay=0.0, clip_logits=None))


def network(seed: int = 0) -> Transformer:
    """Small and untrained."""
    return Transformer(preset("tiny", SHAPE)).initialise(seed)


def nothing(sampled: tuple[int, ...], world: Any) -> Score:
    """Nobody grades here."""
    raise AssertionError


class Source:
    """The cells in turn; a prompt says which."""

    def problem(self, index: int) -> Problem:
        domain, effort = CELLS[index % len(CELLS)]
        return Problem(id=str(index), prompt=(30 + index % len(CELLS), 3 + index % 9), domain=domain, effort=effort, grade=nothing,
                       max_tokens=6, stop_ids=frozenset({1, 2}))


def save(model: Transformer, folder: Path, config: ModelConfig | None = None) -> Path:
    """A run folder of these weights."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(toml.to_toml(Shape(model=config or model.config)))
    checkpoint.save(folder, 1, {}, {"model": checkpoint.model_tensors(model)}, 1)
    return folder


def taught(model: Transformer, likes: dict[int, range], updates: int) -> Transformer:
    """Trained to answer a prompt's first id with three ids of a set, then to stop."""
    made = Learner(model, LearnerConfig(optimizer=MuonConfig(learning_rate=0.01, matrices=False, clip_logits=None)), updates)
    rng = np.random.default_rng(0)
    for _ in range(updates):
        documents = [Document(token_ids=(first, 3 + int(rng.integers(9)), *rng.choice(list(liked), 3).tolist(), 1),
                              mask=(False, False, True, True, True, True)) for first, liked in likes.items() for _ in range(16)]
        made.update([documents], lambda piece: -token_logprobs(model, stream(piece)).mean())
    return model


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What student and teachers come from: it knows the form of an answer, and roughly what each cell wants."""
    likes = {30 + n: range(3 + 4 * n, 19 + 4 * n) for n in range(3)}
    return save(taught(network(), likes, 25), tmp_path_factory.mktemp("start") / "run")


@pytest.fixture(scope="module")
def teachers(start: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Path]:
    """Three teachers, each fond of other ids."""
    folder = tmp_path_factory.mktemp("teachers")
    return {cell: save(taught(load_model(start)[0], {30 + n: range(3 + 8 * n, 11 + 8 * n)}, 15), folder / f"{n}")
            for n, cell in enumerate(CELLS)}


def small(**changes: Any) -> DistillConfig:
    """A run of a moment."""
    return DistillConfig(**{"steps": 8, "pool": PoolConfig(prompts=48, group_size=1), "learner": FAST, "keep": KeepConfig(every=4, keep=9),
                            "sampling": SamplingConfig(slots=64, cache_tokens=4096)} | changes)


def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without the clock."""
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


@pytest.mark.parametrize("mode", ["sampled", "topk", "full"])
def test_the_student_comes_near_all_teachers(mode: Any, start: Path, teachers: dict[Cell, Path], tmp_path: Path) -> None:
    """The divergence falls in every mode and cell, and no teacher is read more than once per step."""
    bench = Teachers(routed(teachers), network().config)
    rows = distill.distill(Start(model=load_model(start)[0], source=Source()), bench, small(mode=mode, k=6), tmp_path / "run")
    assert rows[-1]["kl"] < 0.75 * rows[0]["kl"] and bench.reads <= 3 * 8
    assert all(f"kl/{d}/{e}" in rows[0] and rows[0][f"spent/{d}/{e}"] > 0 for d, e in CELLS)
    assert rows[0]["tokens"] == rows[0]["sampled_tokens"] and rows[0]["kept"] > 0.9


def test_a_run_that_was_killed_goes_on_the_same(teachers: dict[Cell, Path], tmp_path: Path) -> None:
    """With partial rollouts and weighted cells."""
    config = small(steps=4, pool=PoolConfig(prompts=24, group_size=1, share=0.7), reweigh=True, keep=KeepConfig(every=2, keep=9))
    bench = Teachers(routed(teachers), network().config)
    whole = distill.distill(Start(model=network(), source=Source()), bench, config, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints" / "step-000004").iterdir():  # as if it had died in step 3
        file.unlink()
    (tmp_path / "run" / "checkpoints" / "step-000004").rmdir()
    again = distill.distill(Start(model=network(), source=Source()), bench, config, tmp_path / "run")
    assert told(again) == told(whole)[2:]
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_a_teacher_that_is_the_student_changes_nothing(tmp_path: Path) -> None:
    """The first gradient is that of rounding, and none is left with the whole vocabulary."""
    same = save(network(), tmp_path / "same")
    bench = Teachers(routed(dict.fromkeys(CELLS, same)), network().config)
    for mode in ("sampled", "full"):
        rows = distill.distill(Start(model=network(), source=Source()), bench, small(steps=1, updates=1, mode=mode), tmp_path / mode)
        assert abs(rows[0]["kl"]) < 1e-6 and rows[0]["gradient_norm"] < 1e-4, mode
    shifted = Document(token_ids=(3, 4, 5, 6), mask=(False, True, True, True))
    said, moved = bench.score([(CELLS[0], shifted), (CELLS[0], replace(shifted, token_ids=(3, 3, 4, 5)))])
    assert (said.logprobs - moved.logprobs).abs().max() > 0.05, "an alignment that is one off is seen"


def test_what_is_kept_has_a_bound_of_bytes(teachers: dict[Cell, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole vocabularies are large: what does not fit is asked again, and says the same."""
    documents = [(CELLS[0], Document(token_ids=(30, first, 5, 6), mask=(False, False, True, True))) for first in (3, 4, 5)]
    monkeypatch.setattr("gnomon.posttrain.teachers.REMEMBERED_BYTES", 2 * (2 * 40 + 2) * 4)  # two documents of two places
    bench = Teachers(routed(teachers), network().config)
    first, again = bench.score(documents, "full"), bench.score(documents, "full")
    assert bench.hits == 2
    for one, two in zip(first, again, strict=True):  # asked alone or beside others: the same up to rounding
        torch.testing.assert_close(one.logprobs, two.logprobs, atol=1e-5, rtol=1e-5)


def test_scores_are_those_of_the_teacher_and_are_kept(teachers: dict[Cell, Path]) -> None:
    """By content: the same ids from the same teacher are asked once, from another again."""
    bench = Teachers(routed(teachers), network().config)
    document = Document(token_ids=(30, 4, 5, 6, 7), mask=(False, False, True, False, True))
    found = bench.score([(CELLS[0], document), (CELLS[1], document), (CELLS[0], document)])
    assert bench.reads == 2 and torch.equal(found[0].logprobs, found[2].logprobs)
    model = network()
    model.load_state_dict(checkpoint.load(bench.checkpoints[teachers[CELLS[1]]]).tensors["model"])
    alone = Learner(model, LearnerConfig(), 1).logprobs([document])[0]
    assert torch.allclose(found[1].logprobs, alone, atol=1e-5)
    bench.score([(CELLS[1], document)])
    assert bench.reads == 2 and bench.hits == 1
    top = bench.score([(CELLS[0], document)], "topk", 3)[0]
    assert top.ids is not None and top.scores is not None and top.scores.shape == (2, 3)


def test_routing_is_strict(teachers: dict[Cell, Path], tmp_path: Path) -> None:
    """No teacher, two teachers, another vocabulary, another tokenizer, no checkpoint: each is said at the start or when asked."""
    shape = network().config
    document = Document(token_ids=(3, 4), mask=(False, True))
    with pytest.raises(ConfigError, match="no teacher for coding/low"):
        Teachers(routed(teachers), shape).score([(("coding", "low"), document)])
    with pytest.raises(ConfigError, match="general/low twice"):
        Teachers((*routed(teachers), *routed({CELLS[0]: tmp_path})), shape)
    with pytest.raises(ConfigError, match="'vocab_size' 40, the student 48"):
        Teachers(routed(teachers), replace(shape, vocab_size=48))
    with pytest.raises(ConfigError, match="'eos_token_id' None, the student 7"):
        Teachers(routed(teachers), replace(shape, eos_token_id=7))
    own = save(network(), tmp_path / "own")
    for folder, words in ((own / "tokenizer", "a b"), (tmp_path / "tokenizer", "b a")):
        folder.mkdir()
        (folder / "words.txt").write_text(words)
    with pytest.raises(ConfigError, match="another tokenizer"):
        Teachers(routed({CELLS[0]: own}), shape, tokenizer=tmp_path / "tokenizer")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "recipe.toml").write_text(toml.to_toml(Shape(model=shape)))
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        Teachers(routed({CELLS[0]: empty}), shape)
    with pytest.raises(ConfigError, match="groups of 2 or more"):
        DistillConfig(outcome=0.1)


def test_cells_that_are_far_weigh_more() -> None:
    """In proportion to the divergence, within bounds, and kept through a resume."""
    cells = Cells()
    for cell, value in zip(CELLS, (0.01, 0.1, 0.19), strict=True):
        cells.observe(cell, value)
    assert cells.weights() == pytest.approx(dict(zip(CELLS, (0.25, 1.0, 1.9), strict=True)))
    copy = Cells()
    copy.restore(json.loads(json.dumps(cells.state())))
    assert copy.weights() == cells.weights()
