"""The engine under asyncio: streams, cancelling by leaving, draining, failures that are told and survived, sleep when idle."""

import asyncio
import dataclasses
import threading
import time
from contextlib import aclosing

import pytest
from stand_in import StandIn

from gnomon.errors import CapacityError, ConfigError
from gnomon.serve import live as module
from gnomon.serve.engine import Engine, EngineSettings
from gnomon.serve.live import LiveEngine
from gnomon.serve.request import Finished, Grammar, Request, Sampled, Sampling, Started


def request(name="a", prompt=(1, 2, 3), tokens=5):
    return Request(id=name, prompt=tuple(prompt), sampling=Sampling(temperature=0.0, max_tokens=tokens))


async def said(live, asked):
    return [event async for event in live.stream(asked)]


def run(test, seconds=0.0):
    """Run a coroutine function over a live engine that is stopped at the end, whatever happens."""
    runner = StandIn(seconds)
    live = LiveEngine(Engine(runner, EngineSettings(memory_bytes=1 << 20)))
    live.start()
    try:
        return asyncio.run(asyncio.wait_for(test(live, runner), 60))
    finally:
        live.stop()
        assert live._thread is not None and not live._thread.is_alive()


def test_a_stream_has_a_beginning_tokens_and_an_end():
    async def test(live, runner):
        events = await said(live, request())
        assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
        assert [event.id for event in events[1:-1]] == [4, 5, 6, 7, 8]
        assert live.healthy and live.stats().output_tokens == 5 and live.max_tokens > 100

    run(test)


def test_many_streams_at_once():
    async def test(live, runner):
        answers = await asyncio.gather(*(said(live, request(f"r{i}", [i % 60], 3 + i % 5)) for i in range(100)))
        for i, events in enumerate(answers):
            assert [event.id for event in events[1:-1]] == [(i % 60 + 1 + j) % 64 for j in range(3 + i % 5)]
        assert max(len(step) for step in runner.steps) > 10

    run(test)


def test_leaving_a_stream_cancels_its_request():
    async def test(live, runner):
        async with aclosing(live.stream(request(tokens=100_000))) as events:
            async for event in events:
                if isinstance(event, Sampled):
                    break
        task = asyncio.create_task(said(live, request("b", tokens=100_000)))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while live.stats().running or live.stats().waiting:
            await asyncio.sleep(0.001)
        assert live.stats().memory_used_bytes == 0 and not live._listeners

    run(test)


def test_cancelling_by_id_ends_the_stream():
    async def test(live, runner):
        task = asyncio.create_task(said(live, request(tokens=10_000)))
        await asyncio.sleep(0.01)
        live.cancel("a")
        live.cancel("nobody")
        assert (await task)[-1].reason == "cancelled"

    run(test)


def test_refused_requests_raise_where_they_are_asked_for():
    async def test(live, runner):
        with pytest.raises(ConfigError, match="outside the vocabulary"):
            await said(live, request(prompt=[99]))
        with pytest.raises(CapacityError, match="tokens and a sequence may have"):
            await said(live, request(prompt=[1] * 10**6))
        stream = live.stream(request(tokens=10_000))
        await anext(stream)
        with pytest.raises(ConfigError, match="'id' is 'a'"):
            await said(live, request())
        await anext(stream)  # the first one with this id goes on
        await stream.aclose()

    run(test)


def test_a_step_that_fails_ends_requests_with_the_reason_and_the_next_ones_run():
    async def test(live, runner):
        runner.failure = RuntimeError("the roof fell in")
        first, second = await asyncio.gather(said(live, request("a")), said(live, request("b")))
        failed = [events[-1] for events in (first, second) if events[-1].reason == "error"]
        assert failed and all("RuntimeError: the roof fell in" in event.error for event in failed)
        assert (await said(live, request("c")))[-1].reason == "length" and live.healthy

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_takes_no_request_with_it_silently():
    async def test(live, runner):
        runner.failure = KeyboardInterrupt()
        assert (await said(live, request()))[-1].reason == "error"
        while live._thread.is_alive():
            await asyncio.sleep(0.001)
        assert not live.healthy and live.problem
        with pytest.raises(CapacityError, match="not running: the engine's thread ended"):
            await said(live, request())

    run(test)


def test_stopping_lets_answers_end_and_takes_no_more():
    async def test(live, runner):
        task = asyncio.create_task(said(live, request(tokens=50)))
        await asyncio.sleep(0.02)
        stopping = asyncio.create_task(asyncio.to_thread(live.stop, 30.0))
        await asyncio.sleep(0.005)
        with pytest.raises(CapacityError, match=r"stopping|not running"):
            await said(live, request("b"))
        assert (await task)[-1].reason == "length" and not live.healthy
        await stopping

    run(test, seconds=0.002)


def test_stopping_at_once_tells_those_that_run():
    async def test(live, runner):
        task = asyncio.create_task(said(live, request(tokens=100_000)))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(live.stop, 0.0)
        last = (await task)[-1]
        assert last.reason == "error" and "stopped" in last.error

    run(test)


def test_an_idle_engine_sleeps():
    async def test(live, runner):
        await said(live, request())
        await asyncio.sleep(0.05)
        before = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before < 0.1
        assert len(runner.steps) == 5

    run(test)


def test_a_loop_that_is_gone_does_not_hold_the_engine():
    runner = StandIn(0.001)
    live = LiveEngine(Engine(runner, EngineSettings(memory_bytes=1 << 20)))
    live.start()
    try:
        def listen():
            loop = asyncio.new_event_loop()
            stream = live.stream(request(tokens=100_000))
            loop.run_until_complete(anext(stream))
            loop.close()

        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()
        assert asyncio.run(asyncio.wait_for(said(live, request("b")), 30))[-1].reason == "length"
        for _ in range(1000):
            if not live.stats().running:
                break
            time.sleep(0.005)
        assert live.stats().running == 0
    finally:
        live.stop()


def test_a_grammar_that_takes_too_long_holds_up_no_other(monkeypatch):
    """It is refused in time, at once while it is still being compiled, and others are compiled beside it."""
    done, compiled = threading.Event(), []

    def prepare(asked):
        compiled.append(asked.sampling.grammar.text)
        if asked.sampling.grammar.text == "slow" and not done.wait(60):
            raise AssertionError("nobody let it go on")

    def bound(text):
        asked = request(text)
        return dataclasses.replace(asked, sampling=dataclasses.replace(asked.sampling, grammar=Grammar(kind="regex", text=text)))

    async def test(live, runner):
        monkeypatch.setattr(live._engine, "prepare", prepare)
        for seconds in (0.2, 60.0):
            monkeypatch.setattr(module, "COMPILE_SECONDS", seconds)
            with pytest.raises(ConfigError, match="took longer"):
                await said(live, bound("slow"))
        assert compiled == ["slow"]
        assert isinstance((await said(live, bound("quick")))[-1], Finished)
        done.set()
        live._grammars.shutdown(wait=True)

    run(test)
