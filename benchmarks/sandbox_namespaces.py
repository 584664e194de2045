"""What does a sandbox of the default backend cost, to make, use, keep and end, as root and as an ordinary user, beside other programs?

Life cycle one at a time, then many at once, then many alive; afterwards nothing may be left. Bubblewrap, runc and runsc (gVisor) do the
same in the same run where they are installed. Beside the clock stands the processor time of the whole cycle, which other load distorts
less.

    python benchmarks/sandbox_namespaces.py                          all of it, some minutes
    python benchmarks/sandbox_namespaces.py --parts cycles others    only these; what was measured before of the others stays
    python benchmarks/sandbox_namespaces.py --short                  seconds, to see that it runs
"""

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gnomon.sandbox.backends.namespaces import Backend
from gnomon.sandbox.ns import cgroups
from gnomon.sandbox.ns.machine import Machine
from gnomon.sandbox.sandbox import Command, Limits, Spec

TRUE = Command(argv=("/bin/true",))
DATA_BYTES = 32 << 20
PARTS = ("cycles", "rate", "live", "soak")
Rows = dict[str, list[float]]


def spread(values: list[float]) -> dict[str, float]:
    """Median, quantiles and extremes in milliseconds of values in seconds."""
    ordered = sorted(value * 1e3 for value in values)
    return {"median_ms": statistics.median(ordered), "min_ms": ordered[0], "p95_ms": ordered[int(0.95 * (len(ordered) - 1))],
            "runs": len(ordered)}


class Clock:
    """Collects how long things take."""

    def __init__(self) -> None:
        self.rows: Rows = defaultdict(list)

    async def time(self, name: str, call: Awaitable[Any]) -> Any:
        """Await something and note the time."""
        began = time.perf_counter()
        answer = await call
        self.rows[name].append(time.perf_counter() - began)
        return answer


