"""A sandbox is forked; one branch is wrecked, the other graded; the original is as it was. The tour's step, in the calls that RL uses."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gnomon.sandbox.cycles import thinking
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.open import open_backend
from gnomon.sandbox.sandbox import Command, Limits, Sandbox, Spec

WORK = "/home/user/work"
PROGRAM = b"def double(x):\n    return 2 * x\n"
TEST = b"import sys\nsys.path.insert(0, '/home/user/work')\nfrom program import double\nassert [double(x) for x in (0, 3)] == [0, 6]\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Branches:
    """What was seen: files of the original before and after, of the wrecked branch, the other's reward, seconds to fork and to resume."""

    backend: str
    isolation: str
    files_before: int
    files_wrecked: int
    files_after: int
    reward: float
    fork_seconds: float
    pause_seconds: float


async def two_branches(store: LayerStore) -> Branches:
    """Do it with the first backend that works here. Raises `Unsupported` where none does."""
    backend = await open_backend(store=store)
    try:
        limits = Limits(memory_bytes=256 << 20, disk_bytes=64 << 20)
        async with await backend.create(Spec(limits=limits, ttl_seconds=300)) as original:
            await original.write(f"{WORK}/program.py", PROGRAM)
            await original.write(f"{WORK}/notes.txt", b"what the agent has done so far\n")
            before = await _files(original)
            began = time.monotonic()
            async with thinking(original):  # the model thinks; nothing runs
                paused = time.monotonic() - began
            began = time.monotonic()
            wrecked, graded = await original.fork(2)
            forked = time.monotonic() - began
            for child in (wrecked, graded):
                if isinstance(child, Exception):
                    raise child
            assert isinstance(wrecked, Sandbox) and isinstance(graded, Sandbox)
            async with wrecked, graded:
                await wrecked.exec(Command(argv=("sh", "-c", f"rm -rf {WORK}/* /tmp/* /var/*"), timeout_seconds=30))
                await graded.write("/home/user/test.py", TEST)  # the verifier comes after the fork, so no branch could prepare for it
                result = await graded.exec(Command(argv=("python3", "/home/user/test.py"), timeout_seconds=30))
                left = await _files(wrecked)
            found = await backend.probe()
            return Branches(backend=backend.name, isolation=found.isolation, files_before=before, files_wrecked=left,
                            files_after=await _files(original), reward=float(result.code == 0), fork_seconds=forked, pause_seconds=paused)
    finally:
        await backend.close()


async def _files(sandbox: Sandbox) -> int:
    return len(await sandbox.list(WORK))
