"""The owner of one sandbox that outlives the command that made it: `gnomon sandbox run --detach`.

It reads a wish from its standard input, makes the sandbox, says its id, and stays until the sandbox has ended. Read next: `reach.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

from gnomon.errors import GnomonError
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.open import open_backend
from gnomon.sandbox.reach import Reach
from gnomon.sandbox.reaper import sweep
from gnomon.sandbox.registry import Registry
from gnomon.sandbox.sandbox import Command, Limits, Network, Sandbox, Spec

LOOK_SECONDS = 0.5


def spec_of(fields: dict[str, Any]) -> Spec:
    """A `Spec` from what `dataclasses.asdict` and JSON made of one."""
    network = Network(allow=tuple(fields["network"]["allow"]))
    return Spec(**(fields | {"limits": Limits(**fields["limits"]), "network": network}))


async def keep(wish: dict[str, Any]) -> None:
    """Make a sandbox, run a program in it if one is wished for, and stay until it has ended."""
    store = LayerStore()
    registry = Registry(store)
    await asyncio.to_thread(sweep, registry)
    backend = await open_backend(wish["backend"], isolation=wish["isolation"], store=store, registry=registry)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        async with await backend.create(spec_of(wish["spec"])) as sandbox, Reach(store, {sandbox.id: sandbox}.get):
            tell(id=sandbox.id)
            running = asyncio.ensure_future(_run(sandbox, wish["argv"])) if wish["argv"] else None
            while registry.get(sandbox.id) is not None and not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), LOOK_SECONDS)
            if running is not None:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
    finally:
        await backend.close()


async def _run(sandbox: Sandbox, argv: list[str]) -> None:
    """The program that came with the sandbox; what it prints is dropped, so let it write files."""
    process = await sandbox.start(Command(argv=tuple(argv), timeout_seconds=None))
    async for _ in process.output():
        pass


def tell(**fields: str) -> None:
    """Say one line to whoever started this process, and then never anything again."""
    os.write(1, json.dumps(fields).encode() + b"\n")
    with open(os.devnull, "r+b") as null:
        for descriptor in (0, 1, 2):
            os.dup2(null.fileno(), descriptor)


def main() -> None:
    """Read the wish, keep the sandbox."""
    try:
        asyncio.run(keep(json.loads(sys.stdin.buffer.read())))
    except GnomonError as error:
        tell(error=str(error))
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
