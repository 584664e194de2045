"""Backends for tests that need a real machine: made for a block, or the test is skipped with the reason."""

import asyncio
import contextlib
import functools
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gnomon.errors import Unsupported
from gnomon.sandbox.backends import gvisor, microvm
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.microvm import qemu
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


@functools.cache
def why_no_microvm() -> str:
    """Why no virtual machine can be made here in the way that the environment asks for, or nothing."""

    async def ask(home: str) -> str:
        try:
            await microvm.Backend(LayerStore(Path(home))).ready()
        except Unsupported as error:
            return str(error)
        return ""

    with tempfile.TemporaryDirectory() as home:
        return asyncio.run(ask(home))


def need_microvm() -> None:
    """Skip the test, with the reason, where there are no virtual machines; without KVM they are asked for by translation."""
    if "GNOMON_MICROVM_ACCEL" not in os.environ and qemu.refusal() is not None:
        os.environ["GNOMON_MICROVM_ACCEL"] = "tcg"
    if reason := why_no_microvm():
        pytest.skip(reason)
