"""A run folder as a policy: `gnomon serve` in a process of its own, for as long as an evaluation lasts. Agents reach it over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from gnomon.errors import PolicyError

READY_SECONDS = 900.0
"""Loading a large checkpoint takes minutes; a process that ends is noticed at once."""
END_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"
_ADDRESS = re.compile(r"\bat\s+(http://[^\s]+)\s")  # with what follows it: a line may be read before all of it is written


@contextlib.asynccontextmanager
async def serving(run: Path, settings: Mapping[str, Any], log: Path) -> AsyncIterator[str]:
    """The address of a server for `run`, which ends with the block, or with this process. What it prints is in `log`.

    Raises `PolicyError` with its last words where it does not come up.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gnomon", "serve", str(run), "port=0", "page=false", "log=none", *overrides(settings)]
    if sys.platform == "linux":
        command = [sys.executable, "-c", END_WITH_PARENT, *command]
    with open(log, "wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                                                       env={**os.environ, "COLUMNS": "400"}, start_new_session=True)
    try:
        yield await _address(process, run, log)
    finally:
        await asyncio.shield(_end(process))


async def _address(process: asyncio.subprocess.Process, run: Path, log: Path) -> str:
    ends = time.monotonic() + READY_SECONDS
    while process.returncode is None and time.monotonic() < ends:
        if found := _ADDRESS.search(log.read_text(encoding="utf-8", errors="replace")):
            return found[1]
        await asyncio.sleep(0.05)
    words = log.read_text(encoding="utf-8", errors="replace").strip()[-500:]
    how = f"ended with status {process.returncode}" if process.returncode is not None else f"was not ready within {READY_SECONDS:g} s"
    raise PolicyError(f"gnomon serve {run} {how}: {words or 'it said nothing'}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 20.0)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def overrides(table: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """A table as arguments `a.b=c`."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from overrides(value, f"{above}{name}.")
        else:
            yield f"{above}{name}={json.dumps(value, ensure_ascii=False)}"
