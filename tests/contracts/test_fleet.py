"""A fleet: keys stay with their replica, failures go to the secondary, a broken stream says so, budgets hold, the dead come back."""

import asyncio
import json
import signal
import sys
import time
from collections import Counter

import httpx
import pytest

from gnomon.errors import ConfigError, GnomonError
from gnomon.serve.fleet import FleetSettings, Place, Ring, cost_of, key_of
from gnomon.serve.fleet_processes import Replica, processes, wait
from gnomon.serve.fleet_router import Router

NAMES = [f"replica-{i}" for i in range(4)]


def test_a_replica_less_moves_its_own_keys_only():
    """Keys of the one that went go to their secondaries; nobody else's key moves; shares are even within a factor."""
    keys = [f"key {i}" for i in range(2000)]
    ring, fewer = Ring(NAMES), Ring(NAMES[:-1])
    for key in keys:
        places = ring.places(key)
        assert sorted(places) == NAMES
        assert fewer.places(key)[0] == next(name for name in places if name != NAMES[-1])
    shares = Counter(ring.places(key)[0] for key in keys)
    assert min(shares.values()) > len(keys) / len(NAMES) / 2
    with pytest.raises(ConfigError, match="at least one"):
        Ring([])


def test_a_conversation_keeps_its_key():
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "hello"}
    turn = [system, user]
    later = [*turn, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
    assert key_of({"messages": turn}) == key_of({"messages": later, "temperature": 0.1, "stream": True})
    assert key_of({"messages": turn}) != key_of({"messages": [system, user | {"content": "other"}]})
    assert key_of({"messages": turn, "user": "a"}) == key_of({"messages": [user], "user": "a"}) != key_of({"messages": turn, "user": "b"})
    assert key_of({"prompt": "x" * 3000}) == key_of({"prompt": "x" * 9000})
    assert key_of({"prompt": [1, 2, 3]}) != key_of({"prompt": [1, 2, 4]})
    assert key_of({"input": "a"}) != key_of({"input": "b"})
    assert key_of({"messages": turn, "system": "x"}) != key_of({"messages": turn, "system": "y"})
    assert key_of({"metadata": {"user_id": "u"}, "messages": turn}) == key_of({"metadata": {"user_id": "u"}, "messages": later})
    for odd in (None, [], "x", {"messages": 3}, {"messages": [3]}, {"prompt": [[1], [2]]}, {"user": 7}):
        assert isinstance(key_of(odd), str)


def test_costs_and_budgets():
    assert cost_of({"max_tokens": 100}, 400) == 200
    assert cost_of({"max_tokens": 100, "n": 3}, 400) == 400
    assert cost_of(None, 400) == cost_of({"max_tokens": "x"}, 400) == 1124
    place = Place("a", "http://a", 100, healthy=True)
    assert place.fits(1000), "one larger than the whole budget may run alone"
    place.enter(60)
    assert place.fits(40) and not place.fits(41)
    place.leave(60)
    assert (place.used, place.running) == (0, 0)
    with pytest.raises(ConfigError, match="replicas"):
        FleetSettings(replicas=0)


class Scripted(httpx.AsyncBaseTransport):
    """Replicas by host: what each does is a word in `does`."""

    def __init__(self, names=NAMES):
        self.does = dict.fromkeys(names, "answers")
        self.asked = Counter()
        self.gate = asyncio.Event()

    async def handle_async_request(self, request):
        name = request.url.host
        does = self.does[name]
        if does == "down":
            raise httpx.ConnectError("refused")
        if request.url.path == "/health":
            return httpx.Response(503 if does == "drains" else 200, json={})
        self.asked[name] += 1
        body = json.loads(await request.aread())
        if does == "drains":
            return httpx.Response(503, json={})
        if does == "waits":
            await self.gate.wait()
        if not body.get("stream"):
            whole = Bytes([b'{"from": "', name.encode(), b'"}'], does)
            return httpx.Response(200, headers={"content-type": "application/json"}, stream=whole)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Bytes([b"data: 1\n\n", b"data: 2\n\n"], does))


class Bytes(httpx.AsyncByteStream):
    """Bytes that come in pieces, and break where the replica is lost."""

    def __init__(self, pieces, does):
        self.pieces, self.does = pieces, does

    async def __aiter__(self):
        for index, piece in enumerate(self.pieces):
            if (self.does, index) in (("dies first", 0), ("dies later", 1)):
                raise httpx.ReadError("lost")
            yield piece


def fleet(play, **settings):
    """Run `play(client, router, scripted)` with a client of the router over scripted replicas."""

    async def inside():
        scripted = Scripted()
        addresses = {name: f"http://{name}" for name in NAMES}
        router = Router(addresses, FleetSettings(replicas=len(NAMES), **settings), scripted)
        await router.check()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(router.app()), base_url="http://fleet") as client:
            await play(client, router, scripted)
        await router.client.aclose()
        assert all(place.used == place.running == 0 for place in router.places.values()), "every request gave its budget back"

    asyncio.run(inside())


def body(user="someone", **fields):
    return {"messages": [{"role": "user", "content": "hi"}], "user": user, "max_tokens": 10, **fields}


URL = "/v1/chat/completions"


def test_turns_go_to_one_replica():
    async def play(client, router, scripted):
        for user in ("a", "b", "c"):
            answers = [await client.post(URL, json=body(user, seed=i)) for i in range(3)]
            assert {answer.headers["x-gnomon-replica"] for answer in answers} == {router.ring.places(f"user {user}")[0]}
            assert answers[0].json() == {"from": answers[0].headers["x-gnomon-replica"]}

    fleet(play)


