"""Backends for tests that need a real machine: made for a block, or the test is skipped with the reason."""

import asyncio
import contextlib
import functools
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gnomon.errors import Unsupported
from gnomon.sandbox.backends import gvisor
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.open import open_backend
from gnomon.sandbox.sandbox import Backend


@contextlib.asynccontextmanager
async def namespaces() -> AsyncIterator[Backend]:
    """The default backend, closed after the block."""
    try:
        backend = await open_backend("namespaces")
    except Unsupported as error:
        pytest.skip(f"namespaces do not work here: {error}")
    try:
        yield backend
    finally:
        await backend.close()


@functools.cache
def why_no_gvisor() -> str:
    """Why no sandbox can be made with `runsc` here, or nothing; found out once for all tests of a process."""

    async def ask(home: str) -> str:
        backend = gvisor.Backend(LayerStore(Path(home)))
        try:
            await backend.probe()
        except Unsupported as error:
            return str(error)
        finally:
            await backend.close()
        return ""

    with tempfile.TemporaryDirectory() as home:
        return asyncio.run(ask(home))


def need_gvisor() -> None:
    """Skip the test, with the reason, where gVisor does not work."""
    if reason := why_no_gvisor():
        pytest.skip(reason)
