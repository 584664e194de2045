"""How fast, and how well, does each rule balance 896 experts from a cold start?

    python benchmarks/quantile_balancing.py [--steps 110]

n = 896 experts, k = 16, 16,384 fresh tokens per step, expert means ~ N(0, 0.5). Every rule sees the same batches. The
yardstick is what converged exact quantiles give: the exact quantile iterated on large batches, then frozen, and measured
on the fresh batches. Target: the histogram rule is within 1.3 times of it after at most 2 steps.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from machine import RESULTS, save, spread

from gnomon.model import balance

EXPERTS, CHOSEN, TOKENS, SPREAD = 896, 16, 16_384, 0.5
TARGET, TARGET_STEPS = 1.3, 2
Curves = dict[str, list[float]]


def batch(seed: int, means: torch.Tensor) -> torch.Tensor:
    """Sigmoid scores of fresh tokens."""
    return torch.sigmoid(torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)) + means)


def route(scores: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Load per expert and cutoff per token."""
    top = (scores + bias).topk(CHOSEN + 1, dim=-1)
    return torch.bincount(top.indices[:, :CHOSEN].reshape(-1), minlength=EXPERTS), top.values[:, CHOSEN]


def histogram_rule(scores: torch.Tensor, bias: torch.Tensor, load: torch.Tensor, cutoff: torch.Tensor) -> torch.Tensor:
    """The rule that training uses."""
    histogram = balance.new_histogram(EXPERTS)
    balance.accumulate(histogram, scores, cutoff, bias)
    return balance.quantile_bias(histogram, bias, CHOSEN)


def exact_rule(scores: torch.Tensor, bias: torch.Tensor, load: torch.Tensor, cutoff: torch.Tensor) -> torch.Tensor:
    """One exact alternation per step, on the step's own tokens."""
    return balance.exact_quantile_bias(scores, cutoff, CHOSEN)


def sign_rule(step: float):
    """The fixed-step rule."""
    return lambda scores, bias, load, cutoff: balance.sign_rule(bias, load, step)


def converged_bias(means: torch.Tensor, rounds: int = 30, batches: int = 4) -> torch.Tensor:
    """Exact quantiles iterated to their fixed point on tokens that are not measured later."""
    scores = torch.cat([batch(10_000 + i, means) for i in range(batches)])
    bias = torch.zeros(EXPERTS)
    for _ in range(rounds):
        previous, bias = bias, balance.exact_quantile_bias(scores, route(scores, bias)[1], CHOSEN)
        if (bias - previous).abs().max() < 1e-6:
            break
    return bias


def follow(rules: dict, steps: int, means: torch.Tensor, frozen: torch.Tensor) -> tuple[Curves, dict[str, dict[str, float]]]:
    """MaxVio per step and the seconds per update of each rule, on the same fresh batches."""
    biases = {name: torch.zeros(EXPERTS) for name in rules}
    curves: Curves = {name: [] for name in ["converged exact", *rules]}
    seconds: dict[str, list[float]] = {name: [] for name in rules}
    for step in range(steps):
        scores = batch(step, means)
        curves["converged exact"].append(float(balance.max_violation(route(scores, frozen)[0])))
        for name, rule in rules.items():
            load, cutoff = route(scores, biases[name])
            curves[name].append(float(balance.max_violation(load)))
            started = time.perf_counter()
            biases[name] = rule(scores, biases[name], load, cutoff)
            seconds[name].append(time.perf_counter() - started)
    return curves, {name: spread(values) for name, values in seconds.items()}


def draw(curves: Curves, path: Path) -> None:
    """MaxVio over steps, logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, values in curves.items():
        axes.plot(values, label=name, linestyle="--" if name == "converged exact" else "-", linewidth=1.6)
    axes.set(yscale="log", xlabel="optimiser step", ylabel="MaxVio", title=f"{EXPERTS} experts, top {CHOSEN}, {TOKENS:,} tokens per step")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def table(curves: Curves, seconds: dict[str, dict[str, float]]) -> None:
    """Print MaxVio at a few steps, and the median time of an update."""
    steps = len(curves["histogram"])
    shown = [s for s in (0, 1, 2, 5, 10, 50, 100) if s < steps]
    print("MaxVio at step      " + "".join(f"{s:>9}" for s in shown) + "   s/update")
    for name, values in curves.items():
        time_per_update = f"{seconds[name]['median']:>11.4f}" if name in seconds else ""
        print(f"{name:<20}" + "".join(f"{values[s]:>9.3f}" for s in shown) + time_per_update)


def main() -> int:
    """Run, print, keep; returns 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=110)
    arguments = parser.parse_args()
    means = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(2)) * SPREAD
    rules = {"histogram": histogram_rule, "exact": exact_rule, "sign 1e-3": sign_rule(1e-3), "sign 1e-2": sign_rule(1e-2)}
    curves, seconds = follow(rules, arguments.steps, means, converged_bias(means))
    table(curves, seconds)
    floor = statistics.median(curves["converged exact"])
    after = curves["histogram"][TARGET_STEPS] / floor
    settled = statistics.median(curves["histogram"][TARGET_STEPS:]) / floor
    met = max(after, settled) <= TARGET
    print(f"\nconverged exact quantiles: median {floor:.3f}; histogram after {TARGET_STEPS} steps {after:.2f} times that, "
          f"median from there on {settled:.2f} times; target {TARGET}: {'met' if met else 'MISSED'}")
    save("quantile_balancing", {"curves": curves, "seconds_per_update": seconds, "converged_exact_median": floor,
                                "ratio_after_two_steps": after, "ratio_median": settled, "target": TARGET, "met": met})
    draw(curves, RESULTS / "quantile_balancing.png")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