@pytest.mark.parametrize("does", ["down", "drains", "dies first"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_the_first_byte_is_asked_elsewhere(does, stream):
    async def play(client, router, scripted):
        first, second = router.ring.places("user a")[:2]
        scripted.does[first] = does
        answer = await client.post(URL, json=body("a", stream=stream))
        assert answer.status_code == 200
        assert answer.headers["x-gnomon-replica"] == second
        assert router.retried == 1
        assert not router.places[first].healthy, "the next request does not try it first"
        assert (await client.post(URL, json=body("a", stream=stream))).status_code == 200
        assert router.retried == 1
        scripted.does[first] = "answers"
        await router.check()
        assert (await client.post(URL, json=body("a"))).headers["x-gnomon-replica"] == first, "it is the primary again"

    fleet(play)


def test_an_answer_that_is_not_streamed_can_always_be_repeated():
    async def play(client, router, scripted):
        first, second = router.ring.places("user a")[:2]
        scripted.does[first] = "dies later"
        assert (await client.post(URL, json=body("a"))).json() == {"from": second}

    fleet(play)


@pytest.mark.parametrize(("url", "said"), [(URL, b'{"error":'), ("/v1/completions", b'{"error":')])
def test_a_stream_that_breaks_says_so(url, said):
    async def play(client, router, scripted):
        scripted.does[router.ring.places("user a")[0]] = "dies later"
        answer = await client.post(url, json=body("a", stream=True))
        events = answer.content.split(b"\n\n")
        assert events[0] == b"data: 1"
        assert said in answer.content
        assert b"lost in the middle" in answer.content
        assert b"data: 2" not in answer.content

    fleet(play)


def test_budgets_hold_and_the_secondary_helps_out():
    """One request fills the primary, one the secondary; the third is told when to come back, another conversation is not held up."""

    async def play(client, router, scripted):
        scripted.does = dict.fromkeys(NAMES, "waits")
        pair = router.ring.places("user a")[:2]
        running = [asyncio.create_task(client.post(URL, json=body("a", max_tokens=90))) for _ in range(2)]
        while sum(router.places[name].running for name in pair) < 2:
            await asyncio.sleep(0)
        refused = await client.post(URL, json=body("a", max_tokens=90))
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        other = next(f"u{i}" for i in range(100) if router.ring.places(f"user u{i}")[0] not in pair)
        running.append(asyncio.create_task(client.post(URL, json=body(other, max_tokens=90))))
        await asyncio.sleep(0)
        scripted.gate.set()
        answers = await asyncio.gather(*running)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert [answer.headers["x-gnomon-replica"] for answer in answers[:2]] == pair

    fleet(play, tokens=150)


def test_no_replica_and_too_large_a_body():
    async def play(client, router, scripted):
        large = await client.post(URL, json=body("a", filler="x" * 5000))
        assert large.status_code == 413
        assert (await client.get("/health")).status_code == 200
        scripted.does = dict.fromkeys(NAMES, "down")
        assert (await client.post(URL, json=body("a"))).status_code == 503
        await router.check()
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "no replica answers"
        assert (await client.get("/v1/models")).status_code == 503
        assert 'gnomon_router_replica_healthy{replica="replica-0"} 0' in (await client.get("/metrics")).text

    fleet(play, body_bytes=4096)


def test_bodies_that_are_inside_are_bounded_together_and_in_time():
    """Two bodies fill the room while their replica thinks; the third is sent away, and a body that never ends is too."""

    async def play(client, router, scripted):
        scripted.does = dict.fromkeys(NAMES, "waits")
        running = [asyncio.create_task(client.post(URL, json=body(user, filler="x" * 1500))) for user in ("a", "b")]
        while sum(place.running for place in router.places.values()) < 2:
            await asyncio.sleep(0)
        assert router.room.used > 3000
        refused = await client.post(URL, json=body("c", filler="x" * 1500))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        scripted.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
        assert router.room.used == 0

    async def late(client, router, scripted):
        never = asyncio.Event()

        async def slowly():
            yield b'{"messages": '
            await never.wait()

        slow = await client.post(URL, content=slowly(), headers={"content-type": "application/json"})
        assert slow.status_code == 408
        assert router.room.used == 0

    fleet(play, inside_bytes=4096)
    fleet(late, body_seconds=0.2)


SERVER = """
import http.server, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


def test_the_dead_come_back_and_none_stays_behind():
    settings = FleetSettings(replicas=2, start_seconds=60, stop_seconds=10)
    with processes(lambda port: [sys.executable, "-c", SERVER, str(port)], settings) as replicas:
        wait(replicas, settings)
        lost, port = replicas[0].process, replicas[0].port
        lost.send_signal(signal.SIGKILL)
        lost.wait()
        assert not replicas[0].look(now=0.0), "there is a pause first"
        assert not replicas[1].look(now=9.0)
        assert replicas[0].look(now=9.0)
        wait(replicas, settings)
        assert (replicas[0].port, replicas[0].restarts) == (port, 1)
        alive = [replica.process for replica in replicas]
    assert all(process.poll() is not None for process in alive)


def test_a_replica_that_cannot_start_is_told():
    settings = FleetSettings(replicas=1, start_seconds=60)
    begin = time.monotonic()
    ends = [sys.executable, "-c", ""]
    with pytest.raises(GnomonError, match="ended before it answered"), processes(lambda port: ends, settings) as replicas:
        wait(replicas, settings)
    assert time.monotonic() - begin < 60
    assert Replica("a", lambda port: []).url.startswith("http://127.0.0.1:")
