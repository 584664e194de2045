"""Any traffic: a request's tokens and log-probabilities have the same bits alone and in company, with a cache and without, with little
memory, in small steps and large, whoever is cancelled meanwhile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_models import config, model

from gnomon.kernels import native
from gnomon.model.inference import InferenceModel
from gnomon.serve.engine import Engine, EngineSettings
from gnomon.serve.pages import Memory
from gnomon.serve.prefix import PrefixCache
from gnomon.serve.request import Request, Sampled, Sampling, Started
from gnomon.serve.scheduler import ScheduleSettings

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
SMALL = config(num_hidden_layers=2, moe="none", hidden_size=32, intermediate_size=32, kda={"num_heads": 1}, mla={"num_attention_heads": 1})
RUNNERS = {weights: InferenceModel.from_transformer(model(SMALL), weights) for weights in ("fp32", "bf16")} \
    if native.unavailable() is None else {}
STREAM = torch.randint(61, (400,), generator=torch.Generator().manual_seed(1)).tolist()
ALONE: dict[tuple, list] = {}

prompts = st.tuples(st.sampled_from([1, 20, 64, 65, 129, 200]), st.integers(0, 3)).map(
    lambda pair: (*STREAM[: pair[0]], *STREAM[300 : 300 + pair[1]]))  # prompts that share beginnings
samplings = st.builds(
    Sampling, max_tokens=st.sampled_from([1, 5, 40]), temperature=st.sampled_from([0.0, 0.8, 1.3]), top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 7]), presence_penalty=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 5),
    top_logprobs=st.sampled_from([None, 2]))
requests = st.lists(st.tuples(prompts, samplings, st.booleans(), st.sampled_from(["interactive", "batch"]), st.integers(0, 3)),
                    min_size=1, max_size=7)
worlds = st.fixed_dictionaries({
    "weights": st.sampled_from(["fp32", "bf16"]), "cached": st.booleans(), "pages": st.sampled_from([6, 9, 400]),
    "max_sequences": st.sampled_from([1, 3, 64]), "step_tokens": st.sampled_from([64, 128, 512]), "cancelled": st.sets(st.integers(0, 6))})


def engine_of(weights, cached=True, pages=400, **schedule):
    runner = RUNNERS[weights]
    probe = Memory(runner, 1 << 22)
    budget = pages // 2 * probe.slot_bytes + pages * probe.page_bytes
    cache = PrefixCache(Memory(runner, budget)) if cached else None
    return Engine(runner, EngineSettings(memory_bytes=budget, schedule=ScheduleSettings(mixed_tokens=64, **schedule)), cache)


def run(engine, submitted):
    said = {}
    while submitted or not engine.idle:
        while submitted and submitted[0][0] <= 0:
            engine.submit(submitted.pop(0)[1])
        submitted = [(wait - 1, request) for wait, request in submitted]
        for name, event in engine.step():
            said.setdefault(name, []).append(event)
    return said


def tokens(events):
    return [event for event in events[:-1] if not isinstance(event, Started)]


def alone(weights, request):
    """The same request in an engine of its own, without a cache."""
    key = weights, request.prompt, request.sampling
    if key not in ALONE:
        ALONE[key] = tokens(run(engine_of(weights, cached=False), [(0, request)])[request.id])
    return ALONE[key]


@given(asked=requests, world=worlds)
@settings(max_examples=12)
def test_company_cache_memory_and_steps_change_no_bit(asked, world):
    check(asked, dict(world))


@pytest.mark.slow
@given(asked=requests, world=worlds)
@settings(max_examples=400)
def test_much_company_changes_no_bit(asked, world):
    check(asked, dict(world))


def check(asked, world):
    weights, cancelled = world["weights"], world.pop("cancelled")
    engine = engine_of(**world)
    waits, submitted = 0, []
    for i, (prompt, sampling, cache, priority, wait) in enumerate(asked):
        waits += wait
        submitted.append((waits, Request(id=str(i), prompt=prompt, sampling=sampling, cache=cache, priority=priority)))
    left = [i for i in sorted(cancelled) if i < len(asked)]
    step, inside = engine.step, engine.cache.memory

    def stepping():
        assert inside.used_bytes <= inside.budget_bytes
        if left and engine.stats().steps % 9 == 8:
            engine.cancel(str(left.pop()))
        return step()

    engine.step = stepping
    said = run(engine, list(submitted))
    assert inside.live_bytes == 0 and engine.stats().running == engine.stats().waiting == 0
    for _, request in submitted:
        events, wanted = said[request.id], alone(weights, request)
        assert all(isinstance(event, Sampled) for event in tokens(events))
        if events[-1].reason == "cancelled":
            assert tokens(events) == wanted[: len(tokens(events))]
        else:
            assert events[-1].reason == "length" and tokens(events) == wanted
