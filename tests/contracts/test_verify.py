"""`gnomon verify` passes on the engine, and each deliberate fault is caught by the check that is meant for it."""

import math
from dataclasses import replace

import inference_models as models
import pytest
import torch

from gnomon.errors import ConfigError
from gnomon.model.inference import InferenceModel
from gnomon.serve.cache_settings import CacheSettings
from gnomon.serve.prefix import PrefixCache
from gnomon.serve.verify import Answer, Ask, Check, Finding, as_dict, difference, passed, table, verify
from gnomon.serve.verify_checks import shared_checks
from gnomon.serve.verify_engine import EngineSubject, engine_checks
from gnomon.serve.verify_forward import forward_checks

CONTEXT = 640


@pytest.fixture(scope="module")
def model():
    return models.model()


@pytest.fixture(scope="module")
def runner(model):
    return InferenceModel.from_transformer(model, "fp32")


def checks_of(subject, model, operations=24):
    """Every check, by name."""
    every = [*shared_checks(subject, operations), *engine_checks(subject), *forward_checks(subject, lambda: model, CONTEXT, 1e-3)]
    return {check.name: check for check in every}


def test_the_engine_passes(model, runner):
    """All equivalences hold bit for bit, and each had something to show."""
    verdicts = verify(checks_of(EngineSubject(runner, fingerprint="tiny"), model).values())
    assert passed(verdicts), [(v.name, v.worst, v.note) for v in verdicts if v.status == "fail"]
    assert {v.name: v.worst for v in verdicts if v.name not in ("meaning", "speculation")} == dict.fromkeys(
        (v.name for v in verdicts if v.name not in ("meaning", "speculation")), 0.0)
    assert [v.name for v in verdicts if v.status == "not applicable"] == ["speculation"]


# Each fault is a subject whose cache, memory or runner does one thing wrong.


class Cache(PrefixCache):
    """A cache that spoils what it hands out after a hit."""

    def spoil(self, held):
        raise NotImplementedError

    def open(self, tokens, **options):
        held = super().open(tokens, **options)
        if held.cached_tokens:
            self.spoil(held)
        return held


def a_cache(spoil):
    """A subject whose cache is spoilt so."""
    kind = type("Spoilt", (Cache,), {"spoil": spoil})

    class Subject(EngineSubject):
        def cache(self, memory, disk):
            return kind(memory, CacheSettings(hash_block=self.block), self.fingerprint, disk)

    return Subject


def earlier_boundary(self, held):
    node = held._tip.parent
    if node is not None and node.checkpoint is not None:
        self.memory.pool.copy(node.checkpoint.slot, held.slot)


def zeros(self, held):
    self.memory.pool.matrices[held.slot] = 0
    self.memory.pool.conv[held.slot] = 0


def no_history(self, held):
    self.memory.pool.conv[held.slot] = 0


def one_layer_lost(self, held):
    self.memory.pool.matrices[held.slot, 1] = 0


def latents_of_another_place(self, held):
    pages = held.pages.tolist()
    self.memory.pool.latents[pages[-1]] = self.memory.pool.latents[pages[0]] + 0.1


def wrong_slot_after_eviction(self, held):
    if self.store.counters.evicted_checkpoints:
        used = [node.checkpoint.slot for node in self.index.nodes() if node.checkpoint is not None and node is not held._tip]
        if used:
            self.memory.pool.copy(used[0], held.slot)


class NoCopyOnWrite(EngineSubject):
    """A page that two sequences share is written by both."""

    def cache(self, memory, disk):
        memory.pool.copy_page = lambda source, target: None
        return super().cache(memory, disk)


class LateCheckpoints(EngineSubject):
    """Checkpoints are taken one token late."""

    def cache(self, memory, disk):
        cache = super().cache(memory, disk)
        open_, subject = cache.open, self

        def late(tokens, **options):
            held = open_(tokens, **options)
            copies = held.copies
            held.copies = lambda start, stop: [(min(seen + 1, stop - start), slot) for seen, slot in copies(start, stop)]
            return held

        assert subject.block
        cache.open = late
        return cache


class NoSalt(EngineSubject):
    """The salt is not part of the key."""

    def cache(self, memory, disk):
        cache = super().cache(memory, disk)
        open_ = cache.open
        cache.open = lambda tokens, salt="", **options: open_(tokens, **options)
        return cache


class AnyFiles(EngineSubject):
    """The disk tier takes files of any weights."""

    def cache(self, memory, disk):
        return PrefixCache(memory, CacheSettings(hash_block=self.block), "any", disk)


class NeverHits(EngineSubject):
    """A cache that is switched on and inert."""

    def cache(self, memory, disk):
        cache = super().cache(memory, disk)
        open_ = cache.open
        cache.open = lambda tokens, **options: open_(tokens, **options | {"reuse": False})
        return cache


class Spoilt:
    """A runner that spoils results or states of another."""

    def __init__(self, runner):
        self.runner, self.config = runner, runner.config
        self.new_pool, self.steady = runner.new_pool, runner.steady

    def forward(self, rows, pool, *, logits=True):
        raise NotImplementedError

    def run(self, rows, pool, change):
        out = self.runner.forward(rows, pool)
        change(out.logits)
        return out


class RoundsByBatch(Spoilt):
    """The last bits depend on how many sequences a call has."""

    def forward(self, rows, pool, *, logits=True):
        return self.run(rows, pool, lambda scores: scores.mul_(1 + 1e-6 * (len(rows.slots) - 1)))


class LosesAtCuts(Spoilt):
    """A call that does not begin on the grid begins without the convolution's history."""

    def forward(self, rows, pool, *, logits=True):
        for slot, past in zip(rows.slots.tolist(), rows.past.tolist(), strict=True):
            if past % 64:
                pool.conv[slot] = 0
        return self.run(rows, pool, lambda scores: None)


