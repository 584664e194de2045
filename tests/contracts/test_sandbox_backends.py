"""The contract of a sandbox, held against every backend that works on this machine; what one cannot do, it must refuse and not imitate."""

import asyncio
import contextlib
import importlib
import os
import secrets
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_backends import need_microvm

from gnomon.errors import ConfigError, SandboxError, SandboxLost, Unsupported
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import Backend, Capabilities, Chunk, Command, FileEvent, Limits, Result, Sandbox, Spec

NAMES = ("namespaces", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gvisor", "microvm", "e2b")))
WORKS: dict[str, Capabilities | str] = {}
SMALL = Limits(memory_bytes=128 << 20, disk_bytes=32 << 20, processes=64)
PLAIN = Spec(limits=SMALL)


def backend(name: str, store: Path | None = None) -> Backend:
    """A backend of a name, or a skip where it does not work here."""
    try:
        module = importlib.import_module(f"gnomon.sandbox.backends.{name}")
    except ImportError:
        pytest.skip(f"{name} is not built yet")
    if name == "e2b":
        loop()
    if name == "microvm":
        need_microvm()
    if name not in WORKS:
        WORKS[name] = asyncio.run(ask(module.Backend()))
    found = WORKS[name]
    if isinstance(found, str):
        pytest.skip(f"{name} does not work here: {found}")
    return module.Backend(LayerStore(store)) if store is not None else module.Backend()


SERVERS: list[tuple[Any, threading.Thread]] = []


def loop() -> None:
    """Let the `e2b` backend reach a server of our own over the default backend, by the environment as a user would."""
    if SERVERS:
        return
    pytest.importorskip("e2b", reason="the e2b SDK is not installed: pip install 'gnomon[e2b]'")
    pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'gnomon[serve]'")
    backend("namespaces")
    from gnomon.sandbox.backends import namespaces
    from gnomon.sandbox.server import address_of, build, server
    from gnomon.sandbox.server_desk import Settings

    key = secrets.token_hex(20)
    home = tempfile.TemporaryDirectory()
    store = LayerStore(Path(home.name))
    served = namespaces.Backend(store)
    live = server(build(served, Settings(keys=(key,), limits=SMALL), store))

    async def main() -> None:
        await live.serve()
        await served.close()
        home.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    SERVERS.append((live, thread))
    while not live.started and thread.is_alive():
        thread.join(0.02)
    os.environ.update(E2B_API_URL=address_of(live), E2B_SANDBOX_URL=address_of(live), E2B_API_KEY=key)


@pytest.fixture(scope="module", autouse=True)
def _no_server_stays() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for live, thread in SERVERS:
        live.should_exit = True
        thread.join()
    SERVERS.clear()
    os.environ.clear()
    os.environ.update(before)


async def ask(candidate: Backend) -> Capabilities | str:
    """What a backend can do, or why it cannot."""
    try:
        return await candidate.probe()
    except Unsupported as error:
        return str(error)
    finally:
        await candidate.close()


def capabilities(name: str) -> Capabilities:
    """What a backend that works can do."""
    found = WORKS[name]
    assert isinstance(found, Capabilities)
    return found


@contextlib.asynccontextmanager
async def opened(name: str, spec: Spec = PLAIN, store: Path | None = None) -> AsyncIterator[tuple[Backend, Sandbox]]:
    """A backend with a sandbox, both gone afterwards."""
    made = backend(name, store)
    try:
        async with await made.create(spec) as box:
            yield made, box
    finally:
        await made.close()


def run(name: str, body: Callable[[Sandbox], Awaitable[None]], spec: Spec = PLAIN) -> None:
    """Do something with a fresh sandbox, within a time that only a hang exceeds."""

    async def main() -> None:
        async with opened(name, spec) as (_, box):
            await asyncio.wait_for(body(box), 300)

    backend(name)
    asyncio.run(main())


def sh(script: str, timeout: float | None = 120.0, **options: object) -> Command:
    """A shell command."""
    return Command(argv=("/bin/sh", "-c", script), timeout_seconds=timeout, **options)


each = pytest.mark.parametrize("name", NAMES)


@each
def test_runs_programs(name: str) -> None:
    async def body(box: Sandbox) -> None:
        result = await box.exec(sh("echo out; echo err >&2; exit 3"))
        assert (result.code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
        assert not result.timed_out and not result.truncated and result.seconds > 0
        assert (await box.exec(sh("kill -9 $$"))).code == -9
        assert (await box.exec(Command(argv=("cat",), stdin=b"through"))).stdout == b"through"
        assert (await box.exec(Command(argv=("wc", "-c"), stdin=b"x" * 3_000_000))).text.strip() == "3000000"
        assert (await box.exec(Command(argv=("no-such-program",)))).code == 127
        assert (await box.exec(Command(argv=("/etc",)))).code == 126
        result = await box.exec(sh("echo $A $B; pwd", env={"B": "two"}, cwd="/tmp"))
        assert result.text == "one two\n/tmp\n"
        assert (await box.exec(sh("pwd"))).text == "/home/user\n"

    run(name, body, Spec(limits=SMALL, env={"A": "one"}))


@each
def test_many_at_once(name: str) -> None:
    async def body(box: Sandbox) -> None:
        results = await asyncio.gather(*(box.exec(sh(f"sleep 0.1; echo {i}")) for i in range(20)))
        said = [(result.code, result.text, result.stderr, result.timed_out) for result in results]
        assert said == [(0, f"{i}\n", b"", False) for i in range(20)]

    run(name, body)


@each
def test_time_ends_a_program_that_ignores_signals(name: str) -> None:
    async def body(box: Sandbox) -> None:
        result = await box.exec(sh("trap '' TERM INT HUP; echo started; while :; do sleep 0.05; done", timeout=0.5))
        assert result.timed_out and result.code == -9 and result.stdout == b"started\n"
        assert 0.4 < result.seconds < 100
        assert (await box.exec(sh("echo on"))).text == "on\n"

    run(name, body)


@each
def test_output_is_bounded(name: str) -> None:
    async def body(box: Sandbox) -> None:
        result = await box.exec(sh("head -c 5000000 /dev/zero; echo end >&2", max_output_bytes=10_000))
        assert result.code == 0 and result.truncated and len(result.stdout) == 10_000 and result.stderr == b"end\n"
        result = await box.exec(sh("yes", timeout=0.5, max_output_bytes=1000))
        assert result.timed_out and result.truncated and len(result.stdout) == 1000

    run(name, body)


@each
def test_a_daemon_does_not_hold_the_answer_back(name: str) -> None:
    async def body(box: Sandbox) -> None:
        result = await box.exec(sh("(while sleep 0.05; do echo tick; date >> /tmp/ticks; done) & echo gone"))
        assert result.code == 0 and result.stdout.startswith(b"gone\n") and result.seconds < 55
        before = len(await box.read("/tmp/ticks")) if (await box.exec(sh("sleep 0.3"))).code == 0 else 0
        await box.exec(sh("sleep 0.5"))
        assert len(await box.read("/tmp/ticks")) > before > 0, "what a program leaves running stays"

    run(name, body)


@each
def test_streams(name: str) -> None:
    async def body(box: Sandbox) -> None:
        process = await box.start(sh("read line; echo got $line; read line; echo got $line >&2; exit 5", timeout=None), stdin=True)
        await process.write(b"one\n")
        chunks: list[Chunk] = []
        async for chunk in process.output():
            chunks.append(chunk)
            if chunk.stream == "stdout":
                await process.write(b"two\n")
                await process.close_stdin()
        assert {(c.stream, c.data) for c in chunks} == {("stdout", b"got one\n"), ("stderr", b"got two\n")}
        assert (await process.wait()).code == 5
        process = await box.start(sh("sleep 100 & sleep 100", timeout=None))
        await process.kill()
        assert (await process.wait()).code == -9

    run(name, body)


@each
def test_a_program_waits_for_its_reader(name: str) -> None:
    async def body(box: Sandbox) -> None:
        process = await box.start(sh("head -c 20000000 /dev/zero; echo done > /tmp/done", timeout=None))
        await asyncio.sleep(0.5)
        with pytest.raises(SandboxError):
            await box.read("/tmp/done")
        size = 0
        async for chunk in process.output():
            size += len(chunk.data)
        assert size == 20_000_000 and (await process.wait()).code == 0

    run(name, body)


@each
def test_files(name: str) -> None:
    async def body(box: Sandbox) -> None:
        await box.write("/tmp/a/b/file", b"content", mode=0o640)
        assert await box.read("/tmp/a/b/file") == b"content"
        assert (await box.exec(sh("find /tmp/a/b/file -printf '%m %s\\n'"))).text == "640 7\n"
        await box.write("/tmp/a/b/file", b"less")
        assert await box.read("/tmp/a/b/file") == b"less"
        large = bytes(range(256)) * 12_000
        await box.write("/tmp/large", large)
        assert await box.read("/tmp/large") == large
        with pytest.raises(SandboxError, match="large"):
            await box.read("/tmp/large", max_bytes=1000)
        await box.exec(sh("ln -s b/file /tmp/a/link; mkfifo /tmp/a/pipe"))
        found = {entry.path: entry for entry in await box.list("/tmp/a", depth=2)}
        assert {path: entry.kind for path, entry in found.items()} == {
            "/tmp/a/b": "directory", "/tmp/a/b/file": "file", "/tmp/a/link": "symlink",
            **({} if name == "e2b" else {"/tmp/a/pipe": "other"})}  # E2B's SDK leaves out what is of no kind that it knows
        assert found["/tmp/a/link"].target == "b/file" and found["/tmp/a/b/file"].size == 4
        for path in ("/tmp/none", "/tmp/a", "/tmp/a/pipe", "relative"):
            with pytest.raises(SandboxError):
                await box.read(path)
        await box.remove("/tmp/a")
        assert [entry.path for entry in await box.list("/tmp")] == ["/tmp/large"]
        with pytest.raises(SandboxError, match="none"):
            await box.remove("/tmp/none")

    run(name, body)


@each
def test_folders_go_in_and_out(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "deep").mkdir(parents=True)
    (source / "sub" / "file").write_bytes(b"x" * 200_000)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/file")

    async def body(box: Sandbox) -> None:
        await box.upload(source, "/tmp/in")
        result = await box.exec(sh("/tmp/in/run.sh; wc -c < /tmp/in/link; find /tmp/in/sub/deep"))
        assert result.text == "ran\n200000\n/tmp/in/sub/deep\n"
        await box.download("/tmp/in", tmp_path / "out")
        await box.upload(source / "run.sh", "/tmp/one")
        await box.download("/tmp/one", tmp_path / "one")

    run(name, body)
    assert (tmp_path / "out" / "sub" / "file").read_bytes() == b"x" * 200_000
    assert (tmp_path / "out" / "sub" / "deep").is_dir() and (tmp_path / "out" / "link").readlink() == Path("sub/file")
    assert (tmp_path / "out" / "run.sh").stat().st_mode & 0o111 and (tmp_path / "one").read_text().endswith("echo ran\n")


@each
def test_a_program_cannot_lead_a_second_download_astray(name: str, tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()

    async def body(box: Sandbox) -> None:
        made = await box.exec(sh(f"mkdir /tmp/w; ln -s {outside} /tmp/w/a; touch -d 3000-01-01 /tmp/w/late"))
        assert made.code == 0, made
        await box.download("/tmp/w", target)
        await box.exec(sh("rm /tmp/w/a; mkdir /tmp/w/a; echo x > /tmp/w/a/file"))
        with pytest.raises(SandboxError):
            await box.download("/tmp/w", target)
        assert "/tmp/w/late" in [entry.path for entry in await box.list("/tmp/w")]

    run(name, body)
    assert list(outside.iterdir()) == []


@each
def test_changes_are_seen(name: str) -> None:
    async def body(box: Sandbox) -> None:
        await box.exec(sh("mkdir -p /tmp/w/sub"))
        seen: list[FileEvent] = []

        async def look() -> None:
            async for event in box.watch("/tmp/w", recursive=True):
                seen.append(event)

        task = asyncio.ensure_future(look())
        for _ in range(100):
            await box.exec(sh("echo > /tmp/w/sub/file; chmod 600 /tmp/w/sub/file; rm /tmp/w/sub/file"))
            if {"create", "chmod", "remove"} <= {event.kind for event in seen}:
                break
        task.cancel()
        assert {"create", "chmod", "remove"} <= {event.kind for event in seen if event.path == "/tmp/w/sub/file"}
        with pytest.raises(SandboxError):
            async for _ in box.watch("/none"):
                pass

    run(name, body)


@each
def test_freezing_stops_and_resuming_goes_on(name: str) -> None:
    async def body(box: Sandbox) -> None:
        if "freeze" not in capabilities(name).pause:
            with pytest.raises(Unsupported):
                await box.pause("freeze")
            return
        writing = "while :; do date +%s%N > /tmp/next; mv /tmp/next /tmp/now; sleep 0.01; done"
        process = await box.start(sh(writing, timeout=None))
        await box.exec(sh("while [ ! -e /tmp/now ]; do sleep 0.01; done", timeout=None))
        await box.pause()
        with pytest.raises(SandboxError, match="paused"):
            await box.exec(sh("true"))
        await box.resume()
        first = (await box.read("/tmp/now")).decode().strip()
        moved = await box.exec(sh(f"while [ $(cat /tmp/now) = {first} ]; do sleep 0.01; done", timeout=120))
        assert moved.code == 0
        await box.pause()
        await asyncio.wait_for(box.kill(), 120)  # with a program that stands still
        with pytest.raises(SandboxLost):
            await process.wait()

    run(name, body)


@each
def test_stopping_keeps_the_files(name: str) -> None:
    async def body(box: Sandbox) -> None:
        if "stop" not in capabilities(name).pause:
            with pytest.raises(Unsupported):
                await box.pause("stop")
            return
        await box.write("/tmp/kept", b"1")
        process = await box.start(sh("sleep 1000", timeout=None))
        await box.pause("stop")
        with pytest.raises((SandboxError, SandboxLost)):
            await process.wait()
        await box.resume()
        assert await box.read("/tmp/kept") == b"1"
        assert "sleep" not in (await box.exec(sh("cat /proc/[0-9]*/comm"))).text

    run(name, body)


@each
def test_forks_diverge(name: str) -> None:
    async def body(box: Sandbox) -> None:
        await box.exec(sh("echo parent > /tmp/who; mkdir /tmp/d; touch /tmp/d/x; rm -r /tmp/d; rm -f /etc/hosts"))
        levels = ["running", *(level for level in ("freeze", "stop") if level in capabilities(name).pause)]
        for level in levels:
            if level != "running":
                await box.pause(level)
            children = await box.fork(3)
            for i, child in enumerate(children):
                assert not isinstance(child, Exception), child
                result = await child.exec(sh(f"cat /tmp/who; echo /tmp/*; test ! -e /etc/hosts && echo {i} > /tmp/who"))
                assert result.stdout == b"parent\n/tmp/who\n" and result.code == 0
                assert child.id != box.id
            assert [await child.read("/tmp/who") for child in children] == [b"0\n", b"1\n", b"2\n"]
            grandchild = (await children[1].fork())[0]
            assert await grandchild.read("/tmp/who") == b"1\n"
            for child in (*children, grandchild):
                await child.kill()
            if level != "running":
                await box.resume()
            assert await box.read("/tmp/who") == b"parent\n"

    run(name, body)


@each
def test_snapshots_are_images(name: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(name, store=tmp_path / "store") as (made, box):
            await box.write("/tmp/state", b"one")
            snapshot = await box.snapshot()
            await box.write("/tmp/state", b"two")
            named = await box.snapshot("after-two")
            assert named.name == "after-two" and not named.memory
            (child,) = await box.fork()
            assert not isinstance(child, Exception)
            await child.write("/tmp/more", b"three")
            await child.snapshot("of-a-child")
            await box.kill()
            async with await made.create(Spec(image=snapshot.name, limits=SMALL)) as other:
                assert await other.read("/tmp/state") == b"one"
            async with await made.create(Spec(image="after-two", limits=SMALL)) as other:
                assert await other.read("/tmp/state") == b"two"
        async with opened(name, Spec(image="after-two", limits=SMALL), store=tmp_path / "store") as (_, box):
            assert await box.read("/tmp/state") == b"two", "a named snapshot outlives its backend"
        async with opened(name, Spec(image="of-a-child", limits=SMALL), store=tmp_path / "store") as (_, box):
            assert (await box.read("/tmp/state"), await box.read("/tmp/more")) == (b"two", b"three")

    backend(name)
    asyncio.run(main())


@each
def test_what_is_not_supported_is_refused(name: str) -> None:
    async def body(box: Sandbox) -> None:
        can = capabilities(name)
        if not can.snapshot_memory:
            with pytest.raises(Unsupported):
                await box.snapshot(memory=True)
        if not can.live_fork:
            with pytest.raises(Unsupported):
                await box.fork(memory=True)
        if "hibernate" not in can.pause:
            with pytest.raises(Unsupported):
                await box.pause("hibernate")
        assert (await box.exec(sh("echo fine"))).text == "fine\n"

    run(name, body)


async def used(box: Sandbox) -> None:
    """Run something in it for as long as it lives."""
    while True:
        await box.exec(sh("true"))
        await asyncio.sleep(0.05)


@each
def test_an_end_is_an_end(name: str) -> None:
    async def main() -> None:
        async with opened(name) as (made, box):
            running = asyncio.ensure_future(box.exec(sh("sleep 1000", timeout=None)))
            await asyncio.sleep(0.2)
            await box.kill()
            await box.kill()
            with pytest.raises(SandboxLost):
                await running
            for call in (box.exec(sh("true")), box.read("/etc/passwd"), box.pause(), box.resume(), box.snapshot(), box.usage()):
                with pytest.raises(SandboxLost):
                    await call
            short = await made.create(Spec(limits=SMALL, ttl_seconds=0.3))
            with pytest.raises(SandboxLost, match="time"):
                await asyncio.wait_for(used(short), 60)
            longer = await made.create(Spec(limits=SMALL, ttl_seconds=2.0))
            await longer.set_timeout(None)
            await asyncio.sleep(2.5)
            assert (await longer.exec(sh("true"))).code == 0
            with pytest.raises(ConfigError):
                await made.create(Spec(image="no-such-image"))

    backend(name)
    asyncio.run(main())


@each
def test_one_key_is_one_sandbox(name: str) -> None:
    async def main() -> None:
        made = backend(name)
        try:
            spec = Spec(limits=SMALL, idempotency_key="once")
            boxes = await asyncio.gather(*(made.create(spec) for _ in range(4)))
            assert len({box.id for box in boxes}) == 1
        finally:
            await made.close()

    backend(name)
    asyncio.run(main())


@each
def test_usage_is_counted(name: str) -> None:
    async def body(box: Sandbox) -> None:
        await box.write("/tmp/five", b"x" * 5_000_000)
        process = await box.start(sh("sleep 1000 & sleep 1000", timeout=None))
        result = await box.exec(sh("i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"))
        assert isinstance(result, Result) and result.code == 0
        usage = await box.usage()
        assert 5_000_000 <= usage.disk_bytes < 32 << 20
        assert 2 <= usage.processes <= 10 and usage.cpu_seconds > 0.01 and usage.memory_bytes > 100_000
        await process.kill()

    run(name, body)
