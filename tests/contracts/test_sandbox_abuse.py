"""What a sandbox holds against: attempts to get out, to look in, to use it all up; the default as root and as an ordinary user, and gVisor.

The attempts are in `sandbox_probes.py`; here stands the verdict that is right for each. An ordinary user has no control groups on most
machines: what that leaves open is in `Capabilities.unenforced`, and here. gVisor has a kernel of its own, which allows what harms nobody
else: there the verdict is another, and what it does not hold is declared too.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import sandbox_probes
from sandbox_backends import need_gvisor
from sandbox_users import as_user, user_without_privileges

from gnomon.errors import SandboxError, SandboxLost, Unsupported
from gnomon.sandbox.backends.namespaces import Backend
from gnomon.sandbox.ns.machine import Machine
from gnomon.sandbox.sandbox import Command, Limits, Spec

SPEC = Spec(limits=Limits(memory_bytes=128 << 20, disk_bytes=16 << 20, processes=32))

BOTH = {
    "fork bomb": "EAGAIN few",
    "memory bomb": "contained",
    "shared memory bomb": "contained",
    "six eaters": "contained",
    "disk fill": "full",
    "shm fill": "full",
    "inodes": "ENOSPC few",
    "descriptors": "EMFILE few refused",
    "pipes": "EMFILE few True",
    "kernel surface": "all refused",
    "newer calls": "ENOSYS ENOSYS ENOSYS",
    "clone": "EPERM EPERM EPERM EPERM EPERM EPERM EPERM",
    "sockets": "vsock EPERM packet EPERM alg EPERM raw EPERM netfilter EPERM bluetooth EPERM xdp EPERM inet ok unix ok",
    "chroot": "sandbox",
    "devices": "EPERM EPERM EPERM EPERM EROFS ENOENT",
    "agent": "closed gnomon-agent",
    "signals": "alive ok",
    "proc": "closed empty",
    "set-user programs": "True none True",
    "terminal": "EPERM EPERM ENOTTY",
    "system v": "contained",
    "priority": "EPERM EACCES EPERM",
    "overlay attributes": "EPERM EPERM y",
    "inotify": "EMFILE few",
    "descriptors in flight": "bounded",
    "locked memory": "ENOMEM",
    "core dump": "-6 no core",
    "host files": "nothing",
    "network": "ECONNREFUSED ECONNREFUSED ENETUNREACH ENETUNREACH ECONNREFUSED",
    "leaks": "none fds [0, 1, 2]",
    "processor": "within 1.3",
    "time bomb": "True -9 soon",
    "endless output": "True True True",
    "daemons": "left",
    "zombies": "0",
    "stop everything": "still here",
    "large argument": "SandboxError",
    "large arguments": "0 900009",
    "terminal escapes": r"b'\x1b]0;owned\x07\x1b[2J'",
    "after all": "works",
    "shared memory of another": "0\n0",
    "running before the end": "some",
    "running after the end": "0",
}
FULL_EACH = ("full", "[('EFBIG', 67108864), ('EFBIG', 67108864)]")
ENDED = ("its sandbox ended", "contained")
GVISOR_DIFFERS: dict[str, tuple[str, ...]] = {
    "fork bomb": (), "inodes": (),  # declared not to hold; the sandbox's memory bounds them
    "memory bomb": ENDED, "shared memory bomb": ENDED, "six eaters": ENDED, "system v": ENDED,
    "disk fill": FULL_EACH, "shm fill": FULL_EACH,
    "kernel surface": (), "newer calls": (), "clone": (), "proc": (), "set-user programs": (), "priority": (),  # gVisor's own kernel
    "agent": (),  # see test_sandbox_gvisor.py: open, and of no use without the agent's key
    "sockets": ("vsock EAFNOSUPPORT packet EPERM alg EAFNOSUPPORT raw EPERM netfilter EPROTONOSUPPORT bluetooth EAFNOSUPPORT "
                "xdp EAFNOSUPPORT inet ok unix ok",),
    "devices": ("ok ok ok ok ok ENOENT",),  # nodes that open nothing of the host
    "signals": ("its sandbox ended", "alive ok"), "terminal": ("ENOTTY ENOTTY ENOTTY",), "overlay attributes": ("ENOTSUP ENOTSUP y",),
    "descriptors in flight": ("ok", "bounded"), "host files": ("['/sys/kernel']", "nothing"),
    "network": ("ECONNREFUSED ECONNREFUSED EHOSTUNREACH EHOSTUNREACH ECONNREFUSED",
                "ECONNREFUSED ECONNREFUSED ENETUNREACH ENETUNREACH ECONNREFUSED"),
    "endless output": ("True True True", "True False False"),  # slow machines do not get to the bound
    "running before the end": ("none", "some"),
}  # fmt: skip
"""Verdicts under gVisor where they differ; an empty row is what its own kernel may allow, or a limit that is declared not to hold."""

VARIES = {"ENETUNREACH": ("ENETUNREACH", "EADDRNOTAVAIL"), "EACCES": ("EACCES", "EPERM")}


def verdicts_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What the probes said; a skip where namespaces do not work at all."""
    if done.returncode and "Unsupported" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """All probes, as root and as an ordinary user, at the same time."""
    started = {}
    # pytest's own folders are closed to other users
    with user_without_privileges() as user, tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as workers:
        if os.geteuid() == 0:
            argv = [sys.executable, sandbox_probes.__file__]
            started["root"] = workers.submit(subprocess.run, argv, capture_output=True, text=True, timeout=180, check=False)
        started["ordinary user"] = workers.submit(as_user, user, Path(folder), "sandbox_probes.py")
        yield started


