"""Does gnomon train a Kimi-Linear model faster than transformers does, with the same weights, optimiser, batches and losses?

The model is the `kimi_linear` twin of the tour's shape: no depth reads, no latent, the softplus gate. Both sides run plain eager
PyTorch with AdamW; steps alternate, so that a change in the machine's speed touches both.
"""

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from machine import save
from torch import Tensor, nn
from torch.nn import functional

from gnomon.model.config import ModelConfig
from gnomon.model.transformer import Transformer
from gnomon.model.weights import save_pretrained
from gnomon.tour import recipe_file
from gnomon.train.recipe import load

TWIN = (
    "family=kimi_linear", "hidden_act=silu", "attention_residuals=off",
    "mixers.kda.gate_lower_bound=none", "mixers.kda.use_full_rank_gate=false",
    "mixers.mla.q_lora_rank=none", "mixers.mla.mla_use_output_gate=false",
    "moe.routed_expert_hidden_size=none", "moe.routed_scaling_factor=2.446", "moe.num_shared_experts=1",
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


def main() -> None:
    """Alternate steps, check that losses agree, print the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=7, help="counted steps of each side, after one that is not counted")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")

    config = load(recipe_file("tour.toml"), tuple(f"model.{change}" for change in TWIN)).model
    ours, theirs = pair(config)
    sides = {"gnomon": stepper(ours, ours), "transformers": stepper(theirs, lambda tokens: theirs(tokens, use_cache=False).logits)}
    random = torch.Generator().manual_seed(0)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.steps + 1):
        tokens = torch.randint(config.vocab_size // 8, (arguments.rows, arguments.context), generator=random)
        for name, step in sides.items():
            start = time.perf_counter()
            losses[name].append(step(tokens))
            seconds[name].append(time.perf_counter() - start)
    difference = max(abs(a - b) / b for a, b in zip(losses["gnomon"], losses["transformers"], strict=True))
    ratios = [b / a for a, b in zip(seconds["gnomon"][1:], seconds["transformers"][1:], strict=True)]
    tokens_per_step = arguments.rows * arguments.context
    for name in sides:
        rate = tokens_per_step / median(seconds[name][1:])
        print(f"{name:13} {rate:8.0f} tokens/s   loss {losses[name][0]:.5f} to {losses[name][-1]:.5f}")
    print(f"gnomon is {median(ratios):.2f} times as fast (min {min(ratios):.2f}, max {max(ratios):.2f}); "
          f"largest loss difference {difference:.1e}")
    if difference > MAX_LOSS_DIFFERENCE:
        raise SystemExit(f"the losses differ by more than {MAX_LOSS_DIFFERENCE}: these are not the same model")
    save("training_throughput", {"seconds": seconds, "losses": losses, "ratio": median(ratios), "parameters": config.num_parameters()})


if __name__ == "__main__":
    main()
