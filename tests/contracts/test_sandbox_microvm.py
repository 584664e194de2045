"""Virtual machines: what of them shows without starting one, one that runs through everything, and (slow) what becomes of them."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_backends import need_microvm

from gnomon.errors import ConfigError, SandboxError, SandboxLost, Unsupported
from gnomon.sandbox import reaper
from gnomon.sandbox.backends import microvm
from gnomon.sandbox.gvisor.bundle import foreign_python
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.microvm import kernel, qemu, starter
from gnomon.sandbox.microvm.machine import Machine
from gnomon.sandbox.microvm.qmp import Monitor
from gnomon.sandbox.ns import cgroups
from gnomon.sandbox.open import open_backend
from gnomon.sandbox.registry import Registry
from gnomon.sandbox.sandbox import Command, Limits, Network, Spec

TINY = Spec(image="scratch", limits=Limits(memory_bytes=64 << 20, disk_bytes=16 << 20, processes=32), workdir="/root")


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def need_qemu() -> str:
    program = shutil.which("qemu-system-x86_64")
    if program is None:
        pytest.skip("no qemu-system-x86_64 (apt-get install qemu-system-x86)")
    return program


def test_a_guest_that_boots_says_its_word() -> None:
    assert asyncio.run(qemu.boots(need_qemu(), "tcg", 120.0))


def test_a_machine_outlives_the_thread_of_its_loop(tmp_path: Path) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv (util-linux): nothing binds a machine to a thread")
    found: list[subprocess.Popen[bytes]] = []

    async def start() -> None:
        found.append(await starter.start(lambda: qemu.spawn(["sleep", "1000"], [], tmp_path / "errors", None)))

    for _ in range(2):
        thread = threading.Thread(target=lambda: asyncio.run(start()))
        thread.start()
        thread.join()
    try:
        for child in found:
            while Path(f"/proc/{child.pid}/comm").read_text() != "sleep\n":  # bound to a thread by now
                assert child.poll() is None
                time.sleep(0.01)
        time.sleep(0.1)
        assert [child.poll() for child in found] == [None, None]
    finally:
        for child in found:
            child.kill()
            child.wait()


def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    began, found = threading.Event(), []

    def order() -> subprocess.Popen[bytes]:
        began.set()
        time.sleep(0.2)
        found.append(subprocess.Popen(["sleep", "1000"]))
        return found[-1]

    async def start() -> None:
        task = asyncio.create_task(starter.start(order))
        await asyncio.to_thread(began.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(FileNotFoundError):
            await starter.start(lambda: subprocess.Popen(["/no/such/program"]))

    asyncio.run(start())
    assert [child.returncode for child in found] == [-signal.SIGKILL]


def test_one_that_does_not_is_given_up_in_time() -> None:
    assert not asyncio.run(qemu.boots(need_qemu(), "tcg", 0.01))
    assert not asyncio.run(qemu.boots("/bin/false", "tcg", 10.0))


def test_what_shows_without_trying_is_said(tmp_path: Path) -> None:
    modules, device = tmp_path / "module", tmp_path / "kvm"
    modules.mkdir()
    assert "does not exist" in (qemu.refusal(modules, device) or "")
    device.touch(0o600)
    (modules / "kvm_pvm").mkdir()
    assert "software" in (qemu.refusal(modules, device) or "")
    (modules / "kvm_intel").mkdir()
    assert qemu.refusal(modules, device) is None
    if os.geteuid() != 0:
        device.chmod(0)
        assert "may not be opened" in (qemu.refusal(modules, device) or "")


def test_translation_is_taken_only_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(qemu.ACCELERATOR, raising=False)
    monkeypatch.setattr(qemu, "refusal", lambda: "there is no such thing here")
    monkeypatch.setattr(qemu, "find", lambda: "/bin/false")
    backend = microvm.Backend(LayerStore(tmp_path))
    for call in (backend.probe, lambda: backend.create(Spec())):
        with pytest.raises(Unsupported, match=r"no such thing here; .*use gvisor.*GNOMON_MICROVM_ACCEL=tcg"):
            asyncio.run(call())
    asyncio.run(backend.close())
    monkeypatch.setenv(qemu.ACCELERATOR, "tcg")
    assert asyncio.run(qemu.accelerator("/bin/false")) == "tcg"
    monkeypatch.setenv(qemu.ACCELERATOR, "hvf")
    with pytest.raises(ConfigError, match="GNOMON_MICROVM_ACCEL=hvf"):
        asyncio.run(qemu.accelerator("/bin/false"))


def module_file(*needs: str) -> bytes:
    return b"\x7fELF...\0license=GPL\0depends=" + ",".join(needs).encode() + b"\0name=x\0"


def test_a_kernel_is_found_with_its_modules_in_an_order_that_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "lib/modules/6.9-cloud"
    (place / "kernel").mkdir(parents=True)
    (tmp_path / "boot").mkdir()
    (tmp_path / "boot/vmlinuz-6.9-cloud").write_bytes(b"kernel")
    (tmp_path / "boot/vmlinuz-6.10").write_bytes(b"one without modules")
    for name, needs in {"virtio-pci": ("virtio", "virtio_ring"), "virtio": (), "virtio_ring": ("virtio",), "virtio_blk": ("virtio",),
                        "virtio_console": ("virtio_ring",), "overlay": (), "fuse": ()}.items():  # fmt: skip
        (place / f"kernel/{name}.ko").write_bytes(module_file(*needs))
    monkeypatch.setenv(kernel.VARIABLE, str(tmp_path))
    found = kernel.find()
    assert (found.image.name, found.version, found.modules) == ("vmlinuz-6.9-cloud", "6.9-cloud", place)
    with pytest.raises(Unsupported, match=r"6\.9-cloud has no erofs"):
        kernel.modules(found)
    (place / "modules.builtin").write_text("kernel/fs/erofs/erofs.ko\n")
    order = [name for name, _ in kernel.modules(found)]
    assert order == ["virtio_ring", "virtio", "virtio_pci", "virtio_blk", "virtio_console", "overlay", "fuse"]
    monkeypatch.setenv(kernel.VARIABLE, str(tmp_path / "boot/vmlinuz-6.9-cloud"))
    assert kernel.find() == found
    monkeypatch.setenv(kernel.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="apt-get install linux-image-cloud-amd64"):
        kernel.find()


def test_the_archive_is_one_that_cpio_unpacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("cpio") is None:
        pytest.skip("no cpio to compare with")
    monkeypatch.setattr(kernel, "modules", lambda _: [("one", b"odd"), ("two", b"four")])
    monkeypatch.setattr(kernel, "shell", lambda: b"busybox")
    found = kernel.Kernel(image=tmp_path / "vmlinuz-1", version="1", modules=tmp_path)
    packed = kernel.archive(found, ("/py", "agent.py", "/dev/x"), tmp_path)
    assert kernel.archive(found, ("/py", "agent.py", "/dev/x"), tmp_path) == packed
    subprocess.run(["cpio", "-idm", "--quiet"], input=packed.read_bytes(), cwd=tmp_path, check=True)
    assert (tmp_path / "modules/one.ko").read_bytes() == b"odd" and (tmp_path / "modules/two.ko").read_bytes() == b"four"
    first = (tmp_path / "init").read_text()
    assert "in one two; do" in first and first.endswith("switch_root /new /py agent.py /dev/x\n") and os.access(tmp_path / "init", os.X_OK)
    assert (tmp_path / "agent/agent.py").is_file()


def test_a_machine_has_no_way_out() -> None:
    shape = qemu.Shape(memory_mib=160, cpus=2, drives=2, words="gnomon.disk=1", qemu="1", accelerator="kvm")
    words = qemu.arguments(shape, (3, 4, 5), (6, 7, 8, 9), None)
    text = " ".join(words)
    assert "-nodefaults" in words and "spawn=deny" in text and "netdev" not in text and "virtio-net" not in text and "vsock" not in text
    assert text.count("read-only=on") == 2 and "160M" in words and "gnomon.disk=1" in text and "tcg" not in text
    again = qemu.arguments(shape, (3, 4, 5), (6, 7, 8, 9), 10)
    assert again[-2:] == ["-incoming", "fd:10"] and "-kernel" not in again


def test_orders_are_answered_refused_or_lost() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        loop, monitor = asyncio.get_running_loop(), Monitor(ours, "x")

        async def serve() -> None:
            await loop.sock_sendall(theirs, b'{"QMP": {}}\n')
            for answer in ({"return": {}}, {"event": "STOP"}, {"return": 5}, {"error": {"desc": "not now"}}):
                if "event" not in answer:
                    order = json.loads(await loop.sock_recv(theirs, 4096))
                    assert order["execute"] in ("qmp_capabilities", "query-x", "do-y")
                await loop.sock_sendall(theirs, json.dumps(answer).encode() + b"\n")
            theirs.close()

        serving = asyncio.create_task(serve())
        await monitor.begin()
        assert await monitor.call("query-x", some_word=1) == 5
        with pytest.raises(SandboxError, match="not now"):
            await monitor.call("do-y")
        await serving
        with pytest.raises(SandboxLost):
            await monitor.call("query-x")
        monitor.close()

    asyncio.run(main())


def with_backend(use: Callable[[microvm.Backend], Awaitable[None]]) -> None:
    """Run a coroutine with a backend over a store of its own, and see that nothing of it is left."""
    need_microvm()

    async def run(home: Path) -> None:
        backend = microvm.Backend(LayerStore(home))
        try:
            await asyncio.wait_for(use(backend), 900)
        finally:
            await backend.close()
            assert backend.registry.list() == []
            assert list((home / "scratch").iterdir()) == []
            backend.registry.close()

    with tempfile.TemporaryDirectory() as home:
        asyncio.run(run(Path(home)))


async def furnished(backend: microvm.Backend, spec: Spec = TINY) -> Machine:
    """A machine of an empty image, with a busybox."""
    machine = await backend.create(spec)
    assert isinstance(machine, Machine)
    await machine.write("/root/busybox", Path(shutil.which("busybox") or "").read_bytes(), mode=0o755)
    return machine


def sh(script: str) -> Command:
    return Command(argv=("/root/busybox", "sh", "-c", f"alias b=/root/busybox\n{script}"), timeout_seconds=300.0)


COUNT = "i=0; while :; do i=$((i+1)); echo $i > /root/count; b usleep 20000; done"


async def grows(machine: Machine) -> None:
    before = await machine.read("/root/count")
    for _ in range(3000):
        if await machine.read("/root/count") not in (before, b""):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the program stands still")


def test_one_machine_through_everything() -> None:
    """Started, frozen, written to disk and read back, forked while a program runs; each with its own name, clock and random numbers."""

    async def use(backend: microvm.Backend) -> None:
        async with await furnished(backend) as machine:
            result = await machine.exec(sh("b echo out; b id -u; b hostname; b cat /proc/sys/kernel/threads-max > /root/kept; exit 3"))
            assert (result.code, result.text) == (3, "out\n0\nsandbox\n")
            await machine.start(Command(argv=sh(COUNT).argv, timeout_seconds=None))
            await machine.exec(sh("while ! b test -s /root/count; do b usleep 10000; done"))
            await machine.pause()
            with pytest.raises(SandboxError, match="paused"):
                await machine.exec(sh("b true"))
            await machine.resume()
            await machine.pause("hibernate")
            assert machine.processes == () and (await machine.usage()).disk_bytes > 10 << 20
            await machine.resume()
            await grows(machine)
            await machine.exec(sh("b date -s @1000000"))
            (child,) = await machine.fork(1, memory=True)
            assert isinstance(child, Machine), child
            await grows(machine)
            await grows(child)
            ask = "b cat /run/gnomon/instance /etc/kept 2>/dev/null; b hostname; b head -c 16 /dev/urandom | b od -An -x; b date +%s"
            told = [(await each.exec(sh(ask))).text.splitlines() for each in (machine, child)]
            assert all(mine != other for mine, other in zip(told[0][:-1], told[1][:-1], strict=True))
            assert all(int(words[-1]) > 1_700_000_000 for words in told), "the clock is set on the way"
            assert (await machine.usage()).memory_bytes > 10 << 20

    with_backend(use)


@pytest.mark.slow
def test_snapshots_outlive_their_machine_and_keep_its_size() -> None:
    async def use(backend: microvm.Backend) -> None:
        async with await furnished(backend) as machine:
            await machine.start(Command(argv=sh(COUNT).argv, timeout_seconds=None))
            await machine.exec(sh("while ! b test -s /root/count; do b usleep 10000; done"))
            whole, bare = await machine.snapshot("whole", memory=True), await machine.snapshot("bare")
            assert (whole.memory, bare.memory) == (True, False) and 0 < bare.bytes < 1 << 28
            await grows(machine)
        async with await backend.create(Spec(image="whole", limits=TINY.limits)) as machine:
            await grows(machine)
        async with await backend.create(Spec(image="bare", limits=TINY.limits)) as machine:
            first = await machine.read("/root/count")
            await asyncio.sleep(0.5)
            assert await machine.read("/root/count") == first and (await machine.usage()).processes == 0
        with pytest.raises(Unsupported, match="ask for as much"):
            await backend.create(Spec(image="whole", limits=Limits(memory_bytes=16 << 20)))

    with_backend(use)


@pytest.mark.slow
def test_the_only_way_out_is_the_proxy_socket(tmp_path: Path) -> None:
    place = Path(tempfile.mkdtemp()) / "gateway"

    async def use(backend: microvm.Backend) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.0 200 OK\r\n\r\nthe gateway")
            await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(answer, str(place))
        async with server, await furnished(backend, replace(TINY, network=Network(proxy=place))) as machine:
            said = await machine.exec(sh("b wget -q -O - -Y on http://model/"))
            assert said.text == "the gateway", said.stderr
            links = await machine.exec(sh("b ls /sys/class/net"))
            assert links.text.split() == ["lo"]

    with_backend(use)
    shutil.rmtree(place.parent)


VERSION_2 = """
import os, sys, time
sys.path.insert(0, "/root")
import cgroups
def child(work):
    pid = os.fork()
    if pid == 0:
        for join in group.joins:
            os.write(join, b"0")
        work()
        os._exit(0)
    return pid