@pytest.fixture(scope="module", params=["root", "ordinary user", pytest.param("gvisor", marks=pytest.mark.slow)])
def verdicts(request: pytest.FixtureRequest, runs: dict[str, Future[subprocess.CompletedProcess[str]]]) -> tuple[str, dict[str, str]]:
    """What the probes said, as one of the two, or under gVisor as whoever runs the tests."""
    if request.param == "gvisor":
        need_gvisor()
        argv = [sys.executable, sandbox_probes.__file__, "gvisor"]
        return "gvisor", verdicts_of(subprocess.run(argv, capture_output=True, text=True, timeout=1800, check=False))
    if request.param not in runs:
        pytest.skip("this is not root")
    return request.param, verdicts_of(runs[request.param].result())


def expected(mode: str, name: str, verdicts: dict[str, str]) -> str | None:
    """The right verdict; None where the limit is declared not to hold."""
    if mode == "gvisor" and name in GVISOR_DIFFERS:
        return next((right for right in GVISOR_DIFFERS[name] if alike(verdicts[name], right)), (*GVISOR_DIFFERS[name], None)[0])
    if name == "processor" and "cpus" in verdicts["unenforced"]:
        return None
    if name == "system v" and "memory_bytes" in verdicts["unenforced"]:
        return "EPERM"  # such memory outlives its process, and no group would count it
    return BOTH[name]


def alike(answer: str, right: str) -> bool:
    """Whether two verdicts agree, where kernels choose between two words for one refusal."""
    words, wanted = answer.split(), right.split()
    return answer == right or (len(words) == len(wanted) and all(a in VARIES.get(b, (b,)) for a, b in zip(words, wanted, strict=True)))


@pytest.mark.parametrize("name", BOTH)
def test_contained(verdicts: tuple[str, dict[str, str]], name: str) -> None:
    mode, told = verdicts
    right = expected(mode, name, told)
    assert right is None or alike(told[name], right), f"{name} as {mode}: {told[name]}"


def test_what_does_not_hold_is_declared(verdicts: tuple[str, dict[str, str]]) -> None:
    mode, told = verdicts
    allowed = {"nothing", "cpus", "memory_bytes"} | ({"disk_bytes", "inodes", "processes"} if mode == "gvisor" else set())
    assert set(told["unenforced"].split()) <= allowed
    assert set(told) == {*BOTH, "unenforced"}, f"as {mode}"


def inside(body: Callable[[Machine], Awaitable[None]]) -> None:
    """Do something with a fresh sandbox of whoever runs the tests."""

    async def main() -> None:
        backend = Backend()
        try:
            await asyncio.wait_for(body(await backend.create(SPEC)), 60)
        except Unsupported as error:
            pytest.skip(str(error))
        finally:
            await backend.close()

    asyncio.run(main())


async def shell(box: Machine, script: str) -> str:
    """What a script says."""
    return (await box.exec(Command(argv=("sh", "-c", script), timeout_seconds=20))).text


async def tried(call: Awaitable[object]) -> object:
    """The answer of a call that must come soon, or the refusal."""
    try:
        return await asyncio.wait_for(call, 20)
    except SandboxError as error:
        return error


