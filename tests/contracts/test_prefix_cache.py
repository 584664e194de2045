"""The prefix cache: when it hits and why not more, who may write where, what goes first; a model whose state is a hash watches."""

import random

import inference_models
import numpy as np
import pytest
import torch
from cache_worlds import CONFIG, HashModel, RealModel, World, state_of, write_state

from gnomon.errors import CapacityError, ConfigError
from gnomon.kernels import native
from gnomon.model.config import preset
from gnomon.serve.cache_settings import CacheSettings, machine_bytes
from gnomon.serve.pages import Memory
from gnomon.serve.prefix import PrefixCache


def ids(count, seed):
    """Random ids."""
    draw = random.Random(seed)
    return [draw.randrange(64) for _ in range(count)]


def world(slots=40, pages=400, **more):
    """A cache with room for so many states and pages together."""
    probe = HashModel().new_pool(1, more.get("page_tokens", 8), more.get("page_tokens", 8))
    return World(HashModel(), budget=slots * probe.slot_bytes + pages * probe.page_bytes, **more)


def say(w, prompt, reply=(), chunk=512, **more):
    """A request from start to end; returns (cached tokens, note)."""
    talk = w.open(prompt, **more)
    answer = talk.held.cached_tokens, talk.held.note
    while talk.todo:
        w.step([(talk, talk.todo[:chunk])])
    for token in reply:
        w.step([(talk, [token])])
    w.close(talk)
    w.check()
    return answer


def test_reuse_where_one_live_state_per_conversation_reuses_nothing():
    w = world(slots=400, pages=600, block=64, page_tokens=64)
    long, own = ids(6000, 1), ids(400, 2)
    assert say(w, long)[0] == 0
    assert say(w, long)[0] == 5952, "the same again"
    assert say(w, long[:4000] + own)[0] == 3968, "an edit of an earlier turn"
    assert say(w, long + own)[0] == 5952, "back to the first branch"
    system = ids(1000, 3)
    assert [say(w, system + ids(n, n))[0] for n in (3000, 2500, 20)] == [0, 960, 960]


def test_a_conversation_goes_on_from_its_last_block():
    w = world()
    prompt, reply = ids(45, 1), ids(22, 2)
    say(w, prompt, reply)
    assert say(w, prompt + reply + ids(9, 3))[0] == (45 + 22) // 8 * 8
    assert say(w, prompt, ids(5, 5))[0] == 40, "regenerated"
    assert say(w, prompt + reply[:19] + ids(9, 6))[0] == 64, "the end of the reply stripped"
    assert say(w, prompt + reply + ids(9, 3))[0] == 72, "back to the branch that was left"


def test_the_last_token_of_a_prompt_is_always_computed():
    w = world()
    prompt = ids(64, 1)
    say(w, prompt)
    assert say(w, prompt)[0] == 56
    assert say(w, [*prompt, 1])[0] == 64
    assert say(w, prompt[:1])[0] == 0


NOTES = {
    "prefix differs at token 20: the cache has 63, the request 0": lambda w: say(w, [*w.first[:20], 0, *ids(30, 3)]),
    "prefix differs at token 0": lambda w: say(w, [(w.first[0] + 1) % 64, *w.first[1:]]),
    "all that a hash block of 8 tokens allows": lambda w: say(w, w.first),
    "shorter than a hash block": lambda w: say(w, w.first[:8]),
    "nothing known after token 40": lambda w: say(w, w.first + ids(30, 4)),
    "cache off": lambda w: say(w, w.first, reuse=False),
    "0 of 40 tokens cached: nothing known": lambda w: say(w, w.first, salt="another"),
}


@pytest.mark.parametrize("expected", NOTES)
def test_every_answer_says_why_not_more(expected):
    w = world()
    w.first = ids(40, 1)
    w.first[20] = 63
    say(w, w.first)
    assert expected in NOTES[expected](w)[1]


def test_what_was_evicted_is_said_to_be():
    w = world(slots=3, pages=12)
    first = ids(40, 1)
    say(w, first)
    say(w, ids(60, 2))
    cached, note = say(w, first)
    assert cached < 32 and "evicted" in note


def test_a_step_in_progress_cannot_be_hit():
    w = world()
    prompt = ids(40, 1)
    one, two = w.open(prompt), w.open(prompt)
    w.step([(one, prompt), (two, prompt)])
    assert one.held.pages.tolist() == two.held.pages.tolist(), "what both computed is kept once"
    w.check()
    three = w.open(prompt)
    assert (two.held.cached_tokens, three.held.cached_tokens) == (0, 32)
    four = w.open(prompt + ids(30, 2))
    held, new = four.held, four.todo
    assert held.reserve(len(new)) and held.copies(40, 70)
    assert w.open(prompt + ids(30, 2)).held.cached_tokens == 40, "copies that were planned are no checkpoints yet"


