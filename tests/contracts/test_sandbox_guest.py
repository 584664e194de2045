"""The channel to an agent, over pipes to the agent's program itself run as an ordinary process: no machine, no privileges."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from gnomon.errors import SandboxError, SandboxLost
from gnomon.sandbox import guest
from gnomon.sandbox.guest import channel as channel_module
from gnomon.sandbox.guest import files
from gnomon.sandbox.guest.channel import FRAME, Guest
from gnomon.sandbox.sandbox import Command, FileEvent

AGENT = Path(guest.__file__).with_name("agent.py")
HERE = ("/", "root" if os.geteuid() == 0 else str(os.geteuid()))


def with_agent(use: Callable[[Guest], Awaitable[None]], program: tuple[str, ...] = (sys.executable, str(AGENT))) -> None:
    """Run a coroutine with a guest connected to a program."""

    async def run() -> None:
        from_guest, out = os.pipe()
        inside, to_guest = os.pipe()
        child = subprocess.Popen(program, stdin=inside, stdout=out)
        os.close(out)
        os.close(inside)
        channel = Guest("here")
        try:
            await channel.connect(from_guest, to_guest)
            await use(channel)
        finally:
            channel.parting = True
            await channel.disconnect()
            child.kill()
            child.wait()

    asyncio.run(run())


def command(*argv: str, **fields: object) -> Command:
    return Command(argv=argv, **{"timeout_seconds": 20.0, **fields})  # type: ignore[arg-type]


def test_a_program_runs_and_its_streams_stay_apart() -> None:
    async def use(channel: Guest) -> None:
        await channel.go(env={"COLOUR": "green"})
        result = await channel.run(command("sh", "-c", "echo $COLOUR$SIZE; echo no >&2; exit 3", env={"SIZE": "4"}), HERE)
        assert (result.code, result.stdout, result.stderr) == (3, b"green4\n", b"no\n")
        result = await channel.run(command("sh", "-c", "kill -TERM $$"), HERE)
        assert result.code == -15
        result = await channel.run(command("no-such-program"), HERE)
        assert result.code == 127
        assert b"no-such-program" in result.stderr

    with_agent(use)


def test_input_larger_than_any_pipe_arrives_whole() -> None:
    async def use(channel: Guest) -> None:
        await channel.go()
        data = os.urandom(1 << 20) * 3
        result = await channel.run(command("cat", stdin=data, max_output_bytes=1 << 22), HERE)
        assert result.stdout == data
        assert not result.truncated

    with_agent(use)


def test_a_flood_is_cut_and_a_sleeper_is_killed_with_what_it_said() -> None:
    async def use(channel: Guest) -> None:
        await channel.go()
        result = await channel.run(command("yes", timeout_seconds=0.3, max_output_bytes=1000), HERE)
        assert result.truncated
        assert result.timed_out
        assert len(result.stdout) == 1000
        result = await channel.run(command("sh", "-c", "trap '' TERM INT; echo early; sleep 60", timeout_seconds=0.5), HERE)
        assert result.timed_out
        assert result.stdout == b"early\n"

    with_agent(use)


def test_a_program_that_leaves_its_pipe_to_a_daemon_ends_at_once() -> None:
    async def use(channel: Guest) -> None:
        await channel.go()
        result = await channel.run(command("sh", "-c", "sleep 3 & echo left"), HERE)
        assert result.stdout == b"left\n"
        assert not result.timed_out

    with_agent(use)


def test_what_an_ended_program_wrote_is_passed_on_however_late() -> None:
    """The agent is given no time at all after a program's end, as if its machine had stood still just then."""

    async def use(channel: Guest) -> None:
        await channel.go(env={})
        for _ in range(3):
            runs = [channel.run(command("sh", "-c", f"echo {i}; head -c 100000 /dev/zero >&2"), HERE) for i in range(10)]
            results = await asyncio.gather(*runs)
            assert [(result.code, result.text, len(result.stderr)) for result in results] == [(0, f"{i}\n", 100_000) for i in range(10)]

    script = f"import sys; sys.path.insert(0, {str(AGENT.parent)!r}); import agent; agent.DRAIN_SECONDS = 0.0; agent.main()"
    with_agent(use, (sys.executable, "-c", script))


