"""From inside a sandbox to a server outside: through the rules, and no other way."""

import asyncio
import contextlib
import ipaddress
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sandbox_backends import need_gvisor

from gnomon.errors import ConfigError, Unsupported
from gnomon.sandbox import network
from gnomon.sandbox.backends import gvisor, namespaces
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import Command, Network, Sandbox, Spec

FETCH = """
import os, socket, sys
host, port = os.environ["HTTP_PROXY"].split("//")[1].split(":")
try:
    connection = socket.create_connection((host, int(port)), 60)
    connection.sendall(f"GET {sys.argv[1]} HTTP/1.0\\r\\n\\r\\n".encode())
    print(b"".join(iter(lambda: connection.recv(4096), b"")).decode())
except OSError as error:
    print('no way:', error)
"""


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name stands for one public address, and every connection that the proxy opens goes to this machine."""
    connect = asyncio.open_connection

    async def lookup(host: str, port: int) -> list[ipaddress.IPv4Address]:
        return [ipaddress.IPv4Address("10.0.0.1" if host == "inner.test" else "93.184.216.34")]

    async def divert(host: str, port: int, **options: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await connect("127.0.0.1", port, **options)

    monkeypatch.setattr(network, "look_up", lookup)
    monkeypatch.setattr(network.asyncio, "open_connection", divert)


async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nyou asked for " + head.split(b" ")[1])
    writer.close()


async def fetch(box: Sandbox, address: str) -> str:
    result = await box.exec(Command(argv=("python3", "-I", "-S", "-c", FETCH, address)))
    return result.text + result.stderr.decode()


def run(tmp_path: Path, work: Callable[[Sandbox, int], Awaitable[None]], kind: type = namespaces.Backend) -> None:
    """Do something with a sandbox and a server outside."""

    if kind is gvisor.Backend:
        need_gvisor()

    async def main() -> None:
        backend = kind(LayerStore(tmp_path / "store"))
        if kind is namespaces.Backend:
            try:
                await backend.probe()
            except Unsupported as error:
                pytest.skip(str(error))
        listening = await asyncio.start_server(web, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        try:
            async with await backend.create(Spec(network=Network(allow=(f"good.test:{port}", f"inner.test:{port}")))) as box:
                await asyncio.wait_for(work(box, port), 300)
        finally:
            await backend.close()
            assert not backend.ways.egresses and not getattr(backend, "doors", {})
            listening.close()
            await asyncio.sleep(0.05)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [namespaces.Backend, gvisor.Backend], ids=["namespaces", "gvisor"])
def test_rules_hold_from_inside_and_can_be_replaced(tmp_path, outside, kind):
    async def work(box: Sandbox, port: int) -> None:
        assert "you asked for /page" in await fetch(box, f"http://good.test:{port}/page")
        assert "gnomon: bad.test" in await fetch(box, f"http://bad.test:{port}/")
        assert "private" in await fetch(box, f"http://inner.test:{port}/")
        around = await box.exec(Command(argv=("python3", "-c", f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")))
        assert around.code == 1 and b"refused" in around.stderr
        await box.set_network(Network(allow=(f"bad.test:{port}",)))
        assert "you asked for" in await fetch(box, f"http://bad.test:{port}/")
        assert "403" in await fetch(box, f"http://good.test:{port}/")
        [child] = await box.fork()
        assert isinstance(child, Sandbox)
        async with child:
            assert "you asked for" in await fetch(child, f"http://bad.test:{port}/")
        await box.set_network(Network())
        assert "you asked" not in await fetch(box, f"http://bad.test:{port}/")
        with pytest.raises(ConfigError, match=r"network\.allow"):
            await box.set_network(Network(allow=("127.0.0.1:80",)))

    run(tmp_path, work, kind)
