"""Who works in a step: counted in steps and tokens, never in seconds. The model is a stand-in, since only shapes matter here."""

import pytest
import torch
from stand_in import StandIn

from gnomon.errors import ConfigError
from gnomon.serve.engine import Engine, EngineSettings
from gnomon.serve.pages import Memory
from gnomon.serve.prefix import PrefixCache
from gnomon.serve.request import Finished, Request, Sampled, Sampling
from gnomon.serve.scheduler import ScheduleSettings


class World:
    """An engine and the step at which each request had its first token and its end."""

    def __init__(self, memory=1 << 22, **schedule):
        self.runner = StandIn()
        cache = PrefixCache(Memory(self.runner, memory))
        self.engine = Engine(self.runner, EngineSettings(schedule=ScheduleSettings(**schedule)), cache)
        self.first, self.ended, self.now, self.reasons = {}, {}, 0, {}

    def submit(self, name, prompt, output=1, priority="interactive", seed=0, text=None):
        ids = torch.randint(64, (prompt,), generator=torch.Generator().manual_seed(seed + 1000 * len(name) + hash_of(text or name)))
        self.engine.submit(Request(id=name, prompt=tuple(ids.tolist()), priority=priority,
                                   sampling=Sampling(temperature=0.0, max_tokens=output)))

    def step(self, count=1):
        for _ in range(count):
            self.now += 1
            for name, event in self.engine.step():
                if isinstance(event, Sampled):
                    self.first.setdefault(name, self.now)
                elif isinstance(event, Finished):
                    self.ended[name], self.reasons[name] = self.now, event.reason

    def finish(self):
        while not self.engine.idle:
            self.step()


def hash_of(name):
    """A number for a name that is the same in every process."""
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % 10**6


def test_a_prompt_is_cut_at_multiples_of_64_and_a_step_keeps_to_its_budget():
    world = World(step_tokens=256, mixed_tokens=128)
    world.submit("long", 1000)
    world.submit("chat", 10, output=30)
    world.finish()
    assert world.runner.steps[:2] == [[(0, 10)], [(0, 64), (10, 1)]]
    for step in world.runner.steps:
        decoding = [piece for piece in step if piece[1] == 1]
        assert sum(length for _, length in step) <= (128 + len(decoding) if decoding else 256)
        assert all((past + length) % 64 == 0 or past + length in (1000, 10) or length == 1 for past, length in step)
    assert world.reasons == {"long": "length", "chat": "length"}
    world = World(step_tokens=256, mixed_tokens=128)
    world.submit("long", 1000)
    world.submit("writer", 10, output=30, priority="batch")
    world.finish()
    assert world.runner.steps[0] == [(0, 10), (0, 192)]


def test_a_short_request_does_not_wait_for_long_prompts_of_its_class():
    world = World(step_tokens=256, mixed_tokens=128)
    for i in range(8):
        world.submit(f"long{i}", 2000)
    world.step(5)
    world.submit("short", 60)
    world.finish()
    assert world.first["short"] - 5 <= 2
    assert min(world.first[f"long{i}"] for i in range(8)) > world.first["short"]


def test_steps_stay_small_for_a_while_after_a_short_prompt():
    sizes = {}
    for names in (("long",), ("long", "short")):
        world = World(step_tokens=512, mixed_tokens=128)
        for name in names:
            world.submit(name, 10_000 if name == "long" else 60)
        world.finish()
        sizes[names[-1]] = [sum(length for _, length in step) for step in world.runner.steps]
    assert set(sizes["long"][:-1]) == {512}
    assert max(sizes["short"][1:63]) <= 64 and max(sizes["short"][64:]) == 512


def test_a_step_that_takes_a_short_prompt_takes_nothing_of_long_ones():
    world = World(step_tokens=512, mixed_tokens=128)
    for i in range(3):
        world.submit(f"long{i}", 4000)
    for i in range(8):
        world.submit(f"short{i}", 100)
        world.step()
        assert world.runner.steps[-1] == [(0, 100)]
        world.step(4)
        assert all(length <= 64 for _, length in world.runner.steps[-1])


def test_a_conversation_that_is_mostly_cached_goes_before_a_prompt_that_is_not():
    world = World(memory=1 << 22, step_tokens=64, mixed_tokens=64)
    world.submit("first", 1000, text="talk")
    world.finish()
    world.submit("cold", 800)
    world.submit("again", 1000, text="talk")
    world.step()
    assert "again" in world.first and "cold" not in world.first


def test_a_short_prompt_is_through_with_the_next_step_whatever_runs():
    world = World(step_tokens=512, mixed_tokens=128)
    world.submit("long", 12_000)
    for i in range(10):
        world.step(3)  # one of the next steps is the oldest's
        world.submit(f"short{i}", 60)
        world.step()
        assert world.first[f"short{i}"] == world.now
    assert "long" not in world.first
    world.finish()


def test_a_long_prompt_moves_in_an_endless_stream_of_short_ones():
    world = World(step_tokens=64, mixed_tokens=64)
    world.submit("long", 640)
    count = 0
    while "long" not in world.first:
        for _ in range(2):
            world.submit(f"s{count}", 64)
            count += 1
        world.step()
        assert world.now <= 60  # ten pieces, every fourth step
    assert world.now >= 30


