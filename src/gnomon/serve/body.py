"""The body of a request: read within a size and a time, while there is room for it, and parsed as strict JSON. Read next: `api.py`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from gnomon.serve.admission import Busy
from gnomon.serve.errors import ClientGone, Rejected
from gnomon.serve.settings import LimitSettings

T = TypeVar("T")
LARGE = 1 << 16
"""Bytes of a body from which on it is read beside the event loop."""


class Room:
    """The bytes of bodies that may be inside at a time; used by one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> None:
        """Hold so many bytes. Raises `Busy` where there are not that many."""
        if self.used + size > self.limit:
            raise Busy(f"the bodies of the requests inside have {self.used} bytes and {self.limit} are allowed; try again later", 1)
        self.used += size

    def give(self, size: int) -> None:
        """Let go of so many."""
        self.used -= size


async def read_json(request: Request, limits: LimitSettings, room: Room, read: Callable[[Any], T]) -> T:
    """What `read` makes of the JSON that a client sent; its place in `room` is noted in the request's scope as `body_bytes`.

    Raises `Rejected` for what is no JSON, too large or too slow, `Busy` where there is no room, `ClientGone` when the client left, and what
    `read` raises.
    """
    _check_head(request, limits)
    data = await read_bytes(request, limits.body_bytes, limits.body_seconds, room)
    if len(data) < LARGE:
        return read(parse(data))
    return await asyncio.to_thread(lambda: read(parse(data)))


def _check_head(request: Request, limits: LimitSettings) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Rejected(415, f"the body must be JSON; send the header 'content-type: application/json' (it says '{kind[:80]}')",
                       "unsupported_media_type")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and len(declared) < 19 and int(declared) > limits.body_bytes:
        raise _too_large(limits.body_bytes)


async def read_bytes(request: Request, most: int, seconds: float, room: Room) -> bytes:
    """The body; what it takes of `room` is noted in the request's scope as `body_bytes`, for whoever gives it back.

    Raises `Rejected` for more than `most` bytes or what takes longer than `seconds`, `Busy` where there is no room, `ClientGone` when the
    client left.
    """
    chunks, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    raise _too_large(most)
                room.take(len(chunk))
                request.scope["body_bytes"] = size
                chunks.append(chunk)
    except TimeoutError:
        raise Rejected(408, f"the body did not arrive within {seconds:g} s", "request_timeout") from None
    except ClientDisconnect:
        raise ClientGone("the client left while it sent the body") from None
    return b"".join(chunks)


def parse(data: bytes) -> Any:
    """Strict JSON: no NaN, nothing infinite, no half characters, no endless nesting. Raises `Rejected`."""
    try:
        value = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
        if b"\\ud" in data or b"\\uD" in data:  # the escape of half a character is JSON and no text
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise Rejected(400, "the body is nested too deep; make it flatter", "invalid_json") from None
    except UnicodeEncodeError:
        raise Rejected(400, "the body has half a character (a lone surrogate such as \\ud800); send whole ones", "invalid_json") from None
    except ValueError as error:
        raise Rejected(400, f"the body is not JSON: {str(error)[:200]}", "invalid_json") from None
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is larger than any number here")
    return value


def _too_large(most: int) -> Rejected:
    return Rejected(413, f"the body is larger than {most} bytes; send less", "request_too_large")
