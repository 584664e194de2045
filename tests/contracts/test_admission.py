"""Admission: budgets for each class, order, bounded queues, honest refusals, and the end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gnomon import config as toml
from gnomon.serve.admission import Admission, Busy
from gnomon.serve.settings import AdmissionSettings


def admission(tokens: int = 100, queue: int = 2, wait: float = 5.0, clock: Callable[[], float] = lambda: 0.0) -> Admission:
    lane = {"tokens": tokens, "queue": queue, "wait_seconds": wait}
    table = {"long_prompt_tokens": 50, "interactive": lane, "long": lane, "batch": lane}
    return Admission(toml.from_dict(AdmissionSettings, table), clock)


def run(test: Callable[[], Awaitable[Any]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


async def waits(task: "asyncio.Task[Any]") -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


def test_in_order_within_the_budget() -> None:
    async def test() -> None:
        gate = admission()
        first = await gate.enter("interactive", 10, 60)
        second = asyncio.create_task(gate.enter("interactive", 10, 50))
        third = asyncio.create_task(gate.enter("interactive", 10, 10))
        assert await waits(second) and await waits(third)  # the third would fit, and does not overtake
        first.release()
        first.release()  # once is enough
        assert (await second).lane.used == 60 and not await waits(third)
        (await second).release()
        (await third).release()
        assert gate.running == 0 and all(lane.used == 0 for lane in gate.lanes.values())

    run(test)


def test_a_deadline_ends_the_wait() -> None:
    async def test() -> None:
        gate = admission(wait=1e6)
        await gate.enter("interactive", 10, 100)
        for seconds in (-1.0, 0.01):
            with pytest.raises(Busy, match="no room for another interactive request"):
                await gate.enter("interactive", 10, 100, seconds)
        assert gate.running == 1

    run(test)


def test_a_burst_of_long_prompts_leaves_the_short_ones_alone() -> None:
    async def test() -> None:
        gate = admission()
        held = [await gate.enter("interactive", 60, 100)]
        waiting = [asyncio.create_task(gate.enter("interactive", 60, 100)) for _ in range(2)]
        assert await waits(waiting[0])
        with pytest.raises(Busy, match="2 long requests wait already") as busy:
            await gate.enter("interactive", 60, 100)
        assert 1 <= busy.value.retry_seconds <= 60
        short = await gate.enter("interactive", 10, 90)
        batch = await gate.enter("batch", 60, 90)
        assert (short.lane.name, batch.lane.name) == ("interactive", "batch")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        held[0].release()
        assert gate.lanes["long"].used == 0 and not gate.lanes["long"].waiting

    run(test)


def test_larger_than_the_budget_runs_alone() -> None:
    async def test() -> None:
        gate = admission()
        large = await gate.enter("interactive", 10, 1000)
        other = asyncio.create_task(gate.enter("interactive", 10, 1))
        assert await waits(other)
        large.release()
        (await other).release()

    run(test)


def test_who_waits_too_long_or_leaves() -> None:
    async def test() -> None:
        gate = admission(wait=0.02)
        held = await gate.enter("interactive", 10, 100)
        with pytest.raises(Busy, match=r"no room .* in 0.02 s"):
            await gate.enter("interactive", 10, 100)
        gone = asyncio.create_task(gate.enter("interactive", 10, 100))
        next_one = asyncio.create_task(gate.enter("interactive", 10, 5))
        assert await waits(gone)
        held.release()
        gone.cancel()  # in the same moment as its turn
        await asyncio.gather(gone, return_exceptions=True)
        (await next_one).release()
        assert gate.running == 0 and gate.lanes["interactive"].used == 0

    run(test)


def test_the_end_sends_away_who_waits_and_lets_who_runs_finish() -> None:
    async def test() -> None:
        gate = admission()
        held = await gate.enter("interactive", 10, 100)
        waiting = asyncio.create_task(gate.enter("interactive", 10, 100))
        assert await waits(waiting)
        gate.close()
        for late in (waiting, gate.enter("batch", 1, 1)):
            with pytest.raises(Busy, match="shutting down") as busy:
                await late
            assert busy.value.draining
        assert gate.running == 1
        held.release()
        assert gate.running == 0 and gate.closed

    run(test)


def test_when_to_come_back_follows_the_rate() -> None:
    async def test() -> None:
        now = [0.0]
        gate = admission(queue=0, clock=lambda: now[0])
        for second in range(10):
            now[0] = float(second)
            (await gate.enter("interactive", 1, 10)).release()
        held = await gate.enter("interactive", 1, 100)
        with pytest.raises(Busy) as busy:
            await gate.enter("interactive", 1, 100)
        assert busy.value.retry_seconds == 9  # 100 tokens at 100 in 9 seconds
        held.release()

    run(test)
