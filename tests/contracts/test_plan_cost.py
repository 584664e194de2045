"""Time and money: steps, prompts, queues, the cache as a cliff, speculation, trainings and rollouts behave as machines do."""

import math
from dataclasses import replace

import pytest

from gnomon.errors import CapacityError, ConfigError
from gnomon.model.config import preset
from gnomon.plan.calibration import record, scaled
from gnomon.plan.cost import Deployment, decode_step, deployment, prefill
from gnomon.plan.hardware import Cluster
from gnomon.plan.rl import rl_iteration
from gnomon.plan.serving import serve
from gnomon.plan.speculation import gained
from gnomon.plan.training import train
from gnomon.plan.workload import RL, Layout, Precision, Serving, Speculation, Training

K3 = preset("k3-2.8t")
LINEAR = preset("kimi-linear-48b")
RELEASED = Precision.released(K3)
B300 = Cluster.parse("b300:8")
EIGHT = Layout(tensor=8)
CHAT = Serving(prompt=8192, output=1024, concurrency=16)


def k3(layout: Layout = EIGHT, precision: Precision = RELEASED, cluster: Cluster = B300) -> Deployment:
    """K3 on eight B300 unless said otherwise."""
    return deployment(K3, cluster, layout, precision)


def small(layout: Layout | None = None) -> Deployment:
    """Kimi Linear on H200s, in bf16, with everything dealt over data-parallel ranks."""
    layout = layout or Layout(data=64, expert=8, zero=3)
    return deployment(LINEAR, Cluster.parse("h200:8x8"), layout, Precision(experts="bf16", rest="bf16"))


def step(sequences: float, context: float, **changes) -> float:
    """Seconds of a K3 decode step."""
    return decode_step(K3, B300, EIGHT, replace(RELEASED, **changes), sequences, context).total.value


def test_a_decode_step_is_its_four_terms() -> None:
    found = decode_step(K3, B300, EIGHT, RELEASED, 16, 8192)
    parts = [found.latency, found.bandwidth, found.compute, found.communication]
    total = sum(part.value for part in parts)
    assert max(part.value for part in parts) < found.total.value <= total
    assert found.total.low < found.total.value < found.total.high
    assert found.total.badge == "validated" and "global fit" in found.total.because


@pytest.mark.parametrize(("sequences", "wall"), [(1, "latency"), (64, "bandwidth")])
def test_walls_of_k3_on_eight_devices(sequences: int, wall: str) -> None:
    assert decode_step(K3, B300, EIGHT, RELEASED, sequences, 8192).wall == wall


def test_a_long_prompt_waits_for_products_or_messages() -> None:
    assert prefill(K3, B300, EIGHT, RELEASED, 400_000).wall == "compute"


def test_the_network_is_slower_than_the_inside_of_a_domain() -> None:
    inside = decode_step(K3, Cluster.parse("gb300:16"), Layout(tensor=16), RELEASED, 16, 8192)
    across = decode_step(K3, Cluster.parse("b300:8x2"), Layout(tensor=16), RELEASED, 16, 8192)
    assert across.communication.value > 1.5 * inside.communication.value
    assert across.latency.value == inside.latency.value


def test_more_ranks_help_little_for_one_sequence() -> None:
    eight, sixteen = (decode_step(K3, Cluster.parse(f"gb300:{n}"), Layout(tensor=n), RELEASED, 1, 8192).total.value for n in (8, 16))
    assert sixteen > 0.85 * eight


def test_steps_grow_with_load_and_context() -> None:
    assert step(1, 8192) < step(16, 8192) < step(64, 8192) < step(64, 65_536)
    assert step(16, 262_144, kv="fp8") < step(16, 262_144)
    assert step(64, 8192, experts="bf16") > 2 * step(64, 8192)


def test_dealing_latents_pays_for_many_long_sessions_only() -> None:
    def gain(sequences: int, context: int) -> float:
        one, eight = (decode_step(K3, B300, Layout(tensor=8, kv_shards=n), RELEASED, sequences, context).total.value for n in (1, 8))
        return one / eight - 1
    assert gain(48, 200_000) > 0.3
    assert abs(gain(1, 8192)) < 0.1


