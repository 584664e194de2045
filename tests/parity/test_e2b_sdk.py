"""The official E2B SDK, unmodified, against our server: what it promises its users holds here (`pip install 'gnomon[e2b]'`)."""

import asyncio
import io
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

e2b = pytest.importorskip("e2b", reason="the e2b SDK is not installed: pip install 'gnomon[e2b]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'gnomon[serve]'")

from gnomon.errors import Unsupported  # noqa: E402
from gnomon.sandbox.backends import gvisor  # noqa: E402
from gnomon.sandbox.layers import LayerStore  # noqa: E402
from gnomon.sandbox.sandbox import Capabilities  # noqa: E402
from gnomon.sandbox.server import address_of, build, server  # noqa: E402
from gnomon.sandbox.server_desk import Settings  # noqa: E402

KEY = "e2b_" + "53c12e7a" * 5


class Live:
    """A server in a thread of its own."""

    def __init__(self, backend: Any, store: LayerStore, capabilities: Capabilities) -> None:
        self.backend, self.capabilities = backend, capabilities
        self.server = server(build(backend, Settings(keys=(KEY,)), store))
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        await self.server.serve()
        await self.backend.close()

    @property
    def options(self) -> dict[str, Any]:
        address = address_of(self.server)
        return {"api_url": address, "sandbox_url": address, "api_key": KEY}


def backends(store: LayerStore) -> Iterator[Any]:
    """What might run sandboxes here, the quickest first."""
    try:
        from gnomon.sandbox.backends import namespaces
    except ImportError:
        pass
    else:
        yield namespaces.Backend(store)
    yield gvisor.Backend(store)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    reasons = []
    with tempfile.TemporaryDirectory() as home:
        store = LayerStore(Path(home))
        for backend in backends(store):

            async def ask(backend: Any = backend) -> Capabilities:
                try:
                    return await backend.probe()
                finally:
                    await backend.close()

            try:
                capabilities = asyncio.run(ask())
            except Unsupported as error:
                reasons.append(str(error))
                continue
            running = Live(type(backend)(store), store, capabilities)
            running.thread.start()
            try:
                while not running.server.started and running.thread.is_alive():
                    running.thread.join(0.02)
                yield running
            finally:
                running.server.should_exit = True
                running.thread.join()
            return
    pytest.skip("no backend works here: " + "; ".join(reasons))


@pytest.fixture
def box(live: Live) -> Iterator[Any]:
    sandbox = e2b.Sandbox.create(envs={"COLOUR": "green"}, metadata={"run": "7", "note": "a b&c"}, **live.options)
    yield sandbox
    sandbox.kill()


def test_commands(box: Any) -> None:
    result = box.commands.run("echo $COLOUR $SIZE; echo warn >&2; pwd", envs={"SIZE": "4"}, cwd="/tmp")
    assert (result.stdout, result.stderr, result.exit_code) == ("green 4\n/tmp\n", "warn\n", 0)
    assert box.commands.run("id -un", user="root").stdout == "root\n"
    with pytest.raises(e2b.CommandExitException) as caught:
        box.commands.run("echo half; exit 3")
    assert (caught.value.exit_code, caught.value.stdout) == (3, "half\n")
    heard: list[str] = []
    box.commands.run("echo one; sleep 0.1; echo two", on_stdout=heard.append)
    assert "".join(heard) == "one\ntwo\n"
    with pytest.raises(e2b.TimeoutException):
        box.commands.run("sleep 30", timeout=0.5)
    assert len(box.commands.run("head -c 3000000 /dev/zero | tr '\\0' x").stdout) == 3_000_000


def test_background_commands(box: Any) -> None:
    handle = box.commands.run("cat", background=True, stdin=True)
    assert handle.pid in [process.pid for process in box.commands.list()]
    box.commands.send_stdin(handle.pid, "hello\n")
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "hello\n"
    sleeper = box.commands.run("sleep 60", background=True)
    other = box.commands.connect(sleeper.pid)
    assert box.commands.kill(sleeper.pid)
    assert not box.commands.kill(999_999)
    for follower in (sleeper, other):
        with pytest.raises(e2b.CommandExitException) as caught:
            follower.wait()
        assert caught.value.exit_code == -1
    assert box.commands.list() == []


def test_a_command_outlives_its_client(box: Any) -> None:
    handle = box.commands.run("while sleep 0.05; do echo tick >> /tmp/ticks; echo tick; done", background=True)
    handle.disconnect()
    first = box.commands.run("sleep 0.3; wc -l < /tmp/ticks").stdout
    assert int(box.commands.run("sleep 0.3; wc -l < /tmp/ticks").stdout) > int(first)
    assert box.commands.kill(handle.pid)


