"""The prefix cache under random use: no wrong state, no page that somebody else wrote, no leak, never over budget, same results as without.

Two models take part: one whose state is a hash of its tokens and that looks at everything it reads, and one that computes, whose
log-probabilities are compared with a run that caches nothing.
"""

import random
import tempfile
from pathlib import Path

import inference_models
import pytest
from cache_worlds import HashModel, RealModel, World, random_operation
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gnomon.kernels import native
from gnomon.serve.cache_settings import FORMS

COMPILED = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
FEW = st.integers(0, 2)


class Clients(RuleBasedStateMachine):
    """What clients do, one operation at a time; subclasses say on which model."""

    def begin(self, model, block, page_tokens, slots, pages, resting="fp32"):
        probe = model.new_pool(1, page_tokens, page_tokens)
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(model, budget=slots * probe.slot_bytes + pages * probe.page_bytes, block=block, page_tokens=page_tokens,
                           disk=Path(self.folder.name), resting=resting)

    def talk(self, which):
        return self.world.talks[which % len(self.world.talks)]

    @rule(fresh=st.lists(FEW, min_size=1, max_size=40), old=st.integers(0, 99), cut=st.integers(0, 99),
          salt=st.sampled_from(["", "", "mine"]), boundary=st.integers(0, 40), reuse=st.integers(0, 9))
    def open(self, fresh, old, cut, salt, boundary, reuse):
        """A new prompt, the next turn, the same again, an earlier turn edited, or somebody else's under a salt."""
        if len(self.world.talks) == 4:
            return
        prompt = fresh
        if self.world.past:
            tokens, own = self.world.past[old % len(self.world.past)]
            prompt = (tokens[:-1 - cut] if cut < len(tokens) - 1 else tokens) + fresh[:cut % 40]
            salt = salt or own
        self.world.open(prompt[:90] or fresh, salt, [boundary], reuse=reuse > 0)
        self.world.check()

    @precondition(lambda self: self.world.talks)
    @rule(which=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.lists(FEW, min_size=1, max_size=3)), min_size=1, max_size=4))
    def step(self, which):
        """Prompts in pieces of any size and tokens one by one, several sequences at once."""
        plan = {}
        for talk, count, words in which:
            talk = self.talk(talk)
            plan[id(talk)] = talk, (talk.todo[:count] if talk.todo else words[:1])
        self.world.step([(talk, new) for talk, new in plan.values() if len(talk.tokens) + len(new) <= 130])
        self.world.check()

    @precondition(lambda self: 0 < len(self.world.talks) < 4)
    @rule(which=st.integers(0, 3))
    def fork(self, which):
        """A sequence goes on twice."""
        self.world.fork(self.talk(which))
        self.world.check()

    @precondition(lambda self: self.world.talks)
    @rule(which=st.integers(0, 3), keep=st.integers(0, 9))
    def close(self, which, keep):
        """A sequence ends, or is given up."""
        self.world.close(self.talk(which), keep=keep > 0)
        self.world.check()

    @rule(really=st.integers(0, 3))
    def restart(self, really):
        """The process ends, another one finds what is on the disk."""
        if really == 0:
            self.world.restart()
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()
            self.folder.cleanup()


class Bookkeeping(Clients):
    """On the model that watches."""

    @initialize(block=st.sampled_from([4, 8, 16]), page_tokens=st.sampled_from([4, 6, 8, 24]), slots=st.sampled_from([2, 5, 40]),
                pages=st.sampled_from([6, 20, 100]), resting=st.sampled_from(["fp32", "bf16", "int8"]))
    def start(self, block, page_tokens, slots, pages, resting):
        """Memory for much or for hardly anything."""
        self.begin(HashModel(), block, page_tokens, slots, pages, resting)


class Computing(Clients):
    """On a model that computes."""

    @initialize(slots=st.sampled_from([3, 8, 40]), pages=st.sampled_from([12, 40, 100]))
    def start(self, slots, pages):
        """Memory for much or for hardly anything."""
        self.begin(real_model(), 8, 8, slots, pages)


def real_model():
    """One packed model for all examples."""
    if not REAL:
        REAL.append(RealModel(inference_models.model()))
    return REAL[0]


REAL: list[RealModel] = []
FORM = settings(max_examples=12, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = FORM
TestComputing = COMPILED(Computing.TestCase)
TestComputing.settings = FORM


def use(model, seed, operations, slots, pages, **shape):
    """So many random operations on one cache; every second seed has a disk."""
    draw = random.Random(seed)
    probe = model.new_pool(1, shape["page_tokens"], shape["page_tokens"])
    with tempfile.TemporaryDirectory() as folder:
        world = World(model, budget=slots * probe.slot_bytes + pages * probe.page_bytes, disk=Path(folder) if seed % 2 else None, **shape)
        for _ in range(operations):
            random_operation(world, draw)
        world.finish()
    return world


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_no_wrong_state_in_tens_of_thousands_of_operations(seed):
    draw = random.Random(seed)
    world = use(HashModel(), seed, 1000, draw.choice((3, 8, 20, 100)), draw.choice((8, 20, 60, 300)),
                block=draw.choice((4, 8, 16)), page_tokens=draw.choice((4, 5, 8, 16, 24)), resting=draw.choice(FORMS),
                disk_bytes=draw.choice((3000, 20_000, 10**9)), disk_queue_bytes=draw.choice((2000, 10**9)))
    assert world.operations > 1000


@pytest.mark.slow
@COMPILED
@pytest.mark.parametrize("seed", range(20))
def test_cached_is_uncached_over_ten_thousand_operations(seed):
    world = use(real_model(), seed, 500, (3, 8, 40, 100)[seed % 4], (20, 60, 200)[seed % 3], block=8, page_tokens=(8, 16)[seed % 2])
    assert world.operations > 500