def test_prompts_take_longer_than_in_proportion() -> None:
    short, long = (prefill(K3, B300, EIGHT, RELEASED, tokens).total.value for tokens in (65_536, 262_144))
    assert 4 * short < long < 16 * short
    cached = prefill(K3, B300, EIGHT, RELEASED, 4096, context=400_000).total.value
    assert cached < 0.1 * prefill(K3, B300, EIGHT, RELEASED, 404_096).total.value


def test_a_pipeline_reads_prompts_in_step() -> None:
    flat, staged = (prefill(K3, Cluster.parse("gb300:32"), layout, RELEASED, 262_144).total.value
                    for layout in (Layout(tensor=8), Layout(tensor=8, pipeline=4)))
    assert flat / 4 < staged < flat / 2.5


def test_serving_figures_belong_together() -> None:
    found = serve(k3(), CHAT)
    assert found.speed.value == pytest.approx(1 / found.time_per_token.value)
    assert found.throughput_per_device.value == pytest.approx(found.throughput.value / 8)
    assert found.read_and_written_per_device.value == pytest.approx(found.throughput_per_device.value * 9)
    assert found.cost_per_million is not None
    assert found.cost_per_million.value == pytest.approx(8 * 7.16 / 3600 / found.throughput.value * 1e6, rel=0.01)
    assert found.speed.unit == "token/s" and found.first_token.unit == "s" and found.tasks_per_day.unit == "1/day"
    assert found.throughput.low < found.throughput.value < found.throughput.high


def test_effort_is_tokens() -> None:
    once, thrice = (serve(k3(), replace(CHAT, prompt=512, effort=effort)) for effort in (1.0, 3.0))
    assert once.cost_per_task is not None and thrice.cost_per_task is not None
    assert thrice.cost_per_task.value == pytest.approx(3 * once.cost_per_task.value, rel=0.25)
    assert thrice.tasks_per_day.value < once.tasks_per_day.value / 2


def test_the_cache_is_a_cliff() -> None:
    agents = Serving(prompt=200_000, output=1000, concurrency=8, cached_share=0.98)
    fits = serve(k3(), agents).fits
    below, above = (serve(k3(), replace(agents, sessions=round(fits * factor))) for factor in (0.9, 3.0))
    assert below.hit_share == pytest.approx(0.98) and below.wall != "capacity"
    assert above.hit_share < 0.4 and above.wall == "capacity"
    assert above.throughput.value < 0.4 * below.throughput.value
    assert above.first_token.value > 5 * below.first_token.value


def test_requests_beyond_memory_wait() -> None:
    long = Serving(prompt=200_000, output=2000, concurrency=4)
    crowded = serve(k3(), replace(long, concurrency=64))
    assert crowded.running == pytest.approx(crowded.fits) and crowded.wall == "capacity"
    assert crowded.first_token.value > 20 * serve(k3(), long).first_token.value


def test_arrivals_queue_and_then_never_drain() -> None:
    most = serve(k3(), replace(CHAT, concurrency=64)).requests_per_second.value
    calm, busy, flooded = (serve(k3(), replace(CHAT, concurrency=64, arrivals_per_second=share * most)) for share in (0.3, 0.9, 1.2))
    assert calm.first_token.value < busy.first_token.value < math.inf
    assert calm.running < busy.running < 64
    assert flooded.saturated and flooded.first_token.value == math.inf and "never drains" in flooded.first_token.because
    assert calm.requests_per_second.value == pytest.approx(0.3 * most)


def test_a_burst_makes_first_tokens_late() -> None:
    burst, stream = (serve(k3(), replace(CHAT, concurrency=64, waves=waves)) for waves in (1.0, None))
    assert burst.first_token.value > stream.first_token.value
    assert burst.time_per_token.value < stream.time_per_token.value


def drafting_gain(concurrency: int, context: int, drafts: int = 7) -> float:
    """How much faster a user is with drafts than without."""
    work = Serving(prompt=context, output=1024, concurrency=concurrency, cached_share=0.99)
    return serve(k3(), replace(work, speculation=Speculation(drafts=drafts))).speed.value / serve(k3(), work).speed.value