def test_output_that_nobody_reads_holds_the_program_and_not_the_host() -> None:
    async def use(channel: Guest) -> None:
        await channel.go()
        process = await channel.start(command("sh", "-c", "head -c 8000000 /dev/zero; echo done >&2"), HERE, stdin=False)
        await asyncio.sleep(0.5)
        assert process.code is None
        assert process.waiting_bytes <= 1 << 18
        total = 0
        async for chunk in process.output():
            total += len(chunk.data)
        assert total == 8_000_000 + 5
        assert process.code == 0

    with_agent(use)


def test_a_background_program_takes_input_and_signals() -> None:
    async def use(channel: Guest) -> None:
        await channel.go()
        process = await channel.start(command("cat"), HERE, stdin=True)
        await process.write(b"one\n")
        chunks = process.output()
        assert (await anext(chunks)).data == b"one\n"
        await process.close_stdin()
        assert (await process.wait()).code == 0
        sleeper = await channel.start(command("sleep", "60"), HERE, stdin=False)
        await sleeper.kill(15)
        assert (await sleeper.wait()).code == -15

    with_agent(use)


def test_files_go_in_and_out_whole(tmp_path: Path) -> None:
    async def use(channel: Guest) -> None:
        await channel.go()
        data = os.urandom(700_000)
        await files.write(channel, f"{tmp_path}/deep/in/file", data, 0o640)
        assert (tmp_path / "deep/in/file").read_bytes() == data
        assert (tmp_path / "deep/in/file").stat().st_mode & 0o777 == 0o640
        assert await files.read(channel, f"{tmp_path}/deep/in/file", 1 << 20) == data
        with pytest.raises(SandboxError, match="larger than 10"):
            await files.read(channel, f"{tmp_path}/deep/in/file", 10)
        with pytest.raises(SandboxError, match="No such file"):
            await files.read(channel, f"{tmp_path}/none", 10)
        with pytest.raises(SandboxError, match="not a regular file"):
            await files.read(channel, "/dev/zero", 10)
        (tmp_path / "deep/link").symlink_to("/etc")
        found = {entry.path: entry for entry in await files.listing(channel, str(tmp_path), 3)}
        assert found[f"{tmp_path}/deep/link"].target == "/etc"
        assert [*found] == sorted(found)
        await files.download(channel, f"{tmp_path}/deep", tmp_path / "copy")
        assert (tmp_path / "copy/in/file").read_bytes() == data
        assert (tmp_path / "copy/link").is_symlink()
        await files.upload(channel, tmp_path / "copy", f"{tmp_path}/again")
        assert (tmp_path / "again/in/file").read_bytes() == data
        await files.remove(channel, f"{tmp_path}/deep")
        assert not (tmp_path / "deep").exists()

    with_agent(use)


def test_changes_are_seen_as_they_happen(tmp_path: Path) -> None:
    async def use(channel: Guest) -> None:
        await channel.go()
        events = channel.watch(str(tmp_path), recursive=True)
        first = asyncio.create_task(anext(events))
        await asyncio.sleep(0)  # so that the watch is asked for before the list
        await files.listing(channel, str(tmp_path), 1)
        (tmp_path / "new").write_text("x")
        event = await asyncio.wait_for(first, 10)
        assert (event.path, event.kind) == (f"{tmp_path}/new", "create")
        await files.write(channel, f"{tmp_path}/whole", b"1", None)
        await files.write(channel, f"{tmp_path}/whole", b"2", None)
        seen: list[str] = []
        while len(seen) < 3:
            event = await asyncio.wait_for(anext(events), 10)
            assert ".part" not in event.path
            seen += [event.kind] if event.path == f"{tmp_path}/whole" else []
        assert seen == ["create", "write", "write"]
        await events.aclose()

    with_agent(use)


