"""Backends for tests that need a real machine: made for a block, or the test is skipped with the reason."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from gnomon.errors import Unsupported
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
