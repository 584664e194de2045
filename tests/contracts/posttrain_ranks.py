"""A program for several ranks: post-training by all of them. Run as `posttrain_ranks.py RANKS [RANKS …] FOLDER`.

What each rank's weights become is saved as FOLDER/CASE-RANKS-RANK.pt; the verbs write their runs to FOLDER/runs-RANKS.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import Case, compare_all

from gnomon.agent.trajectory import Score
from gnomon.cli import main
from gnomon.model.config import preset
from gnomon.model.transformer import Transformer
from gnomon.parallel.mesh import Mesh, join
from gnomon.posttrain import distill, rl, sft
from gnomon.posttrain.demonstrations import Example
from gnomon.posttrain.grading import Grading
from gnomon.posttrain.keeping import Setup
from gnomon.posttrain.learner import Document, Learner, LearnerConfig
from gnomon.posttrain.objective import ObjectiveConfig
from gnomon.posttrain.partial import Iteration, Pool, PoolConfig
from gnomon.posttrain.policy import Sampler
from gnomon.posttrain.problem import Problem
from gnomon.posttrain.rl import RLConfig, Start
from gnomon.posttrain.teachers import Cell, Said
from gnomon.train.settings import MuonConfig

FOLDER = Path(sys.argv[-1])
SHAPE = ("vocab_size=48", "hidden_size=32", "num_hidden_layers=2", "intermediate_size=32", "mixers.kda.num_heads=1",
         "mixers.kda.head_dim=16", "mixers.mla.num_attention_heads=1", "mixers.mla.q_lora_rank=none", "mixers.mla.kv_lora_rank=16",
         "mixers.mla.qk_nope_head_dim=16", "mixers.mla.qk_rope_head_dim=8", "mixers.mla.v_head_dim=16", "moe.num_experts=4",
         "moe.num_experts_per_token=2", "moe.moe_intermediate_size=32", "moe.num_shared_experts=1", "moe.routed_expert_hidden_size=32",
         "initializer_range=0.2")
# AdamW's epsilon is large, since a small one makes steps of parameters whose gradient is rounding and nothing else.
LEARNER = LearnerConfig(optimizer=MuonConfig(learning_rate=0.003, matrices=False, weight_decay=0.0, clip_logits=None, adam_epsilon=1e-4),
                        micro_tokens=64)


class Source:
    """Two domains in turn; right where the first id is below 24; every seventh problem's grader fails."""

    def problem(self, index: int) -> Problem:
        """Problem `index`."""
        def grade(sampled: tuple[int, ...], world: Any) -> Score:
            return Score(reward=None, error="lost") if index % 7 == 3 else Score(reward=float(sampled[0] < 24))

        return Problem(id=str(index), prompt=(2, 3 + index % 40), domain=("a", "b")[index % 2], effort="max", grade=grade, max_tokens=9,
                       stop_ids=frozenset(range(1, 12)))


class Fixed:
    """In the place of teachers: what is said is a function of the ids, to the last bit."""

    def score(self, documents: Sequence[tuple[Cell, Document]], mode: str = "sampled", k: int = 64) -> list[Said]:
        """What is said about each document."""
        found = []
        for (domain, _), each in documents:
            made = torch.Generator().manual_seed(sum(each.token_ids) + ord(domain))
            count = sum(each.mask)
            scores = torch.randn(count, 48, generator=made).log_softmax(-1)
            top, ids = scores.topk(k, -1)
            found.append(Said(logprobs=scores[:, 5], scores=top, ids=ids) if mode == "topk" else Said(logprobs=scores[:, 5]))
        return found


def network() -> Transformer:
    """Small and untrained."""
    return Transformer(preset("tiny", SHAPE)).initialise(5)


def rollouts(prompts: int, size: int) -> Iteration:
    """Groups that are sampled alike on every rank."""
    sampler = Sampler(network(), slots=64, cache_tokens=4096)
    with Grading() as grading:
        return Pool(Source(), PoolConfig(prompts=prompts, group_size=size), 3).iterate(sampler, grading)


