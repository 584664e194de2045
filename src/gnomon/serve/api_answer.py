"""What a route does with a question: read it in its dialect, answer it whole or as events, and stop when nobody listens any more.

Read next: `answering.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gnomon.data.dialects import anthropic, openai_chat, openai_completions, openai_responses
from gnomon.data.dialects.asked import Choice, Cost, Dialect, Sent, Stream, TokenLogprob
from gnomon.data.dialects.sent import as_bytes, encode_json
from gnomon.errors import GnomonError
from gnomon.serve.answering import Answer, Began, Ended, Said, Update
from gnomon.serve.body import read_json
from gnomon.serve.errors import ClientGone, Problem, problem
from gnomon.serve.service import Service

DIALECTS: Mapping[str, Dialect] = MappingProxyType({
    "/v1/chat/completions": openai_chat,
    "/v1/completions": openai_completions,
    "/v1/responses": openai_responses,
    "/v1/messages": anthropic,
})
QUIET_SECONDS = 15.0  # a stream that says nothing for so long sends a comment, so that proxies keep it open
CACHED, NOTE, VERSION = "x-gnomon-cached-tokens", "x-gnomon-cache-note", "x-gnomon-policy-version"


def dialect_of(path: str) -> Dialect:
    """The dialect that a path speaks; errors elsewhere have OpenAI's shape."""
    return anthropic if path.startswith("/v1/messages/") else DIALECTS.get(path, openai_chat)


def endpoint(service: Service, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
    """The route of a dialect."""

    async def answer(request: Request) -> Response:
        asked = await read_json(request, service.settings.limits, service.room, dialect.read)
        note = request.scope["note"]
        note.fields.update(stream=asked.stream, priority=asked.priority, session=asked.session)
        async with while_listening(request.receive):
            opened = await service.open(asked, note.id, note.began)
            if not asked.stream:
                return await _whole(service, dialect, opened, note.fields)
            batches = opened.batches()
            try:
                first = await anext(batches)  # what is refused now still has a status of its own
            except BaseException:
                await batches.aclose()
                _account(service, opened, note.fields)
                raise
        stream = dialect.stream(asked, opened.head)
        chunks = _chunks(service, (dialect, stream), opened, (first, batches), note.fields)
        return EventStream(chunks, _headers(opened.cost() if _known(first) else None))

    return answer


async def _whole(service: Service, dialect: Dialect, answer: Answer, fields: dict[str, Any]) -> Response:
    ended: list[Ended] = []
    logprobs: dict[int, list[TokenLogprob]] = {}
    try:
        async with aclosing(answer.batches()) as batches:
            async for updates in batches:
                for update in updates:
                    if isinstance(update, Said):
                        logprobs.setdefault(update.choice, []).extend(update.logprobs)
                    elif isinstance(update, Ended):
                        ended.append(update)
    finally:
        _account(service, answer, fields)
    ended.sort(key=lambda update: update.choice)
    choices = [Choice(index=e.choice, reply=e.reply, ending=e.ending, logprobs=tuple(logprobs.get(e.choice, ()))) for e in ended]
    body = dialect.whole(answer.asked, answer.head, choices, answer.cost())
    headers = _headers(answer.cost()) | {VERSION: str(service.revision.version)}
    return Response(encode_json(body), headers=headers, media_type="application/json")


async def _chunks(service: Service, voice: tuple[Dialect, Stream], answer: Answer,
                  source: tuple[list[Update], AsyncGenerator[list[Update], None]], fields: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream; a failure becomes its last event."""
    dialect, stream = voice
    first, batches = source
    loop = asyncio.get_running_loop()
    timer = loop.call_later(QUIET_SECONDS, answer.nudge)
    try:
        async with aclosing(batches):
            yield as_bytes([sent for update in first for sent in _events(stream, update)])
            async for updates in batches:
                timer.cancel()
                timer = loop.call_later(QUIET_SECONDS, answer.nudge)
                yield as_bytes([sent for update in updates for sent in _events(stream, update)]) if updates else b": still here\n\n"
        yield as_bytes(stream.end(answer.cost()))
    except GnomonError as error:
        fields["problem"] = str(error)
        yield error_event(dialect, problem(error))
    finally:
        timer.cancel()
        _account(service, answer, fields)


def _events(stream: Stream, update: Update) -> Sequence[Sent]:
    match update:
        case Said(choice=choice, delta=delta, logprobs=logprobs):
            return stream.delta(choice, delta, logprobs)
        case Began(cost=cost):
            return stream.start(cost)
        case Ended(choice=choice, reply=reply, ending=ending):
            return stream.finish(choice, reply, ending)


def error_event(dialect: Dialect, found: Problem) -> bytes:
    """The last event of a stream that failed. Dialects that name their events have the name in its `type`."""
    body = dialect.error(found.status, found.message, found.place, found.code)
    return as_bytes([Sent(body.get("type"), body)])


def _known(updates: Sequence[Update]) -> bool:
    return any(isinstance(update, Began) and update.known for update in updates)


def _headers(cost: Cost | None) -> dict[str, str]:
    headers = {"cache-control": "no-store"}
    if cost is not None:
        note = cost.cache_note.encode("ascii", "replace").decode().replace("\n", " ").replace("\r", " ")
        headers |= {CACHED: str(cost.cached_tokens), NOTE: note[:500]}
    return headers


def _account(service: Service, answer: Answer, fields: dict[str, Any]) -> None:
    """Count an answer that ended, and note what it took for the log."""
    cost, usage = answer.cost(), answer.usage
    service.metrics.answered(cost, usage.first_token_seconds if usage else None)
    fields.update(prompt_tokens=cost.prompt_tokens, cached_tokens=cost.cached_tokens, output_tokens=cost.output_tokens,
                  cache_note=cost.cache_note or None, reason=",".join(answer.reasons) or None)
    if usage is not None:
        fields.update(queue_seconds=usage.queue_seconds, first_token_seconds=usage.first_token_seconds)


class EventStream(Response):
    """Bytes of events, sent as they come for as long as the client is there."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(headers={"x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head and then each chunk."""
        async with aclosing(self._chunks):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with while_listening(receive):
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def while_listening(receive: Receive) -> AsyncIterator[None]:
    """What runs inside is cancelled when the client leaves; then `ClientGone` is raised in its place."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
        if left:
            await asyncio.sleep(0)  # take the cancellation that is on its way
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientGone("the client left before the answer was complete") from None
        raise
    finally:
        watcher.cancel()
