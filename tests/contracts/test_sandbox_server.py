"""The E2B server at the level of bytes: who is let in, what is bounded, how slow a client may be. Over a stand-in that isolates nothing."""

import asyncio
import base64
import contextlib
import gzip
import hashlib
import json
import os
import socket
import struct
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'gnomon[serve]'")

from gnomon.errors import CapacityError, ConfigError, SandboxLost, Unsupported
from gnomon.sandbox import guest, server
from gnomon.sandbox.guest import files
from gnomon.sandbox.guest.channel import Guest
from gnomon.sandbox.sandbox import Capabilities, Snapshot, Spec, Usage
from gnomon.sandbox.server_connect import envelope
from gnomon.sandbox.server_desk import Settings

KEYS = ("first-key-0123456789", "second-key-0123456789")


class HostSandbox:
    """A sandbox in name only: the agent as a process of ours, in a folder of its own."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.id, self.spec, self.guest = os.urandom(8).hex(), spec, Guest("host")
        self.place = (str(folder), "root" if os.geteuid() == 0 else str(os.geteuid()))
        self.paused = False

    async def open(self) -> None:
        from_guest, out = os.pipe()
        inside, to_guest = os.pipe()
        agent = Path(guest.__file__).with_name("agent.py")
        self.process = await asyncio.create_subprocess_exec(sys.executable, str(agent), stdin=inside, stdout=out)
        os.close(out)
        os.close(inside)
        await self.guest.connect(from_guest, to_guest)
        await self.guest.go(env=dict(self.spec.env))

    async def exec(self, command: Any) -> Any:
        return await self.guest.run(command, self.place)

    async def start(self, command: Any, *, stdin: bool = False) -> Any:
        return await self.guest.start(command, self.place, stdin=stdin)

    async def list(self, path: str, depth: int = 1) -> Any:
        return await files.listing(self.guest, path, depth)

    async def upload(self, source: Path, path: str) -> None:
        await files.upload(self.guest, source, path)

    async def download(self, path: str, target: Path) -> None:
        await files.download(self.guest, path, target)

    async def pause(self, level: str = "freeze") -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def fork(self, count: int = 1, *, memory: bool = False) -> Sequence[Any]:
        made = HostSandbox(self.spec, Path(self.place[0]))
        await made.open()
        return [made, *(CapacityError("no room") for _ in range(count - 1))]

    async def snapshot(self, name: str | None = None, *, memory: bool = False) -> Snapshot:
        if memory:
            raise Unsupported("processes are not kept here")
        raise SandboxLost("gone in the middle")

    async def usage(self) -> Usage:
        return Usage(memory_bytes=1, disk_bytes=2, processes=3, cpu_seconds=4.0)

    async def kill(self) -> None:
        self.guest.parting = True
        await self.guest.disconnect()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class HostBackend:
    """Makes them."""

    name = "host"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def probe(self) -> Capabilities:
        return Capabilities(
            backend="host", isolation="standard", pause=frozenset(["freeze"]), snapshot_files=False, snapshot_memory=False, live_fork=False,
            network=False, rootless=True,
        )  # fmt: skip

    async def create(self, spec: Spec) -> HostSandbox:
        if spec.image != "host":
            raise ConfigError(f"unknown image {spec.image}")
        made = HostSandbox(spec, self.folder)
        await made.open()
        return made


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(keys=KEYS, max_sandboxes=3, max_upload_bytes=100_000, patience_seconds=1.0)
        live = server.server(server.build(HostBackend(Path(folder)), settings), patience_seconds=1.0)  # type: ignore[arg-type]
        thread = threading.Thread(target=lambda: asyncio.run(live.serve()))
        thread.start()
        try:
            while not live.started and thread.is_alive():
                thread.join(0.02)
            yield live.servers[0].sockets[0].getsockname()[1]
        finally:
            live.should_exit = True
            thread.join()


Reply = tuple[int, dict[str, str], bytes]


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
    """One request; header names with underscores for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body, headers=named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, dict(reply.headers), reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


@pytest.fixture
def made(port: int) -> Iterator[dict[str, Any]]:
    status, _, body = ask(port, "POST", "/sandboxes", b'{"templateID": "base"}', X_API_Key=KEYS[0], Content_Type="application/json")
    assert status == 201
    sandbox = json.loads(body)
    yield sandbox
    ask(port, "DELETE", f"/sandboxes/{sandbox['sandboxID']}", X_API_Key=KEYS[0])


def inside(made: dict[str, Any]) -> dict[str, str]:
    return {"E2b_Sandbox_Id": made["sandboxID"], "X_Access_Token": made["envdAccessToken"]}


