"""What this machine does: memory, products, small operators, and short runs of small models; prints one JSON object.

`gnomon plan --calibrate` runs this in a process of its own (`python -m gnomon.measure`), because the planner itself never loads torch.
Peaks are the best of several repetitions, times of runs their median; all of it takes well under half a minute.
Read next: `gnomon/plan/local.py`.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from gnomon.data.packing import Batch
from gnomon.kernels import native
from gnomon.model.config import ModelConfig
from gnomon.model.generate import Sampling, draw, generate
from gnomon.model.inference import runner
from gnomon.model.transformer import Transformer
from gnomon.plan.local import DRAWN, SAMPLED, Shape, shapes
from gnomon.train import balance
from gnomon.train.muon import Muon
from gnomon.train.objective import Objective
from gnomon.train.qk_clip import clip_logits, watch
from gnomon.train.settings import BalanceConfig, MuonConfig
from gnomon.train.units import head_rows

READ_BYTES = 256 << 20
PRODUCT = 1024
REPEATS = 5
CLIP = 100.0  # the recipes' default


def seconds(run: Callable[[], object], repeats: int = REPEATS, warm_up: int = 1) -> float:
    """Median time of a call after warming up."""
    for _ in range(warm_up):
        run()
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return median(taken)


def best_seconds(run: Callable[[], object]) -> float:
    """Shortest time of a call: what the hardware can do, whatever else the machine was at."""
    run()
    taken = []
    for _ in range(3 * REPEATS):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def read_bandwidth() -> float:
    """Bytes per second at which a sum reads memory beyond the caches."""
    block = torch.ones(READ_BYTES // 4)
    return READ_BYTES / best_seconds(block.sum)


def product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a square product."""
    a, b = torch.randn(PRODUCT, PRODUCT, dtype=dtype), torch.randn(PRODUCT, PRODUCT, dtype=dtype)
    return 2 * PRODUCT**3 / best_seconds(lambda: a @ b)


def operator_seconds() -> float:
    """Time of a small operator: what every call costs whatever it computes."""
    a = torch.ones(64)
    return seconds(lambda: [a + a for _ in range(1000)]) / 1000


def batch(config: ModelConfig, tokens: int, context: int) -> Batch:
    """Random documents of the context's length, all learnt."""
    rows = tokens // context
    ids = torch.randint(config.vocab_size, (rows, context + 1), generator=torch.Generator().manual_seed(0))
    bounds = torch.arange(0, tokens + 1, context, dtype=torch.int32)
    whole = torch.ones(rows, context, dtype=torch.bool)
    return Batch(tokens=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous(), loss_mask=whole, token_mask=whole, cu_seqlens=bounds)


def training_seconds(shape: Shape, repeats: int = 3) -> float:
    """Time of an optimiser step: forward, backward, balance, clip, Muon."""
    model = Transformer(shape.config).initialise(0)
    settings = BalanceConfig()
    balance.start(model.routers(), settings)
    watch(model.mla_layers())
    objective = Objective(model)
    optimizer = Muon([(name, p) for name, p in model.named_parameters() if p.requires_grad], MuonConfig(), head_rows(shape.config))
    taken = batch(shape.config, shape.batch_tokens, shape.context)

    def step() -> None:
        optimizer.zero_grad()
        objective(taken, shape.batch_tokens)[0].backward()
        optimizer.clip_gradient()
        balance.update_balance(model.routers(), settings, lambda tensor: None)
        optimizer.step(1e-4)
        if model.mla_layers():
            clip_logits(model.mla_layers(), CLIP, lambda tensor: None)

    return seconds(step, repeats)


def drawing_seconds(vocabulary: int) -> float:
    """Time to draw a token from logits."""
    logits, random = torch.randn(vocabulary), torch.Generator().manual_seed(0)
    return seconds(lambda: draw(logits, Sampling(temperature=0.8), random), 30, 5)


def sampling_seconds(shape: Shape, tokens: int = SAMPLED) -> float:
    """Time per token of one sequence, as `gnomon sample` writes it, after a prompt of the shape's context."""
    model = runner(Transformer(shape.config).initialise(0).eval())
    prompt = [1 + i % (shape.config.vocab_size - 1) for i in range(shape.context)]
    taken, last = [], 0.0
    for _ in generate(model, prompt, Sampling(max_tokens=tokens, temperature=0.8)):
        now = time.perf_counter()
        taken.append(now - last)
        last = now
    return median(taken[8:])


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {"processor": _processor(), "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(), "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": f"{platform.system()} {platform.release()}", "torch": torch.__version__,
            "library": native.unavailable() is None}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def measure(chosen: Sequence[Shape]) -> dict[str, Any]:
    """Everything, as plain data."""
    torch.manual_seed(0)
    return {
        "machine": machine(), "read_bytes_per_second": read_bandwidth(), "operator_seconds": operator_seconds(),
        "flops": {"fp32": product_rate(torch.float32), "bf16": product_rate(torch.bfloat16)},
        "drawing": {str(size): drawing_seconds(size) for size in DRAWN},
        "training": [training_seconds(shape) for shape in chosen],
        "sampling": [median(sampling_seconds(shape) for _ in range(3)) for shape in chosen],
    }


def main() -> int:
    """Measure the shapes named on the command line, or those of the calibration."""
    begun = time.perf_counter()
    names = sys.argv[1:]
    known = shapes()
    found = measure([known[name] for name in names] if names else [shape for shape in known.values() if shape.calibrates])
    sys.stdout.write(json.dumps({**found, "seconds": time.perf_counter() - begun}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
