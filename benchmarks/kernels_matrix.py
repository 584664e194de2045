"""How fast are products with packed weights: few rows against the reading of memory, many rows against torch's products?

One row goes through matrices that are read from memory in turn (more of them than caches hold); many rows through one matrix. Each
figure is the median of runs that alternate with the named peer in the same run.

    OMP_NUM_THREADS=2 python benchmarks/kernels_matrix.py
"""

import ctypes
import statistics
import time
from collections.abc import Callable

import torch
from kernels_experts import reader
from machine import described, save

from gnomon.kernels import mxfp, native
from gnomon.kernels.packed.matrix import PackedMatrix

FORMATS = ("fp32", "bf16", "mxfp4")
MEMORY = 160_000_000  # bytes that are walked for one row: several times the largest cache


def pack(name: str, w: torch.Tensor) -> PackedMatrix:
    """`w` in one of the formats."""
    return PackedMatrix.of_mxfp4(*mxfp.encode_mxfp4(w)) if name == "mxfp4" else PackedMatrix.of(w if name == "fp32" else w.bfloat16())


def multiply(w: PackedMatrix, x: torch.Tensor, y: torch.Tensor) -> None:
    """The C++ product as a layer calls it."""
    native.library().gnomon_matrix_multiply(
        ctypes.addressof(w.view), x.data_ptr(), len(x), w.inner, y.data_ptr(), w.out, 0, native.threads()
    )


def seconds(run: Callable[[], object]) -> float:
    """One measurement."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def alternate(ours: Callable[[], object], theirs: Callable[[], object], runs: int) -> tuple[float, float]:
    """Median seconds of two functions, called in turn after a warm-up."""
    both = [(seconds(ours), seconds(theirs)) for _ in range(runs + 1)][1:]
    return statistics.median(a for a, _ in both), statistics.median(b for _, b in both)


def few_rows(name: str, rows: int, size: int, read: Callable[[], float], runs: int) -> dict[str, float]:
    """Bytes per second of products with matrices of `size` x `size`, and of plain reading."""
    w = torch.randn(size, size) / size**0.5
    matrices = [pack(name, w)]
    matrices += [pack(name, w) for _ in range(MEMORY // matrices[0].bytes)]
    x, y = torch.randn(rows, size), torch.empty(rows, size)
    ours, _ = alternate(lambda: [multiply(m, x, y) for m in matrices], lambda: None, runs)
    memory = statistics.median(read() for _ in range(runs))
    return {"bytes_per_second": sum(m.bytes for m in matrices) / ours, "memory": memory}


def many_rows(name: str, rows: int, size: int, runs: int) -> dict[str, float]:
    """Operations per second, ours and torch's with bf16 operands (fp32 for fp32 weights)."""
    w, x, y = torch.randn(size, size) / size**0.5, torch.randn(rows, size), torch.empty(rows, size)
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    packed, a, b = pack(name, w), x.to(dtype), w.to(dtype)
    ours, theirs = alternate(lambda: multiply(packed, x, y), lambda: torch.nn.functional.linear(a, b), runs)
    return {"operations_per_second": 2 * rows * size**2 / ours, "torch": 2 * rows * size**2 / theirs}


def main(runs: int = 5) -> None:
    """Print and save medians."""
    read, results = reader(1 << 28), {}
    for name in FORMATS:
        few = {rows: few_rows(name, rows, 1024, read, runs) for rows in (1, 2, 4)}
        many = {rows: many_rows(name, rows, 1024, runs) for rows in (16, 128, 1024)}
        results[name] = {"few": few, "many": many}
        print(name, ", ".join(f"{rows} rows {r['bytes_per_second'] / 1e9:.1f} of {r['memory'] / 1e9:.1f} GB/s" for rows, r in few.items()))
        print(" " * len(name), ", ".join(
            f"{rows} rows {r['operations_per_second'] / 1e9:.0f} Gflop/s, torch {r['torch'] / 1e9:.0f}" for rows, r in many.items()))
    save("kernels_matrix", {"threads": torch.get_num_threads(), "instructions": native.instruction_set(), "size": 1024, "results": results})


if __name__ == "__main__":
    described(__doc__)
    main()
