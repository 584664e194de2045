"""What does a sandbox from the warm pool cost, beside one that is made on the spot, and what happens when memory runs short?

    python benchmarks/sandbox_pool.py [--runs 50] [--density 100] [--backend auto]

Warm take, cold take and a plain process of the host are measured in the same run, each up to the end of its first `true`. Then sandboxes
are taken under a guard that leaves them a share of the memory, until it refuses: nothing may die.
"""

import argparse
import asyncio
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import machine

from gnomon.errors import CapacityError
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.open import open_backend
from gnomon.sandbox.pool import Pool
from gnomon.sandbox.pressure import Guard, pressure
from gnomon.sandbox.registry import Registry
from gnomon.sandbox.sandbox import Backend, Command, Sandbox, Spec

TRUE = Command(argv=("/bin/true",))


def shown(name: str, seconds: list[float]) -> dict[str, float]:
    """One line of figures, and the figures."""
    figures = machine.spread(seconds)
    late = sorted(seconds)[int(0.95 * (len(seconds) - 1))]
    print(f"{name:32} {figures['median'] * 1e3:8.2f} ms   (min {figures['min'] * 1e3:.2f}, 95 % {late * 1e3:.2f}, {len(seconds)} runs)")
    return figures | {"p95": late}


async def timed(runs: int, work: Callable[[], Awaitable[Sandbox]]) -> tuple[list[float], list[float]]:
    """Seconds until a sandbox is there, and until its first program has ended; each ends before the next is wanted."""
    ready, first = [], []
    for _ in range(runs + 1):
        began = time.perf_counter()
        sandbox = await work()
        there = time.perf_counter()
        result = await sandbox.exec(TRUE)
        first.append(time.perf_counter() - began)
        ready.append(there - began)
        assert result.code == 0
        await sandbox.kill()
    return ready[1:], first[1:]  # the first touches memory that the others find


async def latency(backend: Backend, store: LayerStore, registry: Registry, runs: int) -> dict[str, object]:
    """Cold and warm, beside a plain process."""
    figures: dict[str, object] = {}
    cold, cold_first = await timed(runs, lambda: backend.create(Spec()))
    figures["cold"], figures["cold_first_program"] = shown("created on the spot", cold), shown("  and its first program", cold_first)
    async with Pool(backend, low=0, high=runs + 1, store=store, registry=registry) as pool:
        await pool.warm(Spec())
        warm, warm_first = await timed(runs, lambda: pool.take(Spec()))
    figures["warm"], figures["warm_first_program"] = shown("from the warm pool", warm), shown("  and its first program", warm_first)
    plain = []
    for _ in range(runs):
        began = time.perf_counter()
        subprocess.run(["/bin/true"], check=True)
        plain.append(time.perf_counter() - began)
    figures["host_process"] = shown("a plain process of the host", plain)
    return figures


async def density(backend: Backend, most: int) -> dict[str, object]:
    """Sandboxes under a guard that lets them have a little of the memory, until it says no."""
    start = pressure()
    allowed = min(start.available_bytes // 2, 64 << 20)
    guard = Guard(least_share=(start.available_bytes - allowed) / start.total_bytes, most_stalled_percent=101.0)
    taken: list[Sandbox] = []
    refused = ""
    async with Pool(backend, low=0, high=0, guard=guard) as pool:
        try:
            while len(taken) < most:
                taken.append(await pool.take(Spec()))
        except CapacityError as error:
            refused = str(error)
        alive = [await sandbox.exec(TRUE) for sandbox in taken]
        used = start.available_bytes - pressure().available_bytes
        await asyncio.gather(*(sandbox.kill() for sandbox in taken))
    assert all(result.code == 0 for result in alive)
    print(f"{len(taken)} taken with {allowed / 1e6:.0f} MB to spend; all ran a program; then: {refused or 'not refused up to the limit'}")
    return {"taken": len(taken), "allowed_bytes": allowed, "used_bytes": used, "refused": refused}


async def measure(runs: int, most: int, name: str) -> dict[str, object]:
    """All of it with one backend and a store of its own."""
    with tempfile.TemporaryDirectory() as folder:
        store = LayerStore(Path(folder))
        registry = Registry(store)
        backend = await open_backend(name, store=store, registry=registry)
        try:
            figures = await latency(backend, store, registry, runs)
            return {"backend": backend.name, **figures, "density": await density(backend, most)}
        finally:
            await backend.close()
            registry.close()


def main() -> None:
    """Measure, print, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="repetitions, at least 5 (default: 50)")
    parser.add_argument("--density", type=int, default=100, help="most sandboxes alive at a time (default: 100)")
    parser.add_argument("--backend", default="auto", help="which backend (default: the first that works)")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parsed = parser.parse_args()
    result = asyncio.run(measure(max(5, parsed.runs), parsed.density, parsed.backend))
    if not parsed.no_save:
        print(f"wrote {machine.save('sandbox_pool', result)}")
    warm = result["warm"]
    assert isinstance(warm, dict)
    print(f"warm take: median {warm['median'] * 1e3:.2f} ms; the target is 2 ms")


if __name__ == "__main__":
    main()
