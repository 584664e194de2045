"""How long do forward and backward of KDA take in each of its forms, beside transformers' form in plain PyTorch?

The inputs are those of a small model in training: packed rows, four heads. Each form's outputs and gradients are compared with the
token-by-token recurrence first; then the forms take turns, so that a change in the machine's speed touches all.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import save, spread
from torch import Tensor

from gnomon.kernels import native
from gnomon.kernels.kda import cpu, fused, reference

Form = Callable[..., tuple[Tensor, Any]]
TOLERANCE = 1e-4  # relative, of outputs and gradients against the recurrence


def forms() -> dict[str, Form]:
    """Every form that can run here, transformers' last."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Any]:
        return chunk_kimi_delta_attention(q * q.shape[-1] ** 0.5, k, v, g, beta)  # it scales the queries itself

    found: dict[str, Form] = {
        "reference": lambda *x: reference.chunk(*x, None, None, -5.0),
        "fused": lambda *x: fused.chunk(*x, None, None, -5.0),
    }
    if native.unavailable() is None:
        found["C++"] = cpu.chunk
    return {**found, "transformers": theirs}


def draw(rows: int, time_steps: int, width: int) -> list[Tensor]:
    """q, k, v, g, beta that ask for gradients."""
    q, k = reference.prepare(*(torch.randn(rows, time_steps, 4, width) for _ in range(2)))
    g = reference.decay(torch.randn(rows, time_steps, 4, width), torch.zeros(4), -5.0)
    inputs = [q, k, torch.randn(rows, time_steps, 4, width), g, torch.rand(rows, time_steps, 4)]
    return [x.detach().requires_grad_() for x in inputs]


def run(form: Form, inputs: list[Tensor]) -> tuple[list[Tensor], float, float]:
    """Outputs with gradients, seconds of the forward pass, seconds of both."""
    start = time.perf_counter()
    o, _ = form(*inputs)
    middle = time.perf_counter()
    grads = torch.autograd.grad(o, inputs, torch.ones_like(o))
    return [o.detach(), *grads], middle - start, time.perf_counter() - start


def check(form: Form) -> float:
    """The largest distance to the recurrence on a small input, relative to each tensor's norm."""
    inputs = draw(2, 100, 32)
    exact, _, _ = run(reference.recurrent, inputs)
    ours, _, _ = run(form, inputs)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))


def main() -> None:
    """Compare, then measure each form in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    candidates = forms()
    distances = {name: check(form) for name, form in candidates.items()}
    if worst := {name: d for name, d in distances.items() if not d < TOLERANCE}:
        raise SystemExit(f"these forms do not compute KDA: {worst}")
    results: dict[str, Any] = {}
    for rows, time_steps, width in ((8, 512, 32), (8, 512, 64)):
        inputs, seconds = draw(rows, time_steps, width), {name: ([], []) for name in candidates}
        for turn in range(runs + 1):
            for name, form in candidates.items():
                _, forward, both = run(form, inputs)
                if turn:  # the first is a warm-up
                    seconds[name][0].append(forward)
                    seconds[name][1].append(both)
        shape = f"{rows} x {time_steps} tokens, 4 heads of {width}"
        results[shape] = {name: {"forward": spread(f), "both": spread(b)} for name, (f, b) in seconds.items()}
        print(shape)
        for name, result in results[shape].items():
            forward, both = result["forward"], result["both"]
            print(
                f"  {name:13} forward {forward['median'] * 1e3:7.1f} ms   "
                f"both {both['median'] * 1e3:7.1f} ms ({both['min'] * 1e3:.1f} to {both['max'] * 1e3:.1f})"
            )
    instructions = None if native.unavailable() else native.instruction_set()
    save("kda_forms", {"threads": torch.get_num_threads(), "instructions": instructions, "distance": distances, "seconds": results})


if __name__ == "__main__":
    main()
