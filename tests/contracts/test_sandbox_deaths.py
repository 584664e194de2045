"""What is left when something of the default backend is killed, runs out or is asked for too much: nothing, and the right error."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sandbox_users import as_user, user_without_privileges

from gnomon.errors import CapacityError, SandboxError, SandboxLost, Unsupported
from gnomon.sandbox.backends.namespaces import Backend
from gnomon.sandbox.ns import cgroups, wire
from gnomon.sandbox.ns.machine import Machine
from gnomon.sandbox.sandbox import Command, Limits, Spec

SPEC = Spec(limits=Limits(memory_bytes=64 << 20, disk_bytes=8 << 20, processes=32))
TRUE = Command(argv=("true",), timeout_seconds=30)


def using(body: Callable[[Backend], Awaitable[None]]) -> None:
    """Do something with a backend that is closed afterwards; a skip where it does not work."""

    async def main() -> None:
        backend = Backend()
        try:
            await backend.ready()
            await asyncio.wait_for(body(backend), 100)
        except Unsupported as error:
            pytest.skip(str(error))
        finally:
            await backend.close()

    asyncio.run(main())


def pid_of(backend: Backend) -> int:
    """The process number of the zygote that the host started."""
    assert backend.zygote is not None and backend.zygote.process is not None
    return backend.zygote.process.pid


async def noticed(backend: Backend) -> None:
    """Wait until the death of a zygote is known: as an ordinary user it is two processes, and the second may answer a little longer."""
    async with asyncio.timeout(60):
        while backend.zygote is not None and backend.zygote.alive:
            await asyncio.sleep(0.01)


def descendants(pid: int) -> set[int]:
    """All processes below one, by the machine's process list."""
    found, waiting = set(), [pid]
    while waiting:
        try:
            threads = [*Path(f"/proc/{waiting.pop()}/task").iterdir()]
            below = [int(word) for thread in threads for word in (thread / "children").read_text().split()]
        except OSError:
            below = []
        found.update(below)
        waiting += below
    return found


async def programs(pid: int, name: str, count: int) -> set[int]:
    """The programs of a name below a process, once there are so many: one that was asked for stands in the process list a little later."""
    async with asyncio.timeout(60):
        while len(found := {each for each in descendants(pid) if called(each) == name}) < count:
            await asyncio.sleep(0.01)
    return found