def test_turns_forks_and_ends_stay_longest_under_pressure():
    w = world(slots=9, pages=70)
    prompt = ids(400, 1)
    say(w, prompt, boundaries=(100, 203), chunk=32)
    kept = {node.depth * 8 for node in w.cache.index.nodes() if node.checkpoint}
    assert {96, 200, 392, 400} <= kept
    assert say(w, prompt[:110] + ids(20, 2))[0] == 96
    assert say(w, prompt[:300] + ids(20, 3))[0] <= 296
    assert say(w, prompt[:300] + ids(20, 4))[0] == 296, "the first that diverged left a state there"


def test_checkpoints_are_sparser_towards_the_past():
    w = world(slots=12, pages=110)
    say(w, ids(800, 1), chunk=16)
    kept = sorted(node.depth for node in w.cache.index.nodes() if node.checkpoint)
    gaps = np.diff([0, *kept])
    assert kept[-1] == 100 and len(kept) >= 8 and gaps[:len(gaps) // 2].mean() > gaps[len(gaps) // 2:].mean()


def test_nothing_is_evicted_where_it_would_not_be_enough():
    w = world(slots=4, pages=30)
    say(w, ids(60, 1))
    running = w.open(ids(150, 2))
    w.step([(running, running.todo[:100])])
    before = w.cache.stats().evicted_checkpoints
    assert not running.held.reserve(100_000)
    assert w.cache.stats().evicted_checkpoints == before


def test_no_room_is_an_error_that_says_so():
    w = world(slots=2, pages=8)
    talk = w.open(ids(90, 1))
    w.step([(talk, talk.todo[:72])])
    with pytest.raises(CapacityError, match=r"no room for another sequence.*raise the memory budget"):
        w.cache.open(ids(5, 2))
    with pytest.raises(CapacityError, match="no room to fork"):
        talk.held.fork()
    w.check()
    with pytest.raises(CapacityError, match="holds no sequence"):
        Memory(HashModel(), 100)


@pytest.mark.parametrize(("block", "page_tokens"), [(8, 8), (4, 16), (16, 4), (8, 12), (6, 4)])
def test_pages_are_copied_before_a_second_sequence_writes(block, page_tokens):
    w = world(block=block, page_tokens=page_tokens)
    prompt = ids(29, 1)
    talk = w.open(prompt)
    w.step([(talk, talk.todo)])
    w.fork(talk)
    w.fork(talk)
    for step in range(20):
        w.step([(t, [(7 * i + step) % 64]) for i, t in enumerate(w.talks)])
        w.check()
    cached = [w.open([*t.tokens, 1]).held.cached_tokens for t in list(w.talks)]
    assert cached == [49 // block * block] * 3


def test_a_page_that_only_begins_alike_is_not_taken_over():
    w = world(block=8, page_tokens=16)
    shared = ids(8, 1)
    talks = [w.open(shared + ids(20, seed)) for seed in (2, 3)]
    w.step([(talk, talk.todo[:16]) for talk in talks])
    w.step([(talk, talk.todo) for talk in talks])
    w.check()
    assert len({talk.held.pages[0].item() for talk in talks}) == 2


def test_what_is_not_kept_is_gone_unless_others_use_it():
    w = world()
    shared, own = ids(24, 1), ids(24, 2)
    say(w, shared)
    talk = w.open(shared + own)
    w.step([(talk, talk.todo)])
    w.close(talk, keep=False)
    w.check()
    assert say(w, shared + own)[0] == 24


def test_a_checkpoint_that_is_not_what_it_says_is_not_restored():
    w = world()
    prompt = ids(40, 1)
    say(w, prompt)
    deepest = max((n for n in w.cache.index.nodes() if n.checkpoint and n.depth < 5), key=lambda n: n.depth)
    deepest.checkpoint.length += 8
    assert say(w, prompt)[0] == 24 and w.cache.store.counters.mistaken == 1


def test_wrong_use_is_refused():
    w = world()
    talk = w.open(ids(20, 1))
    with pytest.raises(ConfigError, match="reserve them before"):
        talk.held.advance(ids(20, 1))
    assert talk.held.reserve(20)
    with pytest.raises(ConfigError, match="not those that the sequence was opened with"):
        talk.held.advance(ids(20, 2))
    for wrong, said in (([], "empty"), ([-1.5], "must be ids"), ([1 << 40], "must be ids")):
        with pytest.raises(ConfigError, match=said):
            w.cache.open(wrong)
    for wrong in ({"hash_block": 0}, {"page_tokens": 0}, {"memory_bytes": 0}, {"disk_bytes": -1}, {"latents": "fp8"}, {"resting": "fp8"}):
        with pytest.raises(ConfigError, match=f"'{next(iter(wrong))}' is "):
            CacheSettings(**wrong)


def test_a_cache_is_built_from_its_settings(tmp_path):
    settings = CacheSettings(hash_block=32, page_tokens=16, memory_bytes=1 << 20, latents="bf16", folder=tmp_path / "cache", resting="int8")
    cache = PrefixCache.build(HashModel(), settings, "a model")
    assert cache.memory.pool.latents.dtype == torch.bfloat16 and cache.memory.page_tokens == 16 and cache.memory.budget_bytes == 1 << 20
    assert cache.index.block == 32 and (tmp_path / "cache" / "cache.json").exists() and cache.store.resting == "int8"
    cache.close()
    assert 0 < CacheSettings().budget_bytes <= machine_bytes() // 4


def test_a_prompt_that_found_no_room_counts_once():
    w = world()
    for _ in range(3):
        w.cache.open(ids(20, 1)).close(keep=False)
    say(w, ids(20, 1))
    assert w.cache.stats().lookups == 1


def test_freed_memory_goes_back_and_comes_clean():
    memory = Memory(HashModel(), 1 << 17, 64)
    for _ in range(3):
        slots = []
        while (slot := memory.take_slot()) is not None:
            write_state(memory.pool, slot, state_of([slot % 64]))
            slots.append(slot)
        assert memory.committed_bytes <= 1 << 17 and memory.free_bytes < memory.slot_bytes
        for slot in slots:
            memory.give_slot(slot)
        pages = memory.take_pages((1 << 17) // memory.page_bytes)
        memory.pool.latents[torch.from_numpy(pages).long()] = 1.0
        assert memory.committed_bytes <= 1 << 17
        memory.give_pages(pages, live=True)
    assert memory.used_bytes == memory.live_bytes == 0


@pytest.mark.parametrize("pattern", [("kda",), ("mla",)])
def test_models_of_one_kind_of_layer(pattern):
    import dataclasses

    class OneKind(HashModel):
        config = dataclasses.replace(CONFIG, layer_pattern=pattern)

        def run(self, jobs, pool):
            return None

    w = World(OneKind(), budget=1 << 16, block=8, page_tokens=8)
    prompt = ids(40, 1)
    say(w, prompt)
    assert say(w, prompt + prompt)[0] == 40
    w.finish()


def test_the_cache_in_numbers():
    w = world()
    prompt = ids(40, 1)
    say(w, prompt)
    say(w, prompt)
    stats = w.cache.stats()
    assert (stats.lookups, stats.hits, stats.prompt_tokens, stats.cached_tokens, stats.sequences) == (2, 1, 80, 32, 0)
    assert stats.blocks == stats.checkpoints == 5 and 0 < stats.used_bytes <= stats.budget_bytes and stats.live_bytes == 0
    assert isinstance(w.cache, PrefixCache)
    w.finish()


def test_memory_is_what_the_arithmetic_of_the_model_says():
    tiny = preset("tiny")

    class Tiny(HashModel):
        config = tiny

    memory, tokens = Memory(Tiny(), 1 << 22), 131_072
    expected = tokens * tiny.kv_bytes_per_token(4) + tiny.state_bytes() + tiny.conv_state_bytes(4)
    assert memory.bytes_for(tokens) == pytest.approx(expected, rel=0.05)


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
@pytest.mark.parametrize("steady", [True, False])
def test_from_every_boundary_the_result_has_the_same_bits(steady):
    """However the sequences were cut if the model is steady; else where both are cut into the same chunks."""
    model = RealModel(inference_models.model())
    assert model.network.steady(steady) is True
    w = World(model, budget=64 << 20, block=64, page_tokens=64)
    prompt = [token % 61 for token in ids(400, 1)]
    cold = model.logits(w.open(prompt, reuse=False).held, prompt, 400 if steady else 64)
    say(w, prompt[:310] if steady else prompt, prompt[310:] if steady else (), chunk=64)
    for boundary in range(64, 400, 64):
        held = w.cache.open([*prompt[:boundary + 1], 60])
        assert held.cached_tokens == boundary
        assert torch.equal(model.logits(held, prompt[boundary:], 400 if steady else 64), cold)
        held.close(keep=False)
