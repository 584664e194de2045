"""How fast is a training step: against the reference path of the same package, and against transformers?

A whole step of the tour's shape and of one with 30 million parameters runs by the default operators and by the reference ones, with the
tour's optimiser; with fixed routing their losses must agree over 50 steps.

Run it as the command line runs a training: THP_MEM_ALLOC_ENABLE=1 python benchmarks/training_throughput.py (docs/log.md says why).

Against transformers the model is the `kimi_linear` twin of the tour's shape: no depth reads, no latent, the softplus gate. Both sides run
plain eager PyTorch with AdamW; steps alternate, so that a change in the machine's speed touches both.
"""

import argparse
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import RESULTS, save
from torch import Tensor, nn
from torch.nn import functional

from gnomon.data.packing import Batch
from gnomon.kernels import router
from gnomon.kernels.router import reference
from gnomon.model.config import ModelConfig, preset
from gnomon.model.transformer import Transformer
from gnomon.model.weights import save_pretrained
from gnomon.tour import recipe_file
from gnomon.train import balance
from gnomon.train.muon import Muon
from gnomon.train.objective import Objective
from gnomon.train.qk_clip import clip_logits, watch
from gnomon.train.recipe import load
from gnomon.train.units import head_rows

TWIN = (
    "family=kimi_linear", "hidden_act=silu", "attention_residuals=off",
    "mixers.kda.gate_lower_bound=none", "mixers.kda.use_full_rank_gate=false",
    "mixers.mla.q_lora_rank=none", "mixers.mla.mla_use_output_gate=false",
    "moe.routed_expert_hidden_size=none", "moe.routed_scaling_factor=2.446", "moe.num_shared_experts=1",
)
THIRTY_MILLION = (
    "num_hidden_layers=8", "vocab_size=8192", "hidden_size=320", "intermediate_size=960", "attn_res_block_size=2", "moe.num_experts=16",
    "moe.moe_intermediate_size=256", "moe.routed_expert_hidden_size=192", "mixers.kda.num_heads=5", "mixers.mla.num_attention_heads=5",
)
MAX_LOSS_DIFFERENCE = 1e-3  # relative, over all steps: fp32 rounding grows slowly while both models train


def pair(config: ModelConfig) -> tuple[Transformer, nn.Module]:
    """Our model and transformers' model with the same weights."""
    from transformers import AutoModelForCausalLM

    ours = Transformer(config).initialise(0)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(ours.to(torch.bfloat16).float(), Path(folder), quantize=False)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return ours, theirs.train()


def stepper(model: nn.Module, logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], float]:
    """One optimiser step on a batch; returns the loss."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)

    def step(tokens: Tensor) -> float:
        optimizer.zero_grad()
        predicted = logits(tokens)[:, :-1]
        loss = functional.cross_entropy(predicted.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def optimiser_step(config: ModelConfig, kernels: str) -> Callable[[Batch], float]:
    """One whole step as the training loop takes it, by the reference operators or by whichever run here; returns the loss."""
    os.environ["GNOMON_KERNELS"] = kernels
    model, settings = Transformer(config).initialise(0), load(recipe_file("tour.toml"), ())
    objective = Objective(model)
    optimizer = Muon([(n, p) for n, p in model.named_parameters() if p.requires_grad], settings.optimizer, head_rows(config))
    balance.start(model.routers(), settings.balance)
    watch(model.mla_layers())

    def step(batch: Batch) -> float:
        os.environ["GNOMON_KERNELS"] = kernels
        optimizer.zero_grad()
        loss, _ = objective(batch, batch.tokens.numel())
        loss.backward()
        optimizer.clip_gradient()
        balance.update_balance(model.routers(), settings.balance, lambda counts: None)
        optimizer.step(1e-3)
        clip_logits(model.mla_layers(), 100.0, lambda largest: None)
        return float(loss.detach())

    return step


def packed(config: ModelConfig, seed: int, rows: int, context: int) -> Batch:
    """Two documents a row, of a skewed and slightly predictable distribution."""
    draw = torch.Generator().manual_seed(seed)
    stream = (torch.rand(rows, context + 1, generator=draw) ** 3 * config.vocab_size).long()
    stream[:, 1::2] = (stream[:, :-1:2] * 7 + 3) % config.vocab_size
    everywhere = torch.ones(rows, context, dtype=torch.bool)
    bounds = torch.arange(0, rows * context + 1, context // 2, dtype=torch.int32)
    return Batch(tokens=stream[:, :-1], targets=stream[:, 1:], loss_mask=everywhere, token_mask=everywhere, cu_seqlens=bounds)


@contextmanager
def fixed_routing() -> Iterator[None]:
    """Each token's experts follow from its place alone: a near tie that falls the other way would be no error of arithmetic."""
    def route(scores: Tensor, bias: Tensor, choice: reference.Choice) -> tuple[Tensor, Tensor, Tensor]:
        place = torch.arange(len(scores))[:, None] * 5 + torch.arange(choice.k) * 3
        ids = place % scores.shape[1]
        return ids, reference.weigh(scores, ids, choice), torch.ones(len(scores))

    kept, router.route = router.route, route  # type: ignore[assignment]
    try:
        yield
    finally:
        router.route = kept