def called(pid: int) -> str:
    """What a process is called; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def all_gone(pids: set[int], seconds: float = 20.0) -> bool:
    """Whether processes end within some time; those that only wait to be reaped have ended."""
    deadline = time.monotonic() + seconds

    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        except OSError:
            return False

    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(lives, pids))


def groups_of(pid: int) -> list[str]:
    """The control groups that a zygote has made."""
    return [os.path.join(folder, name) for folder in set(cgroups.own_groups().values()) if os.path.isdir(folder)
            for name in os.listdir(folder) if name.startswith(f"{cgroups.PREFIX}{pid}-")]  # fmt: skip


def test_the_zygote_is_killed() -> None:
    async def body(backend: Backend) -> None:
        box = await backend.create(SPEC)
        await box.start(Command(argv=("sleep", "1000"), timeout_seconds=None))
        waiting = asyncio.ensure_future(box.exec(Command(argv=("sleep", "1000"), timeout_seconds=None)))
        await programs(pid_of(backend), "sleep", 2)
        pids = {pid_of(backend), *descendants(pid_of(backend))}
        os.kill(pid_of(backend), signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await waiting
        with pytest.raises(SandboxLost):
            await box.exec(TRUE)
        assert await asyncio.to_thread(all_gone, pids), "the kernel ends what a dead zygote held"
        await box.kill()
        other = await backend.create(SPEC)
        assert (await other.exec(TRUE)).code == 0, "a new zygote is started"

    using(body)


def test_what_was_frozen_when_its_zygote_died_ends_with_the_next() -> None:
    """A frozen process cannot die; the next zygote lets it go on, whether or not a registry knows of it."""

    async def body(backend: Backend) -> None:
        box = await backend.create(SPEC)
        await box.start(Command(argv=("sleep", "1000"), timeout_seconds=None))
        pids = descendants(pid_of(backend))
        await box.pause()
        os.kill(pid_of(backend), signal.SIGKILL)
        await noticed(backend)
        other = await backend.create(SPEC)
        assert (await other.exec(TRUE)).code == 0
        assert await asyncio.to_thread(all_gone, pids)

    using(body)


def test_the_agent_is_killed() -> None:
    async def body(backend: Backend) -> None:
        box, other = await backend.create(SPEC), await backend.create(SPEC)
        waiting = asyncio.ensure_future(box.exec(Command(argv=("sleep", "1000"), timeout_seconds=None)))
        (sleeper,) = await programs(pid_of(backend), "sleep", 1)
        agent = int(Path(f"/proc/{sleeper}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await waiting
        with pytest.raises(SandboxLost):
            await box.write("/tmp/x", b"")
        assert await asyncio.to_thread(all_gone, {agent, sleeper})
        assert (await other.exec(TRUE)).code == 0, "the others do not notice"
        await box.kill()

    using(body)


OWNER = """
import asyncio, sys
from gnomon.sandbox.backends.namespaces import Backend
from gnomon.sandbox.sandbox import Command, Spec
async def main():
    backend = Backend()
    for _ in range(3):
        box = await backend.create(Spec())
        argv = ("sh", "-c", "trap '' TERM HUP; setsid sleep 1000 & echo up; sleep 1000")
        program = await box.start(Command(argv=argv, timeout_seconds=None))
        async for part in program.output():
            break
    await box.pause()
    print(backend.zygote.process.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_owner_is_killed(how: signal.Signals) -> None:
    using(lambda backend: asyncio.sleep(0))  # a skip where nothing works
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    with owner:
        try:
            assert owner.stdout is not None
            zygote = int(owner.stdout.readline())
            pids = descendants(owner.pid)
            assert zygote in pids and len(pids) >= 10
        finally:
            owner.send_signal(how)
    assert all_gone(pids), "nothing outlives its owner"
    assert not groups_of(zygote)


def test_a_group_left_behind_is_swept() -> None:
    """Only the death of the zygote itself leaves its group; whoever comes next removes it."""

    async def body(backend: Backend) -> None:
        pid = pid_of(backend)
        await backend.create(SPEC)
        pids = {pid, *descendants(pid)}
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.to_thread(all_gone, pids)
        await backend.create(SPEC)
        assert not groups_of(pid)

    using(body)


def test_a_hundred_forks_at_once() -> None:
    async def body(backend: Backend) -> None:
        box = await backend.create(SPEC)
        await box.write("/tmp/mine", b"from the parent")
        await box.pause("stop")
        ticks = 0

        async def clock() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.ensure_future(clock())
        children = [child for some in await asyncio.gather(*(box.fork(10) for _ in range(10))) for child in some]
        ticking.cancel()
        assert len({child.id for child in children}) == 100
        assert set(await asyncio.gather(*(child.read("/tmp/mine") for child in children))) == {b"from the parent"}
        await asyncio.gather(*(child.write("/tmp/mine", child.id.encode()) for child in children))
        assert await asyncio.gather(*(child.read("/tmp/mine") for child in children)) == [child.id.encode() for child in children]
        await asyncio.gather(*(child.kill() for child in children))
        assert ticks > 10, "the event loop went on"

    using(body)


def test_the_host_is_out_of_descriptors() -> None:
    async def body(backend: Backend) -> None:
        box = await backend.create(SPEC)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        try:
            while True:
                try:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
                except OSError:
                    break
            with pytest.raises(CapacityError):
                await backend.create(SPEC)
            assert (await box.exec(TRUE)).code == 0, "one that lives needs no new ones"
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await (await backend.create(SPEC)).exec(TRUE)).code == 0

    using(body)


def test_nothing_is_left() -> None:
    """Processes, descriptors, mounts and groups are the same before and after."""

    def mounts() -> int:
        return len(Path("/proc/self/mountinfo").read_text().splitlines())

    async def body(backend: Backend) -> None:
        first = await backend.create(SPEC)
        files = len(os.listdir("/proc/self/fd"))
        processes, held, groups = await there(backend, first)
        for _ in range(5):
            boxes = await asyncio.gather(*(backend.create(SPEC) for _ in range(5)))
            await asyncio.gather(*(box.exec(TRUE) for box in boxes))
            (child,) = await boxes[0].fork()
            assert not isinstance(child, Exception)
            await asyncio.gather(*(box.kill() for box in (*boxes, child)))
        assert await there(backend, first) == (processes, held, groups)
        assert len(os.listdir("/proc/self/fd")) <= files, "fewer is what an earlier test of this process let go meanwhile"
        assert (await first.exec(TRUE)).code == 0

    async def there(backend: Backend, box: Machine) -> tuple[int, int, int]:
        """Processes, descriptors of the zygote, groups; after an answer of the zygote, which gives things back once it has answered."""
        pid, zygote = pid_of(backend), backend.zygote
        assert zygote is not None
        await zygote.ask(wire.COUNT, (), box.root.upper, doing="counting")
        inner = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0] if zygote.rootless else pid
        groups = sum(1 for folder in groups_of(pid) for _ in os.walk(folder))
        return len(descendants(pid)), len(os.listdir(f"/proc/{inner}/fd")), groups

    before = mounts()
    using(body)
    assert mounts() == before


