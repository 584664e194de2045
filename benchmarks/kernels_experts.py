"""How close do routed experts with MXFP4 weights come to the machine: to its memory for few tokens, to its arithmetic for many?

Experts of the medium K3 shape (latent 512, inner 512, 64 experts, top 8), several layers in turn so that weights come from memory.
Few tokens: bytes of the experts that are used, per second, against the plain reading of a buffer with the same threads in the same
run. Many tokens: operations per second against torch's bf16 and fp32 products of 2048 x 2048 matrices.

    OMP_NUM_THREADS=2 python benchmarks/kernels_experts.py
"""

import ctypes
import statistics
import time
from collections.abc import Callable

import torch
from machine import described, save

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


def product_rate(kind: torch.dtype, n: int) -> float:
    """Operations per second of torch's product of two n x n matrices."""
    a, b = (torch.randn(n, n).to(kind) for _ in range(2))
    start = time.perf_counter()
    a @ b
    return 2 * n**3 / (time.perf_counter() - start)


def width(kind: torch.dtype) -> int:
    """How large a product is timed: where torch has no fast one of this kind (bf16 without AVX-512), a small one takes long enough."""
    return 2048 if max(product_rate(kind, 256) for _ in range(3)) > 1e10 else 256


def main(runs: int = 7) -> None:
    """Print and save medians."""
    draw = torch.Generator().manual_seed(0)
    layers, read = [layer(draw) for _ in range(LAYERS)], reader(1 << 28)
    flops = 2 * 3 * LATENT * INNER * CHOSEN
    results, kinds = {}, {kind: width(kind) for kind in (torch.bfloat16, torch.float32)}
    for tokens in (1, 2, 4, 8, 16, 64, 512, 2048):
        bandwidth: list[float] = []
        memory: list[float] = []
        rate: dict[torch.dtype, list[float]] = {kind: [] for kind in kinds}
        reached: list[float] = []
        for _ in range(runs + 1):  # the first does not count
            memory.append(read() if tokens <= 16 else 0.0)
            seconds, size = seconds_per_layer(layers, tokens, draw)
            bandwidth.append(size / seconds)
            reached.append(tokens * flops / seconds)
            for kind, n in kinds.items():
                rate[kind].append(product_rate(kind, n) if tokens > 16 else 0.0)
        row = {name: statistics.median(values[1:]) for name, values in (
            ("bytes_per_second", bandwidth), ("memory", memory), ("operations_per_second", reached),
            ("torch_bf16_product", rate[torch.bfloat16]), ("torch_fp32_product", rate[torch.float32]))} | {"runs": runs}
        results[tokens] = row
        if tokens <= 16:
            print(f"{tokens:5} tokens: {row['bytes_per_second'] / 1e9:5.1f} GB/s of {row['memory'] / 1e9:5.1f}, "
                  f"{row['bytes_per_second'] / row['memory']:.0%}", flush=True)
        else:
            print(f"{tokens:5} tokens: {row['operations_per_second'] / 1e9:5.0f} Gflop/s, torch's bf16 product "
                  f"{row['torch_bf16_product'] / 1e9:5.0f}, {row['operations_per_second'] / row['torch_bf16_product']:.0%}, fp32 product "
                  f"{row['torch_fp32_product'] / 1e9:5.0f}, {row['operations_per_second'] / row['torch_fp32_product']:.0%}", flush=True)
    save("kernels_experts", {"threads": torch.get_num_threads(), "instructions": native.instruction_set(),
                             "shape": {"experts": EXPERTS, "chosen": CHOSEN, "latent": LATENT, "inner": INNER, "layers": LAYERS},
                             "tokens": results})


if __name__ == "__main__":
    described(__doc__)
    main()