def eat():
    kept = bytearray(64 << 20)
    kept[::4096] = b"x" * len(kept[::4096])
def spawn():
    made = 0
    while made < 20:
        try:
            if os.fork() == 0:
                time.sleep(600)
        except OSError:
            os._exit(made)
        made += 1
def spin():
    while True:
        pass
parents = cgroups.Cgroups()
group = parents.make("x", 32 << 20, 20, 6)
said = [sorted(parents.folders), sorted({os.path.basename(os.path.dirname(group.path(name))) for name in parents.folders}), parents.notes]
said.append(os.waitstatus_to_exitcode(os.waitpid(child(eat), 0)[1]))
said.append(os.waitstatus_to_exitcode(os.waitpid(child(spawn), 0)[1]))
open(group.path("memory") + "/cgroup.kill", "w").write("1")
while "populated 1" in cgroups.read(group.path("memory") + "/cgroup.events"):
    time.sleep(0.01)
group.remove()
group = parents.make("y", 32 << 20, 20, 6)
pid = child(spin)
while group.count()[2] < 100_000:
    time.sleep(0.01)
said.append(group.freeze(True))
stopped = group.count()[2]
time.sleep(0.3)
said += [group.count()[2] == stopped, group.count()[1], group.freeze(False)]
began, before = time.monotonic(), group.count()[2]
time.sleep(2.0)
said.append((group.count()[2] - before) / 1e6 / (time.monotonic() - began) < 0.4)
os.kill(pid, 9)
os.waitpid(pid, 0)
group.remove()
parents.close()
said += [os.path.exists(folder) for folder in (*group.folders, *set(parents.folders.values()))]
print(said[0], [name.startswith("gnomon-") for name in said[1]], *said[2:])
"""


@pytest.mark.slow
def test_control_groups_where_there_is_nothing_but_version_2() -> None:
    """Our module of control groups, inside a guest: its kernel has all controllers on the unified hierarchy, as few test machines do."""
    source = Path(cgroups.__file__)

    async def use(backend: microvm.Backend) -> None:
        async with await furnished(backend, replace(TINY, limits=Limits(memory_bytes=192 << 20, disk_bytes=16 << 20))) as machine:
            await machine.upload(source, "/root/cgroups.py")
            await machine.write("/root/try.py", VERSION_2.encode())
            python = foreign_python()[: foreign_python().index("-I")]
            result = await machine.exec(Command(argv=(*python, "-I", "-S", "/root/try.py"), timeout_seconds=600.0))
            controllers = "['cpu', 'cpuacct', 'freezer', 'memory', 'pids']"
            assert result.text == f"{controllers} [True] [] -9 5 True True 1 True True False False\n", result

    with_backend(use)


OWNER = """
import asyncio, sys
from pathlib import Path
from gnomon.sandbox.backends.microvm import Backend
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import Limits, Spec
async def main():
    backend = Backend(LayerStore(Path(sys.argv[1])))
    spec = Spec(image="scratch", limits=Limits(memory_bytes=64 << 20, disk_bytes=16 << 20), workdir="/root")
    running, frozen = [await backend.create(spec) for _ in range(2)]
    await frozen.pause()
    print(running.processes[0], frozen.processes[0], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.slow
def test_nothing_outlives_an_owner_that_was_killed() -> None:
    """The kernel ends a machine with its owner, also one that stands still; what is left on disk goes with the next sweep."""
    need_microvm()
    with tempfile.TemporaryDirectory() as home:
        owner = subprocess.Popen([sys.executable, "-c", OWNER, home], stdout=subprocess.PIPE, text=True)
        assert owner.stdout is not None
        try:
            handles = [os.pidfd_open(int(word)) for word in owner.stdout.readline().split()]
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            assert all(_ends(handle, 120.0) for handle in handles), "a machine whose owner is gone still runs"
            registry = Registry(LayerStore(Path(home)))
            swept = reaper.sweep(registry)
            assert len(swept.ended) == 2 and not swept.failed
            assert list((Path(home) / "scratch").iterdir()) == []
            registry.close()
        finally:
            owner.kill()
            owner.wait()
            owner.stdout.close()


def _ends(handle: int, seconds: float) -> bool:
    import select

    with contextlib.closing(os.fdopen(handle, "rb", 0)):
        return bool(select.select([handle], [], [], seconds)[0])


class Stand:
    """In place of a machine, for a probe that is not to start one."""

    async def __aenter__(self) -> "Stand":
        return self

    async def __aexit__(self, *exception: object) -> None:
        pass

    async def list(self, path: str) -> None:
        pass

    async def pause(self, level: str) -> None:
        pass

    async def resume(self) -> None:
        pass


@pytest.mark.parametrize("accelerator", ["tcg", "kvm"])
def test_translation_never_passes_for_strong_isolation(accelerator: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def ready(self: microvm.Backend) -> tuple[str, str, str, Path, Path]:
        return accelerator, "7", "6", tmp_path, tmp_path

    async def create(self: microvm.Backend, spec: Spec) -> Stand:
        return Stand()

    async def main() -> None:
        backend = await open_backend("microvm", store=LayerStore(tmp_path))
        found = await backend.probe()
        assert (found.isolation, "TCG" in " ".join(found.notes)) == (("standard", True) if accelerator == "tcg" else ("strong", False))
        await backend.close()
        if accelerator == "tcg":
            with pytest.raises(Unsupported, match="its isolation is standard"):
                await open_backend("microvm", isolation="strong", store=LayerStore(tmp_path))
        else:
            await (await open_backend("microvm", isolation="strong", store=LayerStore(tmp_path))).close()

    monkeypatch.setattr(qemu, "find", lambda: "/bin/false")
    monkeypatch.setattr(microvm.Backend, "ready", ready)
    monkeypatch.setattr(microvm.Backend, "create", create)
    asyncio.run(main())