def test_long_prompts_of_one_class_leave_the_other_its_share():
    world = World(memory=1 << 24, step_tokens=256, mixed_tokens=256, interactive_share=0.75)
    for i in range(2):
        world.submit(f"batch{i}", 8000, priority="batch")
        world.submit(f"chat{i}", 8000)
    done = {"batch": 0, "chat": 0}
    for _ in range(32):
        world.step()
    for running in world.engine._scheduler.running.values():
        done[running.sequence.request.id[:-1]] += running.held.length
    assert done["chat"] + done["batch"] == 32 * 256
    assert done["chat"] == pytest.approx(0.75 * 32 * 256, rel=0.05)


def test_a_class_alone_has_the_whole_budget_and_owes_nothing():
    world = World(step_tokens=256)
    world.submit("batch", 2560, priority="batch")
    world.step(10)
    assert world.first["batch"] == 10
    world.submit("more", 2560, priority="batch")
    world.step(3)
    world.submit("chat", 100)
    world.step()
    assert world.first["chat"] == 14


def test_a_beginning_that_many_share_is_computed_once_although_they_come_at_once():
    world = World(memory=1 << 24)
    beginning = torch.randint(64, (640,), generator=torch.Generator().manual_seed(0)).tolist()
    for i in range(12):
        world.engine.submit(Request(id=f"r{i}", prompt=(*beginning, i, i, i), sampling=Sampling(temperature=0.0, max_tokens=2)))
    world.finish()
    assert world.engine.stats().prompt_tokens == 640 + 12 * 3
    assert len(world.ended) == 12 and max(world.ended.values()) <= 8
    world.engine.submit(Request(id="other", prompt=tuple(beginning), salt="x", sampling=Sampling(max_tokens=1)))
    world.engine.submit(Request(id="off", prompt=tuple(beginning), cache=False, sampling=Sampling(max_tokens=1)))
    world.finish()
    assert world.engine.stats().prompt_tokens == 640 + 12 * 3 + 2 * 640


def test_nobody_waits_long_for_another_prompt():
    world = World(memory=1 << 24, step_tokens=64, mixed_tokens=64)
    beginning = torch.randint(64, (6400,), generator=torch.Generator().manual_seed(0)).tolist()
    world.engine.submit(Request(id="long", prompt=tuple(beginning), sampling=Sampling(max_tokens=1)))
    world.step()
    world.engine.submit(Request(id="short", prompt=(*beginning[:3200], 1), sampling=Sampling(max_tokens=1)))
    world.finish()
    assert world.first["short"] < world.first["long"]


def test_no_more_run_than_may():
    world = World(max_sequences=3)
    for i in range(9):
        world.submit(f"r{i}", 20, output=5)
    while not world.engine.idle:
        world.step()
        assert world.engine.stats().running <= 3
    assert len(world.ended) == 9


def test_memory_is_given_whole_or_not_and_the_oldest_keep_theirs():
    probe = Memory(StandIn(), 1 << 22)
    world = World(memory=4 * probe.slot_bytes + 12 * probe.page_bytes, step_tokens=512, mixed_tokens=512)
    for i in range(6):
        world.submit(f"r{i}", 120, output=200)
    while not world.engine.idle:
        world.step()
        memory = world.engine.cache.memory
        assert memory.used_bytes <= memory.budget_bytes
    assert world.engine.stats().preemptions > 0 and set(world.reasons.values()) == {"length"}
    assert world.ended["r0"] == world.ended["r1"] == 200  # a token in every step


def test_batch_work_is_put_aside_before_interactive_work():
    probe = Memory(StandIn(), 1 << 22)
    world = World(memory=2 * probe.slot_bytes + 6 * probe.page_bytes)
    world.submit("old batch", 60, output=250, priority="batch")
    world.step(3)
    world.submit("chat", 60, output=250)
    world.finish()
    assert world.engine.stats().preemptions > 0
    assert world.ended["chat"] < world.ended["old batch"] and world.ended["chat"] - 3 <= 255


def test_a_request_that_was_refused_often_is_not_overtaken_for_ever():
    probe = Memory(StandIn(), 1 << 22)
    world = World(memory=6 * probe.slot_bytes + 20 * probe.page_bytes)
    for i in range(4):
        world.submit(f"s{i}", 60, output=40 + 7 * i)
    world.step()
    world.submit("large", 1000)
    count = 4
    while "large" not in world.ended and world.now < 2000:
        for name in list(world.ended):
            del world.ended[name]
            world.submit(f"s{count}", 60, output=40)
            count += 1
        world.step()
    assert "large" in world.ended


def test_equal_histories_give_equal_steps():
    def history():
        world = World(memory=1 << 19, step_tokens=128, mixed_tokens=64, max_sequences=5)
        for i in range(12):
            world.submit(f"r{i}", 30 + 37 * i, output=10 + i, priority="batch" if i % 3 == 0 else "interactive")
            world.step(i % 4)
        world.finish()
        return world.runner.steps, world.ended

    assert history() == history()


@pytest.mark.parametrize(("field", "value"), [
    ("step_tokens", 63), ("mixed_tokens", 0), ("max_sequences", 0), ("interactive_share", 1.0), ("interactive_share", 0.0),
])
def test_settings_that_cannot_be(field, value):
    with pytest.raises(ConfigError, match=f"'{field}' is"):
        ScheduleSettings(**{field: value})
