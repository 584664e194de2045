"""Layouts, formats and kinds of work: what they derive, and one clear error for each thing that cannot be."""

from dataclasses import FrozenInstanceError, replace

import pytest

from gnomon.errors import ConfigError
from gnomon.model.config import preset
from gnomon.plan.workload import BITS, MULTIPLIES_AS, RL, Layout, Precision, Serving, Speculation, Training

K3 = preset("k3-2.8t")


@pytest.mark.parametrize(("layout", "ranks", "shards"), [
    (Layout(), 1, 1),
    (Layout(tensor=8), 8, 8),
    (Layout(tensor=8, expert=8, kv_shards=8), 8, 8),
    (Layout(expert=64, data=64), 64, 64),
    (Layout(tensor=4, expert=2, pipeline=2, context=2, data=2), 32, 4),
])
def test_layouts_count_ranks(layout: Layout, ranks: int, shards: int) -> None:
    assert layout.check(K3).ranks == ranks
    assert layout.expert_shards == shards


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Layout(tensor=0), "'tensor' is 0"),
    (lambda: Layout(zero=4), "'zero' is 4"),
    (lambda: Layout(tensor=8, kv_shards=3), "'kv_shards' is 3"),
    (lambda: Layout(tensor=8, expert=3), "'expert' is 3, which does not divide the 8 ranks"),
    (lambda: Layout(tensor=4, expert=6, data=3), "one must divide the other"),
    (lambda: Layout(tensor=8, kv_shards=3), "ranks that share the matrices: use 2 or 4"),
    (lambda: Layout(tensor=5).check(K3), "'tensor' is 5, which does not divide the 96 heads of the 'kda' mixer; use 4 or 6"),
    (lambda: Layout(pipeline=94).check(K3), "'pipeline' is 94, more than the model's 93 layers; use 93 or less"),
    (lambda: Layout(expert=24, data=24).check(K3), "does not divide the pool of 896 experts; use 16 or 28"),
    (lambda: Layout(expert=4, data=4).check(replace(K3, moe=None)), "the model has no experts; use 1"),
    (lambda: Layout(tensor=8).check(replace(K3, moe=replace(K3.moe, moe_intermediate_size=32 * 33, num_shared_experts=0),
                                            intermediate_size=33_796)), "33796 channels of the dense feed-forward; use 7 or 14"),
    (lambda: Layout(tensor=96).check(replace(K3, moe=replace(K3.moe, moe_intermediate_size=32, num_shared_experts=3))),
     "32 channels of an expert that 1 expert ranks leave whole; use 32"),
    (lambda: Layout(tensor=16).check(K3, 8), "takes 16 devices .* there are 8"),
    (lambda: Precision(experts="mxfp", rest="bf16"), "did you mean 'mxfp"),
    (lambda: Speculation(drafts=3, acceptance=4.5), "gains between 1 and 4 tokens"),
    (lambda: Speculation(drafts=0), "'drafts' is 0"),
    (lambda: Serving(prompt=8, output=0, concurrency=1), "'output' is 0"),
    (lambda: Serving(prompt=8, output=8, concurrency=4, sessions=2), "'sessions' is 2, fewer than 'concurrency'"),
    (lambda: Serving(prompt=8, output=8, concurrency=4, cached_share=1.2), "'cached_share' is 1.2"),
    (lambda: Serving(prompt=8, output=8, concurrency=4, effort=float("nan")), "'effort' is nan"),
    (lambda: Training(tokens=1e9, global_batch_tokens=4096, context=8192), "less than one sequence"),
    (lambda: Training(tokens=1e9, global_batch_tokens=8192, context=8192).micro_batches(Layout(data=2)), "cannot give each of 2 copies"),
    (lambda: RL(tasks=8, group=8, prompt=1, output_tokens=1, partial_share=-0.1), "'partial_share' is -0.1"),
])
def test_bad_input_is_named(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_products_run_at_the_wider_arithmetic() -> None:
    weight_only = Precision(experts="mxfp4", rest="bf16")
    assert (weight_only.expert_arithmetic, weight_only.rest_arithmetic) == ("bf16", "bf16")
    mixed = Precision(experts="mxfp4", rest="fp8", activations="mxfp8")
    assert (mixed.expert_arithmetic, mixed.rest_arithmetic) == ("fp8", "fp8")
    assert Precision.released(K3).experts == "mxfp4"
    assert set(BITS) == set(MULTIPLIES_AS)


def test_effort_multiplies_what_is_written() -> None:
    low, high = (Serving(prompt=1000, output=500, concurrency=1, effort=e) for e in (1.0, 3.0))
    assert (low.mean_context, high.mean_context, high.final_context) == (1250, 1750, 2500)


def test_micro_batches_fill_every_copy() -> None:
    work = Training(tokens=1e9, global_batch_tokens=64 * 4096, context=4096, micro_batch=2)
    assert work.micro_batches(Layout(data=4)) == 8


def test_workloads_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Layout().tensor = 2  # type: ignore[misc]


def test_layout_reads_as_people_write_it() -> None:
    assert str(Layout(tensor=8, expert=8, zero=1)) == "TP8 EP8 ZeRO-1"
    assert str(Layout()) == "one rank"