LIAR = f"""
import json, os, struct, sys, time
sys.path.insert(0, {str(AGENT.parent)!r})
from agent_seal import Seal
seal = Seal()
def frame():
    head, body = struct.unpack(">II", sys.stdin.buffer.read(8))
    header = json.loads(sys.stdin.buffer.read(head))
    if header["op"] == "go":
        seal.turn(header["key"], header["word"])
    return header, sys.stdin.buffer.read(body)
def raw(lengths, text=b"", body=b""):
    os.write(1, lengths + seal.of(lengths, text, body) + text + body)
def send(header, body=b""):
    head = json.dumps(header).encode()
    raw(struct.pack(">II", len(head), len(body)), head, body)
"""


def liar(script: str) -> tuple[str, ...]:
    """An agent that knows its key and says what the script says."""
    return (sys.executable, "-c", LIAR + script)


@pytest.mark.parametrize(
    "frame",
    [
        (FRAME.pack(1 << 30, 0),),
        (FRAME.pack(2, 1 << 30), b"{}"),
        (FRAME.pack(4, 0), b"nope"),
        (FRAME.pack(2, 0), b"[]"),
        (FRAME.pack(20_000, 0), b"[" * 20_000),
    ],
)
def test_an_agent_that_lies_loses_its_machine_and_nothing_else(frame: tuple[bytes, ...]) -> None:
    async def use(channel: Guest) -> None:
        with pytest.raises(SandboxLost, match="must not"):
            await channel.go()

    with_agent(use, liar(f"frame(); raw(*{frame!r}); time.sleep(60)"))


FORGERIES = {
    "no seal": "os.write(1, lengths + bytes(16) + text)",
    "a seal of another frame": "os.write(1, lengths + seal.of(lengths, text + b' ') + text)",
    "the same frame twice": "sealed = lengths + seal.of(lengths, text) + text; os.write(1, sealed); os.write(1, sealed)",
    "a frame left out": "seal.of(lengths, text); os.write(1, lengths + seal.of(lengths, text) + text)",
    "another key": "seal.key = bytes(32); os.write(1, lengths + seal.of(lengths, text) + text)",
}


@pytest.mark.parametrize("how", FORGERIES)
def test_what_is_not_sealed_in_its_turn_is_no_answer(how: str) -> None:
    """Whoever can write into the agent's channel but has not its key cannot give a single answer in its name."""
    script = f"""
send({{"ev": "reply", "id": frame()[0]["id"]}})
text = json.dumps({{"ev": "reply", "id": frame()[0]["id"] + (1 if {how == "the same frame twice"} else 0)}}).encode()
lengths = struct.pack(">II", len(text), 0)
{FORGERIES[how]}
time.sleep(60)
"""

    async def use(channel: Guest) -> None:
        await channel.go()
        with pytest.raises(SandboxLost, match="not the agent's"):
            await channel.call({"op": "ping"})

    with_agent(use, liar(script))


def test_an_agent_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(channel_module, "PATIENCE_SECONDS", 0.5)
    script = """
send({"ev": "reply", "id": frame()[0]["id"]})
send({"ev": "reply", "id": frame()[0]["id"], "pid": 2})
time.sleep(60)
"""

    async def use(channel: Guest) -> None:
        monkeypatch.setattr(channel_module, "PATIENCE_SECONDS", 60.0)
        await channel.go()
        monkeypatch.setattr(channel_module, "PATIENCE_SECONDS", 0.5)
        with pytest.raises(SandboxLost, match="no sign of life"):
            await asyncio.wait_for(channel.run(command("true", timeout_seconds=None), HERE), 60)

    with_agent(use, liar(script))


def test_a_listing_cannot_name_places_outside(tmp_path: Path) -> None:
    rows = json.dumps([["/data/../../escape", "file", 1, 420, 0.0, None]])
    script = f"""
while True:
    header, body = frame()
    if header["op"] == "list":
        send({{"ev": "part", "id": header["id"]}}, {rows!r}.encode())
    send({{"ev": "reply", "id": header["id"]}})
"""

    async def use(channel: Guest) -> None:
        await channel.go()
        with pytest.raises(SandboxError, match="escape"):
            await files.download(channel, "/data", tmp_path / "target")

    with_agent(use, liar(script))
    assert not (tmp_path.parent / "escape").exists()