def test_nobody_comes_in_without_a_key(port: int, made: dict[str, Any]) -> None:
    for path in ("/sandboxes", "/v2/sandboxes", f"/sandboxes/{made['sandboxID']}", "/templates", "/snapshots", "/docs", "//"):
        for headers in ({}, {"X_API_Key": ""}, {"X_API_Key": KEYS[0][:-1]}, {"X_API_Key": KEYS[0] + " x"}, {"X_API_Key": "\u00fc"}):
            assert ask(port, "GET", path, **headers)[0] == 401
    assert ask(port, "POST", "/sandboxes", b'{"templateID": "base"}')[0] == 401
    assert ask(port, "DELETE", f"/sandboxes/{made['sandboxID']}", X_API_Key=made["envdAccessToken"])[0] == 401
    assert ask(port, "GET", "/health")[0] == 204
    assert ask(port, "GET", f"/sandboxes/{made['sandboxID']}", X_API_Key=KEYS[1])[0] == 200


def test_a_sandbox_opens_only_to_its_own_token(port: int, made: dict[str, Any]) -> None:
    other = json.loads(ask(port, "POST", "/v2/sandboxes", b'{"templateID": "base"}', X_API_Key=KEYS[0])[2])
    try:
        for path in ("/process.Process/List", "/filesystem.Filesystem/Stat", "/files?path=/etc/passwd", "/health"):
            method = "GET" if path.startswith(("/files", "/health")) else "POST"
            body = None if method == "GET" else b"{}"
            for token in ("", "x", other["envdAccessToken"], KEYS[0]):
                headers = {"E2b_Sandbox_Id": made["sandboxID"], "X_Access_Token": token, "Content_Type": "application/json"}
                status, _, said = ask(port, method, path, body, **headers)
                assert status == 401, (path, token)
                assert b"root:" not in said
            assert ask(port, method, path, body, E2b_Sandbox_Id="absent", X_Access_Token=made["envdAccessToken"])[0] == 502
        assert ask(port, "GET", "/health", **inside(made))[0] == 204
        signed = f"/files?path=/etc/passwd&signature=v1_{'A' * 43}"
        assert ask(port, "GET", signed, E2b_Sandbox_Id=made["sandboxID"])[0] == 401
        assert ask(port, "POST", "/files?path=/tmp/x", b"", X_Access_Token=made["envdAccessToken"])[0] == 400
    finally:
        assert ask(port, "DELETE", f"/sandboxes/{other['sandboxID']}", X_API_Key=KEYS[0])[0] == 204


def test_an_address_signed_for_reading_does_not_write(port: int, made: dict[str, Any], tmp_path: Path) -> None:
    place = tmp_path / "kept"
    place.write_text("before")
    words = f"{place}:read::{made['envdAccessToken']}".encode()
    signature = "v1_" + base64.b64encode(hashlib.sha256(words).digest()).decode().rstrip("=")
    address = "/files?" + urllib.parse.urlencode({"path": place, "signature": signature})
    named = {"E2b_Sandbox_Id": made["sandboxID"]}
    assert ask(port, "GET", address, **named)[2] == b"before"
    for method in ("HEAD", "POST", "PUT", "PATCH", "DELETE"):
        ask(port, method, address, b"after", **named)
        assert place.read_text() == "before", method


def test_the_host_header_opens_nothing(port: int) -> None:
    for host in ("x/health?", "x/health#", "x/files?", "49983-absent00.x/health?"):
        assert ask(port, "GET", "/v2/sandboxes", Host=host)[0] in (400, 401)


