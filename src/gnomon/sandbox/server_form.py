"""Files in a form (multipart/form-data, RFC 7578), written to disk as they come: nothing is held in memory, everything is bounded."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from gnomon.sandbox.server_connect import Refusal

MAX_HEADERS = 8192
MAX_PARTS = 1000
BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))')
NAME = re.compile(r'[;\s]name="((?:\\.|[^"\\\r\n])*)"')
FILENAME = re.compile(r'[;\s]filename="((?:\\.|[^"\\\r\n])*)"')
ESCAPES = (("%22", '"'), ("%0D", "\r"), ("%0A", "\n"), ('\\"', '"'), ("\\\\", "\\"))


class _Reader:
    """Bytes of a body, found by what follows them."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self.pieces, self.buffer = pieces, bytearray()

    async def more(self) -> None:
        async for piece in self.pieces:
            if piece:
                self.buffer += piece
                return
        raise Refusal(400, "the form ends too early")

    async def until(self, mark: bytes, bound: int) -> bytes:
        """What comes before `mark`, which is taken away too."""
        while (found := self.buffer.find(mark)) < 0:
            if len(self.buffer) > bound:
                raise Refusal(400, "a part of the form has headers beyond all measure")
            await self.more()
        taken = bytes(self.buffer[:found])
        del self.buffer[: found + len(mark)]
        return taken

    async def content(self, mark: bytes) -> AsyncIterator[bytes]:
        """What comes before `mark`, piece by piece."""
        while (found := self.buffer.find(mark)) < 0:
            sure = len(self.buffer) - len(mark) + 1
            if sure > 0:
                yield bytes(self.buffer[:sure])
                del self.buffer[:sure]
            await self.more()
        yield bytes(self.buffer[:found])
        del self.buffer[: found + len(mark)]


async def files(content_type: str, pieces: AsyncIterator[bytes], folder: Path) -> list[tuple[str, Path]]:
    """The parts called `file`: the name that each was sent under, and where it lies now. Raises `Refusal` for what is no form."""
    found = BOUNDARY.search(content_type)
    if found is None:
        raise Refusal(400, "the form has no boundary")
    mark = b"--" + (found.group(1) or found.group(2)).encode()
    reader = _Reader(pieces)
    reader.buffer += b"\r\n"
    kept: list[tuple[str, Path]] = []
    await reader.until(b"\r\n" + mark, MAX_HEADERS)
    for _ in range(MAX_PARTS):
        while len(reader.buffer) < 2:
            await reader.more()
        if reader.buffer[:2] == b"--":
            return kept
        header = (await reader.until(b"\r\n\r\n", MAX_HEADERS)).decode("utf-8", "replace")
        name, filename = NAME.search(header), FILENAME.search(header)
        path = folder / secrets.token_hex(8)
        with path.open("wb") as file:
            async for piece in reader.content(b"\r\n" + mark):
                file.write(piece)
        if name is not None and name.group(1) == "file":
            kept.append((_plain(filename.group(1)) if filename is not None else "", path))
    raise Refusal(400, f"more than {MAX_PARTS} parts")


def _plain(text: str) -> str:
    for written, meant in ESCAPES:
        text = text.replace(written, meant)
    return text