class StepsOtherwise(Spoilt):
    """A single token is decayed a little differently than tokens of a chunk."""

    def forward(self, rows, pool, *, logits=True):
        single = (rows.bounds.diff() == 1).nonzero()[:, 0]
        pool.matrices[rows.slots[single]] *= 1.001
        return self.run(rows, pool, lambda scores: None)


class LateCopies(Spoilt):
    """The copy of a state on the way is one token late."""

    def forward(self, rows, pool, *, logits=True):
        if rows.copies is not None:
            copies, news = rows.copies.clone(), rows.bounds.diff()
            copies[:, 1] = torch.minimum(copies[:, 1] + 1, news[copies[:, 0]])
            rows = replace(rows, copies=copies)
        return self.run(rows, pool, lambda scores: None)


class Overflows(Spoilt):
    """After some hundred tokens a state is not finite."""

    def forward(self, rows, pool, *, logits=True):
        far = rows.slots[rows.past > 500]
        pool.matrices[far] = math.nan
        return self.run(rows, pool, lambda scores: None)


def a_runner(kind):
    return lambda runner, **options: EngineSubject(kind(runner), **options)


def other_sign(runner, **options):
    """The decay has the wrong sign: chunks and steps agree with each other, and not with the model."""
    wrong = models.model()
    with torch.no_grad():
        for name, x in wrong.named_parameters():
            if name.endswith("dt_bias"):
                x.neg_()
    return EngineSubject(InferenceModel.from_transformer(wrong, "fp32"), **options)


FAULTS = {
    "state of an earlier boundary": (a_cache(earlier_boundary), ["resume", "edited"]),
    "state zeros after a hit": (a_cache(zeros), ["resume", "interleavings"]),
    "convolution's history not restored": (a_cache(no_history), ["regenerate"]),
    "one layer's state missing": (a_cache(one_layer_lost), ["resume"]),
    "latents of another place": (a_cache(latents_of_another_place), ["resume"]),
    "wrong slot after an eviction": (a_cache(wrong_slot_after_eviction), ["eviction"]),
    "no copy on write": (NoCopyOnWrite, ["fork"]),
    "checkpoints one token late": (LateCheckpoints, ["edited"]),
    "salt ignored": (NoSalt, ["salt"]),
    "disk files of other weights": (AnyFiles, ["restart"]),
    "cache that never hits": (NeverHits, ["resume"]),
    "rounding by batch": (a_runner(RoundsByBatch), ["batch"]),
    "history lost at cuts": (a_runner(LosesAtCuts), ["split"]),
    "step other than chunk": (a_runner(StepsOtherwise), ["recurrent"]),
    "copies one token late": (a_runner(LateCopies), ["checkpoint"]),
    "overflow in long contexts": (a_runner(Overflows), ["long context"]),
    "sign of the decay": (other_sign, ["meaning"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_caught_by_its_check(fault, model, runner):
    build, meant = FAULTS[fault]
    checks = checks_of(build(runner, fingerprint="tiny"), model)
    verdicts = verify(checks[name] for name in meant)
    assert [v.status for v in verdicts] == ["fail"] * len(meant), [(v.name, v.worst, v.note) for v in verdicts]
    assert not any("Error:" in v.note and v.name not in ("long context",) for v in verdicts), [v.note for v in verdicts]


def answer(*tokens, top=None):
    return Answer(tokens=tokens, top=tuple({token: -0.1, 99: -3.0} for token in tokens) if top is None else top)


def test_differences():
    """Equal is zero; another token counts by how clear the first choice was; what cannot be compared is infinite."""
    assert difference(answer(1, 2), answer(1, 2)) == 0
    assert difference(answer(1, 2), answer(1)) == math.inf
    assert difference(answer(1), answer(2)) == math.inf
    near = answer(1, top=({1: -0.5, 2: -0.51},)), answer(2, top=({1: -0.505, 2: -0.5},))
    assert difference(*near) == pytest.approx(0.01, abs=1e-9)
    assert difference(answer(1), answer(1, top=({1: math.nan},))) == math.inf
    after = answer(1, 5, top=({1: -0.5, 2: -0.51}, {5: 0.0})), answer(2, 6, top=({1: -0.505, 2: -0.5}, {6: 0.0}))
    assert difference(*after) < 0.02, "what follows another token is another text"


def test_verdicts_are_told():
    """A check that raises fails with what it said; programs get numbers, people a table."""

    def broken():
        raise ConfigError("no answer")

    checks = [Check(name="a", shows="x", run=broken, bound=0.0),
              Check(name="b", shows="y", run=lambda: Finding(worst=1e-5), bound=1e-4),
              Check(name="c", shows="z", run=lambda: Finding(worst=math.inf), bound=1e-4),
              Check(name="d", shows="w", run=lambda: Finding(inapplicable=True, note="no"), bound=1e-4)]
    verdicts = verify(checks)
    assert [v.status for v in verdicts] == ["fail", "pass", "fail", "not applicable"]
    assert "no answer" in verdicts[0].note
    assert not passed(verdicts)
    told = as_dict("m", verdicts)
    assert told["passed"] is False
    assert told["checks"][2]["worst"] == "inf"
    assert table("m", verdicts).row_count == 4


def test_content_is_a_function_of_its_seed(runner):
    subject = EngineSubject(runner)
    assert subject.text(40, 3) == subject.text(40, 3) != subject.text(40, 4)
    assert subject.reference(Ask(prompt=subject.text(5, 1))) is subject.reference(Ask(prompt=subject.text(5, 1), boundaries=(3,)))