def test_files_of_any_name_and_any_time_are_listed(port: int, made: dict[str, Any], tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/\xff\xfe"
    Path(os.fsdecode(odd)).write_text("odd")
    os.utime(odd, (1 << 40, 1 << 40))
    said = json.dumps({"path": str(tmp_path)}).encode()
    status, _, body = ask(port, "POST", "/filesystem.Filesystem/ListDir", said, Content_Type="application/json", **inside(made))
    assert status == 200, body
    assert json.loads(body)["entries"][0]["name"].encode("utf-8", "surrogateescape") == b"\xff\xfe"


def test_a_gzip_without_its_end_is_refused(port: int, made: dict[str, Any], tmp_path: Path) -> None:
    whole = gzip.compress(b"all of it" * 1000)
    headers = {**inside(made), "Content_Type": "application/octet-stream", "Content_Encoding": "gzip"}
    assert ask(port, "POST", f"/files?path={tmp_path}/a", whole[:-9], **headers)[0] == 400
    assert not (tmp_path / "a").exists()
    assert ask(port, "POST", f"/files?path={tmp_path}/a", whole, **headers)[0] == 200


def test_bodies_are_bounded(port: int, made: dict[str, Any]) -> None:
    assert ask(port, "POST", "/sandboxes", b'"' + b"x" * (2 << 20) + b'"', X_API_Key=KEYS[0])[0] == 413
    headers = {**inside(made), "Content_Type": "application/octet-stream"}
    assert ask(port, "POST", "/files?path=/tmp/never-there", b"x" * 100_001, **headers)[0] == 413


    bomb = gzip.compress(b"\0" * 10_000_000)
    assert len(bomb) < 100_000
    assert ask(port, "POST", "/files?path=/tmp/never-there", bomb, Content_Encoding="gzip", **headers)[0] == 413
    assert not Path("/tmp/never-there").exists()
    huge = struct.pack(">BI", 0, 1 << 31) + b"{}"
    status, _, said = ask(port, "POST", "/process.Process/Start", huge, **inside(made), Content_Type="application/connect+json")
    assert status == 200
    assert b"resource_exhausted" in said


@pytest.mark.parametrize(
    ("path", "kind", "body", "words"),
    [
        ("/process.Process/List", "application/proto", b"", b"unimplemented"),
        ("/process.Process/List", "application/json", b"[1]", b"invalid_argument"),
        ("/process.Process/List", "application/json", b"[" * 100_000, b"invalid_argument"),
        ("/process.Process/SendInput", "application/json", b'{"process": {"pid": 1}}', b"not_found"),
        ("/process.Process/SendSignal", "application/json", b'{"process": {"pid": 1}, "signal": "SIGNAL_SIGSTOP"}', b"invalid_argument"),
        ("/process.Process/Start", "application/connect+proto", b"", b"unimplemented"),
        ("/process.Process/Start", "application/connect+json", b"", b"invalid_argument"),
        ("/process.Process/Start", "application/connect+json", struct.pack(">BI", 1, 2) + b"{}", b"unimplemented"),
        ("/process.Process/Start", "application/connect+json", envelope({"process": {"cmd": 1}}), b"invalid_argument"),
        ("/process.Process/Start", "application/connect+json", envelope({"process": {"cmd": "true", "args": "x"}}), b"invalid_argument"),
        ("/process.Process/StreamInput", "application/connect+json", envelope({"data": {"input": {"stdin": ""}}}), b"invalid_argument"),
        ("/filesystem.Filesystem/Stat", "application/json", b'{"path": "/no/such"}', b"not_found"),
        ("/filesystem.Filesystem/ListDir", "application/json", b'{"path": "/etc/passwd"}', b"invalid_argument"),
        ("/filesystem.Filesystem/Remove", "application/json", b'{"path": "/"}', b"invalid_argument"),
        ("/filesystem.Filesystem/GetWatcherEvents", "application/json", b'{"watcherId": "x"}', b"not_found"),
    ],
)
def test_nonsense_is_answered_with_its_reason(port: int, made: dict[str, Any], path: str, kind: str, body: bytes, words: bytes) -> None:
    status, _, said = ask(port, "POST", path, body, Content_Type=kind, **inside(made))
    assert words in said
    assert status in (200, 400, 404, 415)


def test_a_stream_ends_in_time_and_says_why(port: int, made: dict[str, Any]) -> None:
    start = envelope({"process": {"cmd": "sh", "args": ["-c", "echo begun; sleep 60"]}})
    headers = {**inside(made), "Content_Type": "application/connect+json", "Connect_Timeout_Ms": "500"}
    began = time.monotonic()
    _, _, said = ask(port, "POST", "/process.Process/Start", start, **headers)
    assert time.monotonic() - began < 50
    events = []
    while said:
        flags, length = struct.unpack_from(">BI", said)
        events.append((flags, json.loads(said[5 : 5 + length])))
        said = said[5 + length :]
    assert "start" in events[0][1]["event"]
    assert events[1][1]["event"]["data"]["stdout"] == "YmVndW4K"
    assert (events[-1][0], events[-1][1]["error"]["code"]) == (2, "deadline_exceeded")


def test_a_body_of_two_lengths_is_refused(port: int, made: dict[str, Any]) -> None:
    """What a server in front might read as two requests is none here, and the connection ends."""
    inner = "GET /sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: " + KEYS[0] + "\r\n\r\n"
    both = "Content-Length: 5\r\nTransfer-Encoding: chunked"
    for headers in (both, "Content-Length: 5\r\nContent-Length: 6", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
                    "Transfer-Encoding: xchunked", "Transfer-Encoding: gzip, chunked"):  # fmt: skip
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(f"POST /sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEYS[0]}\r\n{headers}\r\n\r\n0\r\n\r\n{inner}".encode())
            said = b""
            with contextlib.suppress(ConnectionError):
                while piece := client.recv(4096):
                    said += piece
            assert said[9:12] in (b"400", b"501") and said.count(b"HTTP/1.1") == 1, headers


def test_connections_are_bounded(tmp_path: Path) -> None:
    settings = Settings(keys=KEYS)
    live = server.server(server.build(HostBackend(tmp_path), settings), connections=2)  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: asyncio.run(live.serve()))
    thread.start()
    try:
        while not live.started and thread.is_alive():
            thread.join(0.02)
        address = live.servers[0].sockets[0].getsockname()
        held = [socket.create_connection(address, timeout=60) for _ in range(2)]
        for client in held:  # both have been taken
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 204")
        with socket.create_connection(address, timeout=60) as third, contextlib.suppress(ConnectionError):
            assert third.recv(100) == b""
        held[0].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert held[0].recv(100).startswith(b"HTTP/1.1 204")
        for client in held:
            client.close()
    finally:
        live.should_exit = True
        thread.join()


