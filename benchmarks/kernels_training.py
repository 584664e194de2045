"""How fast are the operators of a training step against their references, and against what ran before them, in one run?

Each operator runs forward and backward at the shapes of the tour and of a model of 30 million parameters. `rate` counts the products
alone, against the time of everything. The memory of the cross-entropy is what its peak adds to the process, against all logits at once.
"""

import argparse
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from machine import repeat, save
from torch import Tensor

from gnomon.kernels import native
from gnomon.kernels.cross_entropy import chunked as chunked_loss
from gnomon.kernels.cross_entropy import cpu as loss
from gnomon.kernels.cross_entropy import reference as loss_reference
from gnomon.kernels.experts import cpu as situ_experts
from gnomon.kernels.experts import grouped
from gnomon.kernels.experts import reference as experts_reference
from gnomon.kernels.linear import cpu as linear
from gnomon.kernels.linear import reference as linear_reference
from gnomon.kernels.newton_schulz import cpu as orthogonal
from gnomon.kernels.newton_schulz import reference as orthogonal_reference
from gnomon.kernels.router import cpu as router
from gnomon.kernels.router import reference as router_reference

Run = Callable[[], object]
LINEAR = {"q, k, v, decay, beta of KDA, tour": (4096, 128, (128, 128, 128, 32, 4)), "one map, tour": (4096, 128, (128,)),
          "q, k, v, decay, beta of KDA, 30M": (4096, 320, (320, 320, 320, 64, 5)),
          "gate and up of the dense layer, 30M": (4096, 320, (960, 960))}
EXPERTS = {"tour": (4096, 4, 16, 64, 64), "30M": (4096, 4, 16, 192, 256), "64 experts, 8 chosen": (4096, 8, 64, 128, 64)}
LOSS = {"tour": (4096, 128, 2048), "30M": (4096, 320, 8192)}
MATRICES = {"per-head blocks of KDA, 30M": (90, 64, 320), "per-head blocks of K3": (8, 128, 7168), "experts, 30M": (16, 256, 192),
            "experts, tour": (144, 64, 64), "one dense map": (1, 960, 320)}
ROUTER = {"tour": (4096, 16, 4), "896 experts, 16 chosen": (2048, 896, 16)}


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Random inputs that ask for gradients, of about unit scale after a product."""
    return [(torch.randn(shape) * shape[-1] ** -0.5).requires_grad_() for shape in shapes]


def both_ways(function: Callable[..., Any], inputs: list[Tensor], *arguments: Any) -> Run:
    """Forward and backward of the results' sum."""
    def run() -> object:
        results = function(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        made = [r for r in results if r.requires_grad]
        return torch.autograd.grad(made, inputs, [torch.ones_like(r) for r in made])
    return run


def compare(title: str, sides: dict[str, Run], products: float = 0.0) -> dict[str, Any]:
    """Seconds of each side, best first; prints one line."""
    seconds = {name: repeat(run, runs=5, warm_up=1) for name, run in sides.items()}
    ours = seconds["c++"]["median"]
    ratios = {name: row["median"] / ours for name, row in seconds.items() if name != "c++"}
    rate = products / ours / 1e9
    print(f"{title:58} {ours * 1e3:8.2f} ms " + (f"{rate:5.0f} GFLOP/s " if products else " " * 14)
          + "  ".join(f"{ratio:.2f} x {name}" for name, ratio in ratios.items()))
    return {"title": title, "seconds": seconds, "ratios": ratios, "gflops": rate}


def linears() -> list[dict[str, Any]]:
    """Maps that share an input."""
    rows = []
    for title, (tokens, width, outs) in LINEAR.items():
        x, *weights = leaves((tokens, width), *((out, width) for out in outs))
        modules = {"c++": linear, "torch": linear_reference}
        sides = {name: both_ways(module.linears, [x, *weights], x, weights) for name, module in modules.items()}
        rows.append(compare(f"linear: {title}", sides, 6.0 * tokens * width * sum(outs)))
    return rows


def experts() -> list[dict[str, Any]]:
    """Routed experts."""
    rows = []
    for title, (tokens, k, count, latent, inner) in EXPERTS.items():
        inputs = leaves((tokens, latent), (count, inner, latent), (count, inner, latent), (count, latent, inner), (tokens, k))
        ids = torch.rand(tokens, count).topk(k, dim=-1).indices
        arguments = (*inputs[:4], ids, inputs[4], 4.0, 25.0)
        sides = {"c++": grouped, "products of torch": situ_experts, "reference": experts_reference}
        runs = {name: both_ways(module.experts, inputs, *arguments) for name, module in sides.items()}
        rows.append(compare(f"experts: {title}", runs, 18.0 * tokens * k * latent * inner))
    return rows


def losses() -> list[dict[str, Any]]:
    """Cross-entropy, with what its peak adds to the memory of the process; the smallest is asked first, since a peak never falls."""
    rows = []
    for title, (tokens, width, words) in LOSS.items():
        hidden, weight = leaves((tokens, width), (words, width))
        targets = torch.randint(0, words, (tokens,))
        modules = {"c++": loss, "chunks of torch": chunked_loss, "all logits": loss_reference}
        runs = {name: both_ways(module.cross_entropy_sum, [hidden, weight], hidden, weight, targets) for name, module in modules.items()}
        peaks = {}
        for name, run in runs.items():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            run()
            peaks[name] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        rows.append(compare(f"cross-entropy: {title}", runs, 6.0 * tokens * width * words) | {"bytes_added_to_peak": peaks,
                    "bytes_of_all_logits": 4 * tokens * words})
        print(f"{'':58} peak grows by " + ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in peaks.items())
              + f"; all logits are {4e-6 * tokens * words:.0f} MB")
    return rows


