"""The registry and its reaper: whatever dies, somebody finds what it left, and nothing that lives is touched."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gnomon.errors import CapacityError, SandboxError
from gnomon.sandbox import owners, reaper
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.registry import Registry, Traces
from gnomon.sandbox.sandbox import Spec


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(LayerStore(tmp_path / "store"))


HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from gnomon.sandbox import owners
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.registry import Registry, Traces
from gnomon.sandbox.sandbox import Spec
registry = Registry(LayerStore(Path(sys.argv[1])))
"""


def program(registry: Registry, text: str) -> subprocess.Popen[str]:
    """Python with a registry at hand, in a process of its own."""
    command = [sys.executable, "-c", HEAD + text, str(registry.store.root)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another process does."""
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_record_has_what_was_claimed(registry):
    spec = Spec(image="debian", metadata={"task": "7"}, ttl_seconds=50, idempotency_key="k")
    record = registry.claim("a", "namespaces", spec)
    assert (record.id, record.backend, record.state, record.image) == ("a", "namespaces", "creating", "debian")
    assert record.metadata == {"task": "7"} and record.idempotency_key == "k"
    assert record.owner.pid == os.getpid() and 49 < record.deadline - owners.now() <= 50 and 0 <= record.age_seconds < 10
    traces = Traces(processes=((5, 6),), cgroups=("/c",), mounts=("/m",), files=("/f",))
    registry.update("a", state="running", traces=traces)
    assert registry.get("a").state == "running" and registry.list()[0].traces == traces
    registry.release("a")
    registry.release("a")
    assert registry.get("a") is None
    with pytest.raises(SandboxError, match="not in the registry"):
        registry.update("a", state="paused")
    with pytest.raises(ValueError, match="state 'asleep'"):
        registry.update("a", state="asleep")


def test_one_key_gives_one_sandbox(registry):
    """The answer to the first call was lost, and the caller tries again."""
    first = registry.claim("a", "x", Spec(idempotency_key="k"))
    assert registry.claim("b", "x", Spec(idempotency_key="k")).id == first.id == registry.find("k").id
    assert registry.find("other") is None and registry.get("b") is None
    registry.expire("a", 0)
    assert registry.find("k") is None
    assert registry.claim("b", "x", Spec(idempotency_key="k")).id == "b"
    with pytest.raises(SandboxError, match="taken"):
        registry.claim("b", "x", Spec())


def test_many_callers_with_one_key_get_one_sandbox(registry):
    got: list[str] = []

    def claim(name: str) -> None:
        got.append(registry.claim(name, "x", Spec(idempotency_key="k")).id)

    threads = [threading.Thread(target=claim, args=(f"s{n}",)) for n in range(16)]
    others = [program(registry, f"print(registry.claim('p{n}', 'x', Spec(idempotency_key='k')).id, flush=True)\nsys.stdin.read()")
              for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got += [other.stdout.readline().strip() for other in others]  # both still alive
    for other in others:
        other.communicate(timeout=60)
    assert len(got) == 18 and len(set(got)) == 1


def test_death_is_told_by_the_kernel(registry):
    """Alive, killed, killed but not yet waited for: the last two are dead."""
    other = program(registry, "registry.claim('a', 'x', Spec())\nprint('ready', flush=True)\ntime.sleep(60)")
    assert other.stdout.readline() == "ready\n"
    registry.claim("mine", "x", Spec())
    assert registry.dead() == []
    os.kill(other.pid, signal.SIGKILL)
    until(registry.dead)
    [(record, why)] = registry.dead()
    assert record.id == "a" and why == f"its owner, process {other.pid}, is gone"
    other.communicate()
    assert [r.id for r, _ in registry.dead()] == ["a"]
    assert reaper.sweep(registry).ended == (("a", why),)
    assert [r.id for r in registry.list()] == ["mine"]


def test_a_pid_used_again_is_another_process(registry):
    registry.claim("a", "x", Spec())
    mine = registry.get("a").owner
    other = owners.Owner(boot=mine.boot, pid=mine.pid, start_ticks=mine.start_ticks - 1)
    earlier = owners.Owner(boot="0" * 12, pid=mine.pid, start_ticks=mine.start_ticks)
    assert owners.Owner.parse(mine.id) == mine
    with sqlite3.connect(registry.path) as connection:
        connection.execute("UPDATE sandboxes SET owner = ?", (other.id,))
    assert "is gone" in registry.dead()[0][1]
    with sqlite3.connect(registry.path) as connection:
        connection.execute("UPDATE sandboxes SET owner = ?", (earlier.id,))
    connection.close()
    assert registry.dead()[0][1] == "the machine was restarted"


def test_time_to_live_and_leases(registry, monkeypatch):
    registry.claim("for-ever", "x", Spec(ttl_seconds=None))
    registry.claim("hour", "x", Spec(ttl_seconds=3600))
    registry.claim("leased", "x", Spec(ttl_seconds=None))
    registry.lease("leased", 60)
    later = owners.now()
    monkeypatch.setattr(owners, "now", lambda: later + 61)
    assert [(r.id, why) for r, why in registry.dead()] == [("leased", "its owner stopped renewing it")]
    registry.lease("leased", 60)
    registry.expire("hour", 7200)
    assert registry.dead() == []
    monkeypatch.setattr(owners, "now", lambda: later + 7300)
    registry.lease("leased", None)
    assert [(r.id, why) for r, why in registry.dead()] == [("hour", "its time is over")]


@pytest.mark.parametrize("jump", [-10 * 365 * 86400, 10 * 365 * 86400])
def test_a_clock_that_jumps_ends_nothing(registry, monkeypatch, jump):
    registry.claim("a", "x", Spec(ttl_seconds=100))
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + jump)
    assert registry.dead() == [] and registry.get("a").age_seconds < 50
    registry.claim("b", "x", Spec(ttl_seconds=100))
    monkeypatch.setattr(time, "time", clock)
    assert registry.dead() == []


def test_the_reaper_removes_every_trace(registry, tmp_path):
    """A killed owner leaves a program that ignores signals, a folder nested deep and a socket; all of it goes."""
    place = tmp_path / "left"
    text = f"""
child = subprocess.Popen([sys.executable, '-c', 'import signal, time\\nsignal.signal(15, 1)\\nprint(1, flush=True)\\ntime.sleep(600)'],
                         start_new_session=True, stdout=subprocess.PIPE)
child.stdout.read(1)
Path({str(place)!r}, 'deep', 'er').mkdir(parents=True)
registry.claim('a', 'x', Spec(), traces=Traces(processes=((child.pid, owners.start_ticks(child.pid)),), files=({str(place)!r},)))
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    other = program(registry, text)
    pid = int(other.communicate(timeout=60)[0])
    assert owners.start_ticks(pid) is not None and place.exists()
    assert [id for id, _ in reaper.sweep(registry).ended] == ["a"]
    assert owners.start_ticks(pid) is None and not place.exists() and registry.list() == []


def test_an_innocent_process_with_that_pid_is_spared(registry):
    innocent = subprocess.Popen(["sleep", "60"])
    try:
        start = owners.start_ticks(innocent.pid)
        registry.claim("a", "x", Spec(ttl_seconds=0), traces=Traces(processes=((innocent.pid, start - 1), (2**22 + 5, 1))))
        assert [id for id, _ in reaper.sweep(registry).ended] == ["a"]
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_a_frozen_control_group_is_emptied_and_removed(registry):
    """A paused sandbox whose owner died: its processes do not run, and cannot end until they are thawed."""
    root = next((path for path in (Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup")) if (path / "cgroup.procs").exists()), None)
    group = root / f"gnomon-test-{os.getpid()}" if root else None
    try:
        if group is None:
            raise OSError
        group.mkdir()
    except OSError:
        pytest.skip("no right to make a control group")
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        (group / "cgroup.procs").write_text(str(sleeper.pid))
        freezer = group / "freezer.state"
        (freezer if freezer.exists() else group / "cgroup.freeze").write_text("FROZEN" if freezer.exists() else "1")
        registry.claim("a", "x", Spec(ttl_seconds=0), traces=Traces(cgroups=(str(group),)))
        swept = reaper.sweep(registry)
        assert [id for id, _ in swept.ended] == ["a"], swept
        assert not group.exists() and sleeper.wait(10) == -9
    finally:
        sleeper.kill()
        sleeper.wait()


def test_only_one_reaper_takes_a_sandbox(registry):
    program(registry, "for i in range(40): registry.claim(f's{i}', 'x', Spec())\nos.kill(os.getpid(), 9)").communicate(timeout=60)
    ended: list[str] = []
    sweepers = [threading.Thread(target=lambda: ended.extend(i for i, _ in reaper.sweep(registry).ended)) for _ in range(3)]
    other = program(registry, "from gnomon.sandbox import reaper\nprint(*(i for i, _ in reaper.sweep(registry).ended))")
    for sweeper in sweepers:
        sweeper.start()
    for sweeper in sweepers:
        sweeper.join()
    ended += other.communicate(timeout=60)[0].split()
    assert sorted(set(ended)) == sorted(f"s{i}" for i in range(40)) and registry.list() == []


def test_a_reaper_that_dies_half_way_is_followed_by_another(registry, tmp_path):
    (tmp_path / "left").mkdir()
    registry.claim("a", "x", Spec(ttl_seconds=0), traces=Traces(files=(str(tmp_path / "left"),)))
    text = "from gnomon.sandbox import reaper\nreaper.erase = lambda traces: os.kill(os.getpid(), 9)\nreaper.sweep(registry)"
    other = program(registry, text)
    other.communicate(timeout=60)
    assert other.returncode == -9
    assert registry.get("a").state == "ending"
    assert [id for id, _ in reaper.sweep(registry).ended] == ["a"] and not (tmp_path / "left").exists()


def test_a_sweeper_goes_on_after_trouble(registry):
    sweeper = reaper.Sweeper(registry, every_seconds=0.02)
    sweeper.start()
    try:
        registry.claim("a", "x", Spec(ttl_seconds=0))
        until(lambda: registry.get("a") is None)
    finally:
        sweeper.stop()
    assert sweeper.last.failed == ()


def test_a_full_disk_still_reaps(tmp_path):
    """Space is given back before anything is written down."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    registry = Registry(LayerStore(small / "store"))
    try:
        left = small / "left"
        left.write_bytes(b"x" * 500_000)
        registry.claim("a", "x", Spec(ttl_seconds=0), traces=Traces(files=(str(left),)))
        (small / "ballast").write_bytes(b"x" * (os.statvfs(small).f_bavail * 4096))
        with pytest.raises(CapacityError, match="gnomon sandbox gc"):
            [registry.claim(f"b{i}", "x", Spec(metadata={"pad": "x" * 3000})) for i in range(300)]
        assert "a" in [id for id, _ in reaper.sweep(registry).ended]
        assert not left.exists() and registry.get("a") is None
    finally:
        registry.close()
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_damaged_file_is_named(registry):
    registry.path.write_bytes(b"this is not a database" * 500)
    with pytest.raises(SandboxError, match=r"damaged.*move the file away"):
        registry.list()
