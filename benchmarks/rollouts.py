"""How fast are rollouts at the shape of a laboratory, beside plain PyTorch, and what does training under quantised experts cost?

A model of about 275,000 parameters, prompts of 20 ids and 28 sampled ones. The sampler of `gnomon.posttrain` runs beside the plain loop:
the same network on the references of every operator, all sequences in one batch, one token a step. The raw rate is the inference model
alone, without drawing or bookkeeping. A training step over the same rollouts is timed with full and with quantised experts.

    OMP_NUM_THREADS=2 python benchmarks/rollouts.py [--quick]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from machine import save

from gnomon.agent.trajectory import Score
from gnomon.kernels.operator import FORCE
from gnomon.model.config import ModelConfig, preset
from gnomon.model.inference import InferenceModel
from gnomon.model.inference_state import PackedRows
from gnomon.model.transformer import Transformer
from gnomon.posttrain.learner import Learner, LearnerConfig, document, stream, token_logprobs
from gnomon.posttrain.policy import Sampler
from gnomon.posttrain.problem import Problem
from gnomon.posttrain.rollout import Rollout, seed_of

SHAPE = ("vocab_size=64", "hidden_size=64", "num_hidden_layers=4", "intermediate_size=64", "mixers.kda.num_heads=2",
         "mixers.kda.head_dim=32", "mixers.mla.num_attention_heads=2", "mixers.mla.q_lora_rank=none", "mixers.mla.kv_lora_rank=32",
         "mixers.mla.qk_nope_head_dim=32", "mixers.mla.qk_rope_head_dim=16", "mixers.mla.v_head_dim=32", "moe.num_experts=8",
         "moe.num_experts_per_token=2", "moe.moe_intermediate_size=32", "moe.num_shared_experts=2", "moe.routed_expert_hidden_size=32",
         "moe.first_k_dense_replace=0")
PROMPT, ANSWER = 20, 28


def grade(sampled: tuple[int, ...], world: object) -> Score:
    """Everything is worth 1."""
    return Score(reward=1.0)


def rollouts(count: int) -> list[Rollout]:
    """Fresh ones."""
    problems = [Problem(id=str(i), prompt=(*range(3, 3 + PROMPT - 1), 30 + i % 30), domain="general", effort="max", grade=grade,
                        max_tokens=ANSWER) for i in range(count)]
    return [Rollout(problem=problem, group=i, member=0, seed=seed_of(i)) for i, problem in enumerate(problems)]


@torch.no_grad()
def plain(model: Transformer, count: int) -> int:
    """The plain loop on references; returns the ids that it sampled."""
    os.environ[FORCE] = "reference"
    try:
        states = model.new_states(count, PROMPT + ANSWER)
        tokens = torch.tensor([r.problem.prompt for r in rollouts(count)])
        for _ in range(ANSWER):
            scores = model(tokens, states=states, last_only=True)[:, -1].log_softmax(-1)
            tokens = torch.multinomial(scores.exp(), 1)
        return count * ANSWER
    finally:
        del os.environ[FORCE]


def raw(model: Transformer, count: int) -> int:
    """The inference model alone, over steps of one id for each sequence."""
    twin = InferenceModel.from_transformer(model)
    each = -(-(PROMPT + ANSWER) // 32)
    pool = twin.new_pool(count, count * each * 32, 32)
    pages = torch.arange(count * each, dtype=torch.int32).view(count, each)
    slots = torch.arange(count)
    for past, width in [(0, PROMPT), *((PROMPT + i, 1) for i in range(ANSWER - 1))]:
        tokens = torch.full((count * width,), 5)
        bounds = torch.arange(0, count * width + 1, width)
        twin.forward(PackedRows(tokens=tokens, bounds=bounds, past=torch.full((count,), past), slots=slots, pages=pages), pool)
    return count * ANSWER


def rate(function: Callable[[], int], repeats: int) -> tuple[float, float]:
    """Median and spread of ids per second."""
    function()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        count = function()
        found.append(count / (time.perf_counter() - began))
    return statistics.median(found), max(found) - min(found)


def training(config: ModelConfig, count: int) -> Callable[[], int]:
    """An update over sampled rollouts; returns how many ids it reads."""
    model = Transformer(config).initialise(0)
    documents = [document(r) for r in Sampler(model).sample(rollouts(count)).finished]
    made = Learner(model, LearnerConfig(), 1000)

    def step() -> int:
        made.update([documents], lambda piece: -token_logprobs(model, stream(piece)).mean())
        return count * (PROMPT + ANSWER - 1)

    return step


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two runs of 32 rollouts, to see that it works; nothing is saved")
    quick = parser.parse_args().quick
    count, repeats = (32, 2) if quick else (256, 7)
    config = preset("tiny", SHAPE)
    assert config.moe is not None
    model = Transformer(config).initialise(0).eval()
    sampler = Sampler(model, slots=count, cache_tokens=count * 64)
    quantised = replace(config, moe=replace(config.moe, expert_weights="mxfp4", expert_inputs="mxfp8"))
    measured = {
        "sampler": rate(lambda: sampler.sample(rollouts(count)).tokens, repeats), "raw": rate(lambda: raw(model, count), repeats),
        "plain": rate(lambda: plain(model, count), repeats), "training": rate(training(config, count), repeats),
        "quantised": rate(training(quantised, count), repeats),
    }
    for name, (median, spread) in measured.items():
        print(f"{name:10} {median:10,.0f} ids/s  (spread {spread:,.0f})")
    times, share = measured["sampler"][0] / measured["plain"][0], measured["sampler"][0] / measured["raw"][0]
    cost = measured["training"][0] / measured["quantised"][0] - 1
    print(f"the sampler is {times:.1f} x plain PyTorch and {share:.0%} of the raw rate; quantised experts cost {cost:.1%} of a step")
    if not quick:
        save("rollouts", {"ids_per_second": {name: median for name, (median, _) in measured.items()}, "times_plain": times,
                          "share_of_raw": share, "cost_of_quantised_experts": cost, "parameters": config.num_parameters()})


if __name__ == "__main__":
    main()
