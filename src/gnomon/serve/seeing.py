"""Images in a server's prompts: read where they may be read, seen once, and put in place of their pads.

An image comes as base64; as a file of this machine only from folders that the settings name; from the web only from hosts that they name.
In the prompt its positions get ids beyond the vocabulary, made of what it shows, so that the prefix cache knows it again in whatever file
it comes, and takes no other for it. Read next: `service.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from urllib.parse import unquote, urlsplit

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.data.chat import Encoded
from gnomon.data.dialects.asked import Refused
from gnomon.data.images import ImageLimits, Pixels, open_image, prepare
from gnomon.data.messages import Conversation, Image, Message, Part
from gnomon.errors import DataError
from gnomon.model.multimodal import Eye
from gnomon.serve.request import Seen
from gnomon.serve.settings import SightSettings

IDS = 1 << 31
"""Ids end here: what the prefix cache can tell apart."""

FETCH_SECONDS = 20.0
"""For all images of a request that come from the web, from the first name that is looked up to the last byte."""
READERS = 4
"""Requests whose images are read at a time: a host that is slow holds up no other's."""


class Sight:
    """What a server sees with: the tower and projector of its model. `pad` stands for an image in prompts, ids from `vocabulary` on are
    free for images."""

    def __init__(self, eye: Eye, pad: int, settings: SightSettings) -> None:
        assert eye.config.vision is not None
        self.eye, self.pad, self.settings = eye.eval(), pad, settings
        self.vocabulary = eye.config.vocab_size
        self.limits = ImageLimits(patch_size=eye.config.vision.patch_size, merge_size=eye.config.vision.merge_size)
        self.threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="see")  # looking takes long and must not stop other prompts
        self.readers = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="read")
        self._known: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._bytes, self._turn = 0, Lock()

    def close(self) -> None:
        """Let go of the threads."""
        for threads in (self.threads, self.readers):
            threads.shutdown(wait=False, cancel_futures=True)

    def read(self, conversation: Conversation) -> Conversation:
        """The conversation with the bytes of all its images. Raises `Refused` for too many, too large ones, none, or not allowed."""
        images = conversation.images
        if len(images) > self.settings.images:
            raise Refused(f"the messages have {len(images)} images; this server takes {self.settings.images} in a request", "messages")
        until = time.monotonic() + FETCH_SECONDS
        return replace(conversation, messages=tuple(self._message(message, until) for message in conversation.messages))

    def place(self, encoded: Encoded) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Seen, ...]]:
        """Tokens with as many ids for each image as it has vectors, the boundaries moved along, and the images at their positions."""
        waiting = [prepare(open_image(image.data, self.settings.pixels), self.limits) for image in encoded.images]
        tokens: list[int] = []
        images: list[Seen] = []
        moved = [0]
        for token in encoded.tokens:
            if token == self.pad:
                digest, vectors = self._vectors(waiting[len(images)])
                images.append(Seen(len(tokens), vectors))
                tokens += content_ids(digest, len(vectors), self.vocabulary)
            else:
                tokens.append(token)
            moved.append(len(tokens))
        return tuple(tokens), tuple(moved[length] for length in encoded.boundaries), tuple(images)

    def _message(self, message: Message, until: float) -> Message:
        content: list[Part] = []
        for part in message.content:
            if isinstance(part, Image):
                part = part if part.address is None else replace(part, data=self._at(part.address, until), address=None)
                try:
                    open_image(part.data, self.settings.pixels)
                except DataError as error:
                    raise Refused(str(error), "messages") from None
            content.append(part)
        return replace(message, content=tuple(content))

    def _at(self, address: str, until: float) -> bytes:
        """The bytes at an address, where the settings allow it, if they come before `until`."""
        parts = urlsplit(address)
        if parts.scheme == "file" and parts.netloc in ("", "localhost"):
            return self._file(Path(unquote(parts.path)))
        if parts.scheme in ("http", "https") and parts.hostname in self.settings.hosts:
            return asyncio.run(_fetched(address, self.settings.file_bytes, until - time.monotonic()))
        raise Refused(f"this server does not read {address[:100]!r}; send the image itself, as base64", "messages")

    def _file(self, path: Path) -> bytes:
        """A file of an allowed folder; links are followed first, and what is not allowed looks like what is not there."""
        try:
            real = path.resolve(strict=True)
            allowed = any(real.is_relative_to(folder.expanduser().resolve()) for folder in self.settings.folders)
            if allowed and real.is_file() and real.stat().st_size <= self.settings.file_bytes:
                return real.read_bytes()
        except OSError:
            pass
        raise Refused(f"'{path}' is no image that this server may read; it reads files of up to {self.settings.file_bytes} bytes in the "
                      "folders of 'sight.folders'", "messages")

    def _vectors(self, pixels: Pixels) -> tuple[bytes, NDArray[np.float32]]:
        """What the model sees of an image, and a digest of what it shows; looked at once while it is remembered."""
        shape = f"{pixels.frames} {pixels.rows} {pixels.columns}".encode()
        digest = hashlib.blake2b(pixels.patches.tobytes(), key=hashlib.sha256(shape).digest(), digest_size=32).digest()
        with self._turn:
            if digest in self._known:
                self._known.move_to_end(digest)
                return digest, self._known[digest]
        with torch.inference_mode():
            vectors = np.ascontiguousarray(self.eye.features([pixels])[0].float().cpu().numpy())
        with self._turn:
            if digest not in self._known:
                self._known[digest] = vectors
                self._bytes += vectors.nbytes
            while self._bytes > self.settings.memory_bytes and len(self._known) > 1:
                self._bytes -= self._known.popitem(last=False)[1].nbytes
        return digest, vectors


def content_ids(digest: bytes, count: int, vocabulary: int) -> list[int]:
    """Ids from `vocabulary` on for the positions of an image: 31 bits of its digest for each, so no short run is like another's."""
    raw = hashlib.shake_256(digest).digest(4 * count)
    return [vocabulary + int(value) % (IDS - vocabulary) for value in np.frombuffer(raw, "<u4")]


async def _fetched(address: str, most: int, seconds: float) -> bytes:
    """What an allowed host gives, within bounds of size and time; it cannot send us on to another."""
    import httpx

    data = bytearray()
    try:
        async with asyncio.timeout(seconds), httpx.AsyncClient(timeout=None) as client, client.stream("GET", address) as response:
            if response.status_code != 200:
                raise Refused(f"{address[:100]!r} answers {response.status_code}", "messages")
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > most:
                    raise Refused(f"{address[:100]!r} is larger than {most} bytes", "messages")
    except TimeoutError:
        raise Refused(f"{address[:100]!r} did not come in time; the images of a request have {FETCH_SECONDS:g} s", "messages") from None
    except httpx.HTTPError as error:
        raise Refused(f"{address[:100]!r} cannot be read: {error}", "messages") from None
    return bytes(data)
