"""Output of a program that nobody took, up to a limit for each of its streams. Read next: `sandbox.py`: this is for `Process.wait`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gnomon.sandbox.sandbox import Chunk


class Kept:
    """What `Process.wait` returns of a program's output; `truncated` says that more came than was kept."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.truncated = max_bytes, False
        self._streams = {"stdout": bytearray(), "stderr": bytearray()}

    async def take(self, output: AsyncIterator[Chunk]) -> None:
        """Everything that comes, until the program ends."""
        async for chunk in output:
            kept = self._streams[chunk.stream]
            room = self.max_bytes - len(kept)
            kept += chunk.data[:room]
            self.truncated = self.truncated or len(chunk.data) > room

    @property
    def stdout(self) -> bytes:
        """What was kept of standard output."""
        return bytes(self._streams["stdout"])

    @property
    def stderr(self) -> bytes:
        """What was kept of standard error."""
        return bytes(self._streams["stderr"])
