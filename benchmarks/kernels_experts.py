"""How close do routed experts with MXFP4 weights come to the machine: to its memory for few tokens, to its arithmetic for many?

Experts of the medium K3 shape (latent 512, inner 512, 64 experts, top 8), several layers in turn so that weights come from memory.
Few tokens: bytes of the experts that are used, per second, against the plain reading of a buffer with the same threads in the same
run. Many tokens: operations per second against torch's bf16 product of 2048 x 2048 matrices, and against our experts with bf16 weights.

    OMP_NUM_THREADS=2 python benchmarks/kernels_experts.py
"""

import ctypes
import statistics
import time
from collections.abc import Callable

import torch
from machine import save

from gnomon.kernels import mxfp, native
from gnomon.kernels.packed.matrix import PackedExperts, WeightBuffer

EXPERTS, CHOSEN, LATENT, INNER, LAYERS = 64, 8, 512, 512, 8


def layer(draw: torch.Generator) -> PackedExperts:
    """One layer of random experts as stored."""
    gate, up = (mxfp.encode_mxfp4(torch.randn(EXPERTS, INNER, LATENT, generator=draw) / LATENT**0.5) for _ in range(2))
    return PackedExperts.of_mxfp4(gate, up, mxfp.encode_mxfp4(torch.randn(EXPERTS, LATENT, INNER, generator=draw) / INNER**0.5))


def reader(size: int) -> Callable[[], float]:
    """A function that reads `size` bytes once and returns bytes per second."""
    buffer, parity = WeightBuffer(size), ctypes.c_uint64()
    ctypes.memset(buffer.address, 1, size)

    def read() -> float:
        start = time.perf_counter()
        native.library().gnomon_buffer_read(buffer.address, size, ctypes.addressof(parity), native.threads())
        return size / (time.perf_counter() - start)

    return read


def seconds_per_layer(layers: list[PackedExperts], tokens: int, draw: torch.Generator) -> tuple[float, float]:
    """Seconds and bytes of one layer on average over all of them, each with a routing of its own.

    The C++ function is called as a layer calls it, without the operator's checks.
    """
    z, y = torch.randn(tokens, LATENT, generator=draw), torch.empty(tokens, LATENT)
    routes = [torch.rand(tokens, EXPERTS, generator=draw).topk(CHOSEN, dim=-1).indices.int() for _ in layers]
    weights, refused = torch.full((tokens, CHOSEN), 1.0 / CHOSEN), ctypes.c_int64()
    views, size = [stack.view(4.0, 25.0) for stack in layers], layers[0].bytes / EXPERTS
    run = native.library().gnomon_experts_forward
    start = time.perf_counter()
    for view, ids in zip(views, routes, strict=True):
        run(ctypes.addressof(view), z.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens, CHOSEN, 0, y.data_ptr(),
            ctypes.addressof(refused), native.threads())
    elapsed = time.perf_counter() - start
    return elapsed / len(layers), size * statistics.mean(len(ids.unique()) for ids in routes)


def product_rate(n: int = 2048) -> float:
    """Operations per second of torch's bf16 product."""
    a, b = (torch.randn(n, n).bfloat16() for _ in range(2))
    start = time.perf_counter()
    a @ b
    return 2 * n**3 / (time.perf_counter() - start)


def main(runs: int = 7) -> None:
    """Print and save medians."""
    draw = torch.Generator().manual_seed(0)
    layers, read = [layer(draw) for _ in range(LAYERS)], reader(1 << 28)
    flops = 2 * 3 * LATENT * INNER * CHOSEN
    results = {}
    for tokens in (1, 2, 4, 8, 16, 64, 512, 2048):
        bandwidth, memory, rate, reached = [], [], [], []
        for turn in range(runs + 1):
            memory.append(read() if tokens <= 16 else 0.0)
            seconds, size = seconds_per_layer(layers, tokens, draw)
            bandwidth.append(size / seconds)
            reached.append(tokens * flops / seconds)
            rate.append(product_rate() if tokens > 16 else 0.0)
            if not turn:
                bandwidth, memory, rate, reached = [], [], [], []
        row = {"bytes_per_second": statistics.median(bandwidth), "memory": statistics.median(memory),
               "operations_per_second": statistics.median(reached), "torch_bf16_product": statistics.median(rate), "runs": runs}
        results[tokens] = row
        if tokens <= 16:
            print(f"{tokens:5} tokens: {row['bytes_per_second'] / 1e9:5.1f} GB/s of {row['memory'] / 1e9:5.1f}, "
                  f"{row['bytes_per_second'] / row['memory']:.0%}", flush=True)
        else:
            print(f"{tokens:5} tokens: {row['operations_per_second'] / 1e9:5.0f} Gflop/s, torch's bf16 product "
                  f"{row['torch_bf16_product'] / 1e9:5.0f}, {row['operations_per_second'] / row['torch_bf16_product']:.0%}", flush=True)
    save("kernels_experts", {"threads": torch.get_num_threads(), "instructions": native.instruction_set(),
                             "shape": {"experts": EXPERTS, "chosen": CHOSEN, "latent": LATENT, "inner": INNER, "layers": LAYERS},
                             "tokens": results})


if __name__ == "__main__":
    main()