def test_speculation_changes_sign() -> None:
    assert drafting_gain(1, 4096) > 1.8
    assert drafting_gain(8, 4096) > 1.2
    assert drafting_gain(8, 196_608) < 1.0
    assert drafting_gain(1, 4096) > drafting_gain(16, 4096) > drafting_gain(16, 131_072)


def test_acceptance_falls_with_context_to_what_was_measured() -> None:
    assert gained(Speculation(drafts=7), 8192).value == 3.84
    for context in (118_000, 230_000):
        assert 1.18 <= gained(Speculation(drafts=7), context).value <= 1.68
    assert gained(None, 8192).badge == "exact"
    assert gained(Speculation(drafts=3, acceptance=2.5), 1e6).value == 2.5


def test_training_terms_and_bubble() -> None:
    work = Training(tokens=1e12, global_batch_tokens=2**22, context=8192, recompute="full")
    found = train(small(), work)
    assert 0.05 < found.utilisation < 0.6
    assert found.total.value == pytest.approx(found.steps * found.step.value)
    assert found.tokens_per_second.value == pytest.approx(2**22 / found.step.value)
    staged = train(small(Layout(tensor=2, data=8, pipeline=4, expert=16, zero=1)), work)
    assert staged.bubble.value > 0
    assert train(small(), replace(work, recompute="selective")).step.value < found.step.value


def test_adapters_skip_the_optimiser() -> None:
    work = Training(tokens=1e9, global_batch_tokens=2**22, context=8192, recompute="full")
    assert train(small(), replace(work, trainable_share=0.01)).bytes_per_device < train(small(), work).bytes_per_device


def test_rl_iterations_have_a_tail_that_partial_rollouts_cut() -> None:
    work = RL(tasks=64, group=16, prompt=1000, output_tokens=8000, turns=10, sandbox_seconds=2.0, observation_tokens=200)
    whole, partial, even = (rl_iteration(small(), replace(work, **change))
                            for change in ({}, {"partial_share": 0.1}, {"length_spread": 0.0}))
    assert whole.tail.value > partial.tail.value > 0 and even.tail.value == 0
    assert whole.iteration.value > partial.iteration.value
    slow = rl_iteration(small(), replace(work, sandbox_seconds=60.0))
    assert slow.sandbox_share > whole.sandbox_share and slow.iteration.value > 2 * whole.iteration.value
    assert rl_iteration(small(), replace(work, grading_seconds=600.0, graders=8)).wall == "grading"


def test_what_if_a_stack_had_half_the_launches() -> None:
    fast = scaled(record("default"), {"layer_seconds": 0.5, "expert_layer_seconds": 0.5})
    slow, quick = (decode_step(K3, B300, EIGHT, RELEASED, 1, 8192, found).latency.value for found in (record("default"), fast))
    assert quick == pytest.approx(slow / 2, rel=0.01)


@pytest.mark.parametrize(("run", "error", "words"), [
    (lambda: serve(k3(Layout(tensor=4)), CHAT), CapacityError, "too much; use more ranks"),
    (lambda: serve(k3(cluster=Cluster.parse("b200:8")), CHAT), CapacityError, "use more ranks per copy, narrower formats"),
    (lambda: serve(k3(), replace(CHAT, prompt=4_000_000, concurrency=1)), CapacityError, "one request of .* does not fit"),
    (lambda: k3(Layout(tensor=16)), ConfigError, "takes 16 devices"),
    (lambda: decode_step(K3, B300, EIGHT, RELEASED, 0, 8192), ConfigError, "must be positive"),
    (lambda: prefill(K3, B300, EIGHT, RELEASED, 0), ConfigError, "at least one"),
    (lambda: gained(Speculation(drafts=3, acceptance="codign"), 1), ConfigError, "did you mean 'coding'"),
    (lambda: gained(Speculation(drafts=12), 1), ConfigError, "measured up to 8"),
    (lambda: train(small(Layout()), Training(tokens=1e9, global_batch_tokens=2**20, context=8192)), CapacityError, "raise 'zero'"),
    (lambda: replace(CHAT, waves=1.0, arrivals_per_second=1.0), ConfigError, "give one"),
])
def test_bad_plans_are_refused(run, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run()
