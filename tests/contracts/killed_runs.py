"""A program that kills runs of post-training at known points and starts them again. Run as `killed_runs.py PHASE FOLDER`.

FOLDER/PHASE/whole is a run that nobody killed, FOLDER/PHASE/POINT one that was, and was started again. Prints, as JSON, how each first life
ended. One process imports everything and forks; it computes nothing itself.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gnomon import config as toml
from gnomon.agent.trajectory import Score
from gnomon.model.config import preset
from gnomon.model.transformer import Transformer
from gnomon.posttrain import distill, policy, rl, sft, slots
from gnomon.posttrain.demonstrations import Example
from gnomon.posttrain.keeping import KeepConfig, Shape
from gnomon.posttrain.learner import Learner, LearnerConfig
from gnomon.posttrain.partial import PoolConfig
from gnomon.posttrain.problem import Problem
from gnomon.posttrain.rl import RLConfig, SamplingConfig, Start
from gnomon.posttrain.teachers import Teachers, routed
from gnomon.train import checkpoint
from gnomon.train.settings import MuonConfig

SHAPE = ("vocab_size=48", "hidden_size=32", "num_hidden_layers=2", "intermediate_size=32", "mixers.kda.num_heads=1",
         "mixers.kda.head_dim=16", "mixers.mla.num_attention_heads=1", "mixers.mla.q_lora_rank=none", "mixers.mla.kv_lora_rank=16",
         "mixers.mla.qk_nope_head_dim=16", "mixers.mla.qk_rope_head_dim=8", "mixers.mla.v_head_dim=16", "moe.num_experts=4",
         "moe.num_experts_per_token=2", "moe.moe_intermediate_size=32", "moe.num_shared_experts=1", "moe.routed_expert_hidden_size=32",
         "initializer_range=0.2")
LEARNER = LearnerConfig(optimizer=MuonConfig(learning_rate=0.003, matrices=False, weight_decay=0.0, clip_logits=None))
STEPS, EVERY = 4, 2
KEEP = KeepConfig(every=EVERY, keep=9)
POOL = {"steps": STEPS, "learner": LEARNER, "keep": KEEP, "sampling": SamplingConfig(slots=16, cache_tokens=1024)}
POINTS = {"sft": ("update", "checkpoint"), "rl": ("sampling", "update", "checkpoint"), "distill": ("sampling", "update", "checkpoint")}


class Source:
    """Prompts of two ids; right where the first id is below 24."""

    def problem(self, index: int) -> Problem:
        """Problem `index`."""
        return Problem(id=str(index), prompt=(2, 3 + index % 40), domain="general", effort="max", max_tokens=9,
                       stop_ids=frozenset(range(1, 9)), grade=lambda sampled, world: Score(reward=float(sampled[0] < 24)))


def network(seed: int = 5) -> Transformer:
    """Small and untrained."""
    return Transformer(preset("tiny", SHAPE)).initialise(seed)


def run(phase: str, folder: Path, teacher: Path) -> None:
    """A run of a phase, or what is left of it."""
    start = Start(model=network(), source=Source(), seed=3)
    if phase == "sft":
        examples = [Example(token_ids=tuple(3 + (i * j) % 40 for j in range(6)), weights=(0.0,) + (1.0,) * 5) for i in range(16)]
        sft.fit(network(), examples, sft.SFTConfig(epochs=1, batch_tokens=24, held_out=0.0, learner=LEARNER, keep=KEEP), folder)
    elif phase == "rl":
        rl.train(start, RLConfig(pool=PoolConfig(prompts=4, group_size=4, share=0.6), **POOL), folder)  # type: ignore[arg-type]
    else:
        teachers = Teachers(routed({("general", "max"): teacher}), start.model.config)
        config = distill.DistillConfig(pool=PoolConfig(prompts=16, group_size=1, share=0.6), **POOL)  # type: ignore[arg-type]
        distill.distill(start, teachers, config, folder)


def die_at(point: str, phase: str) -> None:
    """From here on this process kills itself in the fourth step, two steps after its checkpoint: while it samples, between two updates of
    the weights, or when a checkpoint's tensors are written and its list of files is not."""
    def after(calls: int, where: Any, name: str) -> None:
        whole, seen = getattr(where, name), [0]

        def dying(*args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            if seen[0] == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*args, **kwargs)

        setattr(where, name, dying)

    if point == "update":
        after(STEPS if phase == "sft" else 2 * STEPS, Learner, "update")
    elif point == "checkpoint":
        after(STEPS // EVERY, checkpoint, "_write_bytes")
    else:
        begun = policy.Sampler.sample

        def sample(self: policy.Sampler, *args: Any, **kwargs: Any) -> Any:
            if self.version == STEPS - 1:
                after(3, slots.Work, "step")
            return begun(self, *args, **kwargs)

        policy.Sampler.sample = sample  # type: ignore[method-assign]


def life(work: Callable[[], None]) -> int | None:
    """Work in a process of its own; how that ended."""
    def alone() -> None:
        torch.set_num_threads(1)
        work()

    child = multiprocessing.get_context("fork").Process(target=alone)
    child.start()
    child.join()
    return child.exitcode


def teach(folder: Path) -> None:
    """A teacher's run folder."""
    model = network(7)
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(toml.to_toml(Shape(model=model.config)))
    checkpoint.save(folder, 1, {}, {"model": checkpoint.model_tensors(model)}, 1)


def main(phase: str, root: Path) -> None:
    """All points of a phase."""
    teacher, found = root / "teacher", {}
    if phase == "distill":
        assert life(lambda: teach(teacher)) == 0
    assert life(lambda: run(phase, root / phase / "whole", teacher)) == 0
    for point in POINTS[phase]:
        folder = root / phase / point

        def killed() -> None:
            die_at(point, phase)  # noqa: B023
            run(phase, folder, teacher)  # noqa: B023

        found[point] = {"ended": life(killed), "left": sorted(p.name for p in (folder / "checkpoints").iterdir()),
                        "again": life(lambda: run(phase, folder, teacher))}  # noqa: B023
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