def paths(name: str, config: ModelConfig, steps: int, rows: int, context: int) -> dict[str, Any]:
    """Seconds of whole steps by both paths, alternating, after one of each that is not counted; and their losses."""
    sides = {kernels: optimiser_step(config, kernels) for kernels in ("auto", "reference")}
    seconds: dict[str, list[float]] = {kernels: [] for kernels in sides}
    losses: dict[str, list[float]] = {kernels: [] for kernels in sides}
    for number in range(steps + 1):
        batch = packed(config, number, rows, context)
        for kernels, step in sides.items():
            start = time.perf_counter()
            losses[kernels].append(step(batch))
            seconds[kernels].append(time.perf_counter() - start)
    os.environ["GNOMON_KERNELS"] = "auto"
    ratio = median(b / a for a, b in zip(seconds["auto"][1:], seconds["reference"][1:], strict=True))
    difference = max(abs(a - b) / b for a, b in zip(losses["auto"], losses["reference"], strict=True))
    print(f"{name}: {config.num_parameters() / 1e6:.1f}M parameters, {rows * context} tokens: {median(seconds['auto'][1:]) * 1e3:.0f} ms a "
          f"step, {ratio:.2f} times as fast as the reference path; largest loss difference over {steps + 1} steps {difference:.1e}")
    return {"seconds": seconds, "losses": losses, "ratio": ratio, "difference": difference, "parameters": config.num_parameters()}


def own_paths(steps: int) -> dict[str, Any]:
    """The default operators against the reference path, at two shapes; the losses with fixed routing."""
    tour, thirty = load(recipe_file("tour.toml"), ()).model, preset("small", THIRTY_MILLION)
    found = {"tour": paths("tour", tour, steps, 8, 512), "30M": paths("30M", thirty, max(5, steps // 2), 8, 512)}
    with fixed_routing():
        found["tour, fixed routing"] = paths("tour, fixed routing", tour, 49, 2, 256)
        found["30M, fixed routing"] = paths("30M, fixed routing", thirty, 49, 2, 256)
    return found


def main() -> None:
    """Alternate steps of both paths and of both libraries, check that losses agree, print the median ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=7, help="counted steps of each side, after one that is not counted")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--only", choices=("paths", "peer"))
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    if arguments.only != "peer":
        result["paths"] = own_paths(arguments.steps)
    if arguments.only != "paths":
        result |= against_transformers(arguments.steps, arguments.rows, arguments.context)
    save("training_throughput", earlier() | result)
    wrong = [name for name, found in result.get("paths", {}).items() if "fixed" in name and found["difference"] > MAX_LOSS_DIFFERENCE]
    if wrong or result.get("difference", 0.0) > MAX_LOSS_DIFFERENCE:
        raise SystemExit(f"losses differ by more than {MAX_LOSS_DIFFERENCE} ({', '.join(wrong) or 'transformers'}): not the same model")


def earlier() -> dict[str, Any]:
    """The halves of the last result, so that one of them can be measured again."""
    path = RESULTS / "training_throughput.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {name: value for name, value in kept.items() if name not in ("benchmark", "machine")}


def against_transformers(steps: int, rows: int, context: int) -> dict[str, Any]:
    """Alternate steps of both libraries."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")

    config = load(recipe_file("tour.toml"), tuple(f"model.{change}" for change in TWIN)).model
    ours, theirs = pair(config)
    sides = {"gnomon": stepper(ours, ours), "transformers": stepper(theirs, lambda tokens: theirs(tokens, use_cache=False).logits)}
    random = torch.Generator().manual_seed(0)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(steps + 1):
        tokens = torch.randint(config.vocab_size // 8, (rows, context), generator=random)
        for name, step in sides.items():
            start = time.perf_counter()
            losses[name].append(step(tokens))
            seconds[name].append(time.perf_counter() - start)
    difference = max(abs(a - b) / b for a, b in zip(losses["gnomon"], losses["transformers"], strict=True))
    ratios = [b / a for a, b in zip(seconds["gnomon"][1:], seconds["transformers"][1:], strict=True)]
    tokens_per_step = rows * context
    for name in sides:
        rate = tokens_per_step / median(seconds[name][1:])
        print(f"{name:13} {rate:8.0f} tokens/s   loss {losses[name][0]:.5f} to {losses[name][-1]:.5f}")
    print(f"gnomon is {median(ratios):.2f} times as fast (min {min(ratios):.2f}, max {max(ratios):.2f}); "
          f"largest loss difference {difference:.1e}")
    return {"seconds": seconds, "losses": losses, "ratio": median(ratios), "difference": difference, "parameters": config.num_parameters()}


if __name__ == "__main__":
    main()