def test_files(box: Any) -> None:
    assert box.files.write("note.txt", "text ü").path.endswith("/note.txt")
    assert box.files.read("note.txt") == "text ü"
    assert box.files.write_files([{"path": "/tmp/x/a", "data": b"1"}, {"path": '/tmp/x/b "q"', "data": "2"}])[1].name == 'b "q"'
    assert [entry.name for entry in box.files.list("/tmp/x")] == ["a", 'b "q"']
    assert box.files.write("/tmp/stream", io.BytesIO(b"z" * 3_000_001)).name == "stream"
    assert bytes(box.files.read("/tmp/stream", format="bytes")) == b"z" * 3_000_001
    assert b"".join(box.files.read("/tmp/stream", format="stream")) == b"z" * 3_000_001
    box.files.write("/tmp/packed", "q" * 100_000, gzip=True)
    assert box.files.read("/tmp/packed") == "q" * 100_000
    info = box.files.get_info("/tmp/x/a")
    assert (info.size, info.type, info.permissions) == (1, e2b.FileType.FILE, "-rw-r--r--")
    assert box.files.make_dir("/tmp/new/deep")
    assert not box.files.make_dir("/tmp/new/deep")
    assert box.files.rename("/tmp/x/a", "/tmp/new/c").path == "/tmp/new/c"
    assert {entry.path for entry in box.files.list("/tmp/new", depth=2)} == {"/tmp/new/deep", "/tmp/new/c"}
    box.files.remove("/tmp/x")
    assert not box.files.exists("/tmp/x")
    assert box.files.exists("/tmp/new/c")
    box.commands.run("ln -s /tmp/new/c /tmp/new/link")
    link = box.files.get_info("/tmp/new/link")
    assert (link.type, link.symlink_target) == (e2b.FileType.SYMLINK, "/tmp/new/c")
    with pytest.raises(e2b.FileNotFoundException):
        box.files.read("/tmp/absent")
    with pytest.raises(e2b.FileNotFoundException):
        box.files.list("/tmp/absent")
    with pytest.raises(e2b.InvalidArgumentException):
        box.files.read("/tmp")
    with pytest.raises(e2b.InvalidArgumentException):
        box.files.list("/tmp/new/c")


def test_watching(box: Any) -> None:
    box.files.make_dir("/tmp/seen")
    handle = box.files.watch_dir("/tmp/seen", recursive=True)
    box.files.write("/tmp/seen/file", "1")
    box.commands.run("mkdir /tmp/seen/deep; rm /tmp/seen/file")
    events = {(event.name, event.type.value) for event in handle.get_new_events()}
    assert {("file", "create"), ("file", "write"), ("deep", "create"), ("file", "remove")} <= events
    handle.stop()


def test_signed_addresses(live: Live, box: Any) -> None:
    box.files.write("/tmp/signed", "content")
    address = box.download_url("/tmp/signed", use_signature_expiration=60)
    headers = {"E2b-Sandbox-Id": box.sandbox_id}
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as reply:
        assert reply.read() == b"content"
    otherwise = address[:-1] + ("1" if address.endswith("0") else "0")
    for forged in (address.replace("signed", "other"), otherwise, box.upload_url("/tmp/signed")):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(forged, headers=headers))
        assert caught.value.code == 401
        caught.value.close()


def test_lists_and_times(live: Live, box: Any) -> None:
    query = e2b.SandboxQuery(metadata={"note": "a b&c"})
    assert [found.sandbox_id for found in e2b.Sandbox.list(query=query, **live.options).next_items()] == [box.sandbox_id]
    assert e2b.Sandbox.list(query=e2b.SandboxQuery(metadata={"run": "8"}), **live.options).next_items() == []
    others = [e2b.Sandbox.create(metadata={"page": "yes"}, **live.options) for _ in range(3)]
    pages = e2b.Sandbox.list(query=e2b.SandboxQuery(metadata={"page": "yes"}), limit=2, **live.options)
    sizes = []
    while pages.has_next:
        sizes.append(len(pages.next_items()))
    assert sizes == [2, 1]
    assert [other.kill() for other in others] == [True] * 3
    before = box.get_info()
    assert before.metadata == {"run": "7", "note": "a b&c"}
    box.set_timeout(4000)
    assert (box.get_info().end_at - before.end_at).total_seconds() > 3000
    assert box.get_metrics()[0].mem_total == 512 << 20
    assert box.is_running()