def test_a_refused_creation_leaves_nothing() -> None:
    async def body(backend: Backend) -> None:
        processes = len(descendants(pid_of(backend)))
        with pytest.raises((SandboxError, CapacityError)):
            await backend.create(Spec(image="/proc"))
        cancelled = asyncio.ensure_future(backend.create(SPEC))
        await asyncio.sleep(0.001)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        async with asyncio.timeout(60):
            while len(descendants(pid_of(backend))) != processes:
                await asyncio.sleep(0.01)
        assert not backend.machines

    using(body)


def test_a_copied_layer_means_the_same() -> None:
    """Deletions, opaque folders, hard links, holes, attributes, modes and owners survive the copy of a running sandbox's files."""
    script = """cd /tmp; mkdir kept; echo x > kept/a; ln kept/a kept/b; ln -s a kept/link; mkfifo kept/pipe; chmod 751 kept
chmod 4711 kept/a
truncate -s 5M kept/hole; rm -r /etc/skel /etc/hosts; mkdir /etc/skel; echo new > /etc/skel/only
touch -d 2001-02-03T04:05:06Z kept/link kept/hole
python3 -c "import os; os.setxattr('/tmp/kept/hole', 'user.mark', b'1')" """
    look = """cd /tmp; find kept /etc/skel -printf '%p %y %m %n %s %b %U %l\\n' | sort; ls /etc/hosts 2>&1
stat -c %Y kept/hole; cat kept/b
python3 -c "import os; print(os.getxattr('kept/hole', 'user.mark'), os.stat('kept/a').st_ino == os.stat('kept/b').st_ino)" """

    async def body(backend: Backend) -> None:
        box = await backend.create(SPEC)
        made = await box.exec(Command(argv=("sh", "-c", script)))
        assert made.code == 0, made.stderr
        before = (await box.exec(Command(argv=("sh", "-c", look)))).text
        (child,) = await box.fork()
        assert not isinstance(child, Exception)
        (grandchild,) = await child.fork()
        assert not isinstance(grandchild, Exception)
        assert "/etc/skel/only" in before and "True" in before
        assert (await child.exec(Command(argv=("sh", "-c", look)))).text == before
        assert (await grandchild.exec(Command(argv=("sh", "-c", look)))).text == before

    using(body)


@pytest.mark.slow
def test_a_thousand_at_once() -> None:
    async def body(backend: Backend) -> None:
        boxes = []
        for _ in range(20):
            boxes += await asyncio.gather(*(backend.create(SPEC) for _ in range(50)))
        ends = await asyncio.gather(*(box.exec(TRUE) for box in boxes[::25]))
        assert {result.code for result in ends} == {0} and len(boxes) == 1000
        agents = descendants(pid_of(backend))
        assert len(agents) >= 1000
        if os.geteuid() == 0:
            texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in agents]
            lines = [line for text in texts for line in text.splitlines() if line.startswith("Pss:")]
            assert sum(int(line.split()[1]) for line in lines) / len(lines) < 3 * 1024
        await asyncio.gather(*(box.kill() for box in boxes))
        assert await asyncio.to_thread(all_gone, agents - {pid_of(backend)} if os.geteuid() == 0 else set())

    using(body)


def test_many_sandboxes_of_one_user_do_not_share_a_limit() -> None:
    """More sandboxes than each may have processes, as an ordinary user, whose user namespaces count upwards."""
    with user_without_privileges() as user, tempfile.TemporaryDirectory() as folder:
        done = as_user(user, Path(folder), "sandbox_many.py", "60")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "[]"


def test_groups_of_somebody_else_are_left_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gnomon-0-0" / "below").mkdir(parents=True)
    tried = []

    def refuse(folder: str) -> None:
        tried.append(folder)
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "rmdir", refuse)
    assert cgroups.sweep({"pids": str(tmp_path), "cpu": str(tmp_path)}) == 0
    assert len(tried) <= 2


@pytest.mark.parametrize("unified", [False, True])
def test_a_group_that_does_not_stand_still_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unified: bool) -> None:
    """One that stayed half frozen would never answer again."""
    group = object.__new__(cgroups.Group)
    group.name, group.parents, group.unified = "g", {"freezer": str(tmp_path)}, str(tmp_path) if unified else ""
    written = tmp_path / "g" / ("cgroup.freeze" if unified else "freezer.state")
    written.parent.mkdir()
    written.touch()
    monkeypatch.setattr(cgroups, "FREEZE_SECONDS", 0.05)
    monkeypatch.setattr(cgroups, "read", lambda path: "FREEZING")
    with pytest.raises(OSError, match="does not freeze"):
        group.freeze(True)
    assert written.read_text() == ("0" if unified else "THAWED")
