"""The Connect protocol as far as the E2B data plane needs it: JSON messages, one reply or a stream of them (connectrpc.com/docs/protocol).

A single call is a JSON body and a JSON reply. A stream is a row of envelopes: a byte of flags, four bytes of length, a JSON message; the
last one has flag 2 and says how the stream ended. Binary protobuf is refused: the official SDKs send JSON.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from gnomon.errors import CapacityError, ConfigError, GnomonError, SandboxError, SandboxLost, SandboxTimeout, Unsupported

ENVELOPE = struct.Struct(">BI")
END_OF_STREAM = 2
MAX_MESSAGE = 16 << 20

STATUS = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "failed_precondition": 400,
    "resource_exhausted": 429,
    "deadline_exceeded": 504,
    "unavailable": 503,
    "unimplemented": 501,
    "internal": 500,
}
"""Codes of the protocol and the HTTP status that goes with each."""


class Refusal(SandboxError):
    """A request that is answered with an error: HTTP status for the control plane, code for the data plane, and why."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code or next((name for name, number in STATUS.items() if number == status), "internal")


def refusal(error: GnomonError) -> Refusal:
    """What a client is told about an error of ours."""
    if isinstance(error, Refusal):
        return error
    text = str(error)
    if isinstance(error, SandboxLost):
        return Refusal(502, f"The sandbox was not found: {text}", "unavailable")
    if isinstance(error, SandboxTimeout):
        return Refusal(504, text, "deadline_exceeded")
    if isinstance(error, CapacityError):
        return Refusal(503, text, "resource_exhausted")
    if isinstance(error, (ConfigError, Unsupported)):
        return Refusal(400, text, "invalid_argument")
    lowered = text.lower()
    if "no such file" in lowered or "does not exist" in lowered:
        return Refusal(404, text, "not_found")
    if "not a directory" in lowered or "is a directory" in lowered or "not a regular file" in lowered:
        return Refusal(400, text, "invalid_argument")
    if "no space" in lowered:
        return Refusal(507, text, "resource_exhausted")
    return Refusal(500, text, "internal")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What comes with every call: who it is for, how long it may take, how often a silent stream says that it lives."""

    user: str | None
    timeout_seconds: float | None
    keepalive_seconds: float

    @classmethod
    def of(cls, request: Request) -> Call:
        """From the headers of a request."""
        milliseconds = _number(request.headers.get("connect-timeout-ms"))
        ping = _number(request.headers.get("keepalive-ping-interval"))
        return cls(
            user=user_of(request.headers.get("authorization")),
            timeout_seconds=None if milliseconds is None else milliseconds / 1000,
            keepalive_seconds=min(600.0, max(1.0, ping or 90.0)),
        )


def _number(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) <= 12 else None


def user_of(authorization: str | None) -> str | None:
    """The user that `Basic user:` names; `None` without one."""
    if authorization is None or not authorization.startswith("Basic "):
        return None
    try:
        return base64.b64decode(authorization[6:], validate=True).decode().partition(":")[0] or None
    except (binascii.Error, UnicodeDecodeError):
        raise Refusal(400, "the Authorization header is no Basic user") from None


def parsed(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises `Refusal` for anything else."""
    try:
        message = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is no JSON") from None
    if not isinstance(message, dict):
        raise Refusal(400, "the body is no JSON object")
    return message


class Json(JSONResponse):
    """A reply in ASCII: names of files need not be text, and what stands for their bytes has no other form."""

    def render(self, content: Any) -> bytes:
        """The content as bytes."""
        return json.dumps(content, allow_nan=False).encode()


def text_of(message: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A field that must be text."""
    value = message.get(name, default)
    if not isinstance(value, str):
        raise Refusal(400, f"{name} must be text")
    return value


async def unary(request: Request, work: Callable[[dict[str, Any], Call], Awaitable[dict[str, Any]]]) -> Response:
    """Answer a single call."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    try:
        if kind != "application/json":
            raise Refusal(415, f"content type {kind or 'absent'}: this server speaks JSON only", "unimplemented")
        call = Call.of(request)
        message = parsed(await request.body())
        try:
            async with asyncio.timeout(call.timeout_seconds):
                return Json(await work(message, call))
        except TimeoutError:
            raise Refusal(504, "the call took longer than its timeout", "deadline_exceeded") from None
    except GnomonError as error:
        told = refusal(error)
        return Json({"code": told.code, "message": str(told)}, status_code=told.status)


def envelope(message: Mapping[str, Any], flags: int = 0) -> bytes:
    """One message of a stream."""
    data = json.dumps(message).encode()
    return ENVELOPE.pack(flags, len(data)) + data


async def envelopes(request: Request) -> AsyncIterator[dict[str, Any]]:
    """The messages of a stream that a client sends, as they come."""
    buffer = bytearray()
    async for piece in request.stream():
        buffer += piece
        while len(buffer) >= ENVELOPE.size:
            flags, length = ENVELOPE.unpack_from(buffer)
            if length > MAX_MESSAGE:
                raise Refusal(413, f"a message of {length} bytes; {MAX_MESSAGE} is the most", "resource_exhausted")
            if len(buffer) < ENVELOPE.size + length:
                break
            data = bytes(buffer[ENVELOPE.size : ENVELOPE.size + length])
            del buffer[: ENVELOPE.size + length]
            if flags & 1:
                raise Refusal(400, "compressed messages are not accepted", "unimplemented")
            yield parsed(data)


async def stream(request: Request, work: Callable[[dict[str, Any], Call], AsyncIterator[dict[str, Any]]]) -> Response:
    """Answer a call that has one message and a stream of replies."""
    try:
        _check_stream(request)
        call = Call.of(request)
        messages = [message async for message in envelopes(request)]
        if len(messages) != 1:
            raise Refusal(400, f"{len(messages)} messages where one is expected")
    except GnomonError as error:
        return _ended(refusal(error))
    return StreamingResponse(_replies(work(messages[0], call), call), media_type="application/connect+json")


async def client_stream(request: Request, work: Callable[[AsyncIterator[dict[str, Any]], Call], Awaitable[dict[str, Any]]]) -> Response:
    """Answer a call that is a stream of messages and has one reply."""
    try:
        _check_stream(request)
        answer = await work(envelopes(request), Call.of(request))
    except GnomonError as error:
        return _ended(refusal(error))
    return Response(envelope(answer) + envelope({}, END_OF_STREAM), media_type="application/connect+json")


def _check_stream(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/connect+json":
        raise Refusal(415, f"content type {kind or 'absent'}: this server speaks Connect with JSON only", "unimplemented")


def _ended(error: Refusal) -> Response:
    return Response(envelope(_trailer(error), END_OF_STREAM), media_type="application/connect+json")


def _trailer(error: Refusal) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": str(error)}}


async def _replies(messages: AsyncIterator[dict[str, Any]], call: Call) -> AsyncIterator[bytes]:
    """The envelopes of a stream, the last one saying how it ended; in time, whatever happens inside."""
    loop = asyncio.get_running_loop()
    deadline = None if call.timeout_seconds is None else loop.time() + call.timeout_seconds
    trailer: dict[str, Any] = {}
    try:
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await anext(messages)
            except StopAsyncIteration:
                break
            except TimeoutError:
                raise Refusal(504, "the stream took longer than its timeout", "deadline_exceeded") from None
            yield envelope(message)
    except GnomonError as error:
        trailer = _trailer(refusal(error))
    finally:
        closing = getattr(messages, "aclose", None)
        if closing is not None:
            with contextlib.suppress(GnomonError):
                await closing()
    yield envelope(trailer, END_OF_STREAM)