def test_time_over_kills_or_pauses(live: Live) -> None:
    short = e2b.Sandbox.create(timeout=1, **live.options)
    kept = e2b.Sandbox.create(timeout=1, lifecycle={"on_timeout": "pause", "auto_resume": True}, **live.options)
    kept.files.write("kept", "yes")
    for _ in range(100):
        if not e2b.Sandbox.list(query=e2b.SandboxQuery(state=[e2b.SandboxState.RUNNING]), **live.options).next_items():
            break
        threading.Event().wait(0.1)
    with pytest.raises(e2b.SandboxNotFoundException):
        short.get_info()
    assert kept.get_info().state == e2b.SandboxState.PAUSED
    assert kept.files.read("kept") == "yes"
    assert kept.get_info().state == e2b.SandboxState.RUNNING
    assert kept.kill()


def test_pause_and_connect(live: Live, box: Any) -> None:
    box.files.write("kept", "yes")
    assert box.pause()
    assert not box.pause()
    with pytest.raises(e2b.SandboxNotRunningException):
        box.commands.run("true")
    again = e2b.Sandbox.connect(box.sandbox_id, **live.options)
    assert again.commands.run("cat kept").stdout == "yes"


def test_forks_part(live: Live, box: Any) -> None:
    box.files.write("mine", "parent")
    children = box.fork(count=2)
    assert len({box.sandbox_id, *(child.sandbox_id for child in children)}) == 3
    for index, child in enumerate(children):
        assert child.files.read("mine") == "parent"
        child.files.write("mine", str(index))
    assert [child.files.read("mine") for child in (box, *children)] == ["parent", "0", "1"]
    assert [child.kill() for child in children] == [True, True]


def test_snapshots_are_templates(live: Live, box: Any) -> None:
    box.files.write("kept", "yes")
    made = box.create_snapshot("sdk-snapshot")
    assert made.snapshot_id in [found.snapshot_id for found in e2b.Sandbox.list_snapshots(**live.options).next_items()]
    with e2b.Sandbox.create(made.snapshot_id, **live.options) as child:
        assert child.files.read("kept") == "yes"
    assert e2b.Sandbox.delete_snapshot(made.snapshot_id, **live.options)
    assert not e2b.Sandbox.delete_snapshot(made.snapshot_id, **live.options)
    with pytest.raises(e2b.SandboxException, match="not found"):
        e2b.Sandbox.create(made.snapshot_id, **live.options)


def test_refusals(live: Live, box: Any) -> None:
    with pytest.raises(e2b.AuthenticationException):
        e2b.Sandbox.create(**{**live.options, "api_key": "e2b_wrong"})
    for lost in (lambda: e2b.Sandbox.connect("absent", **live.options), lambda: e2b.Sandbox.get_info("absent", **live.options)):
        with pytest.raises(e2b.SandboxNotFoundException):
            lost()
    assert not e2b.Sandbox.kill("absent", **live.options)
    with pytest.raises(e2b.SandboxException, match="no open network"):
        e2b.Sandbox.create(allow_internet_access=True, **live.options)
    with pytest.raises(e2b.SandboxException, match="not found"):
        e2b.Sandbox.create("../../etc", **live.options)


def test_a_key_makes_one_sandbox(live: Live) -> None:
    same = [e2b.Sandbox.create(idempotency_key="once-and-only-once", **live.options) for _ in range(2)]
    assert same[0].sandbox_id == same[1].sandbox_id
    assert same[0].kill()
    fresh = e2b.Sandbox.create(idempotency_key="once-and-only-once", **live.options)
    assert fresh.sandbox_id != same[0].sandbox_id
    assert fresh.kill()


def test_the_asynchronous_sdk(live: Live) -> None:
    async def use() -> None:
        sandbox = await e2b.AsyncSandbox.create(**live.options)
        try:
            results = await asyncio.gather(*(sandbox.commands.run(f"echo {index}") for index in range(5)))
            assert [result.stdout for result in results] == [f"{index}\n" for index in range(5)]
            handle = await sandbox.commands.run("cat", background=True, stdin=True)
            async with sandbox.commands.stream_input(handle.pid) as feed:
                await feed.send("one ")
                await feed.send(b"two")
            await sandbox.commands.close_stdin(handle.pid)
            assert (await handle.wait()).stdout == "one two"
            seen: list[str] = []
            heard = asyncio.Event()

            def event(change: Any) -> None:
                seen.append(f"{change.name} {change.type.value}")
                heard.set()

            await sandbox.files.make_dir("/tmp/seen")
            watch = await sandbox.files.watch_dir("/tmp/seen", event)
            await sandbox.files.write("/tmp/seen/file", "1")
            await asyncio.wait_for(heard.wait(), 20)
            assert seen[0] == "file create"
            await watch.stop()
            terminal = await sandbox.pty.create(e2b.PtySize(rows=24, cols=80), on_data=lambda data: seen.append(data.decode()))
            await sandbox.pty.send_stdin(terminal.pid, b"tty; exit\n")
            await terminal.wait()
            assert "/dev/pts/" in "".join(seen)
        finally:
            await sandbox.kill()

    asyncio.run(use())
