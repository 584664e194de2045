"""Quantile Balancing beside the sign rule: how busy the busiest expert is, step by step, on scores that favour some experts."""

import torch

from gnomon.model.balance import accumulate, max_violation, new_histogram, quantile_bias, sign_rule

EXPERTS, CHOSEN, TOKENS = 64, 4, 4096


def scores(step: int, popularity: torch.Tensor) -> torch.Tensor:
    """Fresh sigmoid scores of a batch."""
    noise = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(step))
    return torch.sigmoid(noise + popularity)


def main() -> None:
    """Five steps of each rule from a cold start."""
    popularity = 0.5 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(99))
    biases = {"quantile": torch.zeros(EXPERTS), "sign": torch.zeros(EXPERTS)}
    print("step   " + "".join(f"{name:>10}" for name in biases) + "   (0 is perfect balance)")
    for step in range(5):
        batch, violations = scores(step, popularity), []
        for name, bias in biases.items():
            values, ids = (batch + bias).topk(CHOSEN + 1, dim=-1)
            load = torch.bincount(ids[:, :CHOSEN].flatten(), minlength=EXPERTS)
            violations.append(float(max_violation(load)))
            if name == "quantile":
                histogram = new_histogram(EXPERTS)
                accumulate(histogram, batch, values[:, -1], bias)
                biases[name] = quantile_bias(histogram, bias, CHOSEN)
            else:
                biases[name] = sign_rule(bias, load, 1e-3)
        print(f"{step:4}   " + "".join(f"{violation:10.2f}" for violation in violations))


if __name__ == "__main__":
    main()