def reinforced(made: Learner, kind: str) -> dict[str, Any]:
    """Two updates from the same rollouts."""
    config = RLConfig(pool=PoolConfig(prompts=6, group_size=4), learner=LEARNER, objective=ObjectiveConfig(kind=kind))  # type: ignore[arg-type]
    return rl.learn(made, rollouts(6, 4), Start(model=made.model, source=Source(), setup=Setup(mesh=made.mesh)), config, 0)


def distilled(made: Learner, mode: str) -> dict[str, Any]:
    """Two updates from the same rollouts."""
    config = distill.DistillConfig(learner=LEARNER, mode=mode, k=5)  # type: ignore[arg-type]
    cells = distill.Cells()
    lessons = distill.prepare(made, rollouts(13, 1), Fixed(), cells, config)  # type: ignore[arg-type]
    return distill.learn(made, lessons, cells, 0, config, 0) | {"cells": cells.state()}


def tuned(made: Learner) -> dict[str, Any]:
    """A step of fine-tuning, and the loss of what is held out."""
    examples = [Example(token_ids=tuple(3 + (i * j) % 40 for j in range(5 + i)), weights=(0.0, 0.0, *(1.0 + i % 2,) * (3 + i)))
                for i in range(9)]
    return sft._step(made, examples, sft.SFTConfig(learner=LEARNER)) | {"held_out": sft.mean_loss(made, examples[:3])}


def nothing_for_some(made: Learner) -> dict[str, Any]:
    """One example: all ranks but the first have none, and take the same step."""
    example = [Example(token_ids=(3, 4, 5, 6), weights=(0.0, 1.0, 1.0, 1.0))]
    return sft._step(made, example, sft.SFTConfig(learner=LEARNER))


def updated(work: Callable[[Learner], dict[str, Any]], name: str, mesh: Mesh) -> dict[str, Any]:
    """What some updates make of the model in fp64, saved, and what they measured."""
    made = Learner(network().double(), LEARNER, 10, mesh)
    found = work(made)
    torch.save(made.model.state_dict(), FOLDER / f"{name}-{mesh.world}-{mesh.rank}.pt")
    return found


def pooled(mesh: Mesh) -> dict[str, Any]:
    """What a rank knows of the ids that all have sampled: of whole groups, and of a pool that stops when half of it has finished."""
    found: dict[str, Any] = {}
    for name, share in (("whole", 1.0), ("part", 0.5)):
        pool, sampler = Pool(Source(), PoolConfig(prompts=5, group_size=3, share=share), 3, mesh), Sampler(network(), cache_tokens=4096)
        with Grading() as grading:
            made = [pool.iterate(sampler, grading) for _ in range(2)]
        ids = [[r.token_ids for r in group.rollouts] for each in made for group in each.groups]
        found[name] = {"ids": ids, "carried": made[1].carried, "state": pool.state(), "tokens": [each.sampled_tokens for each in made]}
    return found


def verbs(mesh: Mesh) -> dict[str, Any]:
    """`gnomon sft`, `rl` and `distill`, as people start them."""
    sys.path.insert(0, str(Path(__file__).parent))
    return {verb: main([verb, str(FOLDER / f"{verb}.toml"), f"run={FOLDER}/runs-{mesh.world}/{verb}", *rest]) for verb, rest in (
        ("sft", ()), ("rl", (f"budgets={FOLDER}/runs-{mesh.world}/budgets.json",)), ("distill", ()))}


def cases(ranks: int) -> Iterable[Case]:
    """Every loop's update, then the verbs."""
    with join("cpu") as mesh:
        every: dict[str, Callable[[Learner], dict[str, Any]]] = {
            "k25": partial(reinforced, kind="k25"), "grpo": partial(reinforced, kind="grpo"), "sampled": partial(distilled, mode="sampled"),
            "topk": partial(distilled, mode="topk"), "sft": tuned, "one": nothing_for_some}
        for name, work in every.items():
            yield name, partial(updated, work, name, mesh)
        yield "pool", partial(pooled, mesh)
        yield "verbs", partial(verbs, mesh)


if __name__ == "__main__":
    compare_all(cases)
