"""The allowlist proxy: what the rules name is reached, through an address that was judged; everything else is refused or cut."""

import asyncio
import contextlib
import ipaddress
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from gnomon.errors import ConfigError
from gnomon.sandbox import network, rules
from gnomon.sandbox.network import Bounds, Egress
from gnomon.sandbox.rules import Rule
from gnomon.sandbox.sandbox import Network

PUBLIC = "93.184.216.34"
NAMES = {
    "good.test": [PUBLIC], "a.good.test": [PUBLIC], "inner.test": ["10.0.0.5"], "mixed.test": [PUBLIC, "127.0.0.1"],
    "meta.test": ["169.254.169.254"], "mapped.test": ["::ffff:127.0.0.1"], "six.test": ["2606:2800:220:1::1"], "none.test": [],
}


async def lookup(host: str, port: int) -> list[rules.Address]:
    """Names of the tests."""
    if host not in NAMES:
        raise network.Refused(502, f"{host} cannot be looked up")
    return [ipaddress.ip_address(text) for text in NAMES[host]]


@contextlib.asynccontextmanager
async def server(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[int]:
    """A server on this machine; its port."""
    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Where the proxy connected to; each connection really goes to this machine, which it would refuse by itself."""
    found: list[tuple[str, int]] = []
    connect = asyncio.open_connection

    async def divert(host: str, port: int, **options: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        found.append((host, port))
        return await connect("127.0.0.1", port, **options)

    monkeypatch.setattr(network.asyncio, "open_connection", divert)
    return found


async def ask(egress: Egress, text: str, *, until_closed: bool = True) -> bytes:
    """What the proxy answers to a request."""
    reader, writer = await asyncio.open_unix_connection(str(egress.path))
    writer.write(text.encode())
    try:
        return await asyncio.wait_for(reader.read(-1 if until_closed else 4096), 20)
    finally:
        await network._shut(writer)


def run(allow: tuple[str, ...], work: Callable[[Egress], Awaitable[object]], bounds: Bounds | None = None, **fields: Path) -> Egress:
    """Do something with a proxy that has these rules."""

    async def main() -> Egress:
        egress = Egress(Network(allow=allow, **fields), bounds, lookup)
        await egress.start()
        try:
            await asyncio.wait_for(work(egress), 60)
        finally:
            await egress.close()
            async with asyncio.timeout(60):  # for the ends that the tests closed
                while egress._tasks:
                    await asyncio.sleep(0.01)
            assert not egress.path.parent.exists()
        return egress

    return asyncio.run(main())


@pytest.mark.parametrize(("rule", "host", "port", "fits"), [
    ("a.test:443", "a.test", 443, True), ("a.test:443", "a.test", 80, False), ("a.test:443", "b.a.test", 443, False),
    ("a.test:*", "a.test", 1, True), ("*.a.test:443", "b.a.test", 443, True), ("*.a.test:443", "c.b.a.test", 443, True),
    ("*.a.test:443", "a.test", 443, False), ("*.a.test:443", "bada.test", 443, False), ("*:443", "any.test", 443, True),
    ("A.Test.:443", "a.test", 443, True), ("bücher.test:443", "xn--bcher-kva.test", 443, True),
    ("[2606:2800:220:1::1]:443", "2606:2800:220:1::1", 443, True),
])
def test_rules_by_name_and_port(rule, host, port, fits):
    assert Rule.parse(rule).fits(host, port) is fits


@pytest.mark.parametrize("text", [
    "a.test", "a.test:", "a.test:0", "a.test:65536", "a.test:x", ":443", "a.*.test:443", "*a.test:443", "a b:443", "127.0.0.1:80",
    "10.1.2.3:*", "[::1]:80", "[::ffff:10.0.0.1]:80", "169.254.169.254:80", "2130706433:80", "0x7f000001:80", "0177.0.0.1:80", "127.1:80",
    "*.1.2.3.4:80", "http://a.test:80",
])
def test_rules_that_are_none_are_named(text):
    with pytest.raises(ConfigError, match=r"network.allow: '" + re.escape(text)):
        Rule.parse(text)


@pytest.mark.parametrize("address", [
    "127.0.0.1", "127.255.0.1", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "100.100.100.200", "192.0.0.192", "168.63.129.16", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "::", "::1",
    "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
    "::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b:1::1",
    "2002:7f00:1::", "2002:a00:1::1", "2001:0:a00:1::1", "2001:db8::1", "fe80::1%eth0",
])
def test_inner_addresses_are_closed(address):
    assert rules.closed(ipaddress.ip_address(address))


def test_public_addresses_are_open_and_the_machines_own_are_not(monkeypatch):
    for text in (PUBLIC, "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"):
        assert rules.closed(ipaddress.ip_address(text)) is None
    monkeypatch.setattr(rules, "_own", lambda address: str(address) == PUBLIC)
    assert "own" in rules.closed(ipaddress.ip_address(PUBLIC)) and rules.closed(ipaddress.ip_address(f"::ffff:{PUBLIC}"))


def test_the_machines_own_addresses_are_found():
    assert rules._own(ipaddress.ip_address("127.0.0.1")) and not rules._own(ipaddress.ip_address("192.0.2.77"))


def test_a_tunnel_carries_bytes_both_ways(dialled):
    async def upper(reader, writer):
        while piece := await reader.read(100):
            writer.write(piece.upper())
        writer.close()

    async def work(egress):
        async with server(upper) as port:
            egress.replace(Network(allow=(f"good.test:{port}",)))
            reader, writer = await asyncio.open_unix_connection(str(egress.path))
            writer.write(f"CONNECT GOOD.test.:{port} HTTP/1.1\r\nHost: x\r\n\r\nhello ".encode())
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 Connection established\r\n\r\n"
            writer.write(b"world")
            writer.write_eof()
            assert await reader.read() == b"HELLO WORLD"
            writer.close()

    egress = run((), work)
    assert dialled[0][0] == PUBLIC and (egress.sent, egress.received) == (11, 11)
    assert [(d.host, d.allowed) for d in egress.decisions] == [("good.test", True)]


def test_a_plain_request_is_passed_on_and_no_second_one(dialled):
    """What follows the body stays here: it could be a request to another host."""
    got: list[bytes] = []

    async def web(reader, writer):
        got.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(4))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            got.append(await asyncio.wait_for(reader.read(100), 0.2))
        writer.close()

    async def work(egress):
        async with server(web) as port:
            egress.replace(Network(allow=(f"good.test:{port}",)))
            text = (f"POST http://good.test:{port}/a?b=c HTTP/1.1\r\nHost: other.test\r\nProxy-Connection: keep-alive\r\nX: y\r\n"
                    "Connection: keep-alive\r\nContent-Length: 4\r\n\r\nbodyGET http://inner.test/ HTTP/1.1\r\n\r\n")
            assert (await ask(egress, text)).endswith(b"ok")
            head = got[0].decode()
            assert head.startswith(f"POST /a?b=c HTTP/1.1\r\nHost: good.test:{port}\r\n") and head.endswith("\r\n\r\nbody")
            assert "Connection: close" in head and "keep-alive" not in head and "other.test" not in head and "X: y" in head
            assert b"inner" not in b"".join(got)

    run((), work)


@pytest.mark.parametrize(("allow", "target", "says"), [
    (("good.test:443",), "bad.test:443", "bad.test:443 is not allowed; the rules are: good.test:443"),
    ((), "good.test:443", "the rules are: none"),
    (("good.test:443",), "good.test:80", "not allowed"),
    (("inner.test:443",), "inner.test:443", "10.0.0.5 is private"),
    (("mixed.test:443",), "mixed.test:443", "127.0.0.1 is this machine"),
    (("meta.test:80",), "meta.test:80", "link-local"),
    (("mapped.test:80",), "mapped.test:80", "this machine"),
    (("*:80",), "127.0.0.1:80", "this machine"),
    (("*:80",), "169.254.169.254:80", "link-local"),
    (("*:80",), "[::ffff:169.254.169.254]:80", "link-local"),
    (("*:80",), "[::1]:80", "this machine"),
    (("*:80",), "2130706433:80", "no host"),
    (("*:80",), "0x7f000001:80", "no host"),
    (("*:80",), "0177.0.0.1:80", "no host"),
    (("*:80",), "127.1:80", "no host"),
    (("*:80",), "good.test@127.0.0.1:80", "this machine"),
    (("none.test:80",), "none.test:80", "no address"),
    (("*:80",), "unknown.test:80", "cannot be looked up"),
    (("*:80",), "good.test", "needs host:port"),
    (("*:80",), "good.test:99999", "cannot be read"),
])
def test_what_is_refused_and_why(allow, target, says, dialled):
    async def work(egress):
        answer = await ask(egress, f"CONNECT {target} HTTP/1.1\r\n\r\n")
        assert re.match(rb"HTTP/1.1 (403|400|502) Refused\r\n", answer) and says in answer.decode(), answer

    run(allow, work)
    assert dialled == []


@pytest.mark.parametrize("text", [
    "nonsense\r\n\r\n", "GET /relative HTTP/1.1\r\n\r\n", "GET https://good.test/ HTTP/1.1\r\n\r\n",
    "GET http://u:p@good.test/ HTTP/1.1\r\n\r\n",
    "GET http://good.test/ HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "GET http://good.test/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "GET http://good.test/ HTTP/1.1\r\n folded\r\n\r\n",
    "SSH-2.0-x\r\n\r\n", "GET ftp://good.test/ HTTP/1.1\r\n\r\n", "GET http://good.test/ HTTP/1.1\r\nX: " + "y" * 20_000 + "\r\n\r\n",
])
def test_what_is_no_request_is_refused(text, dialled):
    async def work(egress):
        assert (await ask(egress, text)).startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))

    run(("*:80",), work)


def test_a_name_that_changes_its_address_gains_nothing(dialled, monkeypatch):
    """First public, then inner: the address that was judged is dialled, for as long as it is kept; then it is judged anew."""
    async def silent(reader, writer):
        writer.close()

    async def work(egress):
        async with server(silent) as port:
            egress.replace(Network(allow=(f"good.test:{port}",)))
            await ask(egress, f"CONNECT good.test:{port} HTTP/1.1\r\n\r\n")
            monkeypatch.setitem(NAMES, "good.test", ["127.0.0.1"])
            await ask(egress, f"CONNECT good.test:{port} HTTP/1.1\r\n\r\n")
            egress._pins.clear()
            assert b"403" in await ask(egress, f"CONNECT good.test:{port} HTTP/1.1\r\n\r\n")

    run((), work)
    assert [host for host, _ in dialled] == [PUBLIC, PUBLIC]


def test_new_rules_cut_what_they_no_longer_allow(dialled):
    async def echo(reader, writer):
        while piece := await reader.read(100):
            writer.write(piece)
        writer.close()

    async def work(egress):
        async with server(echo) as port:
            both = (f"good.test:{port}", f"six.test:{port}")
            egress.replace(Network(allow=both))
            ways = []
            for name in ("good.test", "six.test"):
                reader, writer = await asyncio.open_unix_connection(str(egress.path))
                writer.write(f"CONNECT {name}:{port} HTTP/1.1\r\n\r\n".encode())
                await reader.readuntil(b"\r\n\r\n")
                ways.append((reader, writer))
            egress.replace(Network(allow=both[1:]))
            with contextlib.suppress(ConnectionResetError):
                assert await ways[0][0].read() == b""
            ways[1][1].write(b"still")
            assert await ways[1][0].readexactly(5) == b"still"
            assert b"403" in await ask(egress, f"CONNECT good.test:{port} HTTP/1.1\r\n\r\n")
            with pytest.raises(ConfigError):
                egress.replace(Network(allow=("nonsense",)))
            for _, writer in ways:
                writer.close()

    egress = run((), work)
    assert any(d.reason.startswith("cut: good.test") for d in egress.decisions)


def test_bounds_on_bytes_connections_and_patience(dialled):
    async def flood(reader, writer):
        with contextlib.suppress(OSError):
            while True:
                writer.write(b"x" * 10_000)
                await writer.drain()

    async def work(egress):
        async with server(flood) as port:
            egress.replace(Network(allow=(f"good.test:{port}",)))
            with contextlib.suppress(ConnectionResetError):
                assert len(await ask(egress, f"CONNECT good.test:{port} HTTP/1.1\r\n\r\n")) < 400_000
            assert any("cut: more than" in d.reason for d in egress.decisions)
            idle = [await asyncio.open_unix_connection(str(egress.path)) for _ in range(2)]
            assert b"429" in await ask(egress, "CONNECT good.test:1 HTTP/1.1\r\n\r\n")
            assert await asyncio.wait_for(idle[0][0].read(), 20) == b""  # it never said what it wanted
            for _, writer in idle:
                writer.close()

    run((), work, Bounds(connections=2, bytes=200_000, head_seconds=0.5))


def test_an_upstream_gets_what_the_rules_allow_and_does_the_looking_up(tmp_path):
    """A model gateway as the only way on: names that nobody here can look up, and still no inner address."""
    heads: list[bytes] = []

    async def gateway(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nfrom the gateway")
        writer.close()

    async def work(egress):
        listening = await asyncio.start_unix_server(gateway, tmp_path / "gateway")
        assert b"from the gateway" in await ask(egress, "GET http://model.gateway/v1 HTTP/1.1\r\n\r\n")
        assert b"from the gateway" in await ask(egress, "CONNECT model.gateway:80 HTTP/1.1\r\n\r\n")
        assert b"403" in await ask(egress, "CONNECT 127.0.0.1:80 HTTP/1.1\r\n\r\n")
        assert b"403" in await ask(egress, "CONNECT other.test:80 HTTP/1.1\r\n\r\n")
        listening.close()

    run(("model.gateway:80",), work, proxy=tmp_path / "gateway")
    assert heads[0].startswith(b"GET http://model.gateway:80/v1 HTTP/1.1\r\nHost: model.gateway\r\n")
    assert heads[1].startswith(b"CONNECT model.gateway:80 HTTP/1.1\r\n")


def test_only_this_user_can_reach_the_socket():
    async def work(egress):
        assert os.stat(egress.path).st_mode & 0o077 == 0 and os.stat(egress.path.parent).st_mode & 0o077 == 0

    run((), work)
