"""How fast is KDA in C++ beside its PyTorch forms and the peers' CPU paths, does its time grow with the tokens alone, what does it hold?

The peers are flash-linear-attention's naive chunk function, read from its file, and transformers' chunk function: what runs on a CPU
without this package. Each form's outputs (and gradients, where they are timed) are compared with the token-by-token recurrence first;
then the forms take turns, so that a change in the machine's speed touches all.
"""

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from machine import repeat, save, spread
from torch import Tensor

from gnomon.kernels import native
from gnomon.kernels.kda import cpu, fused, reference

Form = Callable[..., tuple[Tensor, Any]]
TOLERANCE = 1e-4  # relative, of outputs and gradients against the recurrence
HEADS, WIDTH, TIME, LONG = 8, 128, 4096, 65536
DECODE_HEADS, DECODE_LAYERS = 12, 15
OURS = ("fused", "C++")
PARTS = ["forward", "forward and backward", "peak bytes", "linearity", "decode"]


def forms() -> dict[str, Form]:
    """Every form that can run here, the peers last."""
    found: dict[str, Form] = {"fused": lambda *x: fused.chunk(*x, None, None, -5.0)}
    if native.unavailable() is None:
        found["C++"] = cpu.chunk
    if (naive := naive_chunk()) is not None:
        found["fla naive"] = lambda *x: naive(*x, scale=1.0, output_final_state=True)
    try:
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

        # It scales the queries itself.
        found["transformers"] = lambda q, *x: chunk_kimi_delta_attention(q * q.shape[-1] ** 0.5, *x)
    except ImportError as error:
        print(f"transformers is left out: {error}", file=sys.stderr)
    return found


def naive_chunk() -> Form | None:
    """`fla/ops/kda/naive.py` of the installed package, without importing the package, which needs Triton."""
    package = PathFinder.find_spec("fla", [str(Path(sys.prefix) / "peers"), *sys.path])
    if package is None or not package.submodule_search_locations:
        print("flash-linear-attention is left out: it is not installed", file=sys.stderr)
        return None
    path = f"{next(iter(package.submodule_search_locations))}/ops/kda/naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_kda", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_chunk_kda  # type: ignore[no-any-return]


def draw(time_steps: int, heads: int, width: int) -> list[Tensor]:
    """q, k, v, g, beta of one document, asking for gradients."""
    q, k = reference.prepare(*(torch.randn(1, time_steps, heads, width) for _ in range(2)))
    g = reference.decay(torch.randn(1, time_steps, heads, width), torch.zeros(heads), -5.0)
    inputs = [q, k, torch.randn(1, time_steps, heads, width), g, torch.rand(1, time_steps, heads)]
    return [x.detach().requires_grad_() for x in inputs]


def forward(form: Form, inputs: list[Tensor]) -> Tensor:
    """Outputs without a graph."""
    with torch.no_grad():
        return form(*inputs)[0]


def both(form: Form, inputs: list[Tensor], d_o: Tensor | None = None) -> list[Tensor]:
    """Outputs and gradients; the gradient of the outputs, all ones, may be there already, as it is in a model."""
    o, _ = form(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, torch.ones_like(o) if d_o is None else d_o)]


def check(form: Form) -> float:
    """The largest distance to the recurrence in fp64 on a small input, relative to each tensor's norm."""
    inputs = draw(128, 2, 32)
    exact = both(reference.recurrent, [x.detach().double().requires_grad_() for x in inputs])
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(both(form, inputs), exact, strict=True))


