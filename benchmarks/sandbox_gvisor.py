"""What do checkpoints, forks with memory and hibernation under gVisor cost, and how many thinking agents fit into little memory?

A process with unique random bytes in its memory is checkpointed, restored and forked; each copy must go on, keep its bytes and part from
the others. Then many sandboxes are made, 98 % of them hibernated: what stays resident and what lies on disk is counted, and every single
one is resumed and must give the digest of its bytes from memory. The plain verbs of `runsc` stand beside, in the same run.

    python benchmarks/sandbox_gvisor.py                   minutes; 40 sandboxes of 50 MB
    python benchmarks/sandbox_gvisor.py --machines 200    the target of the design: 10 GB of memory, most of it on disk
    python benchmarks/sandbox_gvisor.py --parts density    only that; what was measured before of the others stays
    python benchmarks/sandbox_gvisor.py --short           seconds, to see that it runs
"""

import argparse
import asyncio
import hashlib
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from gnomon.sandbox.backends.gvisor import Backend
from gnomon.sandbox.guest import account
from gnomon.sandbox.guest.process import GuestProcess
from gnomon.sandbox.gvisor import bundle
from gnomon.sandbox.gvisor.machine import Machine
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import MEGABYTE, Command, Limits, Spec

TRUE = Command(argv=("true",))
HOLDER = """
import hashlib, random, sys
block = random.Random(int(sys.argv[1])).randbytes(int(sys.argv[2]))
count = 0
print("ready", flush=True)
for line in sys.stdin:
    count += 1
    print(count, hashlib.sha256(block).hexdigest(), flush=True)
"""
FILE_HOLDER = HOLDER.replace(
    'for line in sys.stdin:\n    count += 1\n    print(count, hashlib.sha256(block).hexdigest(), flush=True)',
    "import os, time\nwhile True:\n    count += 1\n    open('/tmp/new', 'w').write(f'{count} {hashlib.sha256(block).hexdigest()}')\n"
    "    os.rename('/tmp/new', '/tmp/state')\n    time.sleep(0.2)",
)
Rows = dict[str, list[float]]


def spread(values: list[float]) -> dict[str, float]:
    """Median and extremes in milliseconds of values in seconds."""
    ordered = sorted(value * 1e3 for value in values)
    return {"median_ms": statistics.median(ordered), "min_ms": ordered[0], "max_ms": ordered[-1], "runs": len(ordered)}


def digest(seed: int, size: int) -> str:
    """The digest that a holder must give: computed here from the seed, not asked of anybody."""
    return hashlib.sha256(random.Random(seed).randbytes(size)).hexdigest()


async def timed(rows: Rows, name: str, call: Awaitable[Any]) -> Any:
    """Await something and note the time."""
    began = time.perf_counter()
    answer = await call
    rows[name].append(time.perf_counter() - began)
    return answer


async def line(process: GuestProcess) -> str:
    """The next whole line that a program prints."""
    text = b""
    output = process.output()
    while not text.endswith(b"\n"):
        text += (await anext(output)).data
    return text.decode().strip()


async def hold(machine: Machine, seed: int, size: int, program: str = HOLDER) -> GuestProcess:
    """Start a program that holds random bytes in memory, and wait until it does."""
    await machine.write("/tmp/holder.py", program.encode())
    process = await machine.start(
        Command(argv=("python3", "/tmp/holder.py", str(seed), str(size)), timeout_seconds=None), stdin=program is HOLDER
    )
    assert await line(process) == "ready"
    return process


async def small(backend: Backend, rows: Rows) -> None:
    """A sandbox with nothing in it."""
    machine: Machine = await timed(rows, "create", backend.create(Spec()))
    await machine.exec(TRUE)
    await timed(rows, "exec true", machine.exec(TRUE))
    await timed(rows, "freeze", machine.pause())
    await timed(rows, "thaw", machine.resume())
    await timed(rows, "hibernate", machine.pause("hibernate"))
    await timed(rows, "resume", machine.resume())
    await timed(rows, "kill", machine.kill())


async def state(machine: Machine, beyond: int = 0) -> tuple[int, str]:
    """What a holder that writes to a file says, once it has counted further."""
    for _ in range(300):
        number, found = (await machine.read("/tmp/state")).decode().split()
        if int(number) > beyond:
            return int(number), found
        await asyncio.sleep(0.02)
    raise AssertionError("the program does not go on")


async def large(backend: Backend, rows: Rows, size: int, seed: int) -> None:
    """A process with much memory: on disk, back, and five copies at once."""
    spec = Spec(limits=Limits(memory_bytes=4 * size + 256 * MEGABYTE, cpus=2.0))
    async with await backend.create(spec) as machine:
        await hold(machine, seed, size, FILE_HOLDER)
        await asyncio.sleep(0.5)
        await timed(rows, f"checkpoint, {size // MEGABYTE} MB", machine.pause("hibernate"))
        await timed(rows, f"first restore, {size // MEGABYTE} MB", machine.resume())
        number, found = await state(machine)
        assert found == digest(seed, size)
        children = await timed(rows, f"five forks, {size // MEGABYTE} MB", machine.fork(5, memory=True))
        branches = [machine, *children]
        for index, branch in enumerate(branches):
            assert isinstance(branch, Machine), branch
            assert (await state(branch, number))[1] == found
            await branch.write("/tmp/mine", str(index).encode())
        assert [await branch.read("/tmp/mine") for branch in branches] == [str(index).encode() for index in range(6)]
        await asyncio.gather(*(child.kill() for child in children))