def test_slow_clients_are_given_up(port: int, made: dict[str, Any]) -> None:
    half = (
        f"POST /files?path=/tmp/slow HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nE2b-Sandbox-Id: {made['sandboxID']}\r\n"
        f"X-Access-Token: {made['envdAccessToken']}\r\n\r\nabc"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
        slow.sendall(half.encode())
        assert slow.recv(100).startswith(b"HTTP/1.1 408")
    with socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
        silent.sendall(b"GET / HT")
        assert silent.recv(100) == b""
    assert not Path("/tmp/slow").exists()


def test_forks_answer_one_by_one_and_the_house_has_a_size(port: int, made: dict[str, Any]) -> None:
    key = {"X_API_Key": KEYS[0]}
    status, _, body = ask(port, "POST", f"/sandboxes/{made['sandboxID']}/fork", b'{"count": 2}', **key)
    first, second = json.loads(body)
    assert status == 201
    assert first["sandbox"]["envdAccessToken"] != made["envdAccessToken"]
    assert second["error"] == {"code": 503, "message": "no room"}
    assert ask(port, "POST", "/sandboxes", b'{"templateID": "base"}', **key)[0] == 201
    status, headers, _ = ask(port, "POST", "/sandboxes", b'{"templateID": "base"}', **key)
    assert (status, headers.get("should-retry", headers.get("Should-Retry"))) == (503, "false")
    assert ask(port, "POST", f"/sandboxes/{made['sandboxID']}/fork", b'{"count": 0}', **key)[0] == 400
    rows = json.loads(ask(port, "GET", "/v2/sandboxes", **key)[2])
    for row in rows:
        assert ask(port, "DELETE", f"/sandboxes/{row['sandboxID']}", **key)[0] == 204
    assert ask(port, "DELETE", f"/sandboxes/{made['sandboxID']}", **key)[0] == 404


def test_what_a_backend_cannot_do_is_said_and_what_is_lost_is_gone(port: int, made: dict[str, Any]) -> None:
    key, path = {"X_API_Key": KEYS[0]}, f"/sandboxes/{made['sandboxID']}"
    status, _, body = ask(port, "POST", f"{path}/snapshots", b'{"memory": true}', **key)
    assert (status, json.loads(body)["message"]) == (400, "processes are not kept here")
    assert ask(port, "POST", "/sandboxes", b'{"templateID": "absent"}', **key)[0] == 404
    assert ask(port, "POST", "/sandboxes", b'{"templateID": "base", "timeout": -1}', **key)[0] == 400
    assert ask(port, "POST", "/sandboxes", b'{"templateID": "base", "allow_internet_access": true}', **key)[0] == 400
    assert ask(port, "POST", f"{path}/pause", b"{}", **key)[0] == 204
    assert ask(port, "POST", f"{path}/pause", b"{}", **key)[0] == 409
    assert ask(port, "POST", f"{path}/snapshots", b"{}", **key)[0] == 409
    assert ask(port, "POST", f"{path}/connect", b'{"timeout": 60}', **key)[0] == 201
    assert ask(port, "POST", f"{path}/connect", b'{"timeout": 60}', **key)[0] == 200
    assert ask(port, "POST", f"{path}/snapshots", b"{}", **key)[0] == 404
    assert ask(port, "GET", path, **key)[0] == 404


@pytest.mark.parametrize("keys", [(), ("short",), ("long-enough-0123456789", "")])
def test_weak_keys_are_refused(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="16 characters"):
        Settings(keys=keys)


def test_loopback_is_the_default() -> None:
    assert server.server(lambda *_: None).config.host == "127.0.0.1"  # type: ignore[arg-type, return-value]