def one_by_one(batch: Tensor) -> list[Tensor]:
    """The reference on one matrix after another."""
    return [orthogonal_reference.newton_schulz(each) for each in batch]


def matrices() -> list[dict[str, Any]]:
    """Newton-Schulz on batches, against the reference on the batch and matrix by matrix."""
    rows = []
    for title, shape in MATRICES.items():
        batch, small, large = torch.randn(shape), min(shape[1:]), max(shape[1:])
        sides = {"c++": partial(orthogonal.newton_schulz, batch), "reference": partial(orthogonal_reference.newton_schulz, batch),
                 "reference in a loop": partial(one_by_one, batch)}
        rows.append(compare(f"Newton-Schulz: {title}", sides, 5.0 * shape[0] * (4.0 * small * small * large + 2.0 * small**3)))
    return rows


def routers() -> list[dict[str, Any]]:
    """The choice forward and backward, and the counts."""
    rows = []
    for title, (tokens, count, k) in ROUTER.items():
        scores, bias, choice = torch.rand(tokens, count, requires_grad=True), torch.randn(count) * 0.1, router_reference.Choice(k)
        modules = {"c++": router, "reference": router_reference}
        runs = {name: both_ways(module.route, [scores], scores, bias, choice) for name, module in modules.items()}
        rows.append(compare(f"router: {title}", runs))
        fixed, cutoff = scores.detach(), torch.rand(tokens)
        arguments = (fixed, cutoff, None, -1.0, 0.002, 1000)
        counts = {name: partial(module.required_bias_histogram, *arguments) for name, module in modules.items()}
        rows.append(compare(f"router's histogram: {title}", counts))
    return rows


def main() -> None:
    """Measure all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"cross_entropy": losses, "linear": linears, "experts": experts, "newton_schulz": matrices, "router": routers}
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=tuple(parts), help="one operator, printed and not kept")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.only:
        parts[arguments.only]()
        return
    save("kernels_training", {"threads": torch.get_num_threads(), "instruction_set": native.instruction_set(),
                              **{name: part() for name, part in parts.items()}})


if __name__ == "__main__":
    main()