def test_connections_of_the_door_go_both_ways_and_are_bounded(tmp_path: Path) -> None:
    """A program inside reaches the socket that the door leads to, whole and in both directions, and nothing once it leads nowhere."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = os.urandom(1 << 20)

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            sender = threading.Thread(target=lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR)))
            sender.start()
            got = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            sender.join()
        return got

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def use(channel: Guest) -> None:
        await channel.go()
        place = tmp_path / "proxy"
        server = await asyncio.start_unix_server(echo, place)
        async with server:
            await channel.lead(port, place)
            assert await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(2))) == [data] * 2
            await channel.hold()
            await channel.go()
            assert await asyncio.to_thread(ask) == data
            await channel.lead(port, None)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.to_thread(ask)
        assert not channel.door.ways

    with_agent(use)


class Rows:
    """An agent that lists what it likes; the content of every file is the same."""

    def __init__(self, *rows: list[object]) -> None:
        self.rows = rows

    async def call(self, header: dict[str, Any], payload: bytes = b"", *, part: Callable[[bytes], None], seconds: float = 0.0) -> None:
        part(json.dumps(self.rows).encode() if header["op"] == "list" else b"from inside")


def test_a_link_of_an_earlier_download_is_not_followed_by_a_later_one(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    link = Rows(["/w/a", "symlink", 0, 0o777, 0.0, str(outside)])
    through = Rows(["/w/a", "directory", 0, 0o755, 0.0, None], ["/w/a/file", "file", 11, 0o644, 0.0, None])
    asyncio.run(files.download(cast(Guest, link), "/w", target))
    with pytest.raises(SandboxError, match="downloading"):
        asyncio.run(files.download(cast(Guest, through), "/w", target))
    assert list(outside.iterdir()) == []
    onto = Rows(["/w/a", "file", 11, 0o644, 0.0, None])
    asyncio.run(files.download(cast(Guest, onto), "/w", target))
    assert (target / "a").read_bytes() == b"from inside"
    assert not (target / "a").is_symlink()


def test_many_files_are_bounded_together(tmp_path: Path) -> None:
    many = Rows(*[[f"/w/{number}", "file", 11, 0o644, 0.0, None] for number in range(9)])
    with pytest.raises((SandboxError, ValueError)):
        asyncio.run(files.download(cast(Guest, many), "/w", tmp_path / "target", max_bytes=50))
    assert sum(path.stat().st_size for path in (tmp_path / "target").iterdir()) <= 50


@pytest.mark.parametrize("row", [b"[[1]]", b"[7]", b"{x", b"7", b'[["/x","file","x",[],{},1]]', b'[["/x","file",1e999,0,0,null]]'])
def test_whoever_waits_is_told_whatever_a_reply_is_made_of(row: bytes) -> None:
    script = f"""
send({{"ev": "reply", "id": frame()[0]["id"]}})
send({{"ev": "part", "id": frame()[0]["id"]}}, {row!r})
time.sleep(60)
"""

    async def use(channel: Guest) -> None:
        await channel.go()
        with pytest.raises(SandboxLost, match="must not"):
            await asyncio.wait_for(files.listing(channel, "/", 1), 60.0)

    with_agent(use, liar(script))


def test_the_end_is_told_past_a_watch_that_nobody_reads() -> None:
    async def run() -> None:
        channel, ended = Guest("here"), []
        channel.on_lost = lambda: ended.append(True)
        queue: asyncio.Queue[FileEvent | None] = asyncio.Queue(1)
        queue.put_nowait(FileEvent(path="/x", kind="write"))
        channel.watchers[1] = queue
        channel.end("it is over")
        assert ended
        assert queue.get_nowait() is None

    asyncio.run(run())
