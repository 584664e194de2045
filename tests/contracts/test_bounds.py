"""What a server holds for others is bounded: connections, heads that never come, bodies of those who wait, and their time."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from scripted_engine import ScriptedEngine

from gnomon.errors import ConfigError
from gnomon.serve.admission import Busy
from gnomon.serve.body import LARGE, Room
from gnomon.serve.server import Background
from gnomon.serve.service import Service

Make = Callable[..., Service]
HELLO: Any = [{"role": "user", "content": "hello"}]


def connect(url: str) -> socket.socket:
    place = urlsplit(url)
    return socket.create_connection((place.hostname, place.port), timeout=60)


def everything(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            parts.append(part)
    return b"".join(parts)


def ask(url: str, **more: Any) -> httpx.Response:
    return httpx.post(url + "/v1/chat/completions", json={"model": "tiny", "messages": HELLO} | more, timeout=60)


def test_one_connection_too_many_is_told_so(service: Make, scripted: ScriptedEngine) -> None:
    with Background(service(limits={"connections": 2})) as url:
        held = [connect(url), connect(url)]
        with connect(url) as third:
            assert b"503" in everything(third).splitlines()[0]
        for connection in held:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert b"200" in everything(connection).splitlines()[0]
            connection.close()


def test_who_never_sends_a_head_is_cut_off(service: Make, scripted: ScriptedEngine) -> None:
    with Background(service(limits={"head_seconds": 0.05})) as url, connect(url) as silent, connect(url) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nho")
        assert everything(silent) == b"" and b"200" not in everything(slow)


def test_bodies_inside_have_a_bound_and_leave_with_their_requests(service: Make, scripted: ScriptedEngine) -> None:
    made = service(limits={"body_bytes": 1000, "inside_bytes": 1000})
    with Background(made) as url:
        made.room.take(990)
        refused = ask(url)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1" and "bodies" in refused.json()["error"]["message"]
        made.room.give(990)
        assert ask(url).status_code == 200 and ask(url, stream=True).status_code == 200
        assert httpx.post(url + "/v1/chat/completions", content=b"{" * 500, headers={"content-type": "application/json"}).status_code == 400
        assert httpx.post(url + "/tokenize", content=b" " * 2000, headers={"content-type": "application/json"}).status_code == 413
    assert made.room.used == 0  # all requests are over when the server has ended


def test_room_is_counted() -> None:
    room = Room(10)
    room.take(6)
    with pytest.raises(Busy):
        room.take(5)
    room.take(4)
    room.give(10)
    assert room.used == 0


def test_large_bodies_are_read_like_small_ones(server_url: str, scripted: ScriptedEngine) -> None:
    padding = " " * LARGE
    said = [httpx.post(server_url + "/tokenize", content=f'{{"prompt": {json.dumps("hello")}{space}}}', timeout=60,
                       headers={"content-type": "application/json"}).json() for space in ("", padding)]
    assert said[0] == said[1] and said[0]["count"] > 0
    broken = httpx.post(server_url + "/tokenize", content="[" + padding, headers={"content-type": "application/json"}, timeout=60)
    assert broken.status_code == 400 and "not JSON" in broken.json()["error"]["message"]


def test_the_bound_of_all_bodies_holds_one(service: Make) -> None:
    with pytest.raises(ConfigError, match="'inside_bytes' is 10"):
        service(limits={"inside_bytes": 10})


def test_a_deadline_counts_from_the_arrival(service: Make, scripted: ScriptedEngine) -> None:
    from gnomon.data.dialects import openai_chat

    made = service()

    async def opened(seconds: float, ago: float) -> float | None:
        asked = openai_chat.read({"model": "tiny", "messages": HELLO, "deadline_seconds": seconds})
        answer = await made.open(asked, "a", time.perf_counter() - ago)
        async for _ in answer.batches():
            pass
        return scripted.requests[-1].deadline_seconds

    left = asyncio.run(opened(1000.0, 400.0))
    assert left is not None and 0 < left <= 600
    assert asyncio.run(opened(5.0, 7.0)) == 0  # the engine ends it at once, with what a deadline is told as