async def dense(backend: Backend, count: int, size: int) -> dict[str, float]:
    """Many sandboxes with unique memory, 98 % hibernated; then each is resumed and asked for its digest."""
    awake = max(1, count // 50)
    spec = Spec(limits=Limits(memory_bytes=4 * size + 256 * MEGABYTE), ttl_seconds=None)
    before, began = available(), time.perf_counter()
    held: list[tuple[Machine, GuestProcess]] = []
    for seed in range(count):
        machine = await backend.create(spec)
        held.append((machine, await hold(machine, seed, size)))
        if seed >= awake:
            await machine.pause("hibernate")
    made = time.perf_counter() - began
    usages = [await machine.usage() for machine, _ in held]
    resident, disk = sum(usage.memory_bytes for usage in usages), sum(usage.disk_bytes for usage in usages)
    processes = [process for machine, _ in held for process in machine.processes]
    shares = sum(account.use([process], ())[0] for process in processes)
    taken = before - available()
    began = time.perf_counter()
    for seed, (machine, process) in enumerate(held):
        if machine.state == "hibernated":
            await machine.resume()
        await process.write(b"\n")
        assert await line(process) == f"1 {digest(seed, size)}", f"sandbox {seed} has forgotten"
        await machine.kill()
    verified = time.perf_counter() - began
    return {
        "machines": count,
        "awake": awake,
        "unique_bytes": count * size,
        "resident_bytes": resident,
        "process_share_bytes": shares,
        "machine_memory_taken_bytes": taken,
        "disk_bytes": disk,
        "overcommit": count * size / max(1, resident, shares),
        "make_seconds": made,
        "resume_verify_kill_seconds": verified,
    }


def available() -> int:
    """Memory of the machine that could be had, in bytes."""
    rows = dict(row.split(":") for row in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024


def plain(backend: Backend, rows: Rows, runs: int) -> None:
    """The verbs of `runsc` by hand, on a program that sleeps."""
    with tempfile.TemporaryDirectory() as folder:
        box = Path(folder)
        (box / "state").mkdir()
        (box / "agent").mkdir()
        content: dict[str, Any] = bundle.configuration(Spec(), bundle.host_root(box), box / "agent", host=True)
        content["process"]["args"] = ["/bin/sleep", "1000"]
        bundle.write(box / "bundle", content)
        words, environment = backend.runsc.arguments(box), backend.runsc.environment()

        def verb(name: str, *arguments: str) -> None:
            began = time.perf_counter()
            subprocess.run(
                [*words, *arguments], check=True, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, timeout=60,
            )  # fmt: skip
            rows[f"runsc {name}"].append(time.perf_counter() - began)

        for run in range(runs):
            first, second = f"plain-{run}-{time.monotonic_ns()}", f"again-{run}-{time.monotonic_ns()}"
            image = box / f"image-{run}"
            image.mkdir()
            verb("run", "run", "--detach", f"--bundle={box / 'bundle'}", first)
            verb("checkpoint", "checkpoint", f"--image-path={image}", first)
            verb("restore", "restore", "--detach", f"--bundle={box / 'bundle'}", f"--image-path={image}", second)
            verb("delete --force", "delete", "--force", second)
            verb("delete --force", "delete", "--force", first)


async def measure(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Everything, in a store of its own."""
    backend, rows, size = Backend(LayerStore(home)), defaultdict(list), options.megabytes * MEGABYTE
    try:
        capabilities = await backend.probe()
        await small(backend, defaultdict(list))
        for run in range(options.runs if "life" in options.parts else 0):
            await small(backend, rows)
            await large(backend, rows, size, run)
        found: dict[str, Any] = {}
        if "life" in options.parts:
            plain(backend, rows, options.runs)
            found["life"] = {"rootless": capabilities.rootless, "unenforced": sorted(capabilities.unenforced),
                             "notes": capabilities.notes, "rows": {name: spread(row) for name, row in rows.items()}}  # fmt: skip
        if "density" in options.parts:
            found["density"] = await dense(backend, options.machines, size)
        assert backend.machines == {}
        return found
    finally:
        await backend.close()


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few of each, nothing saved")
    for name, count, meaning in (
        ("runs", 5, "runs of the life cycle and of the large process"),
        ("machines", 40, "sandboxes that exist at once"),
        ("megabytes", 50, "unique random bytes in each, in MB"),
    ):
        parser.add_argument(f"--{name}", type=int, default=count, help=meaning)
    parser.add_argument("--parts", nargs="+", choices=("life", "density"), default=("life", "density"), help="what to measure")
    parser.add_argument("--home", type=Path, help="folder for the checkpoints (default: a temporary one)")
    options = parser.parse_args()
    if options.short:
        options.runs, options.machines, options.megabytes = 1, 4, 8
    with tempfile.TemporaryDirectory(dir=options.home) as home:
        result = asyncio.run(measure(options, Path(home)))
    for name, row in result.get("life", {}).get("rows", {}).items():
        print(f"  {name:32} {row['median_ms']:8.1f} ms   (min {row['min_ms']:.1f}, max {row['max_ms']:.1f})")
    for name, value in result.get("density", {}).items():
        print(f"  {name:32} {value / MEGABYTE:10.1f} MB" if name.endswith("_bytes") else f"  {name:32} {value:10.2f}")
    if not options.short:
        from machine import save

        save("sandbox_gvisor", result, keep=True)


if __name__ == "__main__":
    main()