def processor_seconds(pids: list[int]) -> float:
    """Processor time of processes and of those that they have reaped."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def zygotes(backend: Backend) -> list[int]:
    """The zygote's process, and for an ordinary user the one behind it."""
    assert backend.zygote is not None and backend.zygote.process is not None
    pid = backend.zygote.process.pid
    if os.geteuid() == 0:
        return [pid]
    return [pid, *(int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


async def cycle(backend: Backend, clock: Clock) -> None:
    """One sandbox through everything."""
    box: Machine = await clock.time("create", backend.create(Spec()))
    await clock.time("exec true, the first", box.exec(TRUE))
    await clock.time("exec true", box.exec(TRUE))
    await clock.time("freeze", box.pause())
    await clock.time("thaw", box.resume())
    await clock.time("write 100 kB", box.write("/tmp/data", b"x" * 100_000))
    await clock.time("read 100 kB", box.read("/tmp/data"))
    await clock.time("stop", box.pause("stop"))
    snapshot = await clock.time("snapshot, stopped", box.snapshot())
    (child,) = await clock.time("fork, stopped", box.fork())
    assert await child.read("/tmp/data") == b"x" * 100_000
    await clock.time("kill", child.kill())
    await clock.time("resume after stop", box.resume())
    await box.kill()
    await backend.remove_snapshot(snapshot.name)


async def with_data(backend: Backend, clock: Clock, size: int) -> None:
    """Snapshot and fork of a stopped and of a running sandbox with much data of its own."""
    box = await backend.create(Spec(limits=Limits(memory_bytes=8 * size, disk_bytes=4 * size)))
    for part in range(16):
        await box.write(f"/tmp/data/{part}", os.urandom(size // 16))
    names = [await clock.time(f"snapshot, running, {size >> 20} MB (copied)", box.snapshot())]
    await box.pause("stop")
    names.append(await clock.time(f"snapshot, stopped, {size >> 20} MB", box.snapshot()))
    (child,) = await clock.time(f"fork, stopped, {size >> 20} MB", box.fork())
    await child.kill()
    await box.kill()
    for snapshot in names:
        await backend.remove_snapshot(snapshot.name)


async def rate(backend: Backend, count: int) -> dict[str, float]:
    """How many a second when all are asked for at once."""
    began = time.perf_counter()
    boxes = await asyncio.gather(*(backend.create(Spec()) for _ in range(count)))
    created = time.perf_counter()
    await asyncio.gather(*(box.exec(TRUE) for box in boxes))
    ran = time.perf_counter()
    await asyncio.gather(*(box.kill() for box in boxes))
    ended = time.perf_counter()
    return {"count": count, "creates_per_second": count / (created - began), "execs_per_second": count / (ran - created),
            "kills_per_second": count / (ended - ran)}


def available() -> int:
    """Memory of the machine that could be had, in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def shares(pids: list[int]) -> float | None:
    """Memory of processes in bytes, shared pages in proportion; None where it may not be read."""
    try:
        texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    except OSError:
        return None
    return 1024.0 * sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("Pss:"))


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def alive(backend: Backend, count: int) -> dict[str, float | None]:
    """Memory of many that live at once, each having run a program, and the time to make and end them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    before, began = available(), time.perf_counter()
    boxes: list[Machine] = []
    for _ in range(0, count, 50):
        boxes += await asyncio.gather(*(backend.create(Spec()) for _ in range(50)))
    made = time.perf_counter() - began
    await asyncio.gather(*(box.exec(TRUE) for box in boxes[:: max(1, count // 100)]))
    await asyncio.sleep(0.5)
    taken = (before - available()) / len(boxes)
    agents = children(zygotes(backend)[-1])
    pss = shares(agents)
    began = time.perf_counter()
    await asyncio.gather(*(box.kill() for box in boxes))
    ended = time.perf_counter() - began
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return {"count": len(boxes), "make_seconds": made, "end_seconds": ended, "machine_bytes_each": taken,
            "pss_bytes_each": None if pss is None else pss / len(agents)}


async def soak(backend: Backend, count: int) -> dict[str, float]:
    """Create, run, kill, again and again, eight at a time; memory of both sides at the start and at the end."""

    def size(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def some(times: int) -> None:
        for _ in range(times):
            async with await backend.create(Spec()) as box:
                assert (await box.exec(Command(argv=TRUE.argv, timeout_seconds=None))).code == 0

    await asyncio.gather(*(some(5) for _ in range(8)))
    zygote = zygotes(backend)[-1]
    first, began = (size(os.getpid()), size(zygote)), time.perf_counter()
    await asyncio.gather(*(some(count // 8) for _ in range(8)))
    last = (size(os.getpid()), size(zygote))
    return {"cycles": count // 8 * 8, "per_second": count / (time.perf_counter() - began), "owner_bytes_before": first[0],
            "owner_bytes_after": last[0], "zygote_bytes_before": first[1], "zygote_bytes_after": last[1]}


def left(backend: Backend) -> dict[str, int]:
    """What there is now of what must not be left over."""
    zygote = zygotes(backend)[-1]
    groups = [os.path.join(folder, name) for folder in set(cgroups.own_groups().values()) if os.path.isdir(folder)
              for name in os.listdir(folder) if name.startswith(f"{cgroups.PREFIX}{zygotes(backend)[0]}-")]
    try:
        mounts = len(Path(f"/proc/{zygote}/mountinfo").read_text().splitlines())
    except OSError:
        mounts = -1
    return {"processes": len(children(zygote)), "descriptors": len(os.listdir("/proc/self/fd")), "mounts": mounts,
            "control groups": sum(len(os.listdir(group)) for group in groups)}


async def life(backend: Backend, cycles: int) -> dict[str, Any]:
    """Life cycles one at a time, with little and with much data."""
    clock = Clock()
    processors = processor_seconds([os.getpid(), *zygotes(backend)])
    for _ in range(cycles):
        await cycle(backend, clock)
    processors = processor_seconds([os.getpid(), *zygotes(backend)]) - processors
    for _ in range(5):
        await with_data(backend, clock, DATA_BYTES)
    return {"processor_ms_per_cycle": processors / cycles * 1e3, "rows": {name: spread(row) for name, row in clock.rows.items()}}


async def namespaces(options: argparse.Namespace) -> dict[str, Any]:
    """The wanted parts with the default backend, as whoever runs this; each says what is there before and after it."""
    backend, found = Backend(), {}
    try:
        began = time.perf_counter()
        capabilities = await backend.probe()
        first = time.perf_counter() - began
        for _ in range(3):
            await cycle(backend, Clock())
        for part in [part for part in PARTS if part in options.parts]:
            before = left(backend)
            if part == "cycles":
                found[part] = {"rootless": capabilities.rootless, "unenforced": sorted(capabilities.unenforced),
                               "first_sandbox_seconds": first, **await life(backend, options.cycles)}
            elif part == "rate":
                found[part] = max([await rate(backend, options.rate) for _ in range(3)], key=lambda row: row["creates_per_second"])
            else:
                found[part] = await (alive(backend, options.live) if part == "live" else soak(backend, options.soak))
            await asyncio.sleep(0.5)
            found[part]["left"] = {"before": before, "after": left(backend)}
        return found
    finally:
        await backend.close()


def readable_python() -> str | None:
    """A Python from 3.11 on that everyone may run."""
    for candidate in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        path = Path(candidate).resolve()
        if path.exists() and all(parent.stat().st_mode & 0o001 for parent in path.parents):
            asked = [str(path), "-c", "import sys; print(sys.version_info >= (3, 11))"]
            if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == "True":
                return str(path)
    return None


def as_ordinary_user(options: argparse.Namespace) -> dict[str, Any]:
    """The same as the user `nobody`, with a copy of the package that it may read; nothing but the reason where that is impossible."""
    python = readable_python()
    if python is None or shutil.which("setpriv") is None:
        return {"nothing": {"why": "no Python that an ordinary user may run, or no setpriv"}}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(sys.modules["gnomon"].__file__ or "").parent, Path(folder) / "gnomon",
                        ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        shutil.copy(__file__, folder)
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)
        counts = [f"--{name}={getattr(options, name)}" for name in PARTS]
        argv = [python, Path(__file__).name, "--inner", *counts, "--parts", *options.parts]
        done = subprocess.run(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *argv], cwd=folder, capture_output=True,
                              text=True, check=False, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": folder, "HOME": folder})
    return json.loads(done.stdout) if done.returncode == 0 else {"nothing": {"why": done.stderr.strip().splitlines()[-1]}}


MERGED = [part for name in ("bin", "lib", "lib64") if Path(f"/{name}").is_symlink() for part in ("--symlink", f"usr/{name}", f"/{name}")]
BWRAP = ["bwrap", "--ro-bind", "/usr", "/usr", *MERGED, "--proc", "/proc", "--dev", "/dev", "--unshare-all", "--die-with-parent"]


def bundle(folder: Path) -> None:
    """An OCI bundle on the host's /usr whose first process sleeps."""
    for name in ("rootfs/usr", "rootfs/proc", "rootfs/dev", "rootfs/sys", "rootfs/tmp"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        if Path(f"/{name}").is_symlink():
            (folder / "rootfs" / name).symlink_to(f"usr/{name}")
    subprocess.run(["runc", "spec", "--bundle", str(folder)], check=True)
    config = json.loads((folder / "config.json").read_text())
    config["process"] |= {"terminal": False, "args": ["/bin/sleep", "1000"]}
    config["mounts"].append({"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]})
    (folder / "config.json").write_text(json.dumps(config))


def timed(rows: Rows, name: str, argv: list[str]) -> None:
    """Run a command and note the time."""
    began = time.perf_counter()
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
    rows[name].append(time.perf_counter() - began)


def others(runs: int) -> dict[str, Any]:
    """Bubblewrap, runc and runsc, each where it is installed and works."""
    rows: Rows = defaultdict(list)
    notes: dict[str, str] = {}

    def attempt(name: str, body: Callable[[], None]) -> None:
        if shutil.which(name) is None:
            notes[name] = "not installed"
            return
        try:
            for _ in range(runs + 1):
                body()
        except (OSError, subprocess.SubprocessError) as error:
            notes[name] = str(error)[:200]

    def container(argv: list[str], folder: str, flag: str) -> None:
        name, id = argv[0], f"gnomon-{os.getpid()}-{time.monotonic_ns()}"
        timed(rows, f"{name} create", [*argv, "run", flag, "--bundle", folder, id])
        timed(rows, f"{name} exec true", [*argv, "exec", id, "/bin/true"])
        timed(rows, f"{name} kill", [*argv, "delete", "--force", id])

    attempt("bwrap", lambda: timed(rows, "bwrap one run of true", [*BWRAP, "/bin/true"]))
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() == 0 and shutil.which("runc"):
            bundle(Path(folder) / "bundle")
            place = str(Path(folder) / "bundle")
            attempt("runc", lambda: container(["runc"], place, "--detach"))
            attempt("runsc", lambda: container(["runsc", "--ignore-cgroups", "--network=none"], place, "-detach"))
    found = {name: spread(row[1:]) for name, row in rows.items() if len(row) > 1}
    return {"rows": found, "notes": notes}


def show(title: str, found: dict[str, Any]) -> None:
    """A table for people."""
    print(f"\n{title}")
    for name, row in found.get("rows", {}).items():
        print(f"  {name:42} {row['median_ms']:8.2f} ms   (min {row['min_ms']:.2f}, p95 {row['p95_ms']:.2f})")
    for name, value in found.items():
        if name != "rows":
            print(f"  {name}: {round(value, 2) if isinstance(value, float) else value}")


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few of each, nothing saved")
    parser.add_argument("--inner", action="store_true", help="only the default backend as this user, as JSON")
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "others"), default=(*PARTS, "others"), help="what to measure")
    parser.add_argument("--users", nargs="+", choices=("me", "ordinary"), default=("me", "ordinary"), help="who does it, if this is root")
    for name, count, meaning in (("cycles", 50, "life cycles one at a time"), ("rate", 200, "sandboxes asked for at once"),
                                 ("live", 1000, "sandboxes alive at once"), ("soak", 20_000, "cycles of create, run, kill")):
        parser.add_argument(f"--{name}", type=int, default=count, help=meaning)
    options = parser.parse_args()
    if options.short:
        options.cycles, options.rate, options.live, options.soak = 5, 20, 50, 40
    if options.inner:
        json.dump(asyncio.run(namespaces(options)), sys.stdout)
        return
    users = {}
    if "me" in options.users:
        users["root" if os.geteuid() == 0 else "ordinary user"] = asyncio.run(namespaces(options))
    if "ordinary" in options.users and os.geteuid() == 0:
        users["ordinary user"] = as_ordinary_user(options)
    result = {f"{part} as {user}": found for user, parts in users.items() for part, found in parts.items()}
    if "others" in options.parts:
        result["others"] = others(5 if options.short else 8)
    for name, found in result.items():
        show(name, found)
    if not options.short:
        from machine import save

        save("sandbox_namespaces", result, keep=True)


if __name__ == "__main__":
    main()