LINKS = """cd /tmp; ln -s {secret} absolute; ln -s ../../../../../../../../..{secret} relative; ln -s /tmp/absolute chained
ln -s /proc/1/root{secret} magic; ln -s loop loop; ln -s /proc/self/fd/0 fd; ln -s {folder} folder; ln -s /proc/self/mem mem
ln -s /proc/1/fd/3 control; mkfifo pipe; ln -s /dev/zero zero; mkdir real; ln -s / top"""
NAMES = ("absolute", "relative", "chained", "magic", "loop", "fd", "folder/secret", "folder/new", "mem", "control", "pipe", "zero")


def test_links_lead_nowhere(tmp_path: Path) -> None:
    """Every file call, through every kind of link: none reaches a file of the host, none hangs, none harms the agent."""
    secret, down = tmp_path / "secret", tmp_path / "down"
    secret.write_text("untouched")

    async def body(box: Machine) -> None:
        await shell(box, LINKS.format(secret=secret, folder=tmp_path))
        for name in (*NAMES, "folder", "../../.." + str(secret)):
            assert b"untouched" not in (got if isinstance(got := await tried(box.read(f"/tmp/{name}")), bytes) else b"")
            await tried(box.download(f"/tmp/{name}", down))
        for name in NAMES:
            await tried(box.write(f"/tmp/{name}", b"owned"))
        for call in (box.upload(secret, "/tmp/folder/uploaded"), box.list("/tmp/folder"), box.list("/tmp/top", 3),
                     box.remove("/tmp/folder"), box.remove("/tmp/top"), box.remove("/tmp/loop")):  # fmt: skip
            await tried(call)
        with pytest.raises(SandboxError):
            await box.remove("/")
        assert (await shell(box, "echo on")) == "on\n"

    inside(body)
    assert secret.read_text() == "untouched" and {path.name for path in tmp_path.iterdir()} <= {"secret", "down"}
    assert not down.exists() or b"untouched" not in down.read_bytes()


FLIP = """while :; do rm -rf /tmp/d/sub; ln -s {outside} /tmp/d/sub; rm /tmp/d/sub; mkdir /tmp/d/sub; echo x > /tmp/d/sub/file; done"""


def test_a_folder_that_comes_out_stays_where_it_is_put(tmp_path: Path) -> None:
    """Links inside a downloaded folder, even one that changes while it is read, write nothing beside the target."""
    outside = tmp_path / "outside"
    outside.mkdir()

    async def body(box: Machine) -> None:
        await shell(box, f"mkdir -p /tmp/d/sub; ln -s {outside} /tmp/d/evil; echo x > /tmp/d/sub/file; ln -s ../.. /tmp/d/up")
        process = await box.start(Command(argv=("sh", "-c", FLIP.format(outside=outside)), timeout_seconds=None))
        for _ in range(20):
            await tried(box.download("/tmp/d", tmp_path / "out"))
        await process.kill()

    inside(body)
    assert not any(outside.iterdir()) and {path.name for path in tmp_path.iterdir()} == {"outside", "out"}


ODD = r"""mkdir /tmp/n; cd /tmp/n; touch "$(printf 'a\nb')" "$(printf '\033[2J')" "$(printf '\377')"; touch -- -rf"""
DEEP = "import os; os.chdir('/tmp'); [(os.mkdir('d'), os.chdir('d')) for _ in range(2000)]"
FILL = "mkdir -p /tmp/f; while :; do touch /tmp/f/$$-$((i=i+1)); done"


def test_odd_names_and_endless_trees() -> None:
    async def body(box: Machine) -> None:
        await shell(box, ODD)
        assert {entry.path[7:] for entry in await box.list("/tmp/n")} == {"a\nb", "\033[2J", "\udcff", "-rf"}
        await box.exec(Command(argv=("python3", "-c", DEEP)))
        assert len(await box.list("/tmp/d", 100)) == 100
        refused = await tried(box.remove("/tmp/d"))
        assert refused is None or "deep" in str(refused)
        filler = await box.start(Command(argv=("sh", "-c", FILL), timeout_seconds=None))
        await tried(box.remove("/tmp/f"))
        await filler.kill()
        assert (await shell(box, "echo on")) == "on\n"

    inside(body)


def test_an_agent_that_lies_is_cut_off() -> None:
    """What comes from inside is bounded and parsed: a flood, or bytes that are no frame, cost the sandbox and not the host."""

    async def body(box: Machine) -> None:
        box.channel.splitter.rest = b"\xff\xff\xff\xff"  # as if the agent had announced a frame of 4 GiB
        with pytest.raises(SandboxLost, match="protocol"):
            await box.exec(Command(argv=("true",)))

    inside(body)