def in_turns(run: Callable[..., Any], candidates: dict[str, Form], inputs: list[Tensor], runs: int) -> dict[str, Any]:
    """Seconds of each form, all of them once per round after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(runs + 1):
        for name, form in candidates.items():
            start = time.perf_counter()
            run(form, inputs)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: spread(taken) for name, taken in seconds.items()}


def peak_bytes(name: str) -> int:
    """What forward and backward hold at most beyond the inputs, in a process of their own."""
    program = [sys.executable, __file__, "--peak", name]
    return int(subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()[-1])


def report_peak(name: str) -> None:
    """Run once small, then once in full, and print by how much the largest resident size rose over the inputs."""
    form = forms()[name]
    both(form, draw(128, 2, 32))
    inputs = draw(TIME, HEADS, WIDTH)
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the largest resident size starts again from the present one
    both(form, inputs)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    print(int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024 - resident)


def linearity(runs: int) -> dict[str, Any]:
    """Seconds per token of C++ at the short and the long length; gradients with fewer heads, for their memory."""
    result: dict[str, Any] = {}
    for name, run, heads in (("forward", forward, HEADS), ("forward and backward", both, 2)):
        per_token = {}
        for length in (TIME, LONG):
            arguments: list[Any] = [draw(length, heads, WIDTH)]
            if run is both:
                arguments.append(torch.ones_like(arguments[0][2]))
            per_token[length] = repeat(partial(run, cpu.chunk, *arguments), runs)["median"] / length
            del arguments
        result[name] = {"heads": heads, "seconds per token": per_token, "ratio": per_token[LONG] / per_token[TIME]}
    return result


def decode_calls(sequences: int, tokens: int) -> dict[str, Callable[[], object]]:
    """One decode call per layer, for layers whose states take turns: the library's, and the same by our PyTorch operators."""
    heads, taps, layers, count = DECODE_HEADS, 4, DECODE_LAYERS, sequences * tokens
    channels, columns, library = 3 * heads * WIDTH, heads * WIDTH, native.library()
    weights = [torch.randn(taps, channels), torch.zeros(heads), torch.randn(columns), torch.rand(WIDTH)]
    rows = [torch.randn(count, n) for n in (channels, columns, heads, columns)]
    conv, matrix = torch.randn(layers, sequences, taps - 1, channels), torch.randn(layers, sequences, heads, WIDTH, WIDTH)
    bounds, slots, out = torch.arange(sequences + 1) * tokens, torch.arange(sequences), torch.empty(count, columns)
    per_head = (rows[0], rows[1].view(count, heads, WIDTH), rows[2], rows[3].view(count, heads, WIDTH))

    def native_layers() -> None:
        for at in range(layers):
            library.gnomon_kda_decode(
                *(x.data_ptr() for x in weights), -5.0, 1e-5, heads, WIDTH, taps, bounds.data_ptr(), sequences,
                *(x.data_ptr() for x in rows), conv[at].data_ptr(), matrix[at].data_ptr(), slots.data_ptr(), 1, None, 0, None, None, None,
                out.data_ptr(), native.threads(),
            )  # fmt: skip

    def plain_layers() -> None:
        for at in range(layers):
            reference.decode(*per_head, conv[at], matrix[at], weights[0].mT, *weights[1:], -5.0, 1e-5, bounds)

    return {"C++": native_layers, "PyTorch operators": plain_layers}


def decode(runs: int) -> dict[str, Any]:
    """Seconds of one layer: one token, a few of one sequence, one of several sequences."""
    result = {}
    for name, sequences, tokens in (("one token", 1, 1), ("four tokens", 1, 4), ("eight sequences", 8, 1)):
        times = {}
        for form, run in decode_calls(sequences, tokens).items():
            times[form] = {key: x if key == "runs" else x / DECODE_LAYERS for key, x in repeat(run, runs).items()}
        moved = 2 * sequences * DECODE_HEADS * WIDTH * WIDTH * 4
        result[name] = {**times, "state bytes per second": moved / times["C++"]["median"]}
    return result


def measure(part: str, runs: int, candidates: dict[str, Form]) -> Any:
    """One part of the result."""
    ours = {name: form for name, form in candidates.items() if name in OURS}
    if part == "forward":
        return in_turns(forward, candidates, draw(TIME, HEADS, WIDTH), runs)
    if part == "forward and backward":
        return in_turns(both, ours, draw(TIME, HEADS, WIDTH), runs)
    if part == "peak bytes":
        return {name: peak_bytes(name) for name in ours}
    return {"linearity": linearity, "decode": decode}[part](runs)


def main() -> None:
    """Compare, then measure; parts that are not asked for keep what an earlier run on this machine found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure, all by default")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peak", metavar="FORM", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.peak:
        report_peak(arguments.peak)
        return
    candidates = forms()
    distances = {name: check(form) for name, form in candidates.items()}
    if worst := {name: d for name, d in distances.items() if not d < TOLERANCE}:
        raise SystemExit(f"these forms do not compute KDA: {worst}")
    instructions = None if native.unavailable() else native.instruction_set()
    for part in arguments.parts:
        found = measure(part, arguments.runs, candidates)
        print(part, json.dumps(found, indent=1))
        shape = f"B=1, T={TIME}, H={HEADS}, K=V={WIDTH}, fp32"
        facts = {"threads": torch.get_num_threads(), "instructions": instructions, "distance": distances, "shape": shape}
        save("kernels_kda", {**facts, part: found}, keep=True)


if __name__ == "__main__":
    main()
