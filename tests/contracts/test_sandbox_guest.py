"""The channel to an agent, over pipes to the agent's program itself run as an ordinary process: no machine, no privileges."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from gnomon.errors import SandboxError, SandboxLost
from gnomon.sandbox import guest
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


@pytest.mark.parametrize(
    "frame",
    [
        FRAME.pack(1 << 30, 0),
        FRAME.pack(2, 1 << 30) + b"{}",
        FRAME.pack(4, 0) + b"nope",
        FRAME.pack(2, 0) + b"[]",
        FRAME.pack(20_000, 0) + b"[" * 20_000,
    ],
)
def test_an_agent_that_lies_loses_its_machine_and_nothing_else(frame: bytes) -> None:
    program = (sys.executable, "-c", f"import os,time; os.read(0,9); os.write(1, {frame!r}); time.sleep(60)")

    async def use(channel: Guest) -> None:
        with pytest.raises(SandboxLost, match="must not"):
            await channel.go()

    with_agent(use, program)


def test_a_listing_cannot_name_places_outside(tmp_path: Path) -> None:
    rows = json.dumps([["/data/../../escape", "file", 1, 420, 0.0, None]])
    liar = f"""
import json, os, struct, sys
def frame():
    head, body = struct.unpack(">II", sys.stdin.buffer.read(8))
    return json.loads(sys.stdin.buffer.read(head)), sys.stdin.buffer.read(body)
def send(header, body=b""):
    head = json.dumps(header).encode()
    os.write(1, struct.pack(">II", len(head), len(body)) + head + body)
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

    with_agent(use, (sys.executable, "-c", liar))
    assert not (tmp_path.parent / "escape").exists()


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


@pytest.mark.parametrize("row", [b"[[1]]", b"[7]", b"{}", b"7", b'[["/x","file","x",[],{},1]]', b'[["/x","file",1e999,0,0,null]]'])
def test_whoever_waits_is_told_whatever_a_reply_is_made_of(row: bytes) -> None:
    async def use(channel: Guest) -> None:
        call = asyncio.ensure_future(files.listing(channel, "/", 1))
        await asyncio.sleep(0)
        channel.open.set()
        await asyncio.sleep(0.05)
        with pytest.raises(SandboxLost, match="must not"):
            await asyncio.wait_for(call, 20.0)

    head = json.dumps({"ev": "part", "id": 1}).encode()
    frame = FRAME.pack(len(head), len(row)) + head + row
    if row == b"{}":
        frame = FRAME.pack(len(head), 2) + head + b"{x"
    with_agent(use, (sys.executable, "-c", f"import os,time; os.read(0,9); os.write(1, {frame!r}); time.sleep(60)"))


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
