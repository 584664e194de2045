"""What every benchmark shares: a fingerprint of the machine, spread over repetitions, and where results are kept."""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def described(text: str | None) -> None:
    """`--help` of a benchmark without options: its docstring. An argument that is not known is refused instead of ignored."""
    argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()


def fingerprint() -> dict[str, Any]:
    """What a figure depends on: processor, cores, memory, operating system, interpreter and the versions that compute."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("torch", "numpy", "transformers", "mlx-lm"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {"processor": _processor(), "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load": os.getloadavg()[0], "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": f"{platform.system()} {platform.release()}", "python": platform.python_version(), "versions": versions}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, extremes and count of repeated measurements."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "runs": len(seconds)}


def repeat(run: Callable[[], object], runs: int = 5, warm_up: int = 1) -> dict[str, float]:
    """Seconds that `run` takes, over `runs` repetitions after a warm-up."""
    for _ in range(warm_up):
        run()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return spread(seconds)


def earlier(name: str) -> dict[str, Any]:
    """What the last result of this name holds, so that a part of it can be measured again; nothing where another machine or other versions
    measured it."""
    path, machine = RESULTS / f"{name}.json", fingerprint()
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if any(before.get("machine", {}).get(key) != machine[key] for key in ("processor", "cores", "memory_bytes", "versions")):
        return {}
    return {part: value for part, value in before.items() if part not in ("benchmark", "machine")}


def save(name: str, result: dict[str, Any], keep: bool = False) -> Path:
    """Write a result with the machine's fingerprint as JSON; returns the file. With `keep`, parts that an earlier run on this machine
    measured and this one did not stay; each part has the load under which it was measured."""
    RESULTS.mkdir(exist_ok=True)
    path, machine = RESULTS / f"{name}.json", fingerprint()
    if keep:
        result = {part: {**value, "load": machine["load"]} if isinstance(value, dict) else value for part, value in result.items()}
        result = earlier(name) | result
    path.write_text(json.dumps({"benchmark": name, "machine": machine, **result}, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}", file=sys.stderr)
    return path
