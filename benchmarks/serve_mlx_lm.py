"""How fast does the engine's model decode and read a prompt beside mlx-lm on the CPU, same weights, same machine, same run?

Both read a K3 checkpoint in the released layout with the weights as stored and run in this process, in turns. mlx-lm has no other way to
run K3 on a processor than MLX's own CPU backend, which is not what MLX was made for: this is a peer by name, not a bar to clear.

    OMP_NUM_THREADS=2 python benchmarks/serve_mlx_lm.py CHECKPOINT
    … --prompt 32 --steps 2 --runs 1          (a short look; nothing is saved)
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import save

from gnomon.model.inference import InferenceModel
from gnomon.model.inference_state import PackedRows

Turn = Callable[[], tuple[float, float]]


def ours(folder: Path, tokens: list[int], steps: int) -> Turn:
    """A function that reads the prompt and decodes; tokens per second of both."""
    model = InferenceModel.load(folder)
    pages = -(-(len(tokens) + steps + 1) // 64)

    def run() -> tuple[float, float]:
        pool, at, seen = model.new_pool(1, pages * 64, dtype=torch.bfloat16), tokens, 0

        def step() -> int:
            rows = PackedRows(tokens=torch.tensor(at), bounds=torch.tensor([0, len(at)]), past=torch.tensor([seen]),
                              slots=torch.zeros(1, dtype=torch.int64), pages=torch.arange(pages, dtype=torch.int32)[None])
            logits = model.forward(rows, pool).logits
            assert logits is not None
            return int(logits[0].argmax())

        start = time.perf_counter()
        at, seen = [step()], len(tokens)
        middle = time.perf_counter()
        for _ in range(steps):
            at, seen = [step()], seen + 1
        return len(tokens) / (middle - start), steps / (time.perf_counter() - middle)

    return run


def theirs(folder: Path, tokens: list[int], steps: int) -> Turn:
    """The same by mlx-lm."""
    import mlx.core as mx
    from mlx_lm import utils

    mx.set_default_device(mx.cpu)
    model, _ = utils.load_model(folder)

    def run() -> tuple[float, float]:
        cache, start = model.make_cache(), time.perf_counter()
        token = int(mx.argmax(model(mx.array([tokens]), cache=cache)[0, -1]))
        middle = time.perf_counter()
        for _ in range(steps):
            token = int(mx.argmax(model(mx.array([[token]]), cache=cache)[0, -1]))
        return len(tokens) / (middle - start), steps / (time.perf_counter() - middle)

    return run


def main() -> None:
    """Print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder in the released layout")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (default: 128)")
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded after it (default: 16)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, in turns (default: 5)")
    asked = parser.parse_args()
    tokens = torch.randint(4096, (asked.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    engines = {"gnomon": ours(asked.checkpoint, tokens, asked.steps), "mlx_lm": theirs(asked.checkpoint, tokens, asked.steps)}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(asked.runs):
        for name, run in engines.items():
            rates[name].append(run())
    result: dict[str, Any] = {}
    for index, kind in enumerate(("prefill", "decode")):
        values = {name: [rate[index] for rate in all_] for name, all_ in rates.items()}
        medians = {name: statistics.median(all_) for name, all_ in values.items()}
        result[kind] = {**medians, "ratio": medians["gnomon"] / medians["mlx_lm"], "runs": values}
        ratio = result[kind]["ratio"]
        print(f"{kind:8} gnomon {medians['gnomon']:8.2f} tok/s, mlx-lm {medians['mlx_lm']:8.2f}, {ratio:.1f} times", flush=True)
    if asked.runs >= 5:
        save("serve_mlx_lm", {"threads": torch.get_num_threads(), "checkpoint": asked.checkpoint.name, "prompt": asked.prompt,
                              "steps": asked.steps, **result})


if __name__ == "__main__":
    main()
