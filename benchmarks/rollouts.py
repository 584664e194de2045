"""How fast are rollouts at the shape of a laboratory, beside plain PyTorch, and what does training under quantised experts cost?

A model of about 275,000 parameters; an iteration is 32 prompts of 20 ids with 8 rollouts each, which sample 28 ids on average. The sampler
of `gnomon.posttrain` goes through whole iterations: weights are loaded, prompts read, ids drawn, and every answer is graded by running two
programs in a sandbox, until the last grade is there. Beside it: the inference model alone, one id for each of 256 sequences a step (the
raw rate of decoding); the plain loop, the same network on the references of every operator, all sequences in one batch, one token a step.
A step of reinforcement, an iteration and two updates, is timed with full and with quantised experts. All take turns, so that what the
machine does meanwhile meets all of them.

    OMP_NUM_THREADS=2 python benchmarks/rollouts.py [--quick]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace

import torch
from machine import save, spread

from gnomon.agent.trajectory import Score
from gnomon.kernels.operator import FORCE
from gnomon.model.config import ModelConfig, preset
from gnomon.model.inference import InferenceModel
from gnomon.model.inference_state import PackedRows
from gnomon.model.transformer import Transformer
from gnomon.posttrain.grading import Grading
from gnomon.posttrain.lab.bench import Bench
from gnomon.posttrain.learner import Learner, LearnerConfig, document, stream, token_logprobs
from gnomon.posttrain.policy import Sampler
from gnomon.posttrain.problem import Problem
from gnomon.posttrain.rollout import Rollout, seed_of

SHAPE = ("vocab_size=64", "hidden_size=64", "num_hidden_layers=4", "intermediate_size=64", "mixers.kda.num_heads=2",
         "mixers.kda.head_dim=32", "mixers.mla.num_attention_heads=2", "mixers.mla.q_lora_rank=none", "mixers.mla.kv_lora_rank=32",
         "mixers.mla.qk_nope_head_dim=32", "mixers.mla.qk_rope_head_dim=16", "mixers.mla.v_head_dim=32", "moe.num_experts=8",
         "moe.num_experts_per_token=2", "moe.moe_intermediate_size=32", "moe.num_shared_experts=2", "moe.routed_expert_hidden_size=32",
         "moe.first_k_dense_replace=0")
PROMPT, ANSWER, GROUP = 20, 28, 8
PROGRAM = (("+", 3), ("*", 7), ("-", 4), ("+", 5), ("*", 3), ("-", 1))


def rollouts(count: int, bench: Bench) -> list[Rollout]:
    """Fresh ones, in groups of one prompt; answers have 20 to 36 ids."""

    def grade(sampled: tuple[int, ...], world: object) -> Future[Score]:
        return bench.judge((*PROGRAM[:5], ("+", sampled[0] % 10)), PROGRAM,
                           lambda found, expected: Score(reward=float(found[sampled[-1] % 10] % 2 == expected[0] % 2)))

    def rollout(i: int) -> Rollout:
        problem = Problem(id=str(i), prompt=(*range(3, 2 + PROMPT), 30 + i // GROUP), domain="general", effort="max", grade=grade,
                          max_tokens=ANSWER - 8 + seed_of(i) % 17)
        return Rollout(problem=problem, group=i // GROUP, member=i % GROUP, seed=seed_of(i))

    return [rollout(i) for i in range(count)]


@torch.no_grad()
def plain(model: Transformer, count: int) -> int:
    """The plain loop on references; returns the ids that it sampled."""
    os.environ[FORCE] = "reference"
    try:
        states = model.new_states(count, PROMPT + ANSWER)
        tokens = torch.tensor([(*range(3, 2 + PROMPT), 30 + i // GROUP) for i in range(count)])
        for _ in range(ANSWER):
            scores = model(tokens, states=states, last_only=True)[:, -1].log_softmax(-1)
            tokens = torch.multinomial(scores.exp(), 1)
        return count * ANSWER
    finally:
        del os.environ[FORCE]


class Decoding:
    """The inference model alone: sequences that have read their prompts, one id more for each at every step."""

    def __init__(self, model: Transformer, count: int) -> None:
        self.twin, self.count = InferenceModel.from_transformer(model), count
        each = -(-(PROMPT + ANSWER) // 32)
        self.pool = self.twin.new_pool(count, count * each * 32, 32)
        self.pages = torch.arange(count * each, dtype=torch.int32).view(count, each)
        self._step(0, PROMPT)

    def _step(self, past: int, width: int) -> None:
        tokens, bounds = torch.full((self.count * width,), 5), torch.arange(0, self.count * width + 1, width)
        self.twin.forward(PackedRows(tokens=tokens, bounds=bounds, past=torch.full((self.count,), past), slots=torch.arange(self.count),
                                     pages=self.pages), self.pool)

    def run(self) -> int:
        """All the ids of an answer; returns how many."""
        for i in range(ANSWER - 1):
            self._step(PROMPT + i, 1)
        return self.count * (ANSWER - 1)


class Steps:
    """Steps of reinforcement: an iteration, graded, and two updates over all of its rollouts."""

    def __init__(self, config: ModelConfig, count: int, bench: Bench) -> None:
        self.model, self.count, self.bench = Transformer(config).initialise(0), count, bench
        self.sampler = Sampler(self.model, slots=count, cache_tokens=count * 64)
        self.learner = Learner(self.model, LearnerConfig(), 1000)
        self.update_seconds: list[float] = []

    def iteration(self) -> int:
        """Weights loaded, rollouts sampled and graded; returns the sampled ids."""
        self.sampler.load(self.model, 0)
        with Grading() as grading:
            made = self.sampler.sample(rollouts(self.count, self.bench), on_finished=grading.submit)
            self.graded = grading.collect()
        assert all(each.score is not None and each.score.reward is not None for each in self.graded)
        return made.tokens

    def run(self) -> int:
        """A whole step; returns the sampled ids."""
        sampled = self.iteration()
        documents = [document(each) for each in self.graded]
        began = time.perf_counter()
        for half in (documents[::2], documents[1::2]):
            self.learner.update([half], lambda piece: -token_logprobs(self.model, stream(piece)).mean())
        self.update_seconds.append(time.perf_counter() - began)
        return sampled


def rates(functions: Mapping[str, Callable[[], int]], repeats: int) -> dict[str, dict[str, float]]:
    """Ids per second of each, taking turns."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            count = function()
            if turn:  # the first is a warm-up
                found[name].append(count / (time.perf_counter() - began))
    return {name: spread(values) for name, values in found.items()}


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two runs of 32 rollouts, to see that it works; nothing is saved")
    quick = parser.parse_args().quick
    count, repeats = (32, 2) if quick else (256, 9)
    config = preset("tiny", SHAPE)
    assert config.moe is not None
    model = Transformer(config).initialise(0).eval()
    quantised = replace(config, moe=replace(config.moe, expert_weights="mxfp4", expert_inputs="mxfp8"))
    with Bench() as bench:
        full, rounded = Steps(config, count, bench), Steps(quantised, count, bench)
        found = rates({"sampler": full.iteration, "raw": Decoding(model, count).run, "plain": lambda: plain(model, count), "step": full.run,
                       "quantised_step": rounded.run}, repeats)
    for name, each in found.items():
        print(f"{name:15} {each['median']:10,.0f} ids/s  ({each['min']:,.0f} to {each['max']:,.0f})")
    middle = {name: each["median"] for name, each in found.items()}
    update, rounded_update = (statistics.median(each.update_seconds[1:]) for each in (full, rounded))
    told = {"times_plain": middle["sampler"] / middle["plain"], "share_of_raw": middle["sampler"] / middle["raw"],
            "cost_of_quantised_experts": middle["step"] / middle["quantised_step"] - 1,
            "cost_of_quantised_experts_in_updates": rounded_update / update - 1}
    print("the sampler, grading, is {times_plain:.1f} x plain PyTorch and {share_of_raw:.0%} of raw decoding; quantised experts cost "
          "{cost_of_quantised_experts:.1%} of a step, {cost_of_quantised_experts_in_updates:.1%} of its updates".format(**told))
    if not quick:
        save("rollouts", {"ids_per_second": found, **told, "parameters": config.num_parameters()})


if __name__ == "__main__":
    main()
