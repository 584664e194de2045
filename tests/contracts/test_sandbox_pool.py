"""Pools, pauses, copies for grading, snapshots from time to time, and the guard of the memory."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pretend_backend
import pytest

from gnomon.errors import CapacityError, ConfigError, SandboxError, SandboxLost, Unsupported
from gnomon.sandbox import identity, pool
from gnomon.sandbox.cycles import Keeping, graded, thinking
from gnomon.sandbox.images import Image
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.pool import Pool
from gnomon.sandbox.pressure import Guard, Pressure, pressure
from gnomon.sandbox.sandbox import Capabilities, Command, Result, Spec

SPEC = Spec(image="scratch")


class Memory:
    """A machine of 100 bytes whose free ones are set by hand."""

    def __init__(self) -> None:
        self.now = Pressure(total_bytes=100, available_bytes=90, stalled_percent=0)

    def free(self, available: int, stalled: float = 0) -> None:
        self.now = Pressure(total_bytes=100, available_bytes=available, stalled_percent=stalled)

    def guard(self) -> Guard:
        return Guard(read=lambda: self.now)


@pytest.fixture
def backend(tmp_path: Path) -> pretend_backend.Backend:
    return pretend_backend.Backend(LayerStore(tmp_path / "store"))


def run(backend: pretend_backend.Backend, work: Callable[[Pool, Memory], Awaitable[None]], low: int = 1, high: int = 3) -> None:
    """Do something with a pool; nothing is left alive after it."""

    async def main() -> None:
        memory = Memory()
        async with Pool(backend, low=low, high=high, guard=memory.guard(), store=backend.store, registry=backend.registry) as ready:
            await asyncio.wait_for(work(ready, memory), 60)
        await backend.close()
        assert not backend.living and backend.registry.list() == []

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")


def test_taking_costs_no_creation_and_the_shelf_is_refilled(backend):
    async def work(ready: Pool, memory: Memory) -> None:
        await ready.warm(SPEC)
        assert ready.ready(SPEC) == 3 == backend.created
        spec = replace(SPEC, env={"A": "1"}, metadata={"task": "7"}, ttl_seconds=50)
        boxes = [await ready.take(spec)]
        assert backend.created == 3 and ready.ready(SPEC) == 2  # above `low`: nothing is made
        boxes.append(await ready.take(spec))
        await until(lambda: ready.ready(SPEC) == 3)
        assert backend.created == 5
        record = backend.registry.get(boxes[0].id)
        assert record.metadata == {"task": "7"} and 40 < record.deadline - record.created < 60
        assert all(r.deadline is None for r in backend.registry.list() if r.id not in {box.id for box in boxes})
        assert boxes[0].spec.env["A"] == "1" and boxes[0].spec.metadata == {"task": "7"}

    run(backend, work)


def test_each_has_an_identity_of_its_own(backend):
    async def work(ready: Pool, memory: Memory) -> None:
        boxes = [await ready.take(SPEC) for _ in range(6)]  # some ready, some made on the spot
        assert len({box.id for box in boxes}) == 6
        for key in ("GNOMON_SANDBOX_ID", "GNOMON_SANDBOX_TOKEN"):
            assert len({box.spec.env[key] for box in boxes}) == 6
        for path in ("/etc/hostname", "/etc/machine-id", identity.PLACE):
            assert len({await box.read(path) for box in boxes}) == 6
        assert json.loads(await boxes[0].read(identity.PLACE))["id"] == boxes[0].id

    run(backend, work)


def test_kinds_are_kept_apart_and_a_new_image_is_noticed(backend):
    async def work(ready: Pool, memory: Memory) -> None:
        store = backend.store
        for text in ("one", "two"):
            folder = store.scratch()
            (folder / "what").write_text(text)
            store.keep(Image(name="base", layers=(store.seal(folder),)))
            await ready.warm(replace(SPEC, image="base"))
            box = await ready.take(replace(SPEC, image="base"))
            assert await box.read("/what") == text.encode()
        assert not (await ready.take(replace(SPEC, user="nobody"))).spec.env.get("A")

    run(backend, work)


def test_one_that_died_while_it_waited_is_not_handed_out(backend):
    async def work(ready: Pool, memory: Memory) -> None:
        await ready.warm(SPEC)
        dead = [*backend.living.values()][:2]
        for box in dead:
            box.set_timeout = lost  # type: ignore[method-assign]
        box = await ready.take(SPEC)
        assert box not in dead and await box.exec(Command(argv=("true",))) and not {*dead} & {*backend.living.values()}

    async def lost(seconds: float | None) -> None:
        raise SandboxLost("gone")

    run(backend, work)


def test_an_idempotency_key_passes_the_pool_by(backend):
    async def work(ready: Pool, memory: Memory) -> None:
        await ready.warm(SPEC)
        spec = replace(SPEC, idempotency_key="k")
        assert (await ready.take(spec)) is (await ready.take(spec))
        assert ready.ready(SPEC) == 3

    run(backend, work)


def test_under_pressure_it_refuses_waits_and_gives_up_what_is_ready(backend, monkeypatch):
    monkeypatch.setattr(pool, "LOOK_SECONDS", 0.01)

    async def work(ready: Pool, memory: Memory) -> None:
        await ready.warm(SPEC)
        mine = await ready.take(SPEC)
        memory.free(5)
        await until(lambda: ready.ready(SPEC) == 0)
        assert list(backend.living.values()) == [mine]  # what was taken lives
        with pytest.raises(CapacityError, match=r"5 B of 100 B memory are available; 8 B are kept free"):
            await ready.take(SPEC)
        waiting = asyncio.ensure_future(ready.take(SPEC, wait_seconds=30))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        memory.free(50)
        assert (await waiting).id
        await until(lambda: ready.ready(SPEC) == 3)
        memory.free(50, stalled=60)
        with pytest.raises(CapacityError, match="waited for memory in 60 %"):
            await ready.take(replace(SPEC, user="x"))

    run(backend, work)


def test_what_waits_for_the_model_goes_to_disk_when_memory_is_short(backend, monkeypatch):
    monkeypatch.setattr(pool, "LOOK_SECONDS", 0.01)
    levels: list[str] = []

    async def probe() -> Capabilities:
        return replace(await pretend_backend.Backend.probe(backend), pause=frozenset({"freeze", "hibernate"}))

    async def pause(self, level: str = "freeze") -> None:
        levels.append(level)
        self.paused = True

    monkeypatch.setattr(backend, "probe", probe)
    monkeypatch.setattr(pretend_backend.PretendSandbox, "pause", pause)

    async def work(ready: Pool, memory: Memory) -> None:
        box = await ready.take(SPEC)
        async with ready.thinking(box):
            assert levels == ["freeze"]
            memory.free(1)
            await until(lambda: levels == ["freeze", "hibernate"])
            await asyncio.sleep(0.05)
        assert levels == ["freeze", "hibernate"] and not box.paused
        memory.free(90)

    run(backend, work)


def test_a_backend_that_fails_is_not_asked_all_the_time(backend):
    async def work(ready: Pool, memory: Memory) -> None:
        backend.fail = CapacityError("no more processes")
        with pytest.raises(CapacityError, match="no more processes"):
            await ready.warm(SPEC)
        for _ in range(20):
            with pytest.raises(CapacityError):
                await ready.take(SPEC)
        assert ready._shelf(SPEC).failures == 1
        backend.fail = None
        assert await ready.take(SPEC)

    run(backend, work)


def test_closing_in_the_middle_of_a_refill_leaves_nothing(backend, monkeypatch):
    create = backend.create

    async def slow(spec: Spec) -> object:
        await asyncio.sleep(0.01)
        return await create(spec)

    monkeypatch.setattr(backend, "create", slow)

    async def work(ready: Pool, memory: Memory) -> None:
        (await ready.take(SPEC))
        await asyncio.sleep(0.015)

    run(backend, work, high=8)
    with pytest.raises(ConfigError, match="low is 3 and high is 1"):
        Pool(backend, low=3, high=1)


async def box_of(backend: pretend_backend.Backend) -> pretend_backend.PretendSandbox:
    return await backend.create(SPEC)


def test_thinking_pauses_and_always_resumes(backend):
    async def work(ready: Pool, memory: Memory) -> None:
        box = await box_of(backend)
        async with thinking(box):
            with pytest.raises(SandboxError, match="is paused"):
                await box.exec(Command(argv=("true",)))
        with pytest.raises(ZeroDivisionError):
            async with thinking(box):
                raise ZeroDivisionError
        assert box.calls == ["pause", "resume"] * 2
        async with thinking(box, after_seconds=10):
            assert await box.exec(Command(argv=("true",)))
        assert "pause" not in box.calls[4:]
        async with thinking(box, after_seconds=0.01):
            await until(lambda: box.paused)
        assert not box.paused and box.calls[-2:] == ["pause", "resume"]
        with pytest.raises(Unsupported):
            async with thinking(box, "hibernate"):
                pass
        task = asyncio.ensure_future(_think_long(box))
        await until(lambda: box.paused)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not box.paused

    run(backend, work)


async def _think_long(box: pretend_backend.PretendSandbox) -> None:
    async with thinking(box):
        await asyncio.sleep(60)


def test_a_copy_is_graded_and_goes(backend):
    async def work(ready: Pool, memory: Memory) -> None:
        box = await box_of(backend)
        await box.write("/answer", b"42")
        with contextlib.suppress(ZeroDivisionError):
            async with graded(box) as copy:
                assert await copy.read("/answer") == b"42" and copy.id != box.id
                await copy.remove("/answer")
                raise ZeroDivisionError
        assert await box.read("/answer") == b"42" and [*backend.living.values()] == [box]
        backend.fail = CapacityError("full")
        with pytest.raises(CapacityError, match="full"):
            async with graded(box):
                pass
        backend.fail = None

    run(backend, work)


def test_snapshots_from_time_to_time_keep_the_last_ones(backend):
    async def work(ready: Pool, memory: Memory) -> None:
        box = await box_of(backend)
        async with Keeping(box, backend.store, "task", every_seconds=0.02, last=2) as kept:
            await box.write("/n", b"1")
            await until(lambda: kept._number >= 4)
            box.snapshot, real = failing, box.snapshot
            await until(lambda: kept.failures >= 2)
            assert isinstance(kept.error, CapacityError) and kept.latest is not None
            box.snapshot = real
            await box.write("/n", b"2")
            last = await kept.now()
            assert kept.latest is last
            again = await backend.create(replace(SPEC, image=kept.latest.name))
            assert await again.read("/n") == b"2"
            assert len(backend.store.images()) in (2, 3)
        assert backend.store.images() == []

    async def failing(name: str | None = None, *, memory: bool = False) -> None:
        raise CapacityError("no space")

    run(backend, work)


def test_a_restored_sandbox_gets_randomness_and_the_right_clock(backend, monkeypatch):
    """What is run inside is seen; a clock that is off and cannot be set is an error."""
    seen: list[tuple[str, ...]] = []
    offset = 0.0

    async def exec(self, command: Command) -> Result:
        seen.append(command.argv)
        clock = f"{identity.time.time() + offset:.3f}"
        return Result(code=0, stdout=clock.encode() if command.argv[:2] == ("date", "+%s.%N") else b"", stderr=b"")

    monkeypatch.setattr(pretend_backend.PretendSandbox, "exec", exec)

    async def work(ready: Pool, memory: Memory) -> None:
        nonlocal offset
        box = await box_of(backend)
        before = await identity.renew(box)
        assert seen == []
        after = await identity.renew(box, restored=True)
        assert after.token != before.token and after.hostname != before.hostname and after.machine != before.machine
        assert seen[0][-1] == "cat > /dev/urandom" and ("hostname", after.hostname) in seen
        offset = -500.0
        with pytest.raises(SandboxError, match="clock is -500 s off"):
            await identity.renew(box, restored=True)
        assert any(argv[:2] == ("date", "-s") for argv in seen)

    run(backend, work)


def test_pressure_is_read_from_the_kernel(tmp_path):
    now = pressure()
    assert 0 < now.available_bytes <= now.total_bytes and 0 <= now.stalled_percent <= 100
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    for name, text in {
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 800 kB\n",
        "proc/pressure/memory": "some avg10=12.50 avg60=0 total=1\nfull avg10=0\n",
        "proc/self/cgroup": "4:cpu,memory:/a/b\n0::/\n", "groups/memory/a/memory.limit_in_bytes": "500000\n",
        "groups/memory/a/memory.usage_in_bytes": "450000\n", "groups/memory/a/memory.stat": "total_inactive_file 50000\n",
        "groups/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert pressure(proc, groups) == Pressure(total_bytes=500_000, available_bytes=100_000, stalled_percent=12.5)
    (proc / "self" / "cgroup").write_text("0::/c\n")
    (groups / "c").mkdir()
    (groups / "c" / "memory.max").write_text("300000\n")
    (groups / "c" / "memory.current").write_text("299999\n")
    assert pressure(proc, groups).available_bytes == 1
    (groups / "c" / "memory.max").write_text("max\n")
    assert pressure(proc, groups).available_bytes == 800 * 1024


def test_periods_that_make_no_sense():
    with pytest.raises(ConfigError):
        Keeping(None, None, "x", every_seconds=0)
