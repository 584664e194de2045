"""How fast, and how well, does each rule balance 896 experts from a cold start?

    python benchmarks/quantile_balancing.py [--steps 120] [--out build/benchmarks]

n = 896 experts, k = 16, 16,384 fresh tokens per step, expert means ~ N(0, 0.5). Every rule sees the same batches. The
yardstick is what converged exact quantiles give: the exact quantile iterated on large batches, then frozen, and measured
on the fresh batches. Target: the histogram rule is within 1.3 times of it after at most 2 steps.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from gnomon.model import balance

EXPERTS, CHOSEN, TOKENS, SPREAD = 896, 16, 16_384, 0.5
TARGET, TARGET_STEPS = 1.3, 2


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


def follow(rules: dict, steps: int, means: torch.Tensor, frozen: torch.Tensor) -> tuple[dict[str, list[float]], dict[str, float]]:
    """MaxVio per step and median seconds per update of each rule, on the same fresh batches."""
    biases = {name: torch.zeros(EXPERTS) for name in rules}
    curves: dict[str, list[float]] = {name: [] for name in ["converged exact", *rules]}
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
    return curves, {name: statistics.median(values) for name, values in seconds.items()}


def draw(curves: dict[str, list[float]], path: Path) -> None:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    means = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(2)) * SPREAD
    rules = {"histogram": histogram_rule, "exact": exact_rule, "sign 1e-3": sign_rule(1e-3), "sign 1e-2": sign_rule(1e-2)}
    curves, seconds = follow(rules, arguments.steps, means, converged_bias(means))
    shown = [s for s in (0, 1, 2, 5, 10, 50, 100) if s < arguments.steps]
    print("MaxVio at step      " + "".join(f"{s:>9}" for s in shown) + "   s/update")
    for name, values in curves.items():
        print(f"{name:<20}" + "".join(f"{values[s]:>9.3f}" for s in shown) + (f"{seconds[name]:>11.4f}" if name in seconds else ""))
    floor = statistics.median(curves["converged exact"])
    settled = curves["histogram"][TARGET_STEPS:]
    ratio = statistics.median(settled) / floor
    at_target = curves["histogram"][TARGET_STEPS] / floor
    met = at_target <= TARGET and ratio <= TARGET
    print(f"\nconverged exact quantiles: median {floor:.3f}; histogram after {TARGET_STEPS} steps: "
          f"{curves['histogram'][TARGET_STEPS]:.3f} ({at_target:.2f}x), median from there on {ratio:.2f}x, "
          f"worst {max(settled) / floor:.2f}x; target {TARGET}x: {'met' if met else 'MISSED'}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = {"machine": platform.machine(), "system": platform.system(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    result = {"question": __doc__.splitlines()[0], "curves": curves, "seconds_per_update": seconds, "floor": floor,
              "ratio_after_two_steps": at_target, "ratio_median": ratio, "met": met, "machine": machine}
    (arguments.out / "quantile_balancing.json").write_text(json.dumps(result, indent=1))
    draw(curves, arguments.out / "quantile_balancing.png")
    print(f"written: {arguments.out}/quantile_balancing.json and .png")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
